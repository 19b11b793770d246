"""Owns the removal of checkpoints that retention lets go; refuses to remove any before a newer one is durable."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Union

from ckptspec.check.life.keeping import Fate, Keep, Step, decide, metrics_of
from ckptspec.engine.life.signs import Signs, signs
from ckptspec.engine.locate import Candidate, candidates, committed, scan_run
from ckptspec.engine.saves import probe
from ckptspec.engine.saves.staging import MANIFEST, saved, unlinked
from ckptspec.format import names
from ckptspec.storage import local

# A file of this name in a checkpoint's folder keeps it for good: `touch RUN/step-00001000/protected`. A manifest never
# changes, so it could not be said of an old step there, nor taken back; a list in the run folder is lost by `cp -r`.
PROTECTED = "protected"

Trace = Callable[[str], None]
Busy = Callable[[str], Union[str, None]]


def untraced(point: str) -> None:
    """Observe nothing: tests stop a removal here."""


@dataclass(frozen=True)
class Retained:
    """What retention came to: every step with its fate, newest first."""

    fates: tuple[Fate, ...]

    @property
    def removed(self) -> tuple[Fate, ...]:
        """The steps that went, or would go."""
        return tuple(f for f in self.fates if not f.kept)

    @property
    def kept(self) -> tuple[Fate, ...]:
        """The steps that stay."""
        return tuple(f for f in self.fates if f.kept)


class Ledger:
    """What is known of a run's checkpoints; each manifest is read once, for as long as its file stays the same."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self.run = os.fspath(run)
        self._known: dict[str, tuple[tuple[int, ...], Step]] = {}

    def steps(self, held: Signs) -> tuple[Step, ...]:
        """Return every folder that looks like a checkpoint; raises OSError."""
        found = [self._step(c) for c in scan_run(self.run, exact=False).steps]
        if any(step.good and step.step != c.step for c, step in found):  # the head of a manifest misled
            found = [self._step(c) for c in scan_run(self.run).steps]
        self._known = {c.name: self._known[c.name] for c, _ in found if c.name in self._known}
        return tuple(self._now(step, held) for _, step in found)

    def _step(self, c: Candidate) -> tuple[Candidate, Step]:
        try:
            status = os.stat(os.path.join(self.run, c.name, MANIFEST))
        except OSError:
            return c, Step(c.step, c.name, fault="damaged: there is no manifest")
        key = (status.st_ino, status.st_mtime_ns, status.st_size, c.step)
        known = self._known.get(c.name)
        if known is None or known[0] != key:
            known = self._known[c.name] = key, self._read(c)
        return c, known[1]

    def _read(self, c: Candidate) -> Step:
        m, finding = committed(os.path.join(self.run, c.name))
        if m is None:
            return Step(c.step, c.name, fault=f"damaged: {finding.message if finding else 'unreadable'}")
        fault = f"damaged: {finding.message}" if finding is not None else None
        if c.misnamed:
            fault = fault or f"its name is of another step than its manifest: {m.step}"
        return Step(m.step, c.name, m.save_id, m.run_id, fault, metrics_of(m.annotations))

    def _now(self, step: Step, held: Signs) -> Step:
        """Return the step with what may change while its manifest stays."""
        protected = os.path.lexists(os.path.join(self.run, step.name, PROTECTED))
        return replace(step, protected=protected, held=held.at(step.save_id))


def retain(
    run: str | os.PathLike[str],
    keep: Keep,
    *,
    after: str | None = None,
    run_id: str | None = None,
    ledger: Ledger | None = None,
    dry_run: bool = False,
    trace: Trace = untraced,
) -> Retained:
    """Remove what `keep` lets go of a run, oldest first, and return what became of every step [P-CLEAN].

    `after` is the save id of the commit it follows: where that is no good checkpoint of the run any more nothing goes.
    `run_id` is the run that is tidied (default: the newest good checkpoint's); `ledger` remembers what was read before.
    Nothing goes before the newest good checkpoint and its name are flushed. Raises OSError; what was renamed by then is
    trash, which cleaning removes.
    """
    ledger = Ledger(run) if ledger is None else ledger
    steps = ledger.steps(signs(ledger.run))
    good = [s for s in steps if s.good]
    newest = max(good, key=lambda s: s.step, default=None)
    if newest is None or committed(os.path.join(ledger.run, newest.name))[1] is not None:
        return _all_stay(steps, "there is no good checkpoint that could stay")
    if after is not None and all(s.save_id != after for s in good):
        return _all_stay(steps, f"save {after} is not a good checkpoint here")
    fates = decide(steps, keep, run_id)
    if not dry_run and not all(f.kept for f in fates):
        settle(ledger.run, newest)
        behind = [(c.step, c.name) for c in candidates(ledger.run, exact=False) if c.superseded]
        fates = tuple(reversed([_carry_out(ledger.run, newest, behind, fate, trace) for fate in reversed(fates)]))
    return Retained(fates)


def _carry_out(run: str, newest: Step, behind: list[tuple[int, str]], fate: Fate, trace: Trace) -> Fate:
    """Remove a step that is to go, and return what really became of it.

    What it once superseded, one of `behind`, goes first: else it would come to light as that step.
    """
    if fate.kept:
        return fate
    if not os.path.lexists(os.path.join(run, newest.name, MANIFEST)):  # a roll-back, or somebody's rm
        return replace(fate, kept=True, reason=f"{newest.name} is gone, which was the newest good checkpoint")
    going = [name for step, name in behind if step == fate.step.step and name != fate.step.name]
    for name in [*going, fate.step.name]:
        save_id = fate.step.save_id if name == fate.step.name else saved(os.path.join(run, name)) or ""
        held = remove(run, name, save_id, trace=trace)
        if held is not None:
            break
    return fate if held is None else replace(fate, kept=True, reason=f"in use: {held}")


def _all_stay(steps: tuple[Step, ...], reason: str) -> Retained:
    ordered = sorted(steps, key=lambda s: (-s.step, s.name))
    return Retained(tuple(Fate(s, True, reason) for s in ordered))


def settle(run: str, newest: Step) -> None:
    """Flush a good checkpoint and its name: nobody may have, where its save was cut off after it became visible."""
    local.fsync_folder(os.path.join(run, newest.name))
    local.fsync_folder(run)


# ---- removing --------------------------------------------------------------------------------------------------------


def remove(
    run: str, name: str, save_id: str, *, busy: Busy | None = None, whole: bool = True, trace: Trace = untraced
) -> str | None:
    """Remove a folder of a run: out of sight by one durable rename, then deleted; one that is gone is no error.

    Where somebody is at it by then, it is put back, and who it is is returned: `busy` tells that of the folder where it
    lies (default: whoever holds `save_id`). Not `whole`: it is no checkpoint that a reader would take.
    """
    folder = os.path.join(run, name)
    shown, hidden = _hiding(run, folder, save_id, whole)
    hiding_place = folder if os.path.dirname(hidden) == folder else hidden
    trace(f"hide {name}")
    try:
        local.rename(shown, hidden)
    except FileNotFoundError:
        return None
    trace(f"hidden {name}")
    # Only after the rename: who takes a lease looks for the folder after that, and one of the two sees the other.
    held = busy(hiding_place) if busy is not None else signs(run).at(save_id)
    if held is not None:
        local.rename(hidden, shown)
        local.fsync_folder(os.path.dirname(shown))
        return held
    local.fsync_folder(os.path.dirname(hidden))
    trace(f"flushed {name}")
    if hiding_place == folder:
        _remove_all_but(folder, os.path.basename(hidden), trace)
    local.remove_tree(hiding_place)
    trace(f"removed {name}")
    return None


def _remove_all_but(folder: str, last: str, trace: Trace) -> None:
    """Remove the files of a folder but for the one that tells cleaning what it is: a hidden manifest goes last."""
    for name in local.names(folder):
        if name != last:
            local.remove_file(os.path.join(folder, name))
            trace(f"removed {name}")


def _hiding(run: str, folder: str, save_id: str, whole: bool) -> tuple[str, str]:
    """Return the rename that hides a folder: its own, or that of its manifest where folders cannot be trusted."""
    if whole and probe.means(run).mode == "manifest-last":
        return os.path.join(folder, MANIFEST), os.path.join(folder, unlinked("manifest-last", save_id))
    trash = os.path.join(run, names.trash_folder(save_id or secrets.token_hex(16)))
    if os.path.lexists(trash):
        trash = os.path.join(run, names.trash_folder(secrets.token_hex(16)))
    return folder, trash

"""Owns the tidying of a run folder: what dead saves and removals left; refuses to touch what lives or is needed."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ckptspec.check.keeping import Fate, Keep
from ckptspec.check.leftovers import Leftover, Ruling, rule
from ckptspec.engine import lease
from ckptspec.engine.lease import Signs
from ckptspec.engine.locate import committed, is_run, newest
from ckptspec.engine.retention import Retained, Trace, remove, retain, untraced
from ckptspec.engine.staging import MANIFEST, saved
from ckptspec.errors import CkptspecError, Where
from ckptspec.format import names
from ckptspec.format.manifest import Manifest
from ckptspec.storage import local

MIN_AGE = 3600.0  # seconds
# What lies in a step's folder before its manifest does, where the manifest comes last: each name has its save's id.
_UNLINKED = re.compile(r"(?:rank-[0-9]+-|\.manifest-|\.journal-)([0-9a-f]{32})(?:\.shard|\.json|-[0-9a-f]+)\Z")
_JOURNAL = ".journal-"  # of a reshard, locked while its process lives


@dataclass(frozen=True)
class Item:
    """One entry of a run folder that went or was spared: its name, kind, bytes and why.

    `error` says what kept it from going.
    """

    name: str
    kind: str
    nbytes: int
    reason: str
    error: str | None = None


@dataclass(frozen=True)
class Cleaned:
    """What cleaning removed, or would remove, and what it left alone."""

    removed: tuple[Item, ...]
    spared: tuple[Item, ...]

    @property
    def failed(self) -> tuple[Item, ...]:
        """Those that were to go and could not be removed."""
        return tuple(item for item in self.spared if item.error is not None)

    @property
    def nbytes(self) -> int:
        """The bytes of what went."""
        return sum(item.nbytes for item in self.removed)


def clean(
    run: str | os.PathLike[str],
    keep: Keep | None = None,
    *,
    min_age: float = MIN_AGE,
    abandoned: bool = False,
    dry_run: bool = False,
    trace: Trace = untraced,
) -> Cleaned:
    """Remove what nobody needs any more: checkpoints that `keep` lets go, and what dead saves left [P-CLEAN].

    `min_age` (seconds) spares leftovers that changed since, `abandoned` takes what a roll-back set aside too. With
    `dry_run` nothing goes, and what would is returned. Spared are always: the newest good checkpoint, what a living
    save, reader or upload is at, and a leftover that holds a checkpoint which the run has not. Raises CkptspecError for
    a folder that is a checkpoint itself, OSError where the folder cannot be read or flushed.
    """
    folder = os.fspath(run)
    if not is_run(folder):
        message, advice = "this is a checkpoint, not a run folder", "name the folder that holds the steps"
        raise CkptspecError(message, rule="P-CLEAN", where=Where(folder), advice=advice)
    before = {name: _nbytes(os.path.join(folder, name)) for name in _step_names(folder)} if keep is not None else {}
    kept = Retained(()) if keep is None else retain(folder, keep, dry_run=dry_run, trace=trace)
    items = [(f.kept, _step_item(f, before)) for f in kept.fates]
    told = {f.step.name for f in kept.fates}
    for leftover in _Leftovers(folder).all():
        if leftover.name not in told:
            ruling = rule(leftover, min_age, abandoned=abandoned)
            items.append(_clear(folder, leftover, ruling, dry_run, trace))
    return Cleaned(tuple(i for stays, i in items if not stays), tuple(i for stays, i in items if stays))


def _step_names(run: str) -> list[str]:
    return [name for name in local.names(run) if names.parse_step_folder(name) is not None]


def _step_item(fate: Fate, nbytes: dict[str, int]) -> Item:
    return Item(fate.step.name, "step", nbytes.get(fate.step.name, 0), fate.reason)


def _clear(run: str, leftover: Leftover, ruling: Ruling, dry_run: bool, trace: Trace) -> tuple[bool, Item]:
    """Remove a leftover that may go; return whether it stays, and what there is to say."""
    path = os.path.join(run, leftover.name)
    item = partial(Item, leftover.name, leftover.kind, _nbytes(path))
    if not ruling.goes or dry_run:
        return not ruling.goes, item(ruling.reason)
    try:
        held = _remove(run, leftover, trace)
    except OSError as e:
        return True, item(ruling.reason, error=f"{e.filename or path}: {e.strerror or e}")
    return held is not None, item(ruling.reason if held is None else f"in use: {held}")


def _remove(run: str, leftover: Leftover, trace: Trace) -> str | None:
    path = os.path.join(run, leftover.name)
    if leftover.kind == "lease":
        with contextlib.suppress(FileNotFoundError):
            local.remove_file(path)
        return None
    if leftover.kind == "trash":  # out of sight already; it may be so only until the power fails
        local.fsync_folder(run)
        local.remove_tree(path)
        return None
    ids = _save_ids(leftover.name, path)

    def busy(now: str) -> str | None:
        return _at(now, ids, lease.signs(run))

    return remove(run, leftover.name, "", busy=busy, whole=False, trace=trace)


def _at(path: str, ids: tuple[str, ...], signs: Signs) -> str | None:
    """Return who is at a leftover."""
    return signs.at(*ids) or _resharding(path)


def _resharding(path: str) -> str | None:
    """Return whether a reshard lives that writes in a staging folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in local.names(path):
            if name.startswith(_JOURNAL):
                fd = local.open_read(os.path.join(path, name))
                try:
                    if lease.locked(fd):
                        return "a reshard"
                finally:
                    os.close(fd)
    return None


def _save_ids(name: str, path: str) -> tuple[str, ...]:
    """Return the ids of the saves that a leftover is of, by its name and by what it holds."""
    special = names.parse_special(name)
    if special is None:
        return tuple(dict.fromkeys(m[1] for m in map(_UNLINKED.match, local.names(path)) if m))
    return tuple(dict.fromkeys(filter(None, (special.id, saved(path)))))


def _nbytes(path: str) -> int:
    """Return the bytes of files in a folder, or of one file; what is gone meanwhile counts nothing."""
    with contextlib.suppress(FileNotFoundError):
        if not os.path.isdir(path) or os.path.islink(path):
            return os.lstat(path).st_size
        return sum(_nbytes(entry.path) for entry in os.scandir(path))
    return 0


class _Leftovers:
    """What lies in a run folder beside its checkpoints, with all that a ruling asks for."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._signs = lease.signs(run)
        self._newest = newest(run)

    def all(self) -> Iterator[Leftover]:
        """Yield every leftover by name."""
        for name in local.names(self._run):
            kind = self._kind(name)
            if kind == "lease":
                yield self._lease(name)
            elif kind is not None:
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    yield self._folder(name, kind)

    def _kind(self, name: str) -> str | None:
        if lease.is_lease(name):
            return "lease"
        special = names.parse_special(name)
        path = os.path.join(self._run, name)
        if not os.path.isdir(path) or os.path.islink(path):
            return None
        if special is not None:
            return "staging" if special.kind == "tmp" else special.kind
        if names.parse_step_folder(name) is None or os.path.lexists(os.path.join(path, MANIFEST)):
            return None
        found = local.names(path)  # a save that died before its manifest, where that comes last
        return "staging" if found and all(_UNLINKED.match(n) for n in found) else None

    def _lease(self, name: str) -> Leftover:
        sign = next((s for s in self._signs.signs if s.name == name), None)
        age = self._age(os.path.join(self._run, name))
        if sign is None:  # it never became one, or is gone by now
            return Leftover(name, "lease", age)
        return Leftover(name, "lease", age, sign.holder if sign.alive else None, sign.dead)

    def _folder(self, name: str, kind: str) -> Leftover:
        path = os.path.join(self._run, name)
        ids = _save_ids(name, path)
        live = _at(path, ids, self._signs)
        dead = kind == "staging" and self._signs.died(ids[:1])
        return Leftover(name, kind, self._age(path), live, dead, self._only(name, kind, path))

    def _age(self, path: str) -> float:
        """Return the seconds since a file, or anything in a folder, changed; a rename counts too."""
        times = [self._changed(path)]
        if os.path.isdir(path):
            times += [self._changed(entry.path) for entry in os.scandir(path)]
        return max(0.0, self._signs.now - max(times))

    def _changed(self, path: str) -> float:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return 0.0
        return max(status.st_mtime, status.st_ctime)

    def _only(self, name: str, kind: str, path: str) -> str | None:
        """Return what would be lost with a folder, None where nothing would be."""
        if kind == "abandoned":
            return None
        m, finding = committed(path)
        if kind == "superseded":
            return self._superseded(m)
        special = names.parse_special(name)
        own = special is not None and m is not None and m.save_id == special.id
        if m is None or finding is not None or (kind == "staging" and own):
            return None
        if kind == "trash":
            latest = self._newest.manifest
            newer = latest is None or latest.step < m.step
            return f"it holds step {m.step}, newer than any good checkpoint of the run" if newer else None
        return self._superseded(m)  # swapped with the save that replaced it, which then died

    def _superseded(self, m: Manifest | None) -> str | None:
        if m is None:
            return "nobody can tell which step it was"
        final, finding = committed(os.path.join(self._run, names.step_folder(m.step)))
        if final is None or finding is not None or final.step != m.step:
            return f"step {m.step} has no other good checkpoint"
        return None

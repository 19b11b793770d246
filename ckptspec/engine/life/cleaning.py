"""Owns the tidying of a run folder: what dead saves and removals left; refuses to touch what lives or is needed."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from functools import partial

from ckptspec.check.life.keeping import Fate, Keep
from ckptspec.check.life.leftovers import Leftover, Ruling, rule
from ckptspec.engine.life.leftovers import Leftovers, at, save_ids
from ckptspec.engine.life.retention import Retained, Trace, remove, retain, untraced
from ckptspec.engine.life.signs import signs
from ckptspec.engine.locate import is_run
from ckptspec.errors import CkptspecError, Where
from ckptspec.format import names
from ckptspec.storage import local

MIN_AGE = 3600.0  # seconds


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
    leftovers = {x.name: x for x in Leftovers(folder).all()}
    items = [(f.kept, _step_item(f, before)) for f in kept.fates if not f.kept or f.step.name not in leftovers]
    told = {f.step.name for f in kept.removed}
    for leftover in [x for x in leftovers.values() if x.name not in told]:
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
    ids = save_ids(leftover.name, path)

    def busy(now: str) -> str | None:
        return at(now, ids, signs(run))

    return remove(run, leftover.name, "", busy=busy, whole=False, trace=trace)


def _nbytes(path: str) -> int:
    """Return the bytes of files in a folder, or of one file; what is gone meanwhile counts nothing."""
    with contextlib.suppress(FileNotFoundError):
        if not os.path.isdir(path) or os.path.islink(path):
            return os.lstat(path).st_size
        return sum(_nbytes(entry.path) for entry in os.scandir(path))
    return 0

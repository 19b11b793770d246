"""Owns whether a save fits where it is to go, in numbers; refuses only what certainly does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckptspec.check.registry import fault
from ckptspec.errors import Where
from ckptspec.format.declaration import Declaration
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import BoxesLayout
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.placement import resolve
from ckptspec.format.report import Finding

RULE = "P-ROOM"


@dataclass(frozen=True)
class Ask:
    """What a save wants: bytes and files at least, its longest path and name in bytes.

    `saves` of this size lie beside each other once retention has settled, the one being written among them; `present`
    are there already.
    """

    nbytes: int
    files: int
    path_nbytes: int = 0
    name_nbytes: int = 0
    saves: int = 1
    present: int = 0


@dataclass(frozen=True)
class Space:
    """What a place has for this user: bytes and files, its limits of a path and a name, whether one may write there.

    None is what the file system does not tell. `by` says what sets the limit of bytes: the disk or a quota.
    """

    free: int | None
    files: int | None
    path_nbytes: int | None = None
    name_nbytes: int | None = None
    writable: bool = True
    by: str = "the disk"


@dataclass(frozen=True)
class Room:
    """What a save needs and what is there, in bytes and files; `settled` is what it comes to with what retention keeps.

    `fault` says why the save is refused; `warning` that it fits, and what retention will keep does not.
    """

    run: str
    ask: Ask
    space: Space
    fault: Finding | None = None
    warning: Finding | None = None

    @property
    def need(self) -> int:
        """The bytes this save takes at least."""
        return self.ask.nbytes

    @property
    def free(self) -> int | None:
        """The bytes that are free for it, None where the file system does not tell."""
        return self.space.free

    @property
    def settled(self) -> int:
        """The bytes still to be written until retention removes as much as a save adds."""
        return self.ask.nbytes * max(1, self.ask.saves - self.ask.present)

    def line(self) -> str:
        """Return all of it in one line."""
        free = "unknown" if self.free is None else f"{self.free:,}"
        files = "unknown" if self.space.files is None else f"{self.space.files:,}"
        kept = f", {self.settled:,} with what retention keeps" if self.settled > self.need else ""
        return f"{self.need:,} bytes in {self.ask.files:,} files{kept}; free: {free} bytes, {files} files"


def room(run: str, ask: Ask, space: Space) -> Room:
    """Return whether the save fits [P-ROOM].

    A run's first save is refused where what retention is to keep will not fit either: better now than on the third day.
    A later one that fits is made, and warned of.
    """
    found = next(_faults(run, ask, space), None)
    later = None
    settled = Room(run, ask, space).settled
    if found is None and space.free is not None and settled > space.free:
        message = f"this save fits, {max(1, ask.saves - ask.present)} of its size do not, and retention keeps so many"
        later = _fault(run, message, settled, "bytes", space.free, space.by)
    if ask.present == 0 and later is not None:
        return Room(run, ask, space, fault=later)
    return Room(run, ask, space, found, later)


def _faults(run: str, ask: Ask, space: Space) -> Iterator[Finding]:
    if not space.writable:
        yield fault(RULE, "this user may not write here", Where(run), "a folder to write in", "no permission")
    for what, needed, limit in (
        ("path", ask.path_nbytes, space.path_nbytes),
        ("file name", ask.name_nbytes, space.name_nbytes),
    ):
        if limit is not None and needed > limit:
            message = f"the longest {what} of a save would be too long here"
            yield fault(RULE, message, Where(run), f"at most {limit:,} bytes", f"{needed:,} bytes")
    if space.free is not None and ask.nbytes > space.free:
        yield _fault(run, "not enough room for this save", ask.nbytes, "bytes", space.free, space.by)
    if space.files is not None and ask.files > space.files:
        yield _fault(run, "not enough files (inodes) left for this save", ask.files, "files", space.files, "the disk")


def _fault(run: str, message: str, need: int, what: str, free: int, by: str) -> Finding:
    return fault(RULE, message, Where(run), f"{need:,} {what}", f"{free:,} {what} that {by} has left")


# ---- what a save takes -----------------------------------------------------------------------------------------------


def shared_nbytes(declared: Declaration, copies: int) -> int:
    """Return the payload bytes of all tensors that ranks declare together, as often as they are stored [T-COVER].

    Tensors of a local layout are left out: their shapes are each rank's own.
    """
    holders: dict[str, int] = {}
    return sum(_nbytes(entry, declared, copies, holders) for entry in declared.tensors.values())


def _nbytes(entry: TensorEntry, declared: Declaration, copies: int, holders: dict[str, int]) -> int:
    if entry.shape is None:
        return 0
    itemsize = DTYPES[entry.dtype].itemsize
    whole = prod(entry.shape) * itemsize
    if copies == 1 or whole == 0:
        return whole
    layout = declared.layouts[entry.layout]
    place = resolve(layout, declared.meshes)
    if isinstance(layout, BoxesLayout):
        return sum(box.numel * min(copies, len(ranks)) * itemsize for box, ranks in place.parts(entry.shape))
    if entry.layout not in holders:  # all boxes of a grid have as many
        holders[entry.layout] = len(next(place.parts(entry.shape))[1])
    return whole * min(copies, holders[entry.layout])

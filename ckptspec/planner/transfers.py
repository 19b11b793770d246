"""Owns which chunks of which shards fill a box: pure, from layouts alone first, from indexes then."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptspec.errors import PlanError, Where
from ckptspec.format.box import Box, intersect
from ckptspec.format.dtypes import dtype
from ckptspec.format.holding import Placement
from ckptspec.format.manifest import Manifest
from ckptspec.format.placement import resolve
from ckptspec.format.shard import Index
from ckptspec.format.tiling import tiled
from ckptspec.planner.views import View


@dataclass(frozen=True)
class Need:
    """One box of one stored tensor that a destination wants; `rank` is whose, for a local tensor.

    With `view` the stored tensor is one-dimensional and `box` is a part of the view's box, in its coordinates.
    """

    name: str
    box: Box
    rank: int | None = None
    view: View | None = None


@dataclass(frozen=True)
class Part:
    """A piece of what is stored, `box` in the stored tensor's coordinates, at each of the `ranks` with a copy."""

    need: Need
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """One piece to move: `box` out of chunk row `chunk` of the shard of `rank`, for `need`.

    With `view`, those elements of the chunk's tensor are the view's box, and `box` is a part of it.
    """

    need: Need
    rank: int
    chunk: int
    box: Box
    view: View | None = None


@dataclass
class Locator:
    """Finds where boxes are stored, from the manifest's layouts alone [T-HOLD].

    `prefer` is the rank whose own shard is read where it stores a copy. `without` are (rank, tensor) pairs that cannot
    be read, with tensor None for a whole shard: another copy is taken [Q-REPLICA].
    """

    manifest: Manifest
    prefer: int | None = None
    without: frozenset[tuple[int, str | None]] = frozenset()
    _placements: dict[str, Placement] = field(default_factory=dict)

    def parts(self, need: Need) -> Iterator[Part]:
        """Yield the stored pieces that make up a need, each with every rank that stores a copy."""
        entry = self.manifest.tensors[need.name]
        if need.box.empty:
            return
        if entry.shape is None:
            assert need.rank is not None
            yield Part(need, need.box, (need.rank,))
            return
        if entry.layout not in self._placements:
            layout = self.manifest.layouts[entry.layout]
            self._placements[entry.layout] = resolve(layout, self.manifest.meshes)
        place = self._placements[entry.layout]
        itemsize = dtype(entry.dtype).itemsize
        wanted = need.box if need.view is None else _run(*need.view.hull(need.box))
        found: dict[Box, list[int]] = {}
        for rank, box in place.storers(entry.shape, itemsize, need.name, self.manifest.copies, wanted):
            shared = box if box == wanted else intersect(box, wanted)
            if shared is not None:
                found.setdefault(shared, []).append(rank)
        for box, ranks in found.items():
            yield Part(need, box, tuple(ranks))

    def choose(self, part: Part) -> int:
        """Return the rank to read a part from: the preferred one where it stores a copy, else the first that may be.

        Raises PlanError [Q-REPLICA] where every copy is in a shard that cannot be read.
        """
        good = [rank for rank in part.ranks if self._readable(rank, part.need.name)] if self.without else part.ranks
        if self.prefer is not None and self.prefer in good:
            return self.prefer
        if good:
            return good[0]
        where = Where(tensor=part.need.name, rank=part.ranks[0])
        held = "rank " + ", ".join(map(str, part.ranks))
        message = "no readable shard stores this part"
        raise PlanError(message, rule="Q-REPLICA", where=where, expected=f"a copy in a shard other than of {held}")

    def _readable(self, rank: int, name: str) -> bool:
        return (rank, None) not in self.without and (rank, name) not in self.without


def _run(start: int, stop: int) -> Box:
    return Box((start,), (stop - start,))


def needed(locator: Locator, needs: Iterable[Need]) -> dict[int, list[Part]]:
    """Return the parts to read, by the rank whose shard holds them: the shards whose index a plan needs."""
    out: dict[int, list[Part]] = {}
    for need in needs:
        for part in locator.parts(need):
            out.setdefault(locator.choose(part), []).append(part)
    return out


Rows = Mapping[str, Sequence[int]]  # the rows of a shard's index that are chunks of a tensor, by its name


def moves(rank: int, index: Index, parts: Sequence[Part], rows: Rows | None = None) -> Iterator[Move]:
    """Yield the chunk reads that deliver `parts` from one shard; `rows_of` their names, where several calls share it.

    Raises PlanError [T-COVER] where the shard's index does not hold what the layouts say it does.
    """
    rows = rows_of(index, {p.need.name for p in parts}) if rows is None else rows
    for part in parts:
        found: list[Box] = []
        for row in rows.get(part.need.name, ()):
            box = index.chunks[row].box
            shared = box if box == part.box else intersect(box, part.box)
            if shared is not None:
                found.append(shared)
                yield from _moves(part.need, rank, row, shared)
        if found != [part.box] and not tiled(part.box, found):
            where = Where(tensor=part.need.name, rank=rank)
            message = "the shard does not hold the part that its layout gives it, each element once"
            expected, sizes = f"{part.box.numel} elements", sum(box.numel for box in found)
            raise PlanError(message, rule="T-COVER", where=where, expected=expected, found=f"{sizes} in {len(found)}")


def _moves(need: Need, rank: int, row: int, stored: Box) -> Iterator[Move]:
    """Yield the moves for what one chunk stores of a need."""
    if need.view is None:
        yield Move(need, rank, row, stored)
        return
    for view in need.view.within(stored.offsets[0], stored.stops[0]):
        box = view.box if view.box == need.box else intersect(view.box, need.box)
        if box is not None:
            yield Move(need, rank, row, box, view)


def whole_chunks(index: Index) -> dict[tuple[str, Box], int]:
    """Return the row of every chunk by tensor name and box: a need that is one of them needs no search.

    Raises PlanError [T-COVER] for an index that has a box twice.
    """
    rows = {(index.names[c.tensor], c.box): row for row, c in enumerate(index.chunks)}
    if len(rows) != len(index.chunks):
        raise PlanError("a shard holds one box of a tensor twice", rule="T-COVER")
    return rows


def rows_of(index: Index, names: Collection[str]) -> Rows:
    """Return the rows of the chunks of some tensors, by name."""
    numbers = {i: name for i, name in enumerate(index.names) if name in names}
    out: dict[str, list[int]] = {}
    for row, chunk in enumerate(index.chunks):
        if chunk.tensor in numbers:
            out.setdefault(numbers[chunk.tensor], []).append(row)
    return out

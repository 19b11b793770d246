"""Owns which chunks of which shards fill a box: pure, from layouts alone first, from indexes then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptspec.errors import PlanError, Where
from ckptspec.format.box import Box, intersect
from ckptspec.format.dtypes import dtype
from ckptspec.format.holding import Placement
from ckptspec.format.manifest import Manifest
from ckptspec.format.placement import resolve
from ckptspec.format.shard import Index


@dataclass(frozen=True)
class Need:
    """One box of one tensor that a destination wants; `rank` is whose, for a local tensor."""

    name: str
    box: Box
    rank: int | None = None


@dataclass(frozen=True)
class Part:
    """A stored box (the piece of `need` inside it) at one of the `ranks` that store a copy."""

    need: Need
    box: Box
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """One piece to move: `box` out of chunk row `chunk` of the shard of `rank`, for `need`."""

    need: Need
    rank: int
    chunk: int
    box: Box


@dataclass
class Locator:
    """Finds where boxes are stored, from the manifest's layouts alone [T-HOLD]."""

    manifest: Manifest
    prefer: int | None = None
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
        found: dict[Box, list[int]] = {}
        for rank, box in place.storers(entry.shape, itemsize, need.name, self.manifest.copies, need.box):
            shared = box if box == need.box else intersect(box, need.box)
            if shared is not None:
                found.setdefault(shared, []).append(rank)
        for box, ranks in found.items():
            yield Part(need, box, tuple(ranks))

    def choose(self, part: Part) -> int:
        """Return the rank to read a part from: the preferred one where it stores a copy, else the first."""
        return self.prefer if self.prefer is not None and self.prefer in part.ranks else part.ranks[0]


def needed(locator: Locator, needs: Iterable[Need]) -> dict[int, list[Part]]:
    """Return the parts to read, by the rank whose shard holds them: the shards whose index a plan needs."""
    out: dict[int, list[Part]] = {}
    for need in needs:
        for part in locator.parts(need):
            out.setdefault(locator.choose(part), []).append(part)
    return out


def moves(rank: int, index: Index, parts: Sequence[Part]) -> Iterator[Move]:
    """Yield the chunk reads that deliver `parts` from one shard.

    Raises PlanError [T-COVER] where the shard's index does not hold what the layouts say it does.
    """
    rows: Mapping[str, list[int]] = _rows(index, {p.need.name for p in parts})
    for part in parts:
        found = 0
        for row in rows.get(part.need.name, ()):
            box = index.chunks[row].box
            shared = box if box == part.box else intersect(box, part.box)
            if shared is not None:
                found += shared.numel
                yield Move(part.need, rank, row, shared)
        if found != part.box.numel:
            where = Where(tensor=part.need.name, rank=rank)
            message = "the shard does not hold the part that its layout gives it"
            expected = f"{part.box.numel} elements"
            raise PlanError(message, rule="T-COVER", where=where, expected=expected, found=str(found))


def whole_chunks(index: Index) -> dict[tuple[str, Box], int]:
    """Return the row of every chunk by tensor name and box: a need that is one of them needs no search.

    Raises PlanError [T-COVER] for an index that has a box twice.
    """
    rows = {(index.names[c.tensor], c.box): row for row, c in enumerate(index.chunks)}
    if len(rows) != len(index.chunks):
        raise PlanError("a shard holds one box of a tensor twice", rule="T-COVER")
    return rows


def _rows(index: Index, names: set[str]) -> dict[str, list[int]]:
    numbers = {i: name for i, name in enumerate(index.names) if name in names}
    out: dict[str, list[int]] = {}
    for row, chunk in enumerate(index.chunks):
        if chunk.tensor in numbers:
            out.setdefault(numbers[chunk.tensor], []).append(row)
    return out

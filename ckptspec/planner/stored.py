"""Owns the pieces in which a tensor is stored, as columns: those that meet many boxes, and who has a copy [T-HOLD]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Protocol
from zlib import crc32

import numpy as np

from ckptspec.format import holding
from ckptspec.format.cutting import WHOLE
from ckptspec.format.grid import Cut, GridPlacement
from ckptspec.format.layout import BoxesLayout, Layout, Mesh, RankMap
from ckptspec.format.placement import resolve
from ckptspec.planner.columns import Bools, Ints, boxed, indexes, ints, numels, repeated
from ckptspec.planner.held import spans_at

MOST_STORERS = 64  # copies are at most so many, and storers no more than that or STORERS


@dataclass(frozen=True)
class Boxes:
    """Boxes of a layout that meet others: `row` of what they meet, their number, and `seat`, which says who holds."""

    row: Ints
    number: Ints
    offsets: Ints
    sizes: Ints
    seat: Ints
    holders: Ints

    def __getitem__(self, rows: Ints | Bools) -> Boxes:
        return Boxes(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Pieces:
    """Stored pieces that meet boxes: `row` of the box, the piece's number, and the `ranks` with a copy, else -1."""

    row: Ints
    number: Ints
    offsets: Ints
    sizes: Ints
    ranks: Ints

    def __getitem__(self, rows: Ints | Bools) -> Pieces:
        return Pieces(*(column[rows] for column in vars(self).values()))

    def __len__(self) -> int:
        return len(self.row)


class Shape(Protocol):
    """The distinct boxes that a layout makes of tensors of one shape."""

    def meeting(self, offsets: Ints, sizes: Ints) -> Ints:
        """Return how many of its boxes may meet each of many, none empty."""

    def met(self, offsets: Ints, sizes: Ints) -> Boxes:
        """Return its boxes that meet each of many, none empty."""

    def rank(self, seat: Ints, holder: Ints) -> Ints:
        """Return the ranks of holders, counted from the lowest, of boxes with these seats."""

    def storers(self, copies: int) -> set[int]:
        """Return how many ranks store a box: every number of them that there is."""


def shape_of(layout: Layout, meshes: Mapping[str, Mesh], shape: tuple[int, ...]) -> Shape:
    """Return what a layout that is not local makes of tensors of a shape."""
    place = resolve(layout, meshes)
    if isinstance(place, GridPlacement):
        return Grid(place, shape)
    assert isinstance(layout, BoxesLayout)
    return Listing(layout, len(shape))


class Grid:
    """A mesh or flat layout: boxes are a product of spans, so that what meets is found by dimension."""

    def __init__(self, place: GridPlacement, shape: tuple[int, ...]) -> None:
        mesh = place.mesh
        self._listed = ints(mesh.ranks) if isinstance(mesh.ranks, tuple) else None
        self._base = mesh.ranks.offset if isinstance(mesh.ranks, RankMap) else 0
        self._base += sum(i * mesh.strides[axis] for axis, i in place.pins.items())
        cuts = {cut.dim: cut for cut in place.cuts}
        spans = [_spans(mesh, cuts.get(dim, Cut(dim, (), WHOLE)), n) for dim, n in enumerate(shape)]
        self._starts, self._sizes, self._steps = ([column[i] for column in spans] for i in range(3))
        self._counts = boxed([[len(starts) for starts in self._starts]], len(shape))
        self._spread = _spread(mesh, {*place.pins, *(axis for cut in place.cuts for axis in cut.axes)})

    def storers(self, copies: int) -> set[int]:
        return {min(len(self._spread), max(holding.STORERS, copies))}

    def meeting(self, offsets: Ints, sizes: Ints) -> Ints:
        low, high = self._ranges(offsets, sizes)
        return numels(high - low)

    def _ranges(self, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        low, high = np.empty_like(offsets), np.empty_like(offsets)
        for d, starts in enumerate(self._starts):
            low[:, d] = np.searchsorted(starts, offsets[:, d], "right") - 1
            high[:, d] = np.searchsorted(starts, offsets[:, d] + sizes[:, d], "left")
        return low, high

    def met(self, offsets: Ints, sizes: Ints) -> Boxes:
        low, high = self._ranges(offsets, sizes)
        row, which = repeated(numels(high - low))
        index = low[row] + indexes(which, (high - low)[row])
        number = np.zeros(len(row), np.int64)
        seat = np.full(len(row), self._base, np.int64)
        found = np.empty((2, *index.shape), np.int64)
        for d in range(index.shape[1]):
            number = number * self._counts[0, d] + index[:, d]
            seat += self._steps[d][index[:, d]]
            found[0, :, d], found[1, :, d] = self._starts[d][index[:, d]], self._sizes[d][index[:, d]]
        return Boxes(row, number, found[0], found[1], seat, np.full(len(row), len(self._spread), np.int64))

    def rank(self, seat: Ints, holder: Ints) -> Ints:
        if self._listed is None:
            return seat + self._spread[holder]
        seats, which = np.unique(seat, return_inverse=True)
        table = np.sort(self._listed[seats[:, None] + self._spread], axis=1)
        found: Ints = table[which, holder]
        return found


def _spans(mesh: Mesh, cut: Cut, n: int) -> tuple[Ints, Ints, Ints]:
    """Return offsets and sizes of the spans of `n` elements, none empty, ascending, and what each adds to the rank."""
    widths = boxed([[mesh.shape[axis] for axis in cut.axes]], len(cut.axes))
    at = indexes(np.arange(prod(mesh.shape[axis] for axis in cut.axes)), widths)
    starts, sizes = spans_at(cut.rule, at, n)
    steps = (at * boxed([[mesh.strides[axis] for axis in cut.axes]], len(cut.axes))).sum(axis=1)
    blocks = starts.shape[1]
    starts, sizes, steps = starts.T.ravel(), sizes.T.ravel(), np.tile(steps, blocks)
    kept = sizes > 0
    return starts[kept], sizes[kept], steps[kept]


def _spread(mesh: Mesh, used: set[int]) -> Ints:
    """Return what ranks that differ only along axes that are not `used` are apart from the lowest, ascending."""
    spread = np.zeros(1, np.int64)
    for axis, n in enumerate(mesh.shape):
        if axis not in used:
            spread = (spread[:, None] + mesh.strides[axis] * np.arange(n)).ravel()
    return np.sort(spread)


class Listing:
    """A boxes layout: what meets is looked for along the dimension that is cut most often."""

    def __init__(self, layout: BoxesLayout, ndim: int) -> None:
        holders: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
        for rank, box in layout.boxes:
            if not box.empty:
                holders.setdefault((box.offsets, box.sizes), set()).add(rank)
        offsets, sizes = (boxed([box[i] for box in holders], ndim) for i in range(2))
        self._axis = max(range(ndim), key=lambda d: len(np.unique(offsets[:, d])), default=None)
        by_start = np.arange(len(offsets)) if self._axis is None else np.argsort(offsets[:, self._axis], kind="stable")
        self._offsets, self._sizes = offsets[by_start], sizes[by_start]
        ranks = [sorted(found) for found in holders.values()]
        ranks = [ranks[i] for i in by_start]
        self._counts = ints([len(found) for found in ranks])
        self._first = np.cumsum(self._counts) - self._counts
        self._ranks = ints([rank for found in ranks for rank in found])

    def storers(self, copies: int) -> set[int]:
        return {min(count, max(holding.STORERS, copies)) for count in set(self._counts.tolist())}

    def meeting(self, offsets: Ints, sizes: Ints) -> Ints:
        low, high = self._ranges(offsets, sizes)
        return high - low

    def _ranges(self, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        if self._axis is None or not len(self._offsets):
            return np.zeros(len(offsets), np.int64), np.full(len(offsets), len(self._offsets), np.int64)
        starts = self._offsets[:, self._axis]
        first = offsets[:, self._axis] - self._sizes[:, self._axis].max()  # the last place from which none could reach
        low = np.searchsorted(starts, first, "right")
        high = np.searchsorted(starts, offsets[:, self._axis] + sizes[:, self._axis], "left")
        return low, np.maximum(low, high)

    def met(self, offsets: Ints, sizes: Ints) -> Boxes:
        low, high = self._ranges(offsets, sizes)
        row, which = repeated(high - low)
        number = low[row] + which
        starts, lengths = self._offsets[number], self._sizes[number]
        apart = (starts >= offsets[row] + sizes[row]) | (starts + lengths <= offsets[row])
        meets = ~apart.any(axis=1)
        return Boxes(row, number, starts, lengths, number, self._counts[number])[meets]

    def rank(self, seat: Ints, holder: Ints) -> Ints:
        found: Ints = self._ranks[self._first[seat] + holder]
        return found


@dataclass(frozen=True)
class Stored:
    """Tensors of one shape, itemsize and number of copies in one layout, whose names have one crc32."""

    shape: Shape
    itemsize: int
    copies: int
    crc: int

    @classmethod
    def named(cls, shape: Shape, itemsize: int, copies: int, name: str) -> Stored:
        """Return the tensor called `name`, with no more of its crc32 than decides who stores it."""
        period = lcm(*shape.storers(copies))
        return cls(shape, itemsize, copies, crc32(name.encode()) % period)

    def meeting(self, offsets: Ints, sizes: Ints) -> Ints:
        """Return how many boxes may meet each of many, none empty."""
        return self.shape.meeting(offsets, sizes)

    def pieces(self, offsets: Ints, sizes: Ints) -> Pieces:
        """Return the stored pieces that meet each of many boxes, none empty, with the ranks that store a copy."""
        boxes = self.shape.met(offsets, sizes)
        if (boxes.holders == 1).all():
            ranks = self.shape.rank(boxes.seat, np.zeros(len(boxes.seat), np.int64))[:, None]
            return Pieces(boxes.row, boxes.number * MOST_STORERS, boxes.offsets, boxes.sizes, ranks)
        return self._cut(boxes, offsets, sizes)

    def _cut(self, boxes: Boxes, offsets: Ints, sizes: Ints) -> Pieces:
        """Return the pieces of boxes that several ranks hold."""
        w = np.minimum(boxes.holders, max(holding.STORERS, self.copies))
        large = (boxes.holders > 1) & (numels(boxes.sizes) * self.itemsize >= w * holding.CUT_FROM)
        long = boxes.sizes > 1
        cut = large & long.any(axis=1)
        axis = long.argmax(axis=1) if boxes.sizes.shape[1] else np.zeros(len(cut), np.int64)
        first, last = np.zeros(len(cut), np.int64), np.zeros(len(cut), np.int64)
        step = np.ones(len(cut), np.int64)
        at = np.flatnonzero(cut), axis[cut]
        step[cut] = -(-boxes.sizes[at] // w[cut])
        begin, end = offsets[boxes.row[cut], at[1]], (offsets + sizes)[boxes.row[cut], at[1]]
        first[cut] = np.maximum(begin - boxes.offsets[at], 0) // step[cut]
        last[cut] = (np.minimum(end - boxes.offsets[at], boxes.sizes[at]) - 1) // step[cut]
        of, i = repeated(last - first + 1)
        i = i + first[of]
        found, w, large, cut, axis, step = boxes[of], w[of], large[of], cut[of], axis[of], step[of]
        at = np.flatnonzero(cut), axis[cut]
        skipped = i[cut] * step[cut]
        found.sizes[at] = np.minimum(step[cut], found.sizes[at] - skipped)
        found.offsets[at] += skipped
        return Pieces(
            found.row, found.number * MOST_STORERS + i, found.offsets, found.sizes, self._ranks(found, i, w, large)
        )

    def _ranks(self, boxes: Boxes, i: Ints, w: Ints, large: Bools) -> Ints:
        """Return the ranks that store copy 0, 1, ... of piece `i` of each box."""
        first = np.where(large, i, self.crc)
        out = np.full((len(i), min(self.copies, int(w.max(initial=1)))), -1, np.int64)
        for copy in range(out.shape[1]):
            holder = (first + copy) % w * boxes.holders // w
            out[:, copy] = np.where(copy < w, self.shape.rank(boxes.seat, holder), -1)
        return out

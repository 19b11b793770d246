"""Owns what boxes of a wanted tensor take from the stored pieces of one tensor, as columns: transfers, and their reads.

A transfer is what one box of a destination rank takes from one stored piece: the least box around it in the stored
tensor, and how many elements it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from ckptspec.planner.columns import (
    Bools,
    Ints,
    before,
    boxed,
    changes,
    hulls,
    indexes,
    ints,
    numels,
    order,
    places,
    runs,
    united,
)
from ckptspec.planner.held import Held, Holders
from ckptspec.planner.reads import Reads, whole_blocks
from ckptspec.planner.routes import Strand
from ckptspec.planner.stored import Pieces, Stored
from ckptspec.planner.views import View

ROWS = 1 << 17  # transfers of one tensor that are in memory at once, if no rank by itself has more


@dataclass(frozen=True)
class Transfers:
    """Transfers by destination rank; `box` is the row of the box they fill, `piece` the number of the stored piece."""

    rank: Ints
    source: Ints
    elements: Ints
    offsets: Ints
    sizes: Ints
    box: Ints
    piece: Ints

    def __len__(self) -> int:
        return len(self.rank)

    def __getitem__(self, rows: Ints | Bools) -> Transfers:
        return Transfers(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Lane:
    """One way from a stored tensor to a wanted one: a strand, and where it lands in a flat tensor."""

    strand: Strand
    land: View | None = None

    def near(self, held: Held) -> bool:
        """Tell whether some of the boxes may get something: cheap, and most often not so where there are many lanes."""
        low, high = held.hull
        if self.land is not None:
            return self.land.start < high[0] and self.land.stop > low[0]
        box = self.strand.box
        return all(a < stop and b > start for a, b, start, stop in zip(box.offsets, box.stops, low, high, strict=True))


@dataclass(frozen=True)
class _Wishes:
    """What the boxes of a wanted tensor ask of one lane: `box` says which; offsets and sizes are the strand's.

    Into a flat tensor go the elements from `start` to `stop` in the count of the land's box, and no others.
    """

    box: Ints
    offsets: Ints
    sizes: Ints
    start: Ints
    stop: Ints

    def __getitem__(self, rows: Ints | Bools | slice) -> _Wishes:
        return _Wishes(*(column[rows] for column in vars(self).values()))


@dataclass(frozen=True)
class Leaf:
    """A wanted and a stored tensor: who holds the one, in which pieces the other is stored, and the lanes between."""

    holders: Holders
    stored: Stored
    lanes: tuple[Lane, ...]

    def batches(self, ranks: range, block: int) -> Iterator[tuple[Transfers, Reads]]:
        """Yield the transfers to `ranks` in order of rank, and what is read for them in blocks of `block` bytes."""
        held = self.holders.of(ranks)
        asked = [(lane, _wishes(held, lane)) for lane in self.lanes if lane.near(held)] if len(held) else []
        counts = np.zeros(len(held), np.int64)
        for lane, wish in asked:
            counts[wish.box] += self.stored.meeting(*_sought(lane, wish))
        for start, stop in _slices(held.rank, counts) if asked else ():
            found = []
            for lane, wish in asked:
                some = wish[slice(*np.searchsorted(wish.box, [start, stop]))]
                if len(some.box):
                    found.append(self._taken(held, lane, some, block))
            if len(found) == 1:
                yield found[0]
            elif found:
                yield _merged([t for t, _ in found]), Reads.union([r for _, r in found])

    def _taken(self, held: Held, lane: Lane, wish: _Wishes, block: int) -> tuple[Transfers, Reads]:
        pieces = self.stored.pieces(*_sought(lane, wish))
        wish = wish[pieces.row]
        offsets, sizes = wish.offsets, wish.sizes
        if lane.strand.view is None:
            offsets = np.maximum(offsets, pieces.offsets)
            sizes = np.minimum(wish.offsets + wish.sizes, pieces.offsets + pieces.sizes) - offsets
        low, high = _counted(lane, wish, pieces, offsets, sizes)
        some = low < high
        if not some.all():
            pieces, wish, offsets, sizes = pieces[some], wish[some], offsets[some], sizes[some]
            low, high = low[some], high[some]
        first, last = indexes(low, sizes), indexes(high - 1, sizes)
        rank = held.rank[wish.box]
        taken = _Taken(lane, pieces, offsets, offsets + first, offsets + last, *hulls(first, last, sizes))
        offsets, sizes = taken.stored()
        source = _nearest(pieces.ranks, rank)
        transfers = Transfers(rank, source, high - low, offsets, sizes, wish.box, pieces.number)
        row, start, stop = taken.read(self.stored.itemsize, block)
        (ranks, number), start, stop = united([rank[row], pieces.number[row]], start, stop)
        return transfers, Reads(ranks, number, start, stop)


def _wishes(held: Held, lane: Lane) -> _Wishes:
    """Return what the boxes that ranks hold ask of a lane."""
    box = np.arange(len(held))
    offsets, sizes = held.offsets, held.sizes
    start = stop = np.zeros(len(held), np.int64)
    if lane.land is not None:
        start = np.maximum(offsets[:, 0], lane.land.start) - lane.land.start
        stop = np.minimum(offsets[:, 0] + sizes[:, 0], lane.land.stop) - lane.land.start
        box = np.flatnonzero(start < stop)
        start, stop = start[box], stop[box]
        whole = boxed([lane.land.box.sizes], lane.land.box.ndim)
        offsets, sizes = hulls(indexes(start, whole), indexes(stop - 1, whole), whole)
        offsets = offsets + ints(lane.land.box.offsets)
    given = lane.strand.box
    low = np.maximum(offsets, ints(given.offsets))
    high = np.minimum(offsets + sizes, ints(given.stops))
    meets = (low < high).all(axis=1)
    return _Wishes(box, low, high - low, start, stop)[meets]


def _sought(lane: Lane, wish: _Wishes) -> tuple[Ints, Ints]:
    """Return the boxes of the stored tensor in which what is wished for lies: in a flat one, the shortest runs."""
    view = lane.strand.view
    if view is None:
        return wish.offsets, wish.sizes
    whole = boxed([view.box.sizes], view.box.ndim)
    first = wish.offsets - ints(view.box.offsets)
    start, last = places(first, whole), places(first + wish.sizes - 1, whole)
    return (view.start + start)[:, None], (last + 1 - start)[:, None]


def _counted(lane: Lane, wish: _Wishes, pieces: Pieces, offsets: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Return which elements move, [low, high) in the count of each box (offsets, sizes): those in both of its runs."""
    low, high = np.zeros(len(sizes), np.int64), numels(sizes)
    if lane.land is not None:
        whole, inner = boxed([lane.land.box.sizes], lane.land.box.ndim), offsets - ints(lane.land.box.offsets)
        low = np.maximum(low, before(wish.start, whole, inner, sizes))
        high = np.minimum(high, before(wish.stop, whole, inner, sizes))
    view = lane.strand.view
    if view is not None:
        whole, inner = boxed([view.box.sizes], view.box.ndim), offsets - ints(view.box.offsets)
        start = np.clip(pieces.offsets[:, 0] - view.start, 0, view.box.numel)
        stop = np.clip(pieces.offsets[:, 0] + pieces.sizes[:, 0] - view.start, 0, view.box.numel)
        low = np.maximum(low, before(start, whole, inner, sizes))
        high = np.minimum(high, before(stop, whole, inner, sizes))
    return low, high


@dataclass(frozen=True)
class _Taken:
    """The elements that move out of pieces: those from `first` to `last` of a box at `base`, and their hull in it."""

    lane: Lane
    pieces: Pieces
    base: Ints
    first: Ints
    last: Ints
    hull: Ints
    sizes: Ints

    def _outer(self) -> tuple[Ints, Ints]:
        """Return offsets and sizes of the boxes in whose row-major count the elements are stored."""
        view = self.lane.strand.view
        if view is None:
            return self.pieces.offsets, self.pieces.sizes
        return boxed([view.box.offsets], view.box.ndim), boxed([view.box.sizes], view.box.ndim)

    def _ends(self) -> tuple[Ints, Ints]:
        """Return where the first element stands in that count, and the place behind the last."""
        offsets, sizes = self._outer()
        return places(self.first - offsets, sizes), places(self.last - offsets, sizes) + 1

    def stored(self) -> tuple[Ints, Ints]:
        """Return the least boxes of the stored tensor around the elements."""
        view = self.lane.strand.view
        if view is None:
            return self.base + self.hull, self.sizes
        start, stop = self._ends()
        return (view.start + start)[:, None], (stop - start)[:, None]

    def read(self, itemsize: int, block: int) -> tuple[Ints, Ints, Ints]:
        """Return (row, first byte, byte behind the last) of what is read of each piece: blocks with such elements."""
        offsets, sizes = self._outer()
        low, high = self._ends()
        row, start, stop = runs(sizes, self.base + self.hull - offsets, self.sizes, low, high, -(-block // itemsize))
        view = self.lane.strand.view
        if view is not None:
            shift = view.start - self.pieces.offsets[row, 0]
            start, stop = start + shift, stop + shift
        return row, *whole_blocks(start * itemsize, stop * itemsize, self.pieces.sizes[row], itemsize, block)


def _nearest(ranks: Ints, rank: Ints) -> Ints:
    """Return the rank to read from: the destination's own number where it stores a copy, else the first that does."""
    return reduce(lambda found, column: np.where(column == rank, rank, found), ranks.T[1:], ranks[:, 0])


def _slices(rank: Ints, counts: Ints) -> Iterator[tuple[int, int]]:
    """Yield runs of rows, each of whole ranks, with about ROWS transfers."""
    bounds = np.append(changes([rank]), len(rank)) if len(rank) else ints([0])
    total = np.append(0, np.cumsum(counts))[bounds]
    at = 0
    while at < len(bounds) - 1:
        end = max(at + 1, int(np.searchsorted(total, total[at] + ROWS, "right")) - 1)
        yield int(bounds[at]), int(bounds[end])
        at = end


def _merged(several: Sequence[Transfers]) -> Transfers:
    """Return the transfers of several lanes together: one for each box and piece, whichever lanes it came by."""
    all_ = Transfers(*(np.concatenate(column) for column in zip(*(vars(t).values() for t in several), strict=True)))
    if not len(all_):
        return all_
    all_ = all_[order([all_.rank, all_.box, all_.piece])]
    first = changes([all_.rank, all_.box, all_.piece])
    offsets = np.minimum.reduceat(all_.offsets, first)
    stops = np.maximum.reduceat(all_.offsets + all_.sizes, first)
    found = all_[first]
    elements = np.add.reduceat(all_.elements, first)
    return Transfers(found.rank, found.source, elements, offsets, stops - offsets, found.box, found.piece)

"""Owns how the parts wanted of one chunk are read: in slabs of whole blocks, each block once; reads nothing itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ckptspec.engine.holding import Holding
from ckptspec.format.box import Box, intersect, long_axis
from ckptspec.planner.views import View

LEAST_IN_PLACE = 4  # whole blocks of one part, from which on they are read to where they belong, not by way of a buffer


@dataclass(frozen=True)
class Wish:
    """A part that is wanted of a chunk: `box`, inside the box of `view`, a run of the chunk's elements."""

    view: View
    box: Box
    holding: Holding


@dataclass(frozen=True)
class _Span:
    """A part of a wish, and the run of the chunk's elements that it lies in."""

    start: int
    stop: int
    wish: Wish
    box: Box

    @property
    def dense(self) -> bool:
        """Whether the run holds nothing else."""
        return self.stop - self.start == self.box.numel


@dataclass(frozen=True)
class Slab:
    """Bytes [low, high) of a chunk, whole blocks, and the spans that lie, wholly or in part, in elements [first, last).

    With `place` they are read there, and that is all.
    """

    low: int
    high: int
    first: int = 0
    last: int = 0
    spans: tuple[_Span, ...] = ()
    place: memoryview | None = None

    def pieces(self) -> Iterator[tuple[View, Box, Holding]]:
        """Yield what the slab delivers: a view of the chunk's elements, a box inside it, and who gets it."""
        for span in self.spans:
            for view in span.wish.view.within(max(span.start, self.first), min(span.stop, self.last)):
                box = intersect(view.box, span.box)
                if box is not None:
                    yield view, box, span.wish.holding


def slabs(wishes: Sequence[Wish], nbytes: int, itemsize: int, block: int, room: int) -> Iterator[Slab]:
    """Yield the reads that serve all wishes about a chunk of `nbytes`, ascending, each of at most `room` bytes.

    A block is read once, but for one that an element straddles and that ends a slab. Blocks nobody wants are left out.
    """
    spans = [span for wish in wishes for span in _spans(wish, wish.box, itemsize, block)]
    if len(spans) == 1 and spans[0].dense and block % itemsize == 0:
        yield from _straight(spans[0], nbytes, itemsize, block, room)
        return
    yield from _swept(sorted(spans, key=lambda s: s.start), nbytes, itemsize, block, room)


def _spans(wish: Wish, box: Box, itemsize: int, block: int) -> Iterator[_Span]:
    """Yield a wish in parts between which there are no whole blocks to leave out."""
    start, stop = wish.view.hull(box)
    row = prod(wish.view.box.sizes[1:])
    axis = long_axis(box)
    inner = prod(box.sizes) // box.sizes[axis] if axis is not None else 1
    stride = prod(wish.view.box.sizes[axis + 1 :]) if axis is not None else row
    if axis is None or (stride - inner) * itemsize < 2 * block or stop - start == box.numel:
        yield _Span(start, stop, wish, box)
        return
    for i in range(box.sizes[axis]):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += i
        sizes[axis] = 1
        yield from _spans(wish, Box(tuple(offsets), tuple(sizes)), itemsize, block)


def _straight(span: _Span, nbytes: int, itemsize: int, block: int, room: int) -> Iterator[Slab]:
    """Yield the reads of one part without gaps: its whole blocks in place, where it lies in a row there."""
    low = -(-span.start * itemsize // block) * block
    high = nbytes if span.stop * itemsize == nbytes else span.stop * itemsize // block * block
    place = span.wish.holding.view(span.box) if high - low >= LEAST_IN_PLACE * block else None
    if place is None:
        yield from _swept([span], nbytes, itemsize, block, room)
        return
    if span.start * itemsize < low:
        yield Slab(low - block, low, span.start, low // itemsize, (span,))
    skipped = low - span.start * itemsize
    yield Slab(low, high, place=place[skipped : skipped + high - low])
    if high < span.stop * itemsize:
        yield Slab(high, min(high + block, nbytes), high // itemsize, span.stop, (span,))


def _swept(spans: Sequence[_Span], nbytes: int, itemsize: int, block: int, room: int) -> Iterator[Slab]:
    """Yield slabs over spans, which are sorted by their start."""
    room = max(1, room // block) * block
    open_: list[_Span] = []
    at = taken = 0
    while open_ or taken < len(spans):
        if not open_:
            at = spans[taken].start
        low = at * itemsize // block * block
        limit = (low + room) // itemsize if low + room < nbytes else nbytes // itemsize
        end = max((s.stop for s in open_), default=at)
        while taken < len(spans) and spans[taken].start < limit and (spans[taken].start - end) * itemsize < block:
            open_.append(spans[taken])
            end = max(end, spans[taken].stop)
            taken += 1
        last = min(end, limit)
        high = min(-(-last * itemsize // block) * block, nbytes)
        yield Slab(low, high, at, last, tuple(open_))
        open_ = [s for s in open_ if s.stop > last]
        at = last

"""Owns how one dimension is cut over mesh axes, in chunks (with blocks) or flat parts, and the boxes its spans make."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import Union

from ckptspec.format.box import Box, split

Span = tuple[int, int]  # offset and size along one dimension, in elements
Coord = tuple[int, ...]  # one index for each axis the dimension is cut over, outermost first
Spans = Sequence[Sequence[Span]]  # for every dimension the spans a rank has of it; its boxes are their product


@dataclass(frozen=True)
class Chunks:
    """Each of `blocks` (else the whole dimension) in equal chunks over axes of `sizes`, outermost first [T-DIMS]."""

    sizes: tuple[int, ...]
    blocks: tuple[int, ...] | None = None

    def spans(self, n: int, coord: Coord) -> tuple[Span, ...]:
        """Return the spans of `n` elements at `coord`, one a block, in order; some may be empty."""
        if self.blocks is None:
            return (self._piece(0, n, coord),)
        starts = accumulate(self.blocks, initial=0)
        return tuple(self._piece(start, size, coord) for start, size in zip(starts, self.blocks, strict=False))

    def cover(self, n: int, start: int, stop: int) -> Iterator[tuple[Coord, Span]]:
        """Yield the non-empty spans that meet [start, stop), with their coordinates, by offset."""
        begin = 0
        for size in (n,) if self.blocks is None else self.blocks:
            yield from self._cover(begin, size, start, stop, ())
            begin += size

    def _piece(self, offset: int, n: int, coord: Coord) -> Span:
        for k, i in zip(self.sizes, coord, strict=True):
            start, n = split(n, k, i)
            offset += start
        return offset, n

    def _cover(self, offset: int, n: int, start: int, stop: int, head: Coord) -> Iterator[tuple[Coord, Span]]:
        if max(offset, start) >= min(offset + n, stop):
            return
        if len(head) == len(self.sizes):
            yield head, (offset, n)
            return
        step = -(-n // self.sizes[len(head)])
        for i in range(max(0, start - offset) // step, -(-(min(offset + n, stop) - offset) // step)):
            piece = min(step, n - i * step)
            yield from self._cover(offset + i * step, piece, start, stop, (*head, i))


@dataclass(frozen=True)
class Parts:
    """Flat parts over axes of `sizes`, counted row-major: ceil(n/k) rounded up to `align`, or at `bounds` [T-FLAT]."""

    sizes: tuple[int, ...]
    align: int = 1
    bounds: tuple[int, ...] | None = None

    def spans(self, n: int, coord: Coord) -> tuple[Span, ...]:
        """Return the one span of `n` elements at `coord`, without padding; it may be empty."""
        part = 0
        for size, i in zip(self.sizes, coord, strict=True):
            part = part * size + i
        return (self._span(n, part),)

    def cover(self, n: int, start: int, stop: int) -> Iterator[tuple[Coord, Span]]:
        """Yield the non-empty spans that meet [start, stop), with their coordinates, by offset."""
        k = prod(self.sizes)
        start, stop = max(start, 0), min(stop, n)
        if start >= stop:
            return
        bounds = self.bounds
        first = start // part_size(n, k, self.align) if bounds is None else bisect_right(bounds, start) - 1
        for part in range(first, k):
            offset, size = self._span(n, part)
            if offset >= stop:
                return
            if size:
                yield self._coord(part), (offset, size)

    def _span(self, n: int, part: int) -> Span:
        if self.bounds is not None:
            return self.bounds[part], self.bounds[part + 1] - self.bounds[part]
        size = part_size(n, prod(self.sizes), self.align)
        offset = min(part * size, n)
        return offset, min(size, n - offset)

    def _coord(self, part: int) -> Coord:
        coord = []
        for size in reversed(self.sizes):
            part, i = divmod(part, size)
            coord.append(i)
        return tuple(reversed(coord))


Cutting = Union[Chunks, Parts]
WHOLE = Chunks(())  # a dimension that is not cut


def part_size(numel: int, k: int, align: int) -> int:
    """Return the elements of one flat part with its padding: ceil(numel/k) rounded up to a multiple of `align`."""
    unit = k * align  # one `align` for each of the k parts
    return (numel + unit - 1) // unit * align


def boxes_of(spans: Spans) -> tuple[Box, ...]:
    """Return the row-major product of the spans, without the empty ones."""
    boxes = []
    for choice in product(*spans):
        sizes = tuple([size for _, size in choice])
        if 0 not in sizes:
            boxes.append(Box(tuple([offset for offset, _ in choice]), sizes))
    return tuple(boxes)


def shape_of(spans: Spans) -> tuple[int, ...]:
    """Return the shape of what the spans make when they are moved together."""
    return tuple([sum([size for _, size in several]) for several in spans])


def packed(spans: Spans) -> Spans:
    """Return the spans moved together, as they lie in the rank's own tensor."""
    return [
        tuple(zip(accumulate((size for _, size in several), initial=0), (size for _, size in several), strict=False))
        for several in spans
    ]

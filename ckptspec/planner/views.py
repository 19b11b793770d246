"""Owns views: runs of a one-dimensional tensor seen as boxes of another; knows nothing of names, ranks or files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from ckptspec.format.box import Box


@dataclass(frozen=True)
class View:
    """A run of a one-dimensional tensor, from element `start` on: `box` of a larger tensor, row-major."""

    start: int
    box: Box

    @property
    def stop(self) -> int:
        """The first element behind the run."""
        return self.start + self.box.numel

    def hull(self, box: Box) -> tuple[int, int]:
        """Return the shortest run of elements (start, stop) that holds `box`, a part of the view's, not empty."""
        first = [o - at for o, at in zip(box.offsets, self.box.offsets, strict=True)]
        last = [o + n - 1 for o, n in zip(first, box.sizes, strict=True)]
        return self._element(first), self._element(last) + 1

    def _element(self, index: list[int]) -> int:
        place = 0
        for i, n in zip(index, self.box.sizes, strict=True):
            place = place * n + i
        return self.start + place

    def within(self, start: int, stop: int) -> Iterator[View]:
        """Yield the views of those elements of the run that lie in [start, stop), ascending: at most 2 * ndim - 1."""
        low, high = max(start, self.start), min(stop, self.stop)
        if low == self.start and high == self.stop:
            if high > low:
                yield self
        elif low < high:
            yield from _cut(self.box, 0, low - self.start, high - self.start, self.start)


def _cut(box: Box, axis: int, low: int, high: int, start: int) -> Iterator[View]:
    """Yield the views of elements [low, high) of a box, single before `axis`, whose element 0 is at `start`."""
    row = prod(box.sizes[axis + 1 :])
    first, head = divmod(low, row)
    last, tail = divmod(high, row)
    if head and first == last:
        yield from _cut(_rows(box, axis, first, 1), axis + 1, head, tail, start + first * row)
        return
    if head:
        yield from _cut(_rows(box, axis, first, 1), axis + 1, head, row, start + first * row)
        first += 1
    if last > first:
        yield View(start + first * row, _rows(box, axis, first, last - first))
    if tail:
        yield from _cut(_rows(box, axis, last, 1), axis + 1, 0, tail, start + last * row)


def _rows(box: Box, axis: int, first: int, count: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[axis] += first
    sizes[axis] = count
    return Box(tuple(offsets), tuple(sizes))

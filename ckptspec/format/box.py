"""Owns boxes, offsets and sizes in a tensor, and how they are cut; knows nothing of ranks, names or files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import add

CHUNK_LIMIT = 2**30  # the most bytes one chunk may have [S-CHUNK]


@dataclass(frozen=True)
class Box:
    """An n-d range of elements: `offsets[d] <= index[d] < offsets[d] + sizes[d]`; 0-d is one element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box that is all of a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.sizes)

    @property
    def numel(self) -> int:
        """The number of elements; 1 for a 0-d box."""
        return prod(self.sizes)

    @property
    def empty(self) -> bool:
        """Whether the box has no element."""
        return 0 in self.sizes

    @property
    def stops(self) -> tuple[int, ...]:
        """The first index beyond the box in every dimension."""
        return tuple(map(add, self.offsets, self.sizes))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements that two boxes of one tensor share, or None if there are none."""
    offsets, sizes = [], []
    for start, length, other, extent in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        offset = max(start, other)
        size = min(start + length, other + extent) - offset
        if size <= 0:
            return None
        offsets.append(offset)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def contains(outer: Box, inner: Box) -> bool:
    """Tell whether every index of `inner` lies in `outer`, dimension by dimension (an empty `inner` must too)."""
    return all(
        start <= offset and offset + size <= start + length
        for start, length, offset, size in zip(outer.offsets, outer.sizes, inner.offsets, inner.sizes, strict=True)
    )


def split(n: int, k: int, i: int) -> tuple[int, int]:
    """Return (offset, size) of piece `i` of `n` elements in `k`: ceil(n/k) each, trailing ones smaller or empty."""
    step = -(-n // k)
    offset = min(i * step, n)
    return offset, min(step, n - offset)


def long_axis(box: Box) -> int | None:
    """Return the first axis longer than 1, the one a box is cut along, or None."""
    for axis, size in enumerate(box.sizes):
        if size > 1:
            return axis
    return None


def cut_piece(box: Box, k: int, i: int) -> Box | None:
    """Return piece `i` of `box` cut in `k` along its first axis longer than 1, or None where that piece is empty."""
    axis = long_axis(box)
    if axis is None:
        return box if i == 0 and not box.empty else None
    offset, size = split(box.sizes[axis], k, i)
    return None if size == 0 or box.empty else _along(box, axis, offset, size)


def cut(box: Box, k: int) -> tuple[Box, ...]:
    """Return the non-empty pieces of `box` cut in `k`; empty ones could only trail, so piece i is at index i."""
    pieces = []
    for i in range(k):
        piece = cut_piece(box, k, i)
        if piece is None:
            break
        pieces.append(piece)
    return tuple(pieces)


def pieces(box: Box, itemsize: int, limit: int = CHUNK_LIMIT) -> tuple[Box, ...]:
    """Return the ordered pieces of `box`, each contiguous in its row-major bytes and at most `limit` bytes [S-CHUNK].

    An empty box has none; a single element larger than `limit` is a piece all the same.
    """
    return tuple(iter_pieces(box, itemsize, limit))


def iter_pieces(box: Box, itemsize: int, limit: int = CHUNK_LIMIT) -> Iterator[Box]:
    """Yield what `pieces` returns, lazily: a shape nobody vouches for may have very many."""
    nbytes = box.numel * itemsize
    axis = long_axis(box)
    if nbytes <= limit or axis is None:
        if nbytes:
            yield box
        return
    length = box.sizes[axis]
    row = nbytes // length
    rows = max(1, limit // row)
    for start in range(0, length, rows):
        piece = _along(box, axis, start, min(rows, length - start))
        if row > limit:
            yield from iter_pieces(piece, itemsize, limit)
        else:
            yield piece


def runs(outer: Box, inner: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """Yield (byte offset, bytes) of every contiguous run of `inner` in the row-major bytes of `outer`, ascending.

    Both boxes are in the coordinates of their tensor and `inner` lies in `outer`.
    """
    if inner.empty:
        return
    stride, nbytes, whole = itemsize, itemsize, True
    loops: list[range] = []
    base = 0
    for start, length, offset, size in zip(
        reversed(outer.offsets), reversed(outer.sizes), reversed(inner.offsets), reversed(inner.sizes), strict=True
    ):
        base += (offset - start) * stride
        if whole:
            nbytes *= size
        elif size > 1:
            loops.append(range(0, size * stride, stride))
        whole = whole and size == length
        stride *= length
    for steps in product(*reversed(loops)):
        yield base + sum(steps), nbytes


def _along(box: Box, axis: int, offset: int, size: int) -> Box:
    """Return the part of `box` that begins `offset` along `axis` and has `size` there."""
    offsets, sizes = box.offsets, box.sizes
    return Box(
        (*offsets[:axis], offsets[axis] + offset, *offsets[axis + 1 :]),
        (*sizes[:axis], size, *sizes[axis + 1 :]),
    )

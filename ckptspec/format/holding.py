"""Owns the holder rule [T-HOLD]: which of the ranks that hold a box store it; it never looks at layouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from zlib import crc32

from ckptspec.format.box import Box, cut, cut_piece

CUT_FROM = 1 << 20  # bytes that each storer must get for a box to be cut among them [T-HOLD]
STORERS = 16  # of a box that more ranks hold, so many store it: a reader has no more shards to open [T-HOLD]

Ranks = tuple[int, ...]


def share(box: Box, ranks: Ranks, rank: int, itemsize: int, name: str, copies: int) -> tuple[Box, ...]:
    """Return what `rank` stores of a box held by `ranks` (ascending): the box, pieces of it by offset, or nothing.

    Each element is stored min(copies, len(ranks)) times, never twice by one rank [T-COVER].
    """
    k = len(ranks)
    if k == 1:
        return (box,)
    w = min(k, max(STORERS, copies))
    holder = bisect_left(ranks, rank)
    place = -(-holder * w // k)
    if place * k // w != holder:
        return ()
    if box.numel * itemsize < w * CUT_FROM:
        return (box,) if (place - crc32(name.encode())) % w < copies else ()
    kept = sorted((place - copy) % w for copy in range(min(copies, w)))
    pieces = (cut_piece(box, w, i) for i in kept)
    return tuple(piece for piece in pieces if piece is not None)


def sharers(box: Box, ranks: Ranks, itemsize: int, name: str, copies: int) -> Iterator[tuple[int, Box]]:
    """Yield (rank, box or piece of it) for every copy that `share` gives to any of `ranks`."""
    k = len(ranks)
    w = min(k, max(STORERS, copies))
    small = box.numel * itemsize < w * CUT_FROM
    first = crc32(name.encode()) if small else 0
    for i, piece in enumerate((box,) if small or k == 1 else cut(box, w)):
        for copy in range(min(copies, w)):
            yield ranks[(first + i + copy) % w * k // w], piece


class Placement(ABC):
    """A layout resolved for all ranks; what depends on the layout alone is worked out once and kept."""

    @abstractmethod
    def ranks(self) -> Ranks:
        """Return the ranks that take part in the layout, ascending, those with an empty share included."""

    @abstractmethod
    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        """Return the boxes that `rank` holds, in order, empty ones dropped; () where it takes no part."""

    @abstractmethod
    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
        """Return the shape of the rank's own tensor, its boxes put together; None where it takes no part."""

    @abstractmethod
    def local_boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        """Return where each of `boxes` lies in the rank's own tensor of `local_shape`, in the same order."""

    @abstractmethod
    def group(self, rank: int, box: Box) -> Ranks:
        """Return the ranks that hold `box`, ascending, given that it is one of the boxes of `rank`."""

    @abstractmethod
    def parts(self, shape: Sequence[int], within: Box | None = None) -> Iterator[tuple[Box, Ranks]]:
        """Yield every distinct box (only those that meet `within`, when given) with the ranks that hold it."""

    def holders(self, shape: Sequence[int], rank: int, box: Box) -> Ranks:
        """Return the ranks, ascending, that hold this very box of `rank`; () when `rank` does not hold it."""
        return self.group(rank, box) if box in self.boxes(shape, rank) else ()

    def stored(self, shape: Sequence[int], itemsize: int, name: str, copies: int, rank: int) -> tuple[Box, ...]:
        """Return what `rank` stores, before it is cut into chunks [T-HOLD]; `itemsize` is bytes an element."""
        return self.kept(self.boxes(shape, rank), itemsize, name, copies, rank)

    def kept(self, held: Sequence[Box], itemsize: int, name: str, copies: int, rank: int) -> tuple[Box, ...]:
        """Return what `rank` stores of the boxes it holds, for a caller that has them already."""
        kept: list[Box] = []
        for box in held:
            kept += share(box, self.group(rank, box), rank, itemsize, name, copies)
        return tuple(kept)

    def storers(
        self, shape: Sequence[int], itemsize: int, name: str, copies: int, within: Box | None = None
    ) -> Iterator[tuple[int, Box]]:
        """Yield (rank, box) for all that `stored` gives to any rank; `within` leaves out parts that do not meet it."""
        for box, ranks in self.parts(shape, within):
            yield from sharers(box, ranks, itemsize, name, copies)

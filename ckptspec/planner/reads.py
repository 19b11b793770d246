"""Owns what is read of stored pieces, as columns: bytes in whole blocks, none twice by one rank; reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from ckptspec.format.box import CHUNK_LIMIT, Box, iter_pieces
from ckptspec.planner.columns import Ints, ints, numels, united

FEW = 1 << 14  # reads that are not put together


@dataclass(frozen=True)
class Reads:
    """Bytes [low, high) of stored pieces that destination ranks read: whole blocks, none twice by one rank."""

    rank: Ints
    piece: Ints
    low: Ints
    high: Ints

    @classmethod
    def union(cls, several: Sequence[Reads]) -> Reads:
        """Return all that is read in any of several, each byte of a rank once."""
        rank, piece, low, high = (
            np.concatenate(column) for column in zip(*(vars(r).values() for r in several), strict=True)
        )
        (rank, piece), low, high = united([rank, piece], low, high)
        return cls(rank, piece, low, high)


class Once:
    """The bytes of stored pieces that any rank reads, each once: put together when as many are new as there were."""

    def __init__(self) -> None:
        self._known = (np.zeros(0, np.int64),) * 3
        self._new: list[tuple[Ints, Ints, Ints]] = []
        self._count = 0

    def add(self, reads: Reads) -> None:
        """Add what some ranks read."""
        self._new.append((reads.piece, reads.low, reads.high))
        self._count += len(reads.piece)
        if self._count > max(FEW, len(self._known[0])):
            self._unite()

    def _unite(self) -> None:
        piece, low, high = (np.concatenate(column) for column in zip(self._known, *self._new, strict=True))
        (piece,), low, high = united([piece], low, high)
        self._known, self._new, self._count = (piece, low, high), [], 0

    def nbytes(self) -> int:
        """Return how many bytes that is."""
        self._unite()
        return int((self._known[2] - self._known[1]).sum())


def whole_blocks(start: Ints, stop: Ints, sizes: Ints, itemsize: int, block: int) -> tuple[Ints, Ints]:
    """Return bytes [start, stop) of pieces widened to whole blocks; those of each chunk of a piece begin anew."""
    nbytes = numels(sizes) * itemsize
    low, high = start // block * block, np.minimum(-(-stop // block) * block, nbytes)
    large = np.flatnonzero(nbytes > CHUNK_LIMIT)
    for piece in np.unique(sizes[large], axis=0) if len(large) else ():
        rows = large[(sizes[large] == piece).all(axis=1)]
        ends = _chunk_ends(tuple(map(int, piece)), itemsize)
        begin = ends[np.searchsorted(ends, start[rows], "right") - 1]
        low[rows] = begin + (start[rows] - begin) // block * block
        after = np.searchsorted(ends, stop[rows], "left")
        begin = ends[after - 1]
        high[rows] = np.minimum(begin - (begin - stop[rows]) // block * block, ends[after])
    return low, high


@cache
def _chunk_ends(sizes: tuple[int, ...], itemsize: int) -> Ints:
    """Return the bytes of a piece at which its chunks begin, and its length [S-CHUNK]."""
    lengths = [box.numel * itemsize for box in iter_pieces(Box.whole(sizes), itemsize)]
    return ints([0, *np.cumsum(lengths)])

"""Owns a shard's chunks as a table small enough to keep for every rank of a large job; refuses to hold any payload."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptspec.format import shard
from ckptspec.format.box import Box
from ckptspec.format.shard import Extent, Index


@dataclass(frozen=True)
class Chunk:
    """One chunk: whose shard, its row there, its box, its payload's extent in bytes, the number of its first block."""

    rank: int
    row: int
    box: Box
    start: int
    nbytes: int
    block: int

    @property
    def key(self) -> tuple[int, int]:
        """What tells the chunk from all others of its checkpoint."""
        return self.rank, self.row


class Table:
    """The chunks of one shard by the number of their tensor; some 60 bytes a chunk, where an Index takes 600."""

    def __init__(self, rank: int, index: Index, numbers: Mapping[str, int], block_size: int) -> None:
        self.rank = rank
        self.end = index.end
        self._header_nbytes = index.header_nbytes
        tensors = [numbers[name] for name in index.names]
        order = sorted(range(len(index.chunks)), key=lambda row: tensors[index.chunks[row].tensor])
        self._tensors = array("q", (tensors[index.chunks[row].tensor] for row in order))
        self._rows = array("q", order)
        self._starts = array("q", (c.start for c in index.chunks))
        self._sizes = array("q", (c.nbytes for c in index.chunks))
        self._blocks = array("q", index.first_blocks(block_size)[:-1])
        self._boxes = array("q")
        self._where = array("q")
        for c in index.chunks:
            self._where.append(len(self._boxes))
            self._boxes.extend((*c.box.offsets, *c.box.sizes))
        self._where.append(len(self._boxes))

    @property
    def blocks(self) -> int:
        """The number of blocks of all chunks, the state's left out."""
        return self._blocks[-1]

    def of(self, tensor: int) -> Iterator[Chunk]:
        """Yield the chunks of the tensor with this number, in order."""
        at = bisect_left(self._tensors, tensor)
        while at < len(self._tensors) and self._tensors[at] == tensor:
            yield self.chunk(self._rows[at])
            at += 1

    def chunk(self, row: int) -> Chunk:
        """Return the chunk in this row of the index."""
        numbers = self._boxes[self._where[row] : self._where[row + 1]]
        ndim = len(numbers) // 2
        box = Box(tuple(numbers[:ndim]), tuple(numbers[ndim:]))
        return Chunk(self.rank, row, box, self._starts[row], self._sizes[row], self._blocks[row])

    def lead(self, row: int) -> bytes:
        """Return the frame bytes before a chunk's payload [S-FRAME]."""
        before = self._starts[row - 1] + self._sizes[row - 1] if row else self._header_nbytes
        return shard.lead(before, Extent(self._starts[row], self._sizes[row]))

    def row_of_block(self, block: int) -> int:
        """Return the row of the chunk that a block, by its number in the shard, is a part of."""
        low, high = 0, len(self._starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._blocks[middle] <= block else (low, middle)
        return low

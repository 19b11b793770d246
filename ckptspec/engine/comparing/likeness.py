"""Owns what block digests alone prove equal, and which boxes are left to be compared by bytes; reads no payload."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckptspec.engine.comparing.sides import Side
from ckptspec.format import digest as digests
from ckptspec.format.box import Box, iter_pieces
from ckptspec.format.dtypes import DType
from ckptspec.format.tiling import tiled
from ckptspec.planner.transfers import Locator, Need, moves, needed

PROOF = frozenset(digests.ALGORITHMS) - {"crc32c"}  # of 2^32 blocks that differ one has the same crc32c
LEAST_PIECE = 1 << 16  # bytes; a chunk with few differing blocks is not cut finer than this


@dataclass(frozen=True)
class Item:
    """Two tensors of one dtype and shape to compare: `a` and `b` by their own names, as they stand under `name`.

    `rank` is whose they are, where they are local.
    """

    name: str
    a: str
    b: str
    kind: DType
    shape: tuple[int, ...]
    rank: int | None = None
    also: tuple[str, ...] = ()

    @cached_property
    def whole(self) -> Box:
        """All of the tensor."""
        return Box.whole(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """The bytes of either tensor."""
        return self.whole.numel * self.kind.itemsize


Stored = dict[Box, bytes]  # the block digests of every chunk, one after another


@dataclass
class Likeness:
    """What the indexes of two checkpoints say of the items; empty where they prove nothing: crc32c, or other blocks.

    Chunks are compared only box by box: the digests of two equal boxes are of the same elements in the same order.
    """

    size: int = 0
    block_size: int = 1
    a: dict[tuple[str, int | None], Stored] = field(default_factory=dict)
    b: dict[tuple[str, int | None], Stored] = field(default_factory=dict)

    def unsettled(self, item: Item) -> tuple[Box, ...]:
        """Return disjoint boxes of an item outside of which the two tensors are equal."""
        if item.whole.empty:
            return ()
        first, second = self.a.get((item.a, item.rank), {}), self.b.get((item.b, item.rank), {})
        if first.keys().isdisjoint(second) or not (item.whole in first or tiled(item.whole, list(first))):
            return (item.whole,)
        left: list[Box] = []
        for box, digest in first.items():
            other = second.get(box)
            if other is None:
                left.append(box)
            elif other != digest:
                left += self._blocks(box, item.kind.itemsize, digest, other)
        # All of it is cut anew, by rows of the tensor: what lies in chunks of other boxes is then read once.
        return tuple(left) if sum(box.numel for box in left) < item.whole.numel else (item.whole,)

    def _blocks(self, box: Box, itemsize: int, a: bytes, b: bytes) -> Iterator[Box]:
        """Yield the pieces of a chunk that hold the blocks that differ, or the chunk where most of them do."""
        n = self.size
        unlike = [i // n for i in range(0, len(a), n) if a[i : i + n] != b[i : i + n]]
        if 2 * len(unlike) > len(a) // n:
            yield box
            return
        start = 0
        for piece in iter_pieces(box, itemsize, max(self.block_size, LEAST_PIECE)):
            stop = start + piece.numel * itemsize
            i = bisect_left(unlike, start // self.block_size)
            if i < len(unlike) and unlike[i] * self.block_size < stop:
                yield piece
            start = stop


def likeness(a: Side, b: Side, items: Sequence[Item]) -> Likeness:
    """Return what the indexes prove; raises PlanError [T-COVER] where a shard lacks what its layout gives it."""
    m = a.manifest
    if (m.block, m.block_size) != (b.manifest.block, b.manifest.block_size) or m.block not in PROOF:
        return Likeness()
    size = digests.digest_size(m.block)
    first = _stored(a, {(i.a, i.rank): Need(i.a, i.whole, i.rank) for i in items}, size)
    second = _stored(b, {(i.b, i.rank): Need(i.b, i.whole, i.rank) for i in items}, size)
    return Likeness(size, m.block_size, first, second)


def _stored(
    side: Side, needs: dict[tuple[str, int | None], Need], size: int
) -> dict[tuple[str, int | None], dict[Box, bytes]]:
    """Return the digests of one copy of every chunk that makes up the needs."""
    found: dict[tuple[str, int | None], Stored] = {}
    with side.blamed():
        for rank, parts in needed(Locator(side.manifest), needs.values()).items():
            index = side.document(rank).index
            first = index.block_offsets(side.manifest.block_size)
            for move in moves(rank, index, parts):
                if move.box == index.chunks[move.chunk].box:
                    rows = index.digests[first[move.chunk] * size : first[move.chunk + 1] * size]
                    found.setdefault((move.need.name, move.need.rank), {})[move.box] = rows
    return found

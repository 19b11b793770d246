"""Owns the judgement of one tensor's stored pieces: right, stored by others or cut otherwise, or not covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod

from ckptspec.format.box import Box, iter_pieces
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import LocalLayout
from ckptspec.format.manifest import Manifest, TensorEntry
from ckptspec.format.placement import storers
from ckptspec.format.tiling import overlap

Piece = tuple[int, tuple[int, ...], tuple[int, ...]]  # rank, offsets, sizes
SPARE = 1 << 12  # pieces listed beyond the found ones before a tensor counts as not covered: a shape may imply 2^33
CORNER_DIMS = 6  # dimensions along which pieces may differ and still be compared exactly


@dataclass(frozen=True)
class Place:
    """A tensor whose pieces are not those of the holder rule: rule T-COVER or T-HOLD, and one piece that shows it."""

    code: str
    tensor: str
    rank: int | None
    expected: str
    found: str


def expected_pieces(m: Manifest, name: str, entry: TensorEntry) -> Iterator[Piece]:
    """Yield (rank, offsets, sizes) of each chunk that the holder rule and the chunk limit give a tensor [T-HOLD]."""
    itemsize = DTYPES[entry.dtype].itemsize
    for rank, box in storers(m.layouts[entry.layout], m.meshes, entry.shape or (), itemsize, name, m.copies):
        for piece in iter_pieces(box, itemsize):
            yield rank, piece.offsets, piece.sizes


def judge(m: Manifest, name: str, found: Sequence[Piece], ranks: Collection[int]) -> Place | None:
    """Return what is wrong with the pieces `found` of a tensor in the shards of `ranks`, or None.

    Shards of other ranks are unknown and taken to be right. Local tensors are judged shard by shard [T-LOCAL].
    """
    entry = m.tensors[name]
    if isinstance(m.layouts[entry.layout], LocalLayout):
        return None
    limit = len(found) + SPARE
    listed = islice(expected_pieces(m, name, entry), limit + (m.world_size - len(ranks)) * SPARE + 1)
    expected = list(islice((p for p in listed if p[0] in ranks), limit + 1))
    if len(expected) == len(found) and sorted(expected) == sorted(found):
        return None
    same = len(expected) <= limit and _covers_alike(expected, found)
    code = "T-HOLD" if same and not _twice_in_a_rank(found) else "T-COVER"
    lacking, surplus = Counter(expected) - Counter(found), Counter(found) - Counter(expected)
    first = min(lacking or surplus)
    extra = f", of other pieces {_text(min(surplus))}" if surplus and lacking else ""
    return Place(
        code,
        name,
        first[0],
        f"{_text(first)} once" if lacking else f"no more than {_count(expected)} elements in all",
        (f"{_count(found)} elements in all, not this piece{extra}" if lacking else f"{_text(first)}"),
    )


def _text(piece: Piece) -> str:
    return f"rank {piece[0]} to store the box at {list(piece[1])} of {list(piece[2])}"


def _count(pieces: Iterable[Piece]) -> int:
    return sum(prod(sizes) for _, _, sizes in pieces)


def _covers_alike(a: Sequence[Piece], b: Sequence[Piece]) -> bool:
    """Tell whether two lists of boxes cover every element equally often, whoever stores it; False where too costly.

    How often an element is covered is a step function; it is equal where its steps, at the corners of boxes, are.
    """
    if not a or not b:
        return not a and not b
    extents = [{(p[1][d], p[2][d]) for p in (*a, *b)} for d in range(len(a[0][1]))]
    dims = [d for d, seen in enumerate(extents) if len(seen) > 1]
    if len(dims) > CORNER_DIMS:
        return False
    steps: Counter[tuple[int, ...]] = Counter()
    for sign, pieces in ((1, a), (-1, b)):
        for _, offsets, sizes in pieces:
            edges = [((offsets[d], 1), (offsets[d] + sizes[d], -1)) for d in dims]
            for corner in product(*edges):
                steps[tuple(at for at, _ in corner)] += sign * prod(way for _, way in corner)
    return not any(steps.values())


def _twice_in_a_rank(pieces: Sequence[Piece]) -> bool:
    """Tell whether one rank stores an element twice, which is no second copy."""
    mine: dict[int, list[Box]] = {}
    for rank, offsets, sizes in pieces:
        mine.setdefault(rank, []).append(Box(offsets, sizes))
    return any(overlap(boxes) is not None for boxes in mine.values())

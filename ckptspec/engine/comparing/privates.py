"""Owns the comparison of what is not tensor bytes shared by all ranks: objects, and which ranks have a local tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptspec.check.comparing.differences import Difference
from ckptspec.check.comparing.leaves import leaves, shown
from ckptspec.check.comparing.matching import Pair
from ckptspec.engine.comparing.likeness import Item
from ckptspec.engine.comparing.sides import Side
from ckptspec.format.dtypes import dtype
from ckptspec.format.objects import unpack
from ckptspec.format.shard import Index


def compare_objects(a: Side, b: Side, names: Sequence[str]) -> Iterator[Difference]:
    """Yield how objects differ: those of kind `same` once, those of kind `rank` for every rank.

    One that is `same` on one side only is compared with every rank's on the other. Raises ShardError, IntegrityError
    or OSError.
    """
    kinds = {name: (a.manifest.objects[name], b.manifest.objects[name]) for name in names}
    for name, kind in kinds.items():
        if kind == ("same", "same"):
            yield from _unlike(name, None, _same(a, name), _same(b, name))
    private = {name: kind for name, kind in kinds.items() if "rank" in kind}
    for rank in range(_ranks(a, b) if private else 0):
        with a.blamed():
            first = a.taken(rank)
        with b.blamed():
            second = b.taken(rank)
        for name, kind in private.items():
            if kind[0] == "same" and name in second:
                yield from _unlike(name, rank, _same(a, name), second[name])
            elif kind[1] == "same" and name in first:
                yield from _unlike(name, rank, first[name], _same(b, name))
            elif kind == ("rank", "rank"):
                yield from _unlike(name, rank, first.get(name), second.get(name))


def _same(side: Side, name: str) -> bytes:
    with side.blamed():
        return side.same(name)


def _ranks(a: Side, b: Side) -> int:
    return max(a.manifest.world_size, b.manifest.world_size)


def _unlike(name: str, rank: int | None, a: bytes | None, b: bytes | None) -> Iterator[Difference]:
    if a == b:
        return
    if a is None or b is None:
        texts = [None if data is None else shown(unpack(data, numpy=False)) for data in (a, b)]
        yield Difference("only_b" if a is None else "only_a", name, rank, a=texts[0], b=texts[1])
        return
    found = leaves(unpack(a, numpy=False), unpack(b, numpy=False), name)
    path, first, second = next(found)
    yield Difference("object", name, rank, a=first, b=second, path=path, count=1 + sum(1 for _ in found))


def local_items(a: Side, b: Side, pairs: Sequence[Pair]) -> Iterator[Item | Difference]:
    """Yield what is to be compared of local tensors, rank by rank, and where only one side has one, or another shape.

    Every index of both sides is read where there are such pairs; raises ShardError, IntegrityError or OSError.
    """
    for rank in range(_ranks(a, b) if pairs else 0):
        with a.blamed():
            first = _shapes(a.index(rank), {pair.a for pair in pairs})
        with b.blamed():
            second = _shapes(b.index(rank), {pair.b for pair in pairs})
        for pair in pairs:
            yield from _local(pair, rank, a.manifest.tensors[pair.a].dtype, first.get(pair.a), second.get(pair.b))


def _shapes(index: Index | None, names: set[str]) -> dict[str, tuple[int, ...]]:
    if index is None:
        return {}
    return {name: shape for name, shape in zip(index.names, index.shapes, strict=True) if name in names}


def _local(
    pair: Pair, rank: int, kind: str, a: tuple[int, ...] | None, b: tuple[int, ...] | None
) -> Iterator[Item | Difference]:
    if a is not None and a == b:
        yield Item(pair.name, pair.a, pair.b, dtype(kind), a, rank, tuple(pair.also))
    elif a is not None or b is not None:
        texts = [None if shape is None else f"{kind} {list(shape)}" for shape in (a, b)]
        word = "only_b" if a is None else "only_a" if b is None else "shape"
        yield Difference(word, pair.name, rank, a=texts[0], b=texts[1], also=tuple(pair.also))

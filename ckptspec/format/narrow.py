"""Owns what a layout becomes where only some ranks of its mesh hold a tensor; refuses holders that leave parts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from zlib import crc32

from ckptspec.format.layout import Axis, FlatLayout, Mesh, MeshLayout, RankMap, coordinate, members, rank_at

Ranks = tuple[int, ...]
Coord = tuple[int, ...]


@dataclass(frozen=True)
class Narrowed:
    """A layout for fewer ranks under a name that tells which, and its mesh."""

    name: str
    layout: MeshLayout | FlatLayout
    mesh: Mesh


class HoldersError(Exception):
    """A rank that must hold a tensor by its layout does not, or one that has no place in the layout does."""

    def __init__(self, rank: int, *, holds: bool) -> None:
        super().__init__(rank)
        self.rank = rank
        self.holds = holds


def tag(ranks: Ranks) -> str:
    """Return a short name for some ranks, ascending: `3`, `0-7`, `1-7:2`, else the first and a checksum."""
    if len(ranks) == 1:
        return str(ranks[0])
    step = ranks[1] - ranks[0]
    if step > 0 and all(b - a == step for a, b in pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return f"{ranks[0]}.{crc32(repr(tuple(ranks)).encode()):08x}"


def strided(ranks: Sequence[int], shape: Sequence[int]) -> RankMap | None:
    """Return row-major ranks of a mesh of `shape` as offset and strides, or None where they follow no such rule."""
    strides = []
    for d in range(len(shape)):
        step = prod(shape[d + 1 :])
        strides.append(ranks[step] - ranks[0] if shape[d] > 1 else 1)
    if any(s < 1 for s in strides):
        return None
    rebuilt = [ranks[0]]
    for size, stride in zip(shape, strides, strict=True):
        rebuilt = [r + i * stride for r in rebuilt for i in range(size)]
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return None  # such strides cannot be told apart [T-MESH]
        reach += stride * (size - 1)
    return RankMap(ranks[0], tuple(strides)) if rebuilt == list(ranks) else None


def mesh_of(axes: Sequence[Axis], ranks: Ranks) -> Mesh:
    """Return the mesh with these axes and row-major ranks, in the shortest form there is."""
    if ranks == tuple(range(len(ranks))):
        return Mesh(tuple(axes))
    regular = strided(ranks, [a.size for a in axes])
    return Mesh(tuple(axes), ranks if regular is None else regular)


def grid(ranks: Ranks) -> tuple[int, ...]:
    """Return the sizes of the runs within runs that ascending ranks are made of, outermost first; (n,) for no rule."""
    sizes: list[int] = []
    starts = ranks
    while len(starts) > 1:
        step, run = starts[1] - starts[0], 2
        while run < len(starts) and starts[run] - starts[run - 1] == step:
            run += 1
        repeats = all(r == starts[i - i % run] + i % run * step for i, r in enumerate(starts))
        if len(starts) % run or not repeats:
            return (len(ranks),)
        sizes.insert(0, run)
        starts = starts[::run]
    return tuple(sizes) or (1,)


def narrow(name: str, layout: MeshLayout | FlatLayout, mesh: Mesh, ranks: Ranks) -> Narrowed:
    """Return the layout of a tensor that only `ranks` (ascending) hold, though every rank of the mesh might.

    Axes that cut the tensor must be held whole. The others are pinned where the holders share one index on them; else
    the holders get a mesh of their own. Raises HoldersError.
    """
    if len(ranks) == mesh.size and not layout.at and ranks == tuple(members(mesh)):
        return Narrowed(name, layout, mesh)
    cut = [mesh.index(a) for a in _cut(layout)]
    if not cut and len(mesh.axes) == 1 and mesh.ranks is None and ranks[-1] < mesh.size:
        return _apart(name, layout, ranks, _own_mesh(mesh, ranks, (), cut, [0]))
    free = [i for i in range(len(mesh.axes)) if i not in cut]
    kept = _places(layout, mesh, ranks, cut, free)
    sizes = [1 if mesh.axes[i].name in layout.at else mesh.shape[i] for i in free]
    seen = [{place[i] for place in kept} for i in range(len(free))]
    if len(kept) == prod(sizes):
        return Narrowed(name, layout, mesh)
    boxed = prod(map(len, seen)) == len(kept)
    if boxed and all(len(s) in (1, n) for s, n in zip(seen, sizes, strict=True)):
        at = {mesh.axes[i].name: min(s) for i, s, n in zip(free, seen, sizes, strict=True) if n > 1 and len(s) == 1}
        if len(mesh.axes) > 1:
            pins = ",".join(f"{axis}={i}" for axis, i in at.items())
            return Narrowed(f"{name}@{pins}", replace(layout, at={**layout.at, **at}), mesh)
    return _apart(name, layout, ranks, _own_mesh(mesh, ranks, kept, cut, free))


def _apart(name: str, layout: MeshLayout | FlatLayout, ranks: Ranks, own: Mesh) -> Narrowed:
    label = tag(ranks)
    return Narrowed(f"{name}@{label}", replace(layout, mesh=f"{layout.mesh}@{label}", at={}), own)


def _cut(layout: MeshLayout | FlatLayout) -> list[str]:
    return list(layout.axes) if isinstance(layout, FlatLayout) else [a for axes in layout.dims for a in axes]


def _places(
    layout: MeshLayout | FlatLayout, mesh: Mesh, ranks: Ranks, cut: Sequence[int], free: Sequence[int]
) -> list[Coord]:
    """Return where the holders stand on the free axes, ascending; raises HoldersError unless each place is whole."""
    found: dict[Coord, int] = {}
    for rank in ranks:
        coord = coordinate(mesh, rank)
        if coord is None or any(coord[mesh.index(axis)] != i for axis, i in layout.at.items()):
            raise HoldersError(rank, holds=True)
        place = tuple(coord[i] for i in free)
        found[place] = found.get(place, 0) + 1
    whole = prod(mesh.shape[i] for i in cut)
    if any(count != whole for count in found.values()):
        holders = set(ranks)
        raise HoldersError(min(r for r in _ranks(mesh, sorted(found), cut, free) if r not in holders), holds=False)
    return sorted(found)


def _ranks(mesh: Mesh, places: Sequence[Coord], cut: Sequence[int], free: Sequence[int]) -> list[int]:
    """Return the ranks at these places of the free axes, for each all along the cut axes, in that order."""
    out = []
    coord = [0] * len(mesh.axes)
    for place in places:
        for i, at in zip(free, place, strict=True):
            coord[i] = at
        for inner in product(*(range(mesh.shape[i]) for i in cut)):
            for i, at in zip(cut, inner, strict=True):
                coord[i] = at
            out.append(rank_at(mesh, tuple(coord)))
    return out


def _own_mesh(mesh: Mesh, ranks: Ranks, kept: Sequence[Coord], cut: Sequence[int], free: Sequence[int]) -> Mesh:
    kinds = {mesh.axes[i].kind for i in free}
    kind = kinds.pop() if len(kinds) == 1 else "other"
    base = mesh.axes[free[0]].name if len(free) == 1 else "held"
    if cut:
        inner = sorted(cut)
        axes = (Axis(_unused(base, mesh, inner), len(kept), kind), *(mesh.axes[i] for i in inner))
        return mesh_of(axes, tuple(_ranks(mesh, kept, inner, free)))
    sizes = grid(ranks)
    names = [base] if len(sizes) == 1 else [f"{base}{i}" for i in range(len(sizes))]
    return mesh_of([Axis(n, s, kind) for n, s in zip(names, sizes, strict=True)], ranks)


def _unused(name: str, mesh: Mesh, taken: Sequence[int]) -> str:
    names = {mesh.axes[i].name for i in taken}
    while name in names:
        name += "'"
    return name

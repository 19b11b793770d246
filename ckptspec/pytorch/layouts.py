"""Owns the layouts of plain tensors and of slices of flat buffers; refuses a slice that is not its rank's part."""

from __future__ import annotations

from functools import lru_cache
from math import isqrt

from ckptspec.errors import StateError, Where
from ckptspec.format.layout import Axis, FlatLayout, Mesh
from ckptspec.format.narrow import mesh_of, tag
from ckptspec.pytorch.wrappers import FlatShard

WORLD = "world"


def world_mesh(size: int) -> Mesh:
    """Return the mesh of all ranks that plain and flat tensors are laid out on."""
    return Mesh((Axis("rank", size, "data"),))


@lru_cache(maxsize=4096)
def align_of(numel: int, parts: int, part: int) -> int:
    """Return the smallest alignment that makes equal flat parts of `part` elements out of `numel` in `parts`."""
    short = part + (-numel // parts)  # what rounding up added to ceil(numel / parts)
    divisors = [d for i in range(1, isqrt(part) + 1) if part % i == 0 for d in (i, part // i)]
    return min((d for d in divisors if d > short), default=1)


def flat(shard: FlatShard, rank: int, world: int, name: str) -> tuple[str, Mesh, FlatLayout, int]:
    """Return a FlatShard's (mesh name, mesh, layout, logical elements here); raises StateError where it cannot be.

    The slice must be one-dimensional and begin where the geometry (equal parts, or `bounds`) puts this rank.
    """

    def refuse(message: str, expected: object, found: object) -> StateError:
        where = Where(tensor=name, rank=rank)
        return StateError(message, rule="P-STATE", where=where, expected=str(expected), found=str(found))

    length = shard.tensor.numel()
    if shard.tensor.ndim != 1 or shard.numel < 0:
        raise refuse("a flat shard is one-dimensional", "shape [n]", f"shape {list(shard.tensor.shape)}")
    ranks = tuple(range(world)) if shard.ranks is None else tuple(int(r) for r in shard.ranks)
    if rank not in ranks:
        raise refuse("this rank is not among the flat shard's ranks", list(ranks), rank)
    place, k = ranks.index(rank), len(ranks)
    if shard.bounds is not None:
        bounds = tuple(int(b) for b in shard.bounds)
        if len(bounds) != k + 1 or bounds[0] != 0 or bounds[-1] != shard.numel or list(bounds) != sorted(bounds):
            raise refuse("bounds must rise from 0 to numel", f"{k + 1} bounds, 0..{shard.numel}", list(bounds))
        start, valid = bounds[place], bounds[place + 1] - bounds[place]
        layout = FlatLayout(WORLD, ("rank",), {}, 1, bounds)
    else:
        start = place * length
        valid = max(0, min(length, shard.numel - start))
        layout = FlatLayout(WORLD, ("rank",), {}, align_of(shard.numel, k, length) if shard.numel else 1)
        if length * k < shard.numel:
            raise refuse("the parts do not hold the whole buffer", f"at least {-(-shard.numel // k)}", length)
    if shard.offset != start or length < valid:
        raise refuse(
            "the slice does not begin where its rank's part does", f"{start} + {valid}", f"{shard.offset} + {length}"
        )
    if shard.ranks is None or ranks == tuple(range(world)):
        return WORLD, world_mesh(world), layout, valid
    mesh_name = f"rank@{tag(ranks)}"
    mesh = mesh_of((Axis("rank", k, "data"),), ranks)
    return mesh_name, mesh, FlatLayout(mesh_name, ("rank",), {}, layout.align, layout.bounds), valid

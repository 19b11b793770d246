"""Owns how torch's ways of sharding become layouts: meshes, placements, flat slices; refuses partial sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import isqrt, prod
from typing import Any
from zlib import crc32

from torch.distributed.tensor import DTensor, Replicate

from ckptspec.errors import StateError, Where
from ckptspec.format.box import split
from ckptspec.format.layout import Axis, FlatLayout, Mesh, MeshLayout, RankMap
from ckptspec.pytorch.wrappers import FlatShard

WORLD = "world"
_KINDS = {
    "data": ("dp", "ddp", "fsdp", "data", "shard", "replicate", "dp_shard", "dp_replicate", "hsdp"),
    "tensor": ("tp", "tensor", "mp"),
    "pipeline": ("pp", "pipeline", "stage"),
    "expert": ("ep", "expert"),
    "context": ("cp", "context", "sp"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


def world_mesh(size: int) -> Mesh:
    """Return the mesh of all ranks that plain and flat tensors are laid out on."""
    return Mesh((Axis("rank", size, "data"),))


def device_mesh(mesh: Any) -> tuple[str, Mesh]:
    """Return a torch DeviceMesh as (name, Mesh); the name tells the axes, and the ranks where they are not 0..n-1."""
    ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
    names = tuple(mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.mesh.ndim)))
    default = "data" if len(names) == 1 and not mesh.mesh_dim_names else "other"
    axes = tuple(Axis(n, int(s), _KIND_OF.get(n, default)) for n, s in zip(names, tuple(mesh.mesh.shape), strict=True))
    name = "-".join(names)
    if ranks == tuple(range(len(ranks))):
        return name, Mesh(axes)
    strides = tuple(mesh.mesh.stride())
    tag = f"{name}@{ranks[0]}.{crc32(repr(ranks).encode()):08x}"
    regular = _strided(ranks, tuple(a.size for a in axes))
    return tag, Mesh(axes, regular if regular is not None and strides else ranks)


def _strided(ranks: Sequence[int], shape: Sequence[int]) -> RankMap | None:
    """Return the ranks as offset and strides, or None where they follow no such rule."""
    strides = []
    for d in range(len(shape)):
        step = prod(shape[d + 1 :])
        strides.append(ranks[step] - ranks[0] if shape[d] > 1 else 1)
    if any(s < 1 for s in strides):
        return None
    rebuilt = [ranks[0]]
    for size, stride in zip(shape, strides, strict=True):
        rebuilt = [r + i * stride for r in rebuilt for i in range(size)]
    return RankMap(ranks[0], tuple(strides)) if rebuilt == list(ranks) else None


def placed(tensor: DTensor, mesh_name: str, mesh: Mesh, name: str) -> tuple[str, MeshLayout]:
    """Return a DTensor's placements as (layout name, MeshLayout); raises StateError for unknown placements."""
    order: dict[int, list[int]] = {}
    blocks: dict[int, tuple[int, ...]] = {}
    sizes = [a.size for a in mesh.axes]
    for i in reversed(range(len(tensor.placements))):
        p: Any = tensor.placements[i]
        if isinstance(p, Replicate):
            continue
        if not hasattr(p, "dim") or getattr(p, "reduce_op", None) is not None:
            raise StateError(
                "a placement that is not a shard or a replica cannot be saved",
                rule="P-STATE",
                where=Where(tensor=name),
                found=str(p),
                advice="reduce the tensor first: tensor.redistribute(placements=[Replicate()])",
            )
        axes = order.setdefault(p.dim % max(1, tensor.ndim), [])
        factor = int(getattr(p, "split_factor", 1))
        at = _position(axes, sizes, factor)
        if at is None:  # no later axis explains the stride: equal interleaved blocks
            n = tensor.shape[p.dim]
            blocks[p.dim] = tuple(split(n, factor, j)[1] for j in range(factor))
            at = 0
        axes.insert(at, i)
    dims = tuple(tuple(mesh.axes[i].name for i in order.get(d, ())) for d in range(max(order, default=-1) + 1))
    text = "/".join(",".join(d) or "-" for d in dims) or "replicated"
    if blocks:
        text += "".join(f";{d}:{'+'.join(map(str, b))}" for d, b in sorted(blocks.items()))
    return f"{mesh_name}:{text}", MeshLayout(mesh_name, dims, {}, blocks)


def _position(axes: Sequence[int], sizes: Sequence[int], factor: int) -> int | None:
    """Return where an axis goes among those right of it: after as many as its split factor says were applied first."""
    done = 1
    for at in range(len(axes) + 1):
        if done == factor:
            return at
        if at < len(axes):
            done *= sizes[axes[at]]
    return None


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
    mesh_name = f"rank@{ranks[0]}.{crc32(repr(ranks).encode()):08x}"
    mesh = Mesh((Axis("rank", k, "data"),), _strided(ranks, (k,)) or ranks)
    return mesh_name, mesh, FlatLayout(mesh_name, ("rank",), {}, layout.align, layout.bounds), valid

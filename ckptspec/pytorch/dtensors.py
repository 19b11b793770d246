"""Owns how a DTensor's placements become a layout; refuses partial sums, and strides that no layout says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any
from zlib import crc32

from torch.distributed.tensor import DTensor, Replicate

from ckptspec.errors import StateError, Where
from ckptspec.format.box import Box, split
from ckptspec.format.layout import Mesh, MeshLayout, members
from ckptspec.format.narrow import tag
from ckptspec.format.placement import resolve
from ckptspec.pytorch.grids import Grid, device_mesh


@dataclass(frozen=True)
class Placed:
    """How a DTensor is laid out: mesh and layout with their names, and the boxes of this rank, empty ones left out."""

    mesh_name: str
    mesh: Mesh
    layout_name: str
    layout: MeshLayout
    boxes: tuple[Box, ...]


def placed(tensor: DTensor, rank: int, name: str) -> Placed:
    """Return how a DTensor is laid out, its local tensor compared with what that gives this rank.

    Raises StateError [P-STATE] naming the tensor for placements that no layout says, and for a local tensor of another
    shape than its placements give: then it is unknown which rows it holds.
    """
    grid = device_mesh(tensor.device_mesh)
    dims, blocks = _dims(tensor, grid, name)
    layout_name, layout = _layout(grid.name, dims, blocks)
    place = resolve(layout, {grid.name: grid.mesh})
    held, local = place.local_shape(tensor.shape, rank), tuple(tensor._local_tensor.shape)
    if held is None:
        ranks = f"ranks {tag(tuple(sorted(members(grid.mesh))))}"
        raise _refuse("this rank is not in the mesh of the tensor", name, tensor, rank, ranks, f"rank {rank}")
    empty = len(held) == len(local) and not prod(held) and not prod(local)  # FSDP2 drops rows that have no columns
    if held != local and not empty:
        message = "the local tensor is not what its placements say"
        found = f"{list(local)} of {list(tensor.shape)}"
        raise _refuse(message, name, tensor, rank, f"shape {list(held)}", found)
    return Placed(grid.name, grid.mesh, layout_name, layout, place.boxes(tensor.shape, rank))


def _refuse(message: str, name: str, tensor: DTensor, rank: int | None, expected: str, found: str) -> StateError:
    placements = ", ".join(map(str, tensor.placements))
    return StateError(
        message,
        rule="P-STATE",
        where=Where(tensor=name, rank=rank),
        expected=expected,
        found=f"{found}, placements {placements}",
        advice="redistribute it first: tensor.redistribute(placements=[Replicate(), ...])",
    )


Dims = tuple[tuple[str, ...], ...]
Blocks = tuple[tuple[int, tuple[int, ...]], ...]


@lru_cache(maxsize=4096)
def _layout(mesh_name: str, dims: Dims, blocks: Blocks) -> tuple[str, MeshLayout]:
    text = "/".join(",".join(d) or "-" for d in dims) or "replicated"
    text += "".join(f";{d}:{_summed(sizes)}" for d, sizes in blocks)
    return f"{mesh_name}:{text}", MeshLayout(mesh_name, dims, {}, dict(blocks))


def _summed(sizes: tuple[int, ...]) -> str:
    """Return `3+3+2` for a few blocks, `8*3` for equal ones, else how many there are and a checksum."""
    if len(set(sizes)) == 1:
        return f"{len(sizes)}*{sizes[0]}"
    text = "+".join(map(str, sizes))
    return text if len(sizes) <= 8 else f"{len(sizes)}*{crc32(text.encode()):08x}"


def _dims(tensor: DTensor, grid: Grid, name: str) -> tuple[Dims, Blocks]:
    """Return the axes that cut each dimension, outermost first, and the blocks of dimensions that are cut in blocks."""
    order: dict[int, list[int]] = {}
    blocks: dict[int, tuple[int, ...]] = {}
    given = _given_order(tensor)
    for i in reversed(range(len(tensor.placements))):
        p: Any = tensor.placements[i]
        if isinstance(p, Replicate) or grid.axes[i] is None:
            continue
        if not isinstance(getattr(p, "dim", None), int) or getattr(p, "reduce_op", None) is not None:
            message, expected = "a placement that is neither a shard nor a replica", "Shard or Replicate"
            raise _refuse(message, name, tensor, None, expected, str(p))
        dim = p.dim % max(1, tensor.ndim)
        factor = int(getattr(p, "split_factor", 1))
        at = _position(order.setdefault(dim, []), tensor.device_mesh.shape, factor)
        if at is None:  # no later axis explains the stride: interleaved blocks
            blocks[dim] = tuple(split(tensor.shape[dim], factor, j)[1] for j in range(factor))
            at = 0
        order[dim].insert(at, i)
    for dim in blocks.keys() & {d for d, axes in order.items() if len(axes) > 1}:
        raise _refuse(
            "a strided shard that no other axis explains, beside another axis on the same dimension, is no layout",
            name, tensor, None, "a split factor that is a product of later axes", f"dimension {dim}",
        )  # fmt: skip
    order.update(given)
    axes = {
        d: tuple(grid.mesh.axes[a].name for i in found if (a := grid.axes[i]) is not None) for d, found in order.items()
    }
    return tuple(axes.get(d, ()) for d in range(max(axes, default=-1) + 1)), tuple(sorted(blocks.items()))


def _given_order(tensor: DTensor) -> dict[int, list[int]]:
    """Return the order in which axes cut a dimension where torch was told one that the placements do not show."""
    spec = tensor._spec
    order = getattr(spec, "shard_order", None)
    if not order or getattr(spec, "use_strided_shard_as_shard_order", False):
        return {}
    return {entry.tensor_dim: list(entry.mesh_dims) for entry in order if len(entry.mesh_dims) > 1}


def _position(axes: Sequence[int], sizes: Sequence[int], factor: int) -> int | None:
    """Return where an axis goes among those right of it: after as many as its split factor says were applied first."""
    done = 1
    for at in range(len(axes) + 1):
        if done == factor:
            return at
        if at < len(axes):
            done *= sizes[axes[at]]
    return None

"""Owns how torch's DeviceMeshes become meshes: a slice of a larger one is axes of the larger; refuses nothing."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from torch.distributed import device_mesh as torch_meshes

from ckptspec.format.layout import Axis, Mesh
from ckptspec.format.narrow import mesh_of, tag

_KINDS = {
    "data": ("dp", "ddp", "fsdp", "data", "shard", "replicate", "dp_shard", "dp_replicate", "hsdp"),
    "tensor": ("tp", "tensor", "mp"),
    "pipeline": ("pp", "pipeline", "stage"),
    "expert": ("ep", "expert"),
    "context": ("cp", "context", "sp"),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}


@dataclass(frozen=True)
class Grid:
    """A torch DeviceMesh in our terms: the mesh's name, the mesh, and its axis for each dimension of the DeviceMesh.

    A DeviceMesh that is a slice of a larger one becomes axes of the larger: then ranks that hold other slices declare
    the same, and who holds a tensor along the other axes is settled between the ranks.
    """

    name: str
    mesh: Mesh
    axes: tuple[int | None, ...]  # None for an axis of one rank


_grids: dict[int, tuple[weakref.ref[Any], Grid]] = {}


def device_mesh(mesh: Any) -> Grid:
    """Return a torch DeviceMesh as a Grid, the same one each time while the DeviceMesh lives."""
    key = id(mesh)
    known = _grids.get(key)
    if known is not None and known[0]() is mesh:
        return known[1]
    found = _grid(mesh)
    _grids[key] = (weakref.ref(mesh, lambda _: _grids.pop(key, None)), found)
    return found


def _grid(mesh: Any) -> Grid:
    root = _root(mesh)
    if root is mesh or not (found := _slice(mesh, root)):
        axes = _axes(mesh)
        name, whole = _named(axes, _ranks(mesh))
        return Grid(name, whole, tuple(range(len(axes))))
    return found


def _root(mesh: Any) -> Any:
    """Return the DeviceMesh that this one was sliced from, or itself."""
    find = getattr(mesh, "_get_root_mesh", None)
    if find is not None:
        return find()
    return torch_meshes._mesh_resources.get_root_mesh(mesh)  # torch before 2.10 keeps this beside the meshes


def _ranks(mesh: Any) -> tuple[int, ...]:
    return tuple(int(r) for r in mesh.mesh.flatten().tolist())


def _axes(mesh: Any) -> list[Axis]:
    names = tuple(mesh.mesh_dim_names or (f"dim{i}" for i in range(mesh.mesh.ndim)))
    default = "data" if len(names) == 1 and not mesh.mesh_dim_names else "other"
    sizes = map(int, mesh.mesh.shape)
    return [Axis(n, size, _KIND_OF.get(n, default)) for n, size in zip(names, sizes, strict=True)]


def _named(axes: Sequence[Axis], ranks: tuple[int, ...]) -> tuple[str, Mesh]:
    """Return the mesh and a name that tells its axes, and its ranks where they are not counted from 0."""
    name = ",".join(f"{a.name}={a.size}" for a in axes)
    return (name if ranks == tuple(range(len(ranks))) else f"{name}@{tag(ranks)}"), mesh_of(axes, ranks)


def _slice(mesh: Any, root: Any) -> Grid | None:
    """Return the root's grid where the slice's axes are axes of the root, else one in which it joins some of them.

    None where the slice has only a part of some axis of the root.
    """
    places = {rank: place for place, rank in enumerate(_ranks(root))}
    outer, inner = _axes(root), _axes(mesh)
    shape = [a.size for a in outer]
    if any(rank not in places for rank in _ranks(mesh)):
        return None
    coords = [_unravel(places[rank], shape) for rank in _ranks(mesh)]
    moving = [i for i in range(len(shape)) if len({c[i] for c in coords}) > 1]
    if prod(shape[i] for i in moving) != len(coords):
        return None
    indices = list(product(*(range(a.size) for a in inner)))
    axes = [
        next((i for i in moving if all(c[i] == at[d] for c, at in zip(coords, indices, strict=True))), None)
        for d in range(len(inner))
    ]
    if all(axis is not None or a.size == 1 for axis, a in zip(axes, inner, strict=True)):
        return Grid(*_named(outer, _ranks(root)), tuple(axes))
    return _joined(_ranks(root), outer, inner, coords, moving)


def _joined(
    ranks: tuple[int, ...],
    outer: Sequence[Axis],
    inner: Sequence[Axis],
    coords: Sequence[tuple[int, ...]],
    moving: Sequence[int],
) -> Grid:
    """Return the root's ranks as a mesh of its axes that do not move along the slice, then those of the slice."""
    shape = [a.size for a in outer]
    rest = [i for i in range(len(shape)) if i not in moving]
    order = []
    for at in product(*(range(shape[i]) for i in rest)):
        still = dict(zip(rest, at, strict=True))
        order += [ranks[_ravel([still.get(i, k) for i, k in enumerate(c)], shape)] for c in coords]
    name, mesh = _named([*(outer[i] for i in rest), *inner], tuple(order))
    return Grid(name, mesh, tuple(range(len(rest), len(rest) + len(inner))))


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        place, at = divmod(place, size)
        out.append(at)
    return tuple(reversed(out))


def _ravel(coord: Sequence[int], shape: Sequence[int]) -> int:
    place = 0
    for at, size in zip(coord, shape, strict=True):
        place = place * size + at
    return place

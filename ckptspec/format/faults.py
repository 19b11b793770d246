"""Owns what a schema cannot say of meshes and layouts: every way one fails its world, mesh or tensor, as values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TypeVar

from ckptspec.format.box import Box, contains
from ckptspec.format.layout import BoxesLayout, FlatLayout, Layout, Mesh, MeshLayout, RankMap
from ckptspec.format.tiling import overlap, tiled

T = TypeVar("T", bound=Hashable)

BLOCKED = 65_536  # boxes that blocks may make on one rank: in 64 dimensions two blocks each would make 2**64


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: the rule it breaks (T-MESH, T-LAYOUT, T-DIMS, T-FLAT or T-BOXES) and a sentence."""

    rule: str
    message: str

    def __str__(self) -> str:
        return self.message


def mesh_faults(mesh: Mesh, world_size: int) -> Iterator[Fault]:
    """Yield why a mesh does not give each of its coordinates a rank of its own in [0, world_size) [T-MESH]."""
    for name in _repeated(axis.name for axis in mesh.axes):
        yield Fault("T-MESH", f"axis {name!r} is there twice")
    if mesh.size > world_size:
        yield Fault("T-MESH", f"the mesh has {mesh.size} ranks, the world {world_size}")
    elif isinstance(mesh.ranks, RankMap):
        yield from _rank_map_faults(mesh, mesh.ranks, world_size)
    elif mesh.ranks is not None:
        yield from _rank_list_faults(mesh, mesh.ranks, world_size)


def _rank_list_faults(mesh: Mesh, ranks: Sequence[int], world_size: int) -> Iterator[Fault]:
    if len(ranks) != mesh.size:
        yield Fault("T-MESH", f"{len(ranks)} ranks are listed for a mesh of {mesh.size}")
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        yield Fault("T-MESH", f"rank {outside[0]} is outside the world of {world_size}")
    for rank in _repeated(ranks):
        yield Fault("T-MESH", f"rank {rank} is listed twice")
        return  # one example is enough, a list may repeat thousands


def _rank_map_faults(mesh: Mesh, ranks: RankMap, world_size: int) -> Iterator[Fault]:
    if len(ranks.strides) != len(mesh.axes):
        yield Fault("T-MESH", f"{len(ranks.strides)} strides are given for {len(mesh.axes)} axes")
        return
    reach = 0  # how far the axes of smaller strides lead; a stride beyond it can never land on one of their ranks
    for i in reversed(mesh.order):
        stride = ranks.strides[i]
        if stride <= reach:
            what = f"stride {stride} of axis {mesh.axes[i].name!r} is not above {reach}"
            yield Fault("T-MESH", f"{what}, the most that smaller strides add up to: ranks could repeat")
            return
        reach += stride * (mesh.shape[i] - 1)
    if ranks.offset < 0 or ranks.offset + reach >= world_size:
        span = f"{ranks.offset} to {ranks.offset + reach}"
        yield Fault("T-MESH", f"the mesh has ranks from {span}, outside the world of {world_size}")


def layout_faults(
    layout: Layout, meshes: Mapping[str, Mesh], shape: Sequence[int] | None = None, world_size: int | None = None
) -> Iterator[Fault]:
    """Yield what is wrong with a layout by itself, then, given `shape`, why a tensor of that shape cannot have it.

    A caller with many tensors asks without `shape` once a layout, then `fit_faults` once a layout and shape; the rank
    numbers of a boxes layout are compared to `world_size` when it is given.
    """
    if isinstance(layout, (MeshLayout, FlatLayout)):
        if layout.mesh not in meshes:
            yield Fault("T-LAYOUT", f"mesh {layout.mesh!r} does not exist")
            return
        yield from _axis_faults(layout, meshes[layout.mesh])
    if isinstance(layout, FlatLayout):
        yield from _bounds_faults(layout, meshes[layout.mesh])
    elif isinstance(layout, MeshLayout):
        yield from _blocked_faults(layout)
    elif isinstance(layout, BoxesLayout):
        yield from _listing_faults(layout, world_size)
    if shape is not None:
        yield from fit_faults(layout, shape)


def _axis_faults(layout: MeshLayout | FlatLayout, mesh: Mesh) -> Iterator[Fault]:
    flat = isinstance(layout, FlatLayout)
    cut = list(layout.axes) if isinstance(layout, FlatLayout) else [name for names in layout.dims for name in names]
    sizes = {axis.name: axis.size for axis in mesh.axes}
    for name in dict.fromkeys((*cut, *layout.at)):
        if name not in sizes:
            yield Fault("T-LAYOUT", f"mesh {layout.mesh!r} has no axis {name!r}")
    for name in _repeated((*cut, *layout.at)):
        doing = "both pins and cuts" if name in layout.at else "cuts twice"
        yield Fault("T-FLAT" if flat else "T-DIMS", f"the layout {doing} along axis {name!r}")
    for name, i in layout.at.items():
        if name in sizes and not 0 <= i < sizes[name]:
            yield Fault("T-LAYOUT", f"axis {name!r} is pinned at {i}, its size is {sizes[name]}")


def _bounds_faults(layout: FlatLayout, mesh: Mesh) -> Iterator[Fault]:
    bounds = layout.bounds
    if bounds is None:
        return
    sizes = {axis.name: axis.size for axis in mesh.axes}
    k = prod(sizes.get(name, 1) for name in layout.axes)
    if len(bounds) != k + 1:
        yield Fault("T-FLAT", f"{len(bounds)} bounds are given for {k} parts, which have {k + 1}")
    if bounds and bounds[0] != 0:
        yield Fault("T-FLAT", f"the bounds begin at {bounds[0]}, not at 0")
    for a, b in pairwise(bounds):
        if a > b:
            yield Fault("T-FLAT", f"the bounds fall from {a} to {b}")
            return


def _blocked_faults(layout: MeshLayout) -> Iterator[Fault]:
    for dim in layout.blocks:
        if dim >= len(layout.dims) or not layout.dims[dim]:
            yield Fault("T-DIMS", f"dimension {dim} has blocks but no axis cuts it")
    count = prod(map(len, layout.blocks.values()))
    if count > BLOCKED:
        yield Fault("T-DIMS", f"the blocks make {count} boxes on a rank, more than {BLOCKED}")


def _listing_faults(layout: BoxesLayout, world_size: int | None) -> Iterator[Fault]:
    outside = [rank for rank, _ in layout.boxes if rank < 0 or (world_size is not None and rank >= world_size)]
    if outside:
        yield Fault("T-BOXES", f"rank {outside[0]} is outside the world of {world_size}")
    for rank, box in _repeated((rank, box) for rank, box in layout.boxes if not box.empty):
        yield Fault("T-BOXES", f"rank {rank} lists {_text(box)} twice")
        return


def fit_faults(layout: Layout, shape: Sequence[int]) -> Iterator[Fault]:
    """Yield why a tensor of `shape` cannot have a layout in which `layout_faults` finds nothing by itself.

    Linear in the layout's boxes, so a caller with many tensors asks once for each layout and shape.
    """
    if isinstance(layout, MeshLayout):
        yield from _dims_faults(layout, shape)
    elif isinstance(layout, FlatLayout):
        yield from _flat_faults(layout, shape)
    elif isinstance(layout, BoxesLayout):
        yield from _boxes_faults(layout, shape)


def _dims_faults(layout: MeshLayout, shape: Sequence[int]) -> Iterator[Fault]:
    if len(layout.dims) > len(shape):
        yield Fault("T-DIMS", f"the layout has {len(layout.dims)} dimensions, the tensor {len(shape)}")
        return
    for dim, blocks in layout.blocks.items():
        if dim < len(shape) and sum(blocks) != shape[dim]:
            yield Fault("T-DIMS", f"the blocks of dimension {dim} add up to {sum(blocks)}, its size is {shape[dim]}")


def _flat_faults(layout: FlatLayout, shape: Sequence[int]) -> Iterator[Fault]:
    if len(shape) != 1:
        yield Fault("T-FLAT", f"a flat layout is for one dimension, the tensor has {len(shape)}")
    elif layout.bounds and layout.bounds[-1] != shape[0]:
        yield Fault("T-FLAT", f"the bounds end at {layout.bounds[-1]}, the tensor at {shape[0]}")


def _boxes_faults(layout: BoxesLayout, shape: Sequence[int]) -> Iterator[Fault]:
    whole = Box.whole(shape)
    distinct = list(dict.fromkeys(box for _, box in layout.boxes))
    for box in distinct:
        if box.ndim != whole.ndim or len(box.offsets) != whole.ndim:
            yield Fault("T-BOXES", f"{_text(box)} has {box.ndim} dimensions, the tensor {whole.ndim}")
            return
        if not contains(whole, box):
            yield Fault("T-BOXES", f"{_text(box)} is not inside shape {list(shape)}")
            return
    distinct = [box for box in distinct if not box.empty]
    missing = whole.numel - sum(box.numel for box in distinct)
    if missing == 0 and tiled(whole, distinct):
        return
    pair = overlap(distinct)
    if pair:
        yield Fault("T-BOXES", f"{_text(pair[0])} and {_text(pair[1])} overlap without being equal")
    elif missing > 0:
        yield Fault("T-BOXES", f"the boxes leave at least {missing} of {whole.numel} elements uncovered")
    else:
        yield Fault("T-BOXES", "boxes overlap without being equal")


def _repeated(items: Iterable[T]) -> Iterator[T]:
    """Yield each item that is there more than once, once."""
    counts: dict[T, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
        if counts[item] == 2:
            yield item


def _text(box: Box) -> str:
    return f"box at {list(box.offsets)} of {list(box.sizes)}"

"""Owns which boxes of a tensor each rank holds and stores, by layout; refuses a layout without its mesh or axes.

`resolve` once a layout, then ask its Placement; the functions below do so for callers with a tensor or two.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from ckptspec.errors import FormatError
from ckptspec.format.box import Box, intersect
from ckptspec.format.cutting import Chunks, Parts, Spans, boxes_of, packed, shape_of
from ckptspec.format.grid import Cut, GridPlacement
from ckptspec.format.holding import Placement, Ranks
from ckptspec.format.layout import BoxesLayout, FlatLayout, Layout, LocalLayout, Mesh, MeshLayout


class _ListedPlacement(Placement):
    """A boxes layout: what is listed; equal boxes are replicas.

    Boxes that are a row-major product of spans make the rank's own tensor a grid; others make it one dimension, the
    elements of one box after those of another.
    """

    def __init__(self, listed: Iterable[tuple[int, Box]]) -> None:
        self._listed: dict[int, list[Box]] = {}
        holders: dict[Box, set[int]] = {}
        for rank, box in listed:
            self._listed.setdefault(rank, []).append(box)
            holders.setdefault(box, set()).add(rank)
        self._holders = {box: tuple(sorted(ranks)) for box, ranks in holders.items() if not box.empty}

    def ranks(self) -> Ranks:
        return tuple(sorted(self._listed))

    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        return tuple(box for box in self._listed.get(rank, ()) if not box.empty)

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
        return shape_of(_local_spans(self._listed[rank])) if rank in self._listed else None

    def local_boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        return boxes_of(packed(_local_spans(self._listed[rank]))) if rank in self._listed else ()

    def group(self, rank: int, box: Box) -> Ranks:
        return self._holders[box]

    def parts(self, shape: Sequence[int], within: Box | None = None) -> Iterator[tuple[Box, Ranks]]:
        if within in self._holders:  # two boxes that are not equal are disjoint [T-BOXES]
            yield within, self._holders[within]
            return
        for box, ranks in self._holders.items():
            if within is None or intersect(box, within) is not None:
                yield box, ranks


def _local_spans(boxes: Sequence[Box]) -> Spans:
    """Return the spans whose product the boxes are, or those of the boxes' elements laid out in one dimension."""
    columns = [list(zip(*pair, strict=True)) for pair in ((b.offsets, b.sizes) for b in boxes)]
    spans = [tuple(dict.fromkeys(column)) for column in zip(*columns, strict=True)]
    if prod(map(len, spans)) == len(boxes) and list(product(*spans)) == [tuple(column) for column in columns]:
        return spans
    return [tuple((0, box.numel) for box in boxes)]


class _LocalPlacement(Placement):
    """A local layout: every rank has the whole of a tensor of its own, whose shape the caller brings."""

    def ranks(self) -> Ranks:
        raise _no_holders()

    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        return boxes_of([((0, n),) for n in shape])

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
        return tuple(shape)

    def local_boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        return self.boxes(shape, rank)

    def group(self, rank: int, box: Box) -> Ranks:
        return (rank,)

    def stored(self, shape: Sequence[int], itemsize: int, name: str, copies: int, rank: int) -> tuple[Box, ...]:
        raise _no_holders()

    def parts(self, shape: Sequence[int], within: Box | None = None) -> Iterator[tuple[Box, Ranks]]:
        raise _no_holders()


def _no_holders() -> FormatError:
    return FormatError("a local tensor has no holders: each rank stores its own", rule="T-LOCAL")


_resolved: dict[int, tuple[weakref.ref[Any], Mesh | None, Placement]] = {}


def resolve(layout: Layout, meshes: Mapping[str, Mesh]) -> Placement:
    """Return the layout's Placement, the same one each time while layout and mesh live.

    Raises FormatError [T-LAYOUT] for a mesh or an axis that does not exist.
    """
    mesh = meshes.get(layout.mesh) if isinstance(layout, (MeshLayout, FlatLayout)) else None
    key = id(layout)  # layouts hold mappings, so they have no hash
    known = _resolved.get(key)
    if known is not None and known[1] is mesh:
        return known[2]
    placement = _place(layout, mesh)
    _resolved[key] = (weakref.ref(layout, lambda _: _resolved.pop(key, None)), mesh, placement)
    return placement


def _place(layout: Layout, mesh: Mesh | None) -> Placement:
    if isinstance(layout, BoxesLayout):
        return _ListedPlacement(layout.boxes)
    if isinstance(layout, LocalLayout):
        return _LocalPlacement()
    if mesh is None:
        raise FormatError("the layout's mesh does not exist", rule="T-LAYOUT", found=repr(layout.mesh))
    if isinstance(layout, FlatLayout):
        axes = tuple(mesh.index(name) for name in layout.axes)
        rule = Parts(tuple(mesh.shape[axis] for axis in axes), layout.align, layout.bounds)
        return GridPlacement(mesh, layout.at, [Cut(0, axes, rule)])
    return GridPlacement(mesh, layout.at, _cuts(layout, mesh))


def _cuts(layout: MeshLayout, mesh: Mesh) -> Iterator[Cut]:
    for dim, names in enumerate(layout.dims):
        if names:
            axes = tuple(mesh.index(name) for name in names)
            yield Cut(dim, axes, Chunks(tuple(mesh.shape[axis] for axis in axes), layout.blocks.get(dim)))


def boxes_at(layout: Layout, meshes: Mapping[str, Mesh], shape: Sequence[int], rank: int) -> tuple[Box, ...]:
    """Return the boxes of a tensor of `shape` that `rank` holds, in order, empty ones dropped (replicas included)."""
    return resolve(layout, meshes).boxes(shape, rank)


def local_shape(layout: Layout, meshes: Mapping[str, Mesh], shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
    """Return the shape of the rank's own tensor, flat padding left out; None where `rank` takes no part."""
    return resolve(layout, meshes).local_shape(shape, rank)


def local_boxes(layout: Layout, meshes: Mapping[str, Mesh], shape: Sequence[int], rank: int) -> tuple[Box, ...]:
    """Return where each box of `boxes_at` lies in the rank's own tensor, in the same order."""
    return resolve(layout, meshes).local_boxes(shape, rank)


def holders(layout: Layout, meshes: Mapping[str, Mesh], shape: Sequence[int], rank: int, box: Box) -> Ranks:
    """Return the ranks, ascending, that hold this very box of `rank`; () when `rank` does not hold it."""
    return resolve(layout, meshes).holders(shape, rank, box)


def stored_at(
    layout: Layout, meshes: Mapping[str, Mesh], shape: Sequence[int], itemsize: int, name: str, copies: int, rank: int
) -> tuple[Box, ...]:
    """Return what `rank` stores of the tensor called `name` before it is cut into chunks [T-HOLD].

    Raises FormatError [T-LOCAL] for a local layout: its tensors are not shared out.
    """
    return resolve(layout, meshes).stored(shape, itemsize, name, copies, rank)


def storers(
    layout: Layout, meshes: Mapping[str, Mesh], shape: Sequence[int], itemsize: int, name: str, copies: int
) -> Iterator[tuple[int, Box]]:
    """Yield (rank, box) for all that `stored_at` gives to any rank, in time that grows with what is yielded."""
    return resolve(layout, meshes).storers(shape, itemsize, name, copies)

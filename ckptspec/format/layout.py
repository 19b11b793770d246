"""Owns the layout language: meshes, layouts, and their JSON forms; what they place where is `placement`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Union

from ckptspec.errors import FormatError
from ckptspec.format.box import Box

KINDS = ("data", "tensor", "pipeline", "expert", "context", "other")


@dataclass(frozen=True)
class Axis:
    """One named axis of a mesh: its size in ranks and what it is for."""

    name: str
    size: int
    kind: str = "other"


@dataclass(frozen=True)
class RankMap:
    """Ranks of a mesh by arithmetic: rank = offset + sum(coordinate[i] * strides[i])."""

    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """A named grid over ranks, row-major (last axis fastest) unless `ranks` lists or computes them."""

    axes: tuple[Axis, ...]
    ranks: tuple[int, ...] | RankMap | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def size(self) -> int:
        """The number of ranks in the mesh."""
        return prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """What one step along each axis adds to the rank, or to the place in `ranks` where they are listed."""
        if isinstance(self.ranks, RankMap):
            return self.ranks.strides
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.axes)))

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The axes longer than 1, largest stride first: the order in which a rank resolves into a coordinate."""
        long = [i for i, size in enumerate(self.shape) if size > 1]
        return tuple(sorted(long, key=lambda i: -self.strides[i]))

    @cached_property
    def places(self) -> Mapping[int, int]:
        """Where each rank stands in a list of `ranks`; empty where they are computed."""
        return {rank: place for place, rank in enumerate(self.ranks)} if isinstance(self.ranks, tuple) else {}

    def index(self, name: str) -> int:
        """Return the position of the axis called `name`; raises FormatError [T-LAYOUT] when there is none."""
        for i, axis in enumerate(self.axes):
            if axis.name == name:
                return i
        known = ", ".join(axis.name for axis in self.axes)
        raise FormatError("the mesh has no such axis", rule="T-LAYOUT", expected=f"one of {known}", found=repr(name))

    def axis(self, name: str) -> Axis:
        """Return the axis called `name`; raises FormatError [T-LAYOUT] when there is none."""
        return self.axes[self.index(name)]


@dataclass(frozen=True)
class MeshLayout:
    """`dims[d]` lists the axes that split dimension d, outermost first; `at` pins axes; all other axes replicate."""

    mesh: str
    dims: tuple[tuple[str, ...], ...] = ()
    at: Mapping[str, int] = field(default_factory=dict)
    blocks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class FlatLayout:
    """A 1-D tensor cut over `axes` in parts of ceil(numel/k) rounded up to `align`, or at explicit `bounds` (k + 1)."""

    mesh: str
    axes: tuple[str, ...]
    at: Mapping[str, int] = field(default_factory=dict)
    align: int = 1
    bounds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class BoxesLayout:
    """Every (rank, box) listed, for what nothing else expresses."""

    boxes: tuple[tuple[int, Box], ...]


@dataclass(frozen=True)
class LocalLayout:
    """Private to each rank: identity is (name, rank), shapes are in the shard indexes."""


Layout = Union[MeshLayout, FlatLayout, BoxesLayout, LocalLayout]


def coordinate(mesh: Mesh, rank: int) -> tuple[int, ...] | None:
    """Return where `rank` stands in the mesh, one index an axis, or None where the mesh does not have it [T-MESH]."""
    rest = rank
    if isinstance(mesh.ranks, RankMap):
        rest -= mesh.ranks.offset
    elif mesh.ranks is not None:
        rest = mesh.places.get(rank, -1)
    found = [0] * len(mesh.axes)
    for i in mesh.order:  # a stride exceeds what the smaller ones reach together, so each division is exact
        found[i], rest = divmod(rest, mesh.strides[i])
        if not 0 <= found[i] < mesh.shape[i]:
            return None
    return tuple(found) if rest == 0 else None


def rank_at(mesh: Mesh, coord: tuple[int, ...]) -> int:
    """Return the rank at a coordinate of the mesh."""
    place = sum(i * stride for i, stride in zip(coord, mesh.strides, strict=True))
    if isinstance(mesh.ranks, RankMap):
        return mesh.ranks.offset + place
    return place if mesh.ranks is None else mesh.ranks[place]


def ranks_where(mesh: Mesh, fixed: Mapping[int, int]) -> tuple[int, ...]:
    """Return the ranks, ascending, whose coordinate has the `fixed` index on the axes (by position) it names."""
    places = [mesh.ranks.offset if isinstance(mesh.ranks, RankMap) else 0]
    for i, (size, stride) in enumerate(zip(mesh.shape, mesh.strides, strict=True)):
        steps = (fixed[i],) if i in fixed else range(size)
        places = [place + step * stride for place in places for step in steps]
    if isinstance(mesh.ranks, tuple):
        places = [mesh.ranks[place] for place in places]
    return tuple(sorted(places))


def members(mesh: Mesh) -> Sequence[int]:
    """Return all ranks of the mesh, ascending."""
    return range(mesh.size) if mesh.ranks is None else ranks_where(mesh, {})


def mesh_document(mesh: Mesh) -> dict[str, Any]:
    """Return the JSON form of a mesh."""
    document: dict[str, Any] = {"axes": [{"name": a.name, "size": a.size, "kind": a.kind} for a in mesh.axes]}
    if isinstance(mesh.ranks, RankMap):
        document["ranks"] = {"offset": mesh.ranks.offset, "strides": list(mesh.ranks.strides)}
    elif mesh.ranks is not None:
        document["ranks"] = list(mesh.ranks)
    return document


def mesh_from_document(document: Mapping[str, Any]) -> Mesh:
    """Return the mesh a schema-valid JSON form describes."""
    ranks = document.get("ranks")
    if isinstance(ranks, Mapping):
        ranks = RankMap(ranks["offset"], tuple(ranks["strides"]))
    elif ranks is not None:
        ranks = tuple(ranks)
    return Mesh(tuple(Axis(a["name"], a["size"], a.get("kind", "other")) for a in document["axes"]), ranks)


def layout_document(layout: Layout) -> dict[str, Any]:
    """Return the JSON form of a layout, its `kind` first."""
    if isinstance(layout, MeshLayout):
        document: dict[str, Any] = {"kind": "mesh", "mesh": layout.mesh, "at": dict(layout.at)}
        document["dims"] = [list(axes) for axes in layout.dims]
        if layout.blocks:
            document["blocks"] = {str(dim): list(sizes) for dim, sizes in sorted(layout.blocks.items())}
        return document
    if isinstance(layout, FlatLayout):
        document = {"kind": "flat", "mesh": layout.mesh, "at": dict(layout.at), "axes": list(layout.axes)}
        if layout.bounds is None:
            return {**document, "align": layout.align}
        return {**document, "bounds": list(layout.bounds)}
    if isinstance(layout, BoxesLayout):
        return {"kind": "boxes", "boxes": [[rank, list(b.offsets), list(b.sizes)] for rank, b in layout.boxes]}
    return {"kind": "local"}


def layout_from_document(document: Mapping[str, Any]) -> Layout:
    """Return the layout a schema-valid JSON form describes; raises FormatError [M-LAYOUT] for an unknown kind."""
    kind = document["kind"]
    at = dict(document.get("at", {}))
    if kind == "mesh":
        blocks = {int(dim): tuple(sizes) for dim, sizes in document.get("blocks", {}).items()}
        return MeshLayout(document["mesh"], tuple(tuple(axes) for axes in document["dims"]), at, blocks)
    if kind == "flat":
        bounds = tuple(document["bounds"]) if "bounds" in document else None
        return FlatLayout(document["mesh"], tuple(document["axes"]), at, document.get("align", 1), bounds)
    if kind == "boxes":
        return BoxesLayout(tuple((rank, Box(tuple(o), tuple(s))) for rank, o, s in document["boxes"]))
    if kind == "local":
        return LocalLayout()
    raise FormatError(
        "unknown kind of layout", rule="M-LAYOUT", expected="mesh, flat, boxes or local", found=repr(kind)
    )

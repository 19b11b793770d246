"""Random checkpoints and targets, and their transfers by the slow way: every element labelled, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import numpy as np
from hypothesis import strategies as st
from worlds import World, pins, worlds

from ckptspec.format.box import Box
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import BoxesLayout, FlatLayout, Layout, MeshLayout
from ckptspec.format.manifest import FlatGroup, Manifest, Member, TensorEntry
from ckptspec.format.placement import resolve
from ckptspec.format.target import Target

DTYPE = st.sampled_from(["uint8", "bfloat16", "float32"])
KIND = "exp_avg"


@st.composite
def mesh_layouts(draw: st.DrawFn, shape: Sequence[int]) -> tuple[World, Layout]:
    """A world and a mesh layout on it that fits `shape`."""
    world = draw(worlds())
    names = draw(st.permutations([axis.name for axis in world.mesh.axes]))
    dims: list[list[str]] = [[] for _ in shape]
    free = []
    for name in names:
        dim = draw(st.integers(-1, len(shape) - 1))
        (dims[dim] if dim >= 0 else free).append(name)
    blocks = {}
    for dim, cut in enumerate(dims):
        if cut and draw(st.integers(0, 2)) == 0:
            stops = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2)))
            blocks[dim] = tuple(int(n) for n in np.diff([0, *stops, shape[dim]]))
    return world, MeshLayout("main", tuple(map(tuple, dims)), pins(draw, world, free), blocks)


@st.composite
def flat_layouts(draw: st.DrawFn, numel: int) -> tuple[World, Layout]:
    """A world and a flat layout on it that fits `numel` elements."""
    world = draw(worlds())
    names = draw(st.permutations([axis.name for axis in world.mesh.axes]))
    count = draw(st.integers(0, len(names)))
    axes, at = tuple(names[:count]), pins(draw, world, list(names[count:]))
    if draw(st.booleans()):
        return world, FlatLayout("main", axes, at, draw(st.integers(1, 8)))
    parts = int(np.prod([world.mesh.axis(name).size for name in axes]))
    inner = sorted(draw(st.lists(st.integers(0, numel), min_size=parts - 1, max_size=parts - 1)))
    return world, FlatLayout("main", axes, at, bounds=(0, *inner, numel))


@st.composite
def box_layouts(draw: st.DrawFn, shape: Sequence[int]) -> tuple[World, Layout]:
    """A world and the boxes of a mesh layout listed, each for any ranks, so that numbers of holders differ."""
    world, layout = draw(mesh_layouts(shape))
    boxes = [box for box, _ in resolve(layout, world.meshes).parts(shape)]
    listed = [
        (rank, box)
        for box in boxes
        for rank in draw(st.lists(st.integers(0, world.size - 1), min_size=1, max_size=4, unique=True))
    ]
    return world, BoxesLayout(tuple(draw(st.permutations(listed))))


def any_layout(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[World, Layout]]:
    """A layout of any kind that can be shared and fits `shape`."""
    flat = [flat_layouts(shape[0])] if len(shape) == 1 else []
    return st.one_of(mesh_layouts(shape), box_layouts(shape), *flat)


@dataclass
class Case:
    """A checkpoint and a target, and for both the labels of every tensor's elements: equal where they are the same."""

    manifest: Manifest
    target: Target
    stored: dict[str, np.ndarray] = field(default_factory=dict)
    wanted: dict[str, np.ndarray] = field(default_factory=dict)


def _manifest(draw: st.DrawFn, size: int, **tables: Any) -> Manifest:
    copies, block = draw(st.integers(1, 3)), draw(st.sampled_from([4, 6, 16, 64]))
    return Manifest("5" * 32, 1, size, copies=copies, block_size=block, digest="sha256:" + "0" * 64, **tables)


@st.composite
def named(draw: st.DrawFn) -> Case:
    """A tensor or two by one layout in the checkpoint and by another in the target."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    (world, layout), (other, aim) = draw(any_layout(shape)), draw(any_layout(shape))
    dtype = draw(DTYPE)
    names = [f"model/w{i}" for i in range(draw(st.integers(1, 2)))]
    tensors = {name: TensorEntry(dtype, shape, "x") for name in names}
    manifest = _manifest(draw, world.size, meshes=world.meshes, layouts={"x": layout}, tensors=tensors)
    target = Target(other.size, other.meshes, {"x": aim}, tensors)
    labels = {name: np.arange(int(np.prod(shape))).reshape(shape) for name in names}
    return Case(manifest, target, labels, labels)


PARAMETERS = {"model/a": (3, 4), "model/b": (7,), "model/c": (2, 3, 2), "model/d": ()}


def _labels() -> dict[str, np.ndarray]:
    first, out = 0, {}
    for name, shape in PARAMETERS.items():
        out[name] = np.arange(first, first + int(np.prod(shape))).reshape(shape)
        first += 100
    return out


@dataclass
class Side:
    """Optimizer state of one kind, in flat groups or by parameter: its tables and the labels of each tensor."""

    size: int
    tables: dict[str, Any]
    labels: dict[str, np.ndarray]


@st.composite
def by_parameter(draw: st.DrawFn, dtype: str) -> Side:
    """The state of every parameter as a tensor of its own."""
    world = draw(worlds())
    tensors, layouts, labels = {}, {}, {}
    for name, values in _labels().items():
        names = [axis.name for axis in world.mesh.axes]
        dims = [[n] if draw(st.booleans()) else [] for n, _ in zip(names, values.shape, strict=False)]
        key = f"optimizer/state/{name.rpartition('/')[2]}/{KIND}"
        layouts[key] = MeshLayout("main", tuple(map(tuple, dims)))
        tensors[key], labels[key] = TensorEntry(dtype, values.shape, key), values
    return Side(world.size, {"meshes": world.meshes, "layouts": layouts, "tensors": tensors}, labels)


def _pieces(draw: st.DrawFn, name: str, values: np.ndarray, groups: int) -> Iterator[tuple[Member, np.ndarray]]:
    """Yield the piece of a parameter that each group holds: it is cut along one dimension, or in one group whole."""
    if not values.ndim or draw(st.booleans()):
        whole = draw(st.integers(0, groups - 1))
        for group in range(groups):
            yield (Member(name, 0, values.shape), values) if group == whole else (Member(None, 0, (0,)), np.zeros(0))
        return
    dim = draw(st.integers(0, values.ndim - 1))
    n = values.shape[dim]
    bounds = [0, *sorted(draw(st.integers(0, n)) for _ in range(groups - 1)), n]
    for a, b in pairwise(bounds):
        piece = np.take(values, range(a, b), axis=dim)
        offsets = tuple(a if d == dim else 0 for d in range(values.ndim))
        yield Member(name, 0, piece.shape, values.shape, offsets), piece


@st.composite
def in_groups(draw: st.DrawFn, dtype: str) -> Side:
    """The state of all parameters in one or two flat groups, in any order, with padding between them."""
    count = draw(st.integers(1, 2))
    members: list[list[Member]] = [[] for _ in range(count)]
    values: list[list[np.ndarray]] = [[] for _ in range(count)]
    labels = _labels()
    for name in draw(st.permutations(list(PARAMETERS))):
        for group, (member, piece) in enumerate(_pieces(draw, name, labels[name], count)):
            for m, v in ((member, piece), (Member(None, 0, (draw(st.integers(0, 2)),)), None)):
                size = int(np.prod(m.shape))
                if m.name is None and not size:
                    continue
                at = sum(map(len, values[group]))
                members[group].append(Member(m.name, at, m.shape, m.of_shape, m.of_offsets))
                values[group].append(np.full(size, -1) if v is None else v.ravel())
    world = draw(worlds())
    side = Side(world.size, {"meshes": world.meshes, "layouts": {}, "tensors": {}, "flat_groups": {}}, {})
    names = [axis.name for axis in world.mesh.axes]
    for group in range(count):
        flat = np.concatenate([np.zeros(0, np.int64), *values[group]])
        name = f"zero/{group}/{KIND}"
        axes = tuple(n for n in names if draw(st.booleans()))
        side.tables["layouts"][name] = FlatLayout("main", axes, {}, draw(st.integers(1, 4)))
        side.tables["tensors"][name] = TensorEntry(dtype, flat.shape, name)
        side.tables["flat_groups"][name] = FlatGroup(len(flat), tuple(members[group]), {KIND: name})
        side.labels[name] = flat
    return side


@st.composite
def regrouped(draw: st.DrawFn) -> Case:
    """Optimizer state from flat groups to parameters, the reverse, or to other groups."""
    dtype = draw(DTYPE)
    kinds = [in_groups(dtype), by_parameter(dtype)]
    one = draw(kinds[draw(st.integers(0, 1))])
    other = draw(kinds[draw(st.integers(0, 1))])
    return Case(_manifest(draw, one.size, **one.tables), Target(other.size, **other.tables), one.labels, other.labels)


Row = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


@dataclass
class Slow:
    """All transfers of a case by wanted and stored tensor, and the blocks that each rank reads of each piece."""

    rows: dict[tuple[str, str], list[Row]] = field(default_factory=dict)
    blocks: dict[tuple[int, str, int], set[int]] = field(default_factory=dict)
    nbytes: dict[tuple[str, int], int] = field(default_factory=dict)


def slow(case: Case) -> Slow:
    """Work all transfers out by looking at each element."""
    m, out = case.manifest, Slow()
    where: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, labels in case.stored.items():
        for index in np.ndindex(*labels.shape):
            if labels[index] >= 0:
                where.setdefault(int(labels[index]), (name, index))
    owned = {name: _owners(m, name, out) for name in case.stored}
    for wanted, labels in case.wanted.items():
        entry = (case.target.tensors or {})[wanted]
        groups = [(side.flat_groups or {}).get(wanted) for side in (m, case.target)]
        as_it_is = wanted in case.stored and groups[0] == groups[1]  # padding and all
        place = resolve((case.target.layouts or {})[entry.layout], case.target.meshes or {})
        for rank in range(case.target.world_size):
            for box in place.boxes(labels.shape, rank):
                moved: dict[tuple[str, int], list[tuple[int, ...]]] = {}
                for index in product(*(range(a, b) for a, b in zip(box.offsets, box.stops, strict=True))):
                    if labels[index] < 0 and not as_it_is:
                        continue
                    source, at = (wanted, index) if as_it_is else where[int(labels[index])]
                    moved.setdefault((source, owned[source][0][at]), []).append(at)
                for (source, piece), found in moved.items():
                    _move(out, m, owned[source], wanted, source, piece, rank, found)
    for rows in out.rows.values():
        rows.sort()
    return out


def _owners(m: Manifest, name: str, out: Slow) -> tuple[np.ndarray, list[tuple[Box, list[int]]]]:
    """Return the piece every element is in, and the box and ranks of each piece."""
    entry = m.tensors[name]
    itemsize = DTYPES[entry.dtype].itemsize
    pieces: dict[Box, list[int]] = {}
    assert entry.shape is not None
    place = resolve(m.layouts[entry.layout], m.meshes)
    for rank, box in place.storers(entry.shape, itemsize, name, m.copies):
        pieces.setdefault(box, []).append(rank)
    owner = np.full(entry.shape, -1)
    for i, box in enumerate(pieces):
        owner[tuple(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True))] = i
        out.nbytes[name, i] = box.numel * itemsize
    return owner, list(pieces.items())


def _move(
    out: Slow, m: Manifest, owned: Any, wanted: str, source: str, piece: int, rank: int, found: list[tuple[int, ...]]
) -> None:
    box, ranks = owned[1][int(piece)]
    low = tuple(min(column) for column in zip(*found, strict=True))
    sizes = tuple(max(column) + 1 - a for a, column in zip(low, zip(*found, strict=True), strict=True))
    chosen = rank if rank in ranks else ranks[0]
    out.rows.setdefault((wanted, source), []).append((rank, chosen, low, sizes, len(found)))
    itemsize = DTYPES[m.tensors[source].dtype].itemsize
    blocks = out.blocks.setdefault((rank, source, int(piece)), set())
    for index in found:
        place = 0
        for i, o, n in zip(index, box.offsets, box.sizes, strict=True):
            place = place * n + i - o
        blocks.update(range(place * itemsize // m.block_size, ((place + 1) * itemsize - 1) // m.block_size + 1))

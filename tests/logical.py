"""Checkpoints of logical arrays, written by the real writer and read for any layout, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import make  # noqa: F401 - puts tools/ on the path
import numpy as np
from fixtures import build
from flats import Arrays, cut
from hypothesis import strategies as st

from ckptspec.engine.fetch import Opened, fetch
from ckptspec.engine.holding import ArrayHolding, Holding
from ckptspec.engine.pool import Pool
from ckptspec.engine.saves.writer import Stored, plan_shard, write_shard
from ckptspec.format import manifest as manifests
from ckptspec.format import objects, shard
from ckptspec.format.box import Box
from ckptspec.format.dtypes import dtype
from ckptspec.format.layout import Axis, BoxesLayout, FlatLayout, Layout, Mesh, MeshLayout
from ckptspec.format.manifest import FlatGroup, Manifest, ShardEntry, TensorEntry
from ckptspec.format.names import shard_path
from ckptspec.format.placement import boxes_at, stored_at
from ckptspec.planner.destination import Destination
from ckptspec.planner.transfers import Need

POOL = Pool(budget=1 << 20, buffer_nbytes=1 << 19, threads=2)
BLOCK = 4096


def held(array: np.ndarray, origin: Sequence[int]) -> ArrayHolding:
    """Memory for bytes as they are, whatever the dtype."""
    size = array.dtype.itemsize
    return ArrayHolding(array.view(np.dtype((np.void, size))), origin, dtype(str(array.dtype)))


def write(folder: Path, m: Manifest, arrays: Arrays) -> Manifest:
    """Write the tensors of a manifest as a checkpoint, every rank's shard by the writer, and return it whole."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = build.Plan(m)
    entries = []
    for rank in range(m.world_size):
        header = shard.Header(m.save_id, m.step, rank, m.world_size, m.block, m.block_size)
        stored = [s for name in m.tensors if (s := _stored(m, name, arrays[name], rank)).boxes]
        shard_plan = plan_shard(header, stored, objects.pack(build.state_of(plan, rank)))
        written = write_shard(str(folder / shard_path(rank)), shard_plan, POOL)
        entries.append(ShardEntry(rank, shard_path(rank), *vars(written).values()))
    data = manifests.dump(replace(m, shards=tuple(entries)))
    (folder / manifests.NAME).write_bytes(data)
    return manifests.parse(data)


def _stored(m: Manifest, name: str, array: np.ndarray, rank: int) -> Stored:
    entry = m.tensors[name]
    layout, size = m.layouts[entry.layout], array.dtype.itemsize
    boxes = stored_at(layout, m.meshes, array.shape, size, name, m.copies, rank)
    return Stored(name, entry.dtype, array.shape, boxes, held(array, (0,) * array.ndim))


def fetched(opened: Opened, d: Destination, rank: int, prefer: int | None = None) -> dict[str, dict[Box, np.ndarray]]:
    """What one rank of a destination holds after a load: an array for each of its boxes, by name."""
    wants: list[tuple[Need, Holding]] = []
    out: dict[str, dict[Box, np.ndarray]] = {}
    for name, entry in d.tensors.items():
        route = d.routes.find(name)
        assert route is not None, name
        assert (route.dtype, route.shape) == (entry.dtype, entry.shape)
        for box in boxes_at(d.layouts[entry.layout], d.meshes, entry.shape or (), rank):
            size = dtype(entry.dtype).itemsize
            array = np.full((box.numel, size), 0xEE, np.uint8).view(_numpy(entry.dtype)).reshape(box.sizes)
            out.setdefault(name, {})[box] = array
            for ask in route.asks(box):
                land = ask.land
                if land is None:
                    wants.append((ask.need, held(array, box.offsets)))
                else:
                    start = land.start - box.offsets[0]
                    part = array[start : start + land.box.numel].reshape(land.box.sizes)
                    wants.append((ask.need, held(part, land.box.offsets)))
            for start, stop in route.padding(box.offsets[0], box.stops[0]) if box.ndim == 1 else ():
                array[start - box.offsets[0] : stop - box.offsets[0]] = 0
    nbytes = fetch(opened, wants, POOL, prefer=prefer)
    assert nbytes == sum(need.box.numel * dtype(opened.manifest.tensors[need.name].dtype).itemsize for need, _ in wants)
    return out


def _numpy(name: str) -> Any:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, None) or name)


def check(opened: Opened, d: Destination, expected: Arrays, prefer: Any = lambda rank: None) -> None:
    """Compare what every rank of a destination gets with what slicing the logical arrays gives."""
    for rank in range(d.world_size):
        for name, boxes in fetched(opened, d, rank, prefer(rank)).items():
            for box, array in boxes.items():
                assert array.tobytes() == cut(expected[name], box).tobytes(), (rank, name, box)


def bits(shape: Sequence[int], kind: str, seed: int) -> np.ndarray:
    """An array of random bits, whatever they mean in its dtype."""
    kind_ = _numpy(kind)
    data = np.random.default_rng(seed).integers(0, 256, prod(shape) * kind_.itemsize, np.uint8)
    return data.view(kind_).reshape(shape)


# ---- random layouts --------------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn, world: int) -> Mesh:
    """A mesh of one to three axes over all ranks, or some, in order or in any order."""
    count = draw(st.sampled_from([world, world, draw(st.integers(1, world))]))
    sizes, rest = [], count
    for _ in range(draw(st.integers(0, 2))):
        sizes.append(draw(st.sampled_from([k for k in range(1, rest + 1) if rest % k == 0])))
        rest //= sizes[-1]
    axes = tuple(Axis(name, n, "data") for name, n in zip(("dp", "tp", "pp"), [*sizes, rest], strict=False))
    if count == world and draw(st.booleans()):
        return Mesh(axes)
    return Mesh(axes, tuple(draw(st.permutations(range(world)))[:count]))


def _pins(draw: st.DrawFn, mesh: Mesh, free: Sequence[str]) -> dict[str, int]:
    return {n: draw(st.integers(0, mesh.axis(n).size - 1)) for n in free if draw(st.integers(0, 2)) == 0}


@st.composite
def mesh_layouts(draw: st.DrawFn, name: str, mesh: Mesh, shape: tuple[int, ...]) -> MeshLayout:
    """Several axes a dimension, blocks, pins and replicas."""
    dims: list[list[str]] = [[] for _ in shape]
    free = []
    for axis in draw(st.permutations([a.name for a in mesh.axes])):
        dim = draw(st.integers(-1, len(shape) - 1))
        (dims[dim] if dim >= 0 else free).append(axis)
    blocks = {}
    for dim, axes in enumerate(dims):
        if axes and draw(st.integers(0, 2)) == 0:
            stops = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2)))
            blocks[dim] = tuple(int(n) for n in np.diff([0, *stops, shape[dim]]))
    return MeshLayout(name, tuple(map(tuple, dims)), _pins(draw, mesh, free), blocks)


@st.composite
def flat_layouts(draw: st.DrawFn, name: str, mesh: Mesh, numel: int) -> FlatLayout:
    names = draw(st.permutations([a.name for a in mesh.axes]))
    count = draw(st.integers(0, len(names)))
    axes, at = tuple(names[:count]), _pins(draw, mesh, names[count:])
    if draw(st.booleans()):
        return FlatLayout(name, axes, at, draw(st.sampled_from([1, 2, 8])))
    parts = prod(mesh.axis(n).size for n in axes)
    inner = sorted(draw(st.lists(st.integers(0, numel), min_size=parts - 1, max_size=parts - 1)))
    return FlatLayout(name, axes, at, bounds=(0, *inner, numel))


@st.composite
def box_layouts(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> BoxesLayout:
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 3))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, max(0, box.ndim - 1)))
        at = draw(st.integers(0, box.sizes[axis])) if box.ndim else 0
        for a, n in ((0, at), (at, box.sizes[axis] - at)) if box.ndim else ():
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[axis], sizes[axis] = offsets[axis] + a, n
            boxes.append(Box(tuple(offsets), tuple(sizes)))
        boxes += [] if box.ndim else [box]
    ranks = st.lists(st.integers(0, world - 1), min_size=1, max_size=3, unique=True)
    return BoxesLayout(tuple((rank, box) for box in boxes for rank in draw(ranks)))


@st.composite
def placed(
    draw: st.DrawFn, world: int, tensors: Mapping[str, TensorEntry], groups: Mapping[str, FlatGroup]
) -> tuple[dict[str, Mesh], dict[str, Layout], dict[str, TensorEntry]]:
    """Meshes, a layout for each tensor (one for the tensors of a group), and the tensors that have them."""
    grids = {f"m{i}": draw(meshes(world)) for i in range(draw(st.integers(1, 2)))}
    group_of = {flat: name for name, group in groups.items() for flat in group.tensors.values()}
    found: dict[str, Layout] = {}
    entries = {}
    for name, entry in tensors.items():
        shape, key = entry.shape or (), group_of.get(name, name)
        mesh = draw(st.sampled_from(sorted(grids)))
        if key not in found:
            kinds = ["flat"] if key != name else ["mesh", "mesh", "boxes", *(["flat"] if len(shape) == 1 else [])]
            made = {
                "mesh": mesh_layouts(mesh, grids[mesh], shape),
                "flat": flat_layouts(mesh, grids[mesh], prod(shape)),
                "boxes": box_layouts(shape, world),
            }
            found[key] = draw(made[draw(st.sampled_from(kinds))])
        entries[name] = replace(entry, layout=key)
    return grids, found, entries

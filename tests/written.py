"""Writes checkpoints of any layout from whole numpy arrays, and reads them back the slow way: no torch, no planner."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckptspec.engine.documents import open_shard
from ckptspec.engine.holding import ArrayHolding
from ckptspec.engine.pool import Pool
from ckptspec.engine.saves import commit
from ckptspec.engine.saves.writer import Stored, Written, plan_shard, write_shard
from ckptspec.format import manifest, shard
from ckptspec.format.box import Box
from ckptspec.format.dtypes import dtype
from ckptspec.format.layout import Axis, FlatLayout, Layout, LocalLayout, Mesh, MeshLayout
from ckptspec.format.manifest import FlatGroup, Manifest, Member, ShardEntry, TensorEntry
from ckptspec.format.objects import TensorRef, pack
from ckptspec.format.placement import resolve

RAW = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
POOL = Pool(2 << 20, 1 << 19, 2)


def line(size: int, name: str = "dp", kind: str = "data") -> Mesh:
    """A mesh of one axis."""
    return Mesh((Axis(name, size, kind),))


def values(name: str, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes that the name decides, as an array of the dtype's storage."""
    itemsize = dtype(kind).itemsize
    seed = np.random.default_rng(list(name.encode()))
    raw = seed.integers(0, 256, prod(shape) * itemsize, dtype=np.uint8)
    return np.frombuffer(raw.tobytes(), RAW[itemsize]).reshape(shape)


@dataclass
class World:
    """All that a checkpoint is made of; arrays of local tensors and objects of kind rank are by rank."""

    size: int
    meshes: dict[str, Mesh] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict, repr=False)
    objects: dict[str, tuple[str, Any]] = field(default_factory=dict)
    groups: dict[str, FlatGroup] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    copies: int = 1
    block: str = "xxh3-128"
    block_size: int = 1 << 20
    annotations: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, kind: str, shape: tuple[int, ...], layout: str) -> None:
        """Add a tensor whose values its name decides."""
        self.tensors[name] = TensorEntry(kind, shape, layout)
        self.arrays[name] = values(name, kind, shape)

    def add_local(self, name: str, kind: str, shapes: Mapping[int, tuple[int, ...]]) -> None:
        """Add a local tensor of these ranks."""
        self.layouts.setdefault("local", LocalLayout())
        self.tensors[name] = TensorEntry(kind, None, "local")
        self.arrays[name] = {rank: values(f"{name} {rank}", kind, shape) for rank, shape in shapes.items()}

    def add_group(self, name: str, layout: str, members: list[Member], kinds: Mapping[str, str], kind: str) -> None:
        """Add a flat group: `kinds` are its tensors by kind; a member's values are those of the tensor it is of."""
        numel = sum(prod(m.shape) for m in members)
        self.groups[name] = FlatGroup(numel, tuple(members), dict(kinds))
        for key, flat in kinds.items():
            self.tensors[flat] = TensorEntry(kind, (numel,), layout)
            self.arrays[flat] = flat_of(members, key, kind)

    def state(self, rank: int) -> dict[str, Any]:
        """The state of a rank: nested dicts by the tokens of names."""
        tree: dict[str, Any] = {}
        held = {n: TensorRef(n) for n in self.tensors if self.has(rank, n)}
        held |= {n: TensorRef(to) for n, to in self.aliases.items() if self.has(rank, to)}
        for name, value in held.items():
            put(tree, name, value)
        for name, (kind, value) in self.objects.items():
            if kind == "same":
                put(tree, name, value)
            elif rank in value:
                put(tree, name, value[rank])
        return tree

    def has(self, rank: int, name: str) -> bool:
        """Whether a rank takes part in a tensor."""
        if self.tensors[name].shape is None:
            return rank in self.arrays[name]
        return rank in resolve(self.layouts[self.tensors[name].layout], self.meshes).ranks()

    def stored(self, rank: int) -> list[Stored]:
        """What the shard of a rank stores."""
        out = []
        for name, entry in self.tensors.items():
            if not self.has(rank, name):
                continue
            if entry.shape is None:
                array = self.arrays[name][rank]
                boxes = () if array.size == 0 else (Box.whole(array.shape),)
                out.append(Stored(name, entry.dtype, array.shape, boxes, holding(array, entry.dtype)))
                continue
            place = resolve(self.layouts[entry.layout], self.meshes)
            boxes = place.stored(entry.shape, dtype(entry.dtype).itemsize, name, self.copies, rank)
            if boxes:
                out.append(Stored(name, entry.dtype, entry.shape, boxes, holding(self.arrays[name], entry.dtype)))
        return out

    def write(self, run: Path, step: int = 7, state: Callable[[int], Any] | None = None) -> Path:
        """Write the checkpoint into a run folder as any save does, and return its folder."""
        save_id = secrets.token_hex(16)
        staging = commit.prepare(str(run), step, save_id)
        entries = []
        for rank in range(self.size):
            header = shard.Header(save_id, step, rank, self.size, self.block, self.block_size)
            name = commit.shard_name(staging.mode, rank, save_id)
            plan = plan_shard(header, self.stored(rank), pack((state or self.state)(rank)))
            written: Written = write_shard(os.path.join(staging.path, name), plan, POOL)
            entries.append(ShardEntry(rank, name, *vars(written).values()))
        m = Manifest(
            save_id,
            step,
            self.size,
            run_id="run",
            wall_clock_seconds=17,
            created_at="2026-01-02T03:04:05Z",
            producer={"name": "test", "version": "0"},
            commit=staging.mode,
            copies=self.copies,
            block=self.block,
            block_size=self.block_size,
            meshes=self.meshes,
            layouts=self.layouts,
            shards=tuple(entries),
            tensors=self.tensors,
            objects={name: kind for name, (kind, _) in self.objects.items()},
            flat_groups=self.groups,
            aliases=self.aliases,
            annotations=self.annotations,
        )
        data = manifest.dump(m)
        manifest.parse(data)
        return Path(commit.publish(staging, data, {s.path: s.nbytes for s in entries}))


def holding(array: np.ndarray, kind: str) -> ArrayHolding:
    """A whole array as what a rank holds."""
    return ArrayHolding(np.ascontiguousarray(array).reshape(array.shape), (0,) * array.ndim, dtype(kind))


def put(tree: dict[str, Any], name: str, value: Any) -> None:
    """Put a value into nested dicts at the place that its name says."""
    *above, last = name.split("/")
    for token in above:
        tree = tree.setdefault(token, {})
    tree[last] = value


def flat_of(members: list[Member], key: str, kind: str) -> np.ndarray:
    """What a flat tensor holds: of each member the values of `<its name>.<key>`; padding is zero."""
    parts = []
    for m in members:
        if m.name is None:
            parts.append(np.zeros(prod(m.shape), RAW[dtype(kind).itemsize]))
            continue
        whole = values(f"{m.name}.{key}", kind, m.of_shape or m.shape)
        offsets = m.of_offsets or (0,) * len(m.shape)
        parts.append(whole[tuple(slice(o, o + n) for o, n in zip(offsets, m.shape, strict=True))].reshape(-1))
    return np.concatenate(parts) if parts else np.zeros(0, RAW[dtype(kind).itemsize])


# ---- reading ---------------------------------------------------------------------------------------------------------


def documents(folder: Path) -> tuple[Manifest, list[Any]]:
    """The manifest and every shard's documents."""
    m = manifest.parse((folder / "manifest.json").read_bytes())
    return m, [open_shard(str(folder), entry, m, numpy=False) for entry in m.shards]


def manifest_of(folder: Path) -> Manifest:
    return documents(folder)[0]


def whole(folder: Path) -> dict[str, Any]:
    """Every tensor put together chunk by chunk; local ones by rank."""
    m, docs = documents(folder)
    out: dict[str, Any] = {}
    for name, entry in m.tensors.items():
        out[name] = {} if entry.shape is None else np.zeros(entry.shape, RAW[dtype(entry.dtype).itemsize])
    for entry, doc in zip(m.shards, docs, strict=True):
        data = (folder / entry.path).read_bytes()
        index = doc.index
        for row, name in enumerate(index.names):
            if m.tensors[name].shape is None:
                out[name][entry.rank] = np.zeros(index.shapes[row], RAW[dtype(index.dtypes[row]).itemsize])
        for chunk in index.chunks:
            name = index.names[chunk.tensor]
            target = out[name][entry.rank] if m.tensors[name].shape is None else out[name]
            raw = np.frombuffer(data[chunk.start : chunk.start + chunk.nbytes], target.dtype).reshape(chunk.box.sizes)
            target[(*(slice(a, b) for a, b in zip(chunk.box.offsets, chunk.box.stops, strict=True)), ...)] = raw
    return out


def payloads(folder: Path) -> list[dict[tuple[str, Box], bytes]]:
    """The payload bytes of every chunk, by rank."""
    m, docs = documents(folder)
    out = []
    for entry, doc in zip(m.shards, docs, strict=True):
        data = (folder / entry.path).read_bytes()
        names = doc.index.names
        out.append({(names[c.tensor], c.box): data[c.start : c.start + c.nbytes] for c in doc.index.chunks})
    return out


def states(folder: Path) -> list[Any]:
    """The state of every rank."""
    return [doc.state for doc in documents(folder)[1]]


def rows(mesh: str = "main", axis: str = "dp") -> MeshLayout:
    """Cut along the first dimension."""
    return MeshLayout(mesh, ((axis,),))


def columns(mesh: str = "main", axis: str = "dp") -> MeshLayout:
    """Cut along the second dimension."""
    return MeshLayout(mesh, ((), (axis,)))


def flat(mesh: str = "main", axis: str = "dp", align: int = 1) -> FlatLayout:
    """Cut a one-dimensional tensor in parts."""
    return FlatLayout(mesh, (axis,), {}, align)


# ---- worlds ----------------------------------------------------------------------------------------------------------


def job(size: int = 4, block_size: int = 4096) -> World:
    """A ZeRO job: parameters on all ranks, optimizer state flat, something private, a tied tensor."""
    w = World(size, {"main": line(size)}, {"rows": rows(), "all": MeshLayout("main", ()), "zero": flat(align=4)})
    w.block_size = block_size
    w.add("model/w", "bfloat16", (257, 64), "rows")
    w.add("model/v", "float32", (7, 5), "all")
    members = [Member("model/w", 0, (257, 64)), Member(None, 257 * 64, (3,)), Member("model/v", 257 * 64 + 3, (7, 5))]
    kinds = {"exp_avg": "optimizer/zero/exp_avg", "exp_avg_sq": "optimizer/zero/exp_avg_sq"}
    w.add_group("optimizer/zero", "zero", members, kinds, "float32")
    w.add_local("rng/torch", "uint8", {rank: (16 + rank,) for rank in range(size)})
    w.aliases = {"model/head": "model/w"}
    w.objects = {
        "step": ("same", 12),
        "optimizer/groups": ("same", [{"lr": 0.1, "betas": (0.9, 0.95)}]),
        "rng/python": ("rank", {rank: [3, (rank, 1.5), None] for rank in range(size)}),
    }
    w.annotations = {"org.example.cluster": "a"}
    return w


def tensor_parallel_zero(tp: int, dp: int) -> World:
    """ZeRO under tensor parallelism: one flat group for each tensor rank, of halves of columns and of rows."""
    w = World(tp * dp, {"main": Mesh((Axis("dp", dp, "data"), Axis("tp", tp, "tensor")))})
    w.block_size = 1000
    w.layouts["model"] = columns(axis="tp")
    w.add("model/w", "bfloat16", (96, 64), "model")
    w.add("model/u", "bfloat16", (64, 32), "model")
    for i in range(tp):
        w.layouts[f"zero{i}"] = replace(flat(), at={"tp": i})
        members = [
            Member("model/w", 0, (96, 64 // tp), (96, 64), (0, 64 // tp * i)),
            Member("model/u", 96 * 64 // tp, (64 // tp, 32), (64, 32), (64 // tp * i, 0)),
        ]
        kinds = {k: f"optimizer/zero{i}/{k}" for k in ("master", "exp_avg")}
        w.add_group(f"optimizer/zero{i}", f"zero{i}", members, kinds, "float32")
    return w

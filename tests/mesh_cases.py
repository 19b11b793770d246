"""The states of tests/test_meshes.py: DTensors in every placement with the global tensors they are parts of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

try:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
except ImportError:  # before torch could be told an order
    ShardOrderEntry = None  # type: ignore[assignment, misc]

import ckptspec
from ckptspec.pytorch.capture import capture

PLACEMENTS: dict[str, Any] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate()}
Build = Callable[[DeviceMesh, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One tensor: its global shape, how its DTensor is made, and the axes that must cut each dimension (None: any)."""

    shape: tuple[int, ...]
    build: Build
    dims: tuple[tuple[str, ...], ...] | None = None
    dtype: torch.dtype = torch.float32

    def whole(self, name: str) -> Tensor:
        """The global tensor: no two of its elements are equal, nor are those of other cases."""
        numel = int(torch.Size(self.shape).numel())
        return (torch.arange(1, numel + 1) + 1000 * (sum(name.encode()) % 97)).to(self.dtype).reshape(self.shape)


def linear(style: Any, mesh_dim: str | None, *, fsdp: str | None, bias: bool = False, dim: int = 0) -> Build:
    """A weight (or bias) that tensor parallelism, then FSDP2, have cut the way they cut a model's."""

    def build(mesh: DeviceMesh, whole: Tensor) -> Tensor:
        weight = whole if not bias else torch.zeros(len(whole), 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nn.Linear: an empty weight cannot be initialised
            module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias)
        with torch.no_grad():
            module.weight.copy_(weight)
            if bias:
                module.bias.copy_(whole)
        model = nn.Sequential(module)
        if style is not None:
            parallelize_module(model, mesh[mesh_dim], {"0": style()})
        if fsdp is not None:
            where = mesh if fsdp == "all" else mesh[fsdp]
            placement = (lambda p: Shard(dim)) if dim else None
            fully_shard(model, mesh=where, shard_placement_fn=placement)
        return module.bias if bias else module.weight

    return build


def placed(*placements: Any, mesh: Callable[[DeviceMesh], DeviceMesh] | None = None) -> Build:
    """A tensor that torch itself distributed; without communication, every rank cuts its part out of the whole."""
    return lambda m, whole: distribute_tensor(whole, mesh(m) if mesh else m, placements, src_data_rank=None)


def ordered(mesh: DeviceMesh, whole: Tensor) -> Tensor:
    """A tensor cut over tp, then over dp, of which torch was told so beside the placements."""
    dp, tp = mesh.shape
    at = mesh.get_coordinate() or [0, 0]
    local = _chunk(_chunk(whole, tp, at[1]), dp, at[0]).clone()
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    return DTensor(local, spec, requires_grad=False)


def _chunk(t: Tensor, k: int, i: int) -> Tensor:
    chunks = t.chunk(k)
    return chunks[i] if i < len(chunks) else t[:0]


def cases(mesh: DeviceMesh, sizes: list[int]) -> Iterator[tuple[str, Case]]:
    """Yield (name, case) for every placement and size on a mesh with axes dp and tp."""
    dp = mesh.shape[0]
    for d in sizes:
        yield f"col/{d}", Case((d, 3), linear(ColwiseParallel, "tp", fsdp="dp"), (("tp", "dp"),))
        yield f"col_bias/{d}", Case((d,), linear(ColwiseParallel, "tp", fsdp="dp", bias=True), (("tp", "dp"),))
        yield f"row/{d}", Case((7, d), linear(RowwiseParallel, "tp", fsdp="dp"), (("dp",), ("tp",)))
        yield f"row_by_rows/{d}", Case((d, 4), linear(RowwiseParallel, "tp", fsdp="dp"), (("dp",), ("tp",)))
        yield f"fsdp/{d}", Case((d, 3), linear(None, None, fsdp="dp"), (("dp",),))
        yield f"fsdp_over_tp_axis/{d}", Case((d, 2), linear(None, None, fsdp="tp"), (("tp",),))
        yield f"fsdp_columns/{d}", Case((3, d * dp), linear(None, None, fsdp="dp", dim=1), ((), ("dp",)))
        yield f"hsdp/{d}", Case((d, 3), linear(None, None, fsdp="all"), (("tp",),))
        yield f"tp/{d}", Case((d, 3), linear(ColwiseParallel, "tp", fsdp=None), (("tp",),))
        yield f"tp_row/{d}", Case((3, d), linear(RowwiseParallel, "tp", fsdp=None), ((), ("tp",)))
        for one, two in product(PLACEMENTS, PLACEMENTS):
            shape = (d, (5 * d + 3) % 14, 2)
            yield f"{one}{two}/{d}", Case(shape, placed(PLACEMENTS[one], PLACEMENTS[two]), _dims(one, two))
        for sf in (2, 3):
            strided = _StridedShard(0, split_factor=sf)
            yield f"lone{sf}/{d}", Case((d, 2), placed(strided, Replicate()), (("dp",),))
            yield f"lone_last{sf}/{d}", Case((d, 2), placed(Shard(1), strided), (("tp",), ("dp",)))
        if ShardOrderEntry is not None:
            yield f"ordered/{d}", Case((d, 2), ordered, (("tp", "dp"),))
        yield f"joined/{d}", Case((d, 2), placed(Shard(0), mesh=joined), (("dp_tp",),))
        yield f"turned/{d}", Case((d, 2), placed(Shard(0), Shard(0), mesh=turned), (("a", "b"),))
        yield f"line/{d}", Case((2, d), placed(Shard(1), mesh=line), ((), ("line",)))
    yield "scalar", Case((), placed(Replicate(), Replicate()), ())
    yield "bf16", Case((11, 5), placed(Shard(0), Shard(1)), (("dp",), ("tp",)), torch.bfloat16)
    yield "big", Case((1 << 20, 3), placed(Replicate(), Shard(1)), ((), ("tp",)))  # cut among those who hold it


def _dims(*placements: str) -> tuple[tuple[str, ...], ...]:
    out: list[tuple[str, ...]] = []
    for d in ("S0", "S1"):
        out.append(tuple(axis for axis, p in zip(("dp", "tp"), placements, strict=True) if p == d))
    while out and not out[-1]:
        out.pop()
    return tuple(out)


_made: dict[str, DeviceMesh] = {}


def joined(mesh: DeviceMesh) -> DeviceMesh:
    """Both axes of the mesh as one."""
    return mesh._flatten("dp_tp")


def turned(mesh: DeviceMesh) -> DeviceMesh:
    """A second mesh over the same ranks, numbered down its columns."""
    if "turned" not in _made:
        _made["turned"] = DeviceMesh("cpu", mesh.mesh.t(), mesh_dim_names=("a", "b"))
    return _made["turned"]


def line(mesh: DeviceMesh) -> DeviceMesh:
    """A third one, of one axis."""
    if "line" not in _made:
        _made["line"] = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("line",))
    return _made["line"]


def build(dp: int, tp: int, sizes: list[int], *, fill: bool) -> tuple[dict[str, Case], dict[str, Tensor]]:
    """Return the cases by name, and the state; `fill=False` gives the same tensors with nothing in them."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    found = dict(cases(mesh, sizes))
    state = {}
    for name, case in found.items():
        whole = case.whole(name)
        state[name] = case.build(mesh, whole if fill else torch.zeros_like(whole))
    return found, state


def check(rank: int, world: int, found: dict[str, Case], state: dict[str, Tensor]) -> None:
    """Compare every box that this rank is said to hold with that part of the global tensor, bit by bit."""
    captured = capture({"t": state}, rank=rank, world=world)
    for name, case in found.items():
        whole, leaf = case.whole(name), captured.leaves["t/" + name.replace("/", "~1")]
        t = state[name]
        local = t.to_local() if isinstance(t, DTensor) else t
        assert sum(b.numel for b in leaf.boxes) == local.numel(), name
        for box in leaf.boxes:
            part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            assert torch.equal(leaf.holding.part(box), part), (name, rank, box)


def save(rank: int, world: int, folder: Path, dp: int, tp: int, sizes: list[int]) -> None:
    found, state = build(dp, tp, sizes, fill=True)
    check(rank, world, found, state)
    manifest = ckptspec.save(folder, {"t": state}, step=1)
    assert set(manifest.tensors) == {"t/" + name.replace("/", "~1") for name in found}
    if (dp, tp) == (3, 2):
        refuse_the_other_order(rank, folder)


def refuse_the_other_order(rank: int, folder: Path) -> None:
    """torch cuts 7 rows by these placements in another way than FSDP2 over TP does that has the very same ones."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    other = distribute_tensor(torch.arange(7.0), mesh, strided, src_data_rank=None)
    error = None
    try:
        ckptspec.save(folder.parent / "other", {"t": other}, step=1)
    except ckptspec.SaveError as e:
        error = e
    assert error is not None
    assert error.rank in (4, 5)
    assert "the local tensor is not what its placements say" in str(error)


def load(rank: int, world: int, folder: Path, dp: int, tp: int, sizes: list[int]) -> None:
    found, state = build(dp, tp, sizes, fill=False)
    result = ckptspec.load(folder, into={"t": state})
    assert not result.missing
    assert not result.unexpected
    check(rank, world, found, state)

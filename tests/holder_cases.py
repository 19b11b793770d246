"""The states of tests/test_holders.py, on 2 x 2 ranks: some hold other tensors than others, or pieces of plain ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from states import leaves
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import ckptspec

State = dict[str, Any]
_meshes: dict[tuple[str, ...], DeviceMesh] = {}


def mesh(*names: str) -> DeviceMesh:
    """The mesh of 2 x 2 ranks with these names, the same one each time."""
    if names not in _meshes:
        _meshes[names] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return _meshes[names]


def whole(name: str, *shape: int) -> Tensor:
    """Values that name and shape decide."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


def stages(rank: int) -> State:
    """PP 2 x DP 2: a stage's layer by FSDP2 over its own slice of the mesh, plain tensors, a ZeRO buffer, values."""
    stage, replica = divmod(rank, 2)
    layer = nn.Linear(5, 7)
    with torch.no_grad():
        layer.weight.copy_(whole(f"weight{stage}", 7, 5))
        layer.bias.copy_(whole(f"bias{stage}", 7))
    fully_shard(layer, mesh=mesh("pp", "dp")["dp"])
    part = 8 if stage else 6
    buffer = whole(f"zero{stage}", 15 - 4 * (1 - stage))
    mine = torch.zeros(part)
    piece = buffer[replica * part : (replica + 1) * part]
    mine[: len(piece)] = piece
    slice_ = ckptspec.FlatShard(
        mine, group=f"zero/{stage}", offset=replica * part, numel=len(buffer), ranks=[2 * stage, 2 * stage + 1]
    )
    return {
        "model": {
            **{f"layers.{stage}.{k}": p for k, p in layer.named_parameters()},
            f"layers.{stage}.norm": whole(f"norm{stage}", 6),
            f"layers.{stage}.big": whole(f"big{stage}", 1 << 18, 3),  # 3 MiB: cut among the two who hold it
            "scale": whole("scale", 3),
        },
        "optimizer": {f"layers.{stage}.norm": {"exp_avg": whole(f"avg{stage}", 6), "step": torch.tensor(3.0 + stage)}},
        "zero": {f"stage{stage}": {"master": slice_}},
        f"stage{stage}": {"layers": [stage], "lr": 0.1 * (stage + 1)},
        "epoch": 4,
    }


def experts(rank: int) -> State:
    """EP over dp x tp: experts of one axis, of the other, of both, by hand and as DTensors over a slice of the mesh."""
    dp, tp = divmod(rank, 2)
    grid = mesh("dp", "tp")
    return {
        "router": whole("router", 4, 3),
        **{f"row.{dp}.{k}": whole(f"row{dp}{k}", 3, 2) for k in ("up", "down")},
        **{f"column.{tp}.{k}": whole(f"column{tp}{k}", 2, 5) for k in ("up", "down")},
        f"own.{rank}.up": whole(f"own{rank}", 4),
        f"cut.{dp}": distribute_tensor(whole(f"cut{dp}", 5, 3), grid["tp"], [Shard(0)], src_data_rank=None),
        "replica": distribute_tensor(whole("replica", 3, 5), grid["tp"], [Shard(1)], src_data_rank=None),
        f"tokens.{rank}": 10 + rank,
        "stacked": ckptspec.Shard(whole("stacked", 4, 3, 2)[rank : rank + 1], (4, 3, 2), [((rank, 0, 0), (1, 3, 2))]),
    }


def tied(rank: int) -> State:
    """An embedding on the first stage whose twin on the last is memory of its own, there with a second name.

    So is one that each stage cuts over its own ranks.
    """
    table = whole("wte", 6, 4)
    cut = distribute_tensor(whole("cut", 5, 2), mesh("pp", "dp")["dp"], [Shard(0)], src_data_rank=None)
    if rank < 2:
        return {"stage0": {"wte": table, "cut": cut, "up": whole("up", 3)}}
    head = table.clone()
    return {"stage1": {"head": head, "again": head, "cut": cut, "down": whole("down", 3)}}


TIES = {"stage1/head": "stage0/wte", "stage1/again": "stage0/wte", "stage1/cut": "stage0/cut"}


def pieces(rank: int) -> State:
    """What Megatron-like code holds: columns, rows, fused QKV, unequal cuts, boxes apart, replicas of them, nothing."""
    tp = rank % 2
    column, row, qkv, odd = whole("column", 6, 3), whole("row", 3, 6), whole("qkv", 12, 2), whole("odd", 5, 5)
    heads = [(0, 8), (8, 2), (10, 2)]
    parts = [(o + tp * (n // 2), n // 2) for o, n in heads]
    rows = [((o, 0), (n, 2)) for o, n in parts]
    corners = {0: [(0, 0, 2, 5)], 1: [(2, 0, 3, 1), (2, 4, 3, 1)], 2: [(2, 1, 3, 3)], 3: []}[rank]
    held = [odd[i : i + h, j : j + w] for i, j, h, w in corners]
    return {
        **{
            f"layers.{i}.column": ckptspec.Shard(column[3 * tp : 3 * tp + 3] + i, (6, 3), [((3 * tp, 0), (3, 3))])
            for i in range(3)
        },
        "row": ckptspec.Shard(row[:, 3 * tp : 3 * tp + 3].contiguous(), (3, 6), [((0, 3 * tp), (3, 3))]),
        "qkv": ckptspec.Shard(torch.cat([qkv[o : o + n] for o, n in parts]), (12, 2), rows),
        "odd": ckptspec.Shard(
            torch.cat(held, 1) if held else odd[:0], (5, 5), [((i, j), (h, w)) for i, j, h, w in corners]
        ),
        "plain": whole("plain", 3),
    }


def uneven(rank: int) -> State:
    """Tensors and values that some ranks have and others lack, in no regular way."""
    state: State = {"all": whole("all", 2)}
    for name, ranks in (("a", (0, 1, 3)), ("b", (0, 3)), ("c", (1,)), ("d", (1, 2, 3))):
        if rank in ranks:
            state[name] = {"t": whole(name, 3, 3), "n": len(ranks)}
    return state


STATES: dict[str, tuple[Callable[[int], State], dict[str, Any]]] = {
    "stages": (stages, {}),
    "experts": (experts, {}),
    "tied": (tied, {"ties": TIES}),
    "pieces": (pieces, {"copies": 2}),
    "uneven": (uneven, {"plain": "held"}),
}


def emptied(state: Any) -> Any:
    """The same state with nothing in it: zeros and other values."""
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, (ckptspec.Shard, ckptspec.FlatShard)):
        return type(state)(**{**vars(state), "tensor": torch.zeros_like(state.tensor)})
    if isinstance(state, Tensor):
        return torch.zeros_like(state, requires_grad=False)
    return None


def local(state: Any) -> Any:
    """The state with the tensors that this rank has itself."""
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    if isinstance(state, (ckptspec.Shard, ckptspec.FlatShard)):
        return state.tensor
    return state.to_local() if isinstance(state, DTensor) else state


def save(rank: int, world: int, folder: Path) -> None:
    for name, (build, options) in STATES.items():
        manifest = ckptspec.save(folder / name, build(rank), step=1, **options)
        assert len(manifest.shards) == world
        assert manifest.tensors


def load(rank: int, world: int, folder: Path) -> None:
    for name, (build, _) in STATES.items():
        state = build(rank)
        fresh = emptied(state)
        assert leaves(local(fresh)) != leaves(local(state))
        ckptspec.load(folder / name, into=fresh)
        assert leaves(local(fresh)) == leaves(local(state)), (name, rank)


# ---- what is refused -------------------------------------------------------------------------------------------------


def lacking(rank: int) -> State:
    return {"a": torch.ones(2), **({} if rank == 2 else {"b": torch.ones(3)})}


def gap(rank: int) -> State:
    return {"t": ckptspec.Shard(torch.ones(2), (9,), [((2 * rank,), (2,))])}


def overlap(rank: int) -> State:
    return {"t": ckptspec.Shard(torch.ones(3), (9,), [((2 * rank,), (3,))])}


def outside(rank: int) -> State:
    return {"t": ckptspec.Shard(torch.ones(2), (8,), [((2 * rank + (rank == 3),), (2,))])}


def misshapen(rank: int) -> State:
    return {"t": ckptspec.Shard(torch.ones(2, 1 + (rank == 1)), (8, 1), [((2 * rank, 0), (2, 1))])}


def value(rank: int) -> State:
    stage = rank // 2
    return {f"stage{stage}": {"w": torch.ones(2), "n": {"x": 1 + (rank == 3)}}}


def two_dtypes(rank: int) -> State:
    stage = rank // 2
    return {"w": torch.ones(2).to(torch.float16 if stage else torch.float32), f"own{stage}": torch.ones(1)}


def two_kinds(rank: int) -> State:
    return {"w": 1.0 if rank == 1 else torch.ones(()), f"own{rank}": torch.ones(1)}


def untrue_tie(rank: int) -> State:
    state = tied(rank)
    if rank == 3:
        state["stage1"]["head"][0, 0] += 1
    return state


def wrong_local(rank: int) -> State:
    local = torch.ones(2 + (rank == 1), 3)
    return {"t": DTensor.from_local(local, mesh("dp", "tp"), [Shard(0), Shard(0)], shape=(8, 3), stride=(3, 1))}


def wrong_slice(rank: int) -> State:
    offset = 4 * rank + (rank == 2)
    return {"t": ckptspec.FlatShard(torch.ones(4), group="g", offset=offset, numel=16)}


def partial_sum(rank: int) -> State:
    return {"t": DTensor.from_local(torch.ones(2), mesh("dp", "tp"), [Partial(), Replicate()])}


def strange_stride(rank: int) -> State:
    placements = [Shard(0), _StridedShard(0, split_factor=2)]
    return {"t": distribute_tensor(torch.arange(8.0), mesh("dp", "tp"), placements, src_data_rank=None)}


def unexplained_stride(rank: int) -> State:
    placements = [_StridedShard(0, split_factor=3), Shard(0)]
    return {"t": distribute_tensor(torch.arange(12.0), mesh("dp", "tp"), placements, src_data_rank=None)}


def part_of_a_mesh(rank: int) -> State:
    t = distribute_tensor(torch.arange(8.0), mesh("dp", "tp"), [Shard(0), Shard(0)], src_data_rank=None)
    return {"own": torch.ones(1)} if rank == 3 else {"t": t, "both": torch.ones(1)}


def piece_or_whole(rank: int) -> State:
    t = torch.ones(8)
    return {"t": t if rank == 1 else ckptspec.Shard(t, (8,), [((0,), (8,))]), f"own{rank}": torch.ones(1)}


REFUSED: dict[str, tuple[Callable[[int], State], dict[str, Any], int | None, str]] = {
    "lacking": (lacking, {}, 2, "does not hold tensor 'b'"),
    "gap": (gap, {}, None, "do not make up tensor 't': the boxes leave at least 1 of 9"),
    "overlap": (overlap, {}, None, "do not make up tensor 't'"),
    "outside": (outside, {}, 3, "tensor 't'|does not lie inside"),
    "misshapen": (misshapen, {}, 1, "tensor 't'|the boxes do not add up"),
    "value": (value, {}, None, "object 'stage1/n' differs"),
    "two_dtypes": (two_dtypes, {}, 2, "'w' in two ways"),
    "two_kinds": (two_kinds, {}, 1, "'w' in two ways"),
    "untrue_tie": (untrue_tie, {"ties": TIES}, 3, "'stage0/wte' differs"),
    "unknown_tie": (tied, {"ties": {**TIES, "stage1/down": "stage0/upp"}}, None, "a tie names 'stage0/upp'"),
    "wrong_local": (wrong_local, {}, 1, "tensor 't'|the local tensor is not what its placements say"),
    "wrong_slice": (wrong_slice, {}, 2, "tensor 't'|does not begin where"),
    "partial_sum": (partial_sum, {}, None, "tensor 't'|neither a shard nor a replica"),
    "strange_stride": (strange_stride, {}, None, "tensor 't'|a strided shard that no other axis explains"),
    "unexplained_stride": (unexplained_stride, {}, None, "tensor 't'|a strided shard that no other axis explains"),
    "part_of_a_mesh": (part_of_a_mesh, {}, 3, "tensor 't' is not held by the ranks its layout"),
    "piece_or_whole": (piece_or_whole, {}, 1, "'t' in two ways"),
}


def refuse(rank: int, world: int, folder: Path) -> None:
    for name, (build, options, blamed, text) in REFUSED.items():
        error: Any = None
        try:
            ckptspec.save(folder / name, build(rank), step=1, **options)
        except ckptspec.SaveError as e:
            error = e
        assert error is not None, f"{name} was saved"
        assert all(part in str(error) for part in text.split("|")), (name, str(error))
        assert blamed is None or error.rank == blamed, (name, error.rank, str(error))
        assert error.rule.startswith(("P-", "N-", "T-")), (name, error.rule)

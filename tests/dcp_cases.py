"""What tests/test_dcp_beside.py runs: one model by FSDP2 over TP, saved and loaded here and by torch's own way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ckptspec

UNTOUCHED = -1.0  # what stands in a fresh model before the load


def model(mesh: DeviceMesh, weight: Tensor) -> nn.Module:
    """A Linear of these rows: cut over tp first, then over dp."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        linear.weight.copy_(weight)
    net = nn.Sequential(linear)
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    return net


def rows(dim: int) -> Tensor:
    """The global weight: row i is full of i."""
    return torch.arange(float(dim)).unsqueeze(1).expand(dim, 3).contiguous()


def held(net: nn.Module) -> list[float]:
    """The first column of this rank's part: the numbers of its rows."""
    weight = net.get_parameter("0.weight")
    local: Tensor = weight.to_local()  # type: ignore[operator]
    return local.detach()[:, 0].tolist() if local.numel() else []


def attempt(what: Callable[[], object]) -> str:
    """Return `ok`, or the name of what was raised: torch's errors here are of no one type."""
    try:
        what()
    except BaseException as e:
        return type(e).__name__
    return "ok"


def save(rank: int, world: int, folder: Path, dims: list[int]) -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    for dim in dims:
        net = model(mesh, rows(dim))
        ckptspec.save(folder / f"ours{dim}", {"model": net.state_dict()}, step=1)
        said = attempt(lambda: dcp.save({"model": net.state_dict()}, checkpoint_id=folder / f"dcp{dim}"))  # noqa: B023
        print("FOUND", json.dumps([dim, said, held(net)]))


def load(rank: int, world: int, folder: Path, dims: list[int]) -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    for dim in dims:
        ours, theirs = (model(mesh, torch.full((dim, 3), UNTOUCHED)) for _ in range(2))
        ckptspec.load(folder / f"ours{dim}", into={"model": ours.state_dict()})
        state = {"model": theirs.state_dict()}
        said = attempt(lambda: dcp.load(state, checkpoint_id=folder / f"dcp{dim}"))  # noqa: B023
        theirs.load_state_dict(state["model"])
        print("FOUND", json.dumps([dim, held(ours), said, held(theirs)]))

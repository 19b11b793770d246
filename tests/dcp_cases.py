"""What tests/test_dcp_beside.py runs: one model by FSDP2 over TP, saved and loaded here and by torch's own way."""

from __future__ import annotations

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


def outcome(error: BaseException | None) -> str:
    return "ok" if error is None else type(error).__name__


def save(rank: int, world: int, folder: Path, dim: int) -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    net = model(mesh, rows(dim))
    ckptspec.save(folder / "ours", {"model": net.state_dict()}, step=1)
    error = None
    try:
        dcp.save({"model": net.state_dict()}, checkpoint_id=folder / "dcp")
    except BaseException as e:  # its errors are of no one type
        error = e
    print("saved", outcome(error), held(net))


def load(rank: int, world: int, folder: Path, dim: int) -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    ours = model(mesh, torch.full((dim, 3), UNTOUCHED))
    ckptspec.load(folder / "ours", into={"model": ours.state_dict()})
    theirs = model(mesh, torch.full((dim, 3), UNTOUCHED))
    error = None
    try:
        state = {"model": theirs.state_dict()}
        dcp.load(state, checkpoint_id=folder / "dcp")
        theirs.load_state_dict(state["model"])
    except BaseException as e:
        error = e
    print("ours", held(ours))
    print("theirs", outcome(error), held(theirs))

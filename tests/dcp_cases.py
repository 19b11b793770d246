"""What tests/test_dcp_beside.py runs: one model by FSDP2 over TP, and a matrix on other ranks, here and torch's way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ckptspec
from ckptspec.storage import local

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


# ---- how much is read ------------------------------------------------------------------------------------------------

SHAPE = (12347, 1024)  # fp32: 48 MiB, whose rows end in the middle of blocks on 3 ranks and on 4


def part(rank: int, world: int, dim: int) -> Tensor:
    """This rank's part of the matrix, cut along a dimension; its elements count from 0."""
    chunk = -(-SHAPE[dim] // world)
    spans = [(0, n) for n in SHAPE]
    spans[dim] = (rank * chunk, min((rank + 1) * chunk, SHAPE[dim]))
    rows, columns = (torch.arange(*span, dtype=torch.float32) for span in spans)
    return rows.unsqueeze(1) * SHAPE[1] + columns


def over(mesh: DeviceMesh, local: Tensor, dim: int) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(SHAPE), stride=(SHAPE[1], 1))


def write(rank: int, world: int, folder: Path, dims: list[int]) -> None:
    t = over(init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)), part(rank, world, 0), 0)
    ckptspec.save(folder / "ours", {"w": t}, step=1)
    dcp.save({"w": t}, checkpoint_id=folder / "theirs")


def counted(what: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes that ckptspec read from files, and those that this process read from anything."""
    found, before, plain = [0], taken(), local.read_at

    def read_at(fd: int, buffer: Any, offset: int) -> None:
        found[0] += memoryview(buffer).nbytes
        plain(fd, buffer, offset)

    local.read_at = read_at
    what()
    local.read_at = plain
    return found[0], taken() - before


def taken() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def move(rank: int, world: int, folder: Path, dim: int) -> None:
    """Load the matrix cut along `dim`: by ckptspec, by its exchange, and by torch; tell what each of them read."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    expected, figures = part(rank, world, dim), []
    for name in ("ours", "exchanged", "theirs"):
        t = over(mesh, torch.full_like(expected, UNTOUCHED), dim)
        group = mesh.get_group() if name == "exchanged" else None
        if name == "theirs":
            _, read = counted(lambda: dcp.load({"w": t}, checkpoint_id=folder / "theirs"))  # noqa: B023
        else:
            read, all_read = counted(lambda: ckptspec.load(folder / "ours", into={"w": t}, process_group=group))  # noqa: B023
            assert name == "exchanged" or all_read < read + (1 << 20)  # so much for what else was read
        assert torch.equal(t.to_local(), expected), name
        figures.append(read)
    print("FOUND", json.dumps([dim, *figures]))


def along(rank: int, world: int, folder: Path, dims: list[int]) -> None:
    move(rank, world, folder, 0)


def across(rank: int, world: int, folder: Path, dims: list[int]) -> None:
    move(rank, world, folder, 1)

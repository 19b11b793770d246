"""FSDP2: torchrun --nproc-per-node 2 examples/fsdp2.py RUN. Stop it whenever you like; started again it goes on."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptspec


def build(world: int) -> nn.Module:
    """Build a model of which every rank holds a part; on the meta device, so that no rank ever holds all of it."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 33), nn.LayerNorm(33), nn.GELU(), nn.Dropout(0.1), nn.Linear(33, 1))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))  # "cuda" on GPUs
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def start(model: nn.Module) -> None:
    """Give the model memory and first values, where there is no checkpoint to take them from."""
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def main(run: str, steps: int = 100, every: int = 10) -> None:
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = build(dist.get_world_size())
    fresh = ckptspec.latest(run) is None
    if fresh:
        start(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())  # from here on every rank draws its own
    state = {"model": model, "optimizer": optimizer, "rng": ckptspec.RNG(), "step": 0}
    if not fresh:
        ckptspec.load(run, into=state, materialize="cpu")
    while state["step"] < steps:
        loss = model(torch.randn(8, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] += 1
        if state["step"] % every == 0:
            ckptspec.save(run, state, step=state["step"])
            print(f"rank {dist.get_rank()} step {state['step']} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

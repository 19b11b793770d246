"""ZeRO by hand: torchrun --nproc-per-node 2 examples/zero.py RUN. Stop it when you like; started again it goes on."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ckptspec


def main(run: str, steps: int = 100, every: int = 10) -> None:
    dist.init_process_group("gloo")  # "nccl" and .cuda() on GPUs
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    torch.manual_seed(1 + rank)  # from here on every rank draws its own

    # All parameters one after another, in equal slices; each rank keeps the moments and the master copy of its own.
    shapes = [(name, p.shape) for name, p in model.named_parameters()]
    numel = sum(shape.numel() for _, shape in shapes)
    part = -(-numel // world)
    offsets = [sum(shape.numel() for _, shape in shapes[:i]) for i in range(len(shapes))]
    members = [{"name": f"model/{n}", "offset": o, "shape": s} for (n, s), o in zip(shapes, offsets, strict=True)]
    padded = torch.zeros(part * world)
    padded[:numel] = parameters_to_vector(model.parameters()).detach()
    master = nn.Parameter(padded[rank * part :][:part].clone())
    adam = torch.optim.Adam([master], lr=0.01)
    adam.state[master] = {"step": torch.tensor(0.0)} | {k: torch.zeros(part) for k in ("exp_avg", "exp_avg_sq")}

    def mine(tensor: torch.Tensor) -> ckptspec.FlatShard:
        return ckptspec.FlatShard(tensor, group="zero", offset=rank * part, numel=numel, members=members)

    slices = {"master": mine(master)} | {k: mine(adam.state[master][k]) for k in ("exp_avg", "exp_avg_sq")}
    state = {"model": model, "zero": slices, "adam_step": adam.state[master]["step"], "rng": ckptspec.RNG(), "step": 0}

    if ckptspec.latest(run) is not None:
        ckptspec.load(run, into=state)
    while state["step"] < steps:
        loss = model(torch.randn(8, 16)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        padded[:numel] = torch.cat([g.flatten() for g in gradients]) / world
        dist.all_reduce(padded)
        master.grad = padded[rank * part :][:part].clone()
        adam.step()
        dist.all_gather(list(padded.chunk(world)), master.detach())
        vector_to_parameters(padded[:numel].clone(), model.parameters())
        padded.zero_()
        state["step"] += 1
        if state["step"] % every == 0:
            ckptspec.save(run, state, step=state["step"])
            print(f"rank {rank} step {state['step']} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))

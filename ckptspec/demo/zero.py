"""Owns the demo's optimizer: Adam as in ZeRO stage 1, fp32 state cut flat over the ranks, bf16 parameters on all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckptspec import FlatShard

ALIGN = 2
BETAS = (0.9, 0.95)
EPSILON = 1e-8


class ZeroAdam:
    """Adam over one flat buffer of all parameters; this rank keeps its slice of master weights and moments.

    The slices are equally long, ceil(numel / world) rounded up to ALIGN elements; what the last ones hold beyond
    numel is padding.
    """

    def __init__(self, module: nn.Module, rank: int, world: int, learning_rate: float) -> None:
        self.names, self.parameters = zip(*module.named_parameters(), strict=True)
        self.rank, self.world, self.learning_rate, self.steps = rank, world, learning_rate, 0
        self.numel = sum(p.numel() for p in self.parameters)
        self.part = -(-self.numel // world)
        self.part += -self.part % ALIGN
        mine = self._flat([p.detach() for p in self.parameters])[rank * self.part :][: self.part]
        self.master = mine.clone()
        self.exp_avg = torch.zeros_like(mine)
        self.exp_avg_sq = torch.zeros_like(mine)

    def step(self) -> None:
        """Average the gradients over the ranks, update this rank's slice, and share the new parameters."""
        gradient = self._flat([p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters])
        dist.all_reduce(gradient)
        self._update(gradient[self.rank * self.part :][: self.part] / self.world)
        self._share()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the optimizer; loading into it fills the slices in place."""
        slices = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "betas": BETAS,
            "zero": {kind: self._shard(tensor) for kind, tensor in slices.items()},
        }

    def _shard(self, tensor: torch.Tensor) -> FlatShard:
        return FlatShard(
            tensor,
            group="optimizer/zero",
            offset=self.rank * self.part,
            numel=self.numel,
            members=self._members(),
        )

    def _members(self) -> list[dict[str, Any]]:
        members, offset = [], 0
        for name, parameter in zip(self.names, self.parameters, strict=True):
            members.append({"name": f"model/{name}", "offset": offset, "shape": tuple(parameter.shape)})
            offset += parameter.numel()
        return members

    def _flat(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Return the tensors one after another as fp32, zeros beyond: 1-D, part * world elements."""
        flat = torch.zeros(self.part * self.world)
        torch.cat([t.reshape(-1).float() for t in tensors], out=flat[: self.numel])
        return flat

    def _update(self, gradient: torch.Tensor) -> None:
        self.steps += 1
        self.exp_avg.lerp_(gradient, 1 - BETAS[0])
        self.exp_avg_sq.lerp_(gradient.square(), 1 - BETAS[1])
        mean = self.exp_avg / (1 - BETAS[0] ** self.steps)
        spread = (self.exp_avg_sq / (1 - BETAS[1] ** self.steps)).sqrt()
        self.master.sub_(self.learning_rate * mean / (spread + EPSILON))

    def _share(self) -> None:
        flat = torch.empty(self.part * self.world, dtype=torch.bfloat16)
        dist.all_gather(list(flat.chunk(self.world)), self.master.bfloat16())
        with torch.no_grad():
            pieces = torch.split(flat[: self.numel], [p.numel() for p in self.parameters])
            for parameter, piece in zip(self.parameters, pieces, strict=True):
                parameter.copy_(piece.view_as(parameter))
                parameter.grad = None

"""One small network trained in many parallel forms, on any number of ranks: what tests/reload_cases.py saves and loads.

Every form takes the same global batches, so all of them have the same losses, up to the order of their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ckptspec

ROWS = 12  # of a batch: 1, 2, 3 and 4 ranks share it evenly
EXPERTS = 4
_meshes: dict[tuple[Any, ...], DeviceMesh] = {}


def mesh(**axes: int) -> DeviceMesh:
    """The mesh of these axes, the same one each time."""
    key = tuple(axes.items())
    if key not in _meshes:
        _meshes[key] = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    return _meshes[key]


class Net(nn.Module):
    """Tokens in, one number out; its rows are 13, 14, 7 and 1, which few numbers of ranks divide."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 5)
        self.up = nn.Linear(5, 14)
        self.mid = nn.Linear(14, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(tokens))

    def first(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.up(self.embed(tokens).mean(1)))

    def second(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(self.mid(hidden))).squeeze(-1)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The tokens and targets of one step, the same on all ranks."""
    g = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 13, (ROWS, 3), generator=g), torch.randn(ROWS, generator=g)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, foreach=False)


adamw([torch.zeros(1)])  # the first optimizer imports much: once here, not in every fork


def mean(loss: Tensor, weight: float = 1.0) -> float:
    """The mean of a loss over all ranks; `weight` makes up for ranks that have none."""
    total = loss.detach().clone() * weight
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


class Job:
    """A model under training: `state` is what is saved of it, `seed` decides what a fresh one begins with."""

    exact = True  # whether a forward pass has the very bits of a single process's

    def __init__(self, world: int, seed: int) -> None:
        self.rank, self.world, self.seed = dist.get_rank(), world, seed
        self.state: dict[str, Any] = {"steps": 0}

    def train(self, steps: int) -> list[float]:
        """Take steps; return the losses, means over all samples."""
        losses = []
        for _ in range(steps):
            losses.append(self.step(*batch(self.state["steps"])))
            self.state["steps"] += 1
        return losses

    def step(self, x: Tensor, y: Tensor) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def look(self) -> float:
        """The loss of the next batch, all of it on every rank."""
        x, y = batch(self.state["steps"])
        return float(F.mse_loss(self.forward(x), y))

    def forward(self, x: Tensor) -> Tensor:
        return self.state["model"](x)


class Replicas(Job):
    """Forms in which every data-parallel rank takes its rows of the batch, and torch averages the gradients."""

    axes: Mapping[str, int] = {}

    def __init__(self, world: int, seed: int) -> None:
        super().__init__(world, seed)
        self.replicas = world
        model = self.wrapped(Net(seed))
        self.optimizer = self.optimizer_of(model)
        self.state |= {"model": model, "optimizer": self.optimizer}

    def wrapped(self, net: nn.Module) -> nn.Module:
        return net

    def optimizer_of(self, model: nn.Module) -> Any:
        return adamw(model.parameters())

    def step(self, x: Tensor, y: Tensor) -> float:
        rows, place = ROWS // self.replicas, self.rank * self.replicas // self.world
        mine = slice(place * rows, (place + 1) * rows)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.forward(x[mine]), y[mine])
        loss.backward()
        self.optimizer.step()
        return mean(loss)


class Single(Replicas):
    """One process."""


class Ddp(Replicas):
    def wrapped(self, net: nn.Module) -> nn.Module:
        return DistributedDataParallel(net)


class Redundant(Ddp):
    """DDP of which each rank keeps the state of some parameters."""

    def optimizer_of(self, model: nn.Module) -> Any:
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.02, foreach=False)


def sharded(net: nn.Module, grid: DeviceMesh) -> nn.Module:
    for child in net.children():
        fully_shard(child, mesh=grid)
    return fully_shard(net, mesh=grid)


class Fsdp(Replicas):
    def wrapped(self, net: nn.Module) -> nn.Module:
        return sharded(net, mesh(dp=self.world))


class Meta(Fsdp):
    """FSDP2 that has no memory yet."""

    def wrapped(self, net: nn.Module) -> nn.Module:
        return super().wrapped(net.to("meta"))


class Hsdp(Replicas):
    def wrapped(self, net: nn.Module) -> nn.Module:
        return sharded(net, mesh(replicate=2, shard=self.world // 2))


class TensorParallel(Replicas):
    """TP 2, and FSDP2 over what that leaves: _StridedShard on some, nothing on others."""

    exact = False

    def wrapped(self, net: nn.Module) -> nn.Module:
        self.replicas = self.world // 2
        grid = mesh(dp=self.replicas, tp=2)
        parallelize_module(net, grid["tp"], {"up": ColwiseParallel(), "mid": RowwiseParallel()})
        return sharded(net, grid["dp"])


class Pipeline(Job):
    """PP 2 x DP: each stage has its layers, cut by FSDP2 over its own ranks, and an optimizer of a name of its own."""

    exact = False

    def __init__(self, world: int, seed: int) -> None:
        super().__init__(world, seed)
        self.replicas = world // 2
        self.stage, self.place = divmod(self.rank, self.replicas)
        net = Net(seed)
        for name in ("mid", "norm", "head") if self.stage == 0 else ("embed", "up"):
            delattr(net, name)
        for child in net.children():
            fully_shard(child, mesh=mesh(pp=2, dp=self.replicas)["dp"])
        self.net, self.optimizer = net, adamw(net.parameters())
        self.state |= {"model": net, f"optimizer{self.stage}": self.optimizer}

    def step(self, x: Tensor, y: Tensor) -> float:
        rows = ROWS // self.replicas
        mine = slice(self.place * rows, (self.place + 1) * rows)
        self.optimizer.zero_grad()
        loss = self.pass_on(x[mine], y[mine], train=True)
        self.optimizer.step()
        return mean(loss, weight=2.0)

    def pass_on(self, x: Tensor, y: Tensor, *, train: bool) -> Tensor:
        """Forward and, to train, backward through both stages; the loss is 0 on the first."""
        other = (self.rank + self.replicas) % self.world
        if self.stage == 0:
            hidden = self.net.first(x)
            dist.send(hidden.detach(), other)
            if train:
                gradient = torch.empty_like(hidden)
                dist.recv(gradient, other)
                hidden.backward(gradient)
            return torch.zeros(())
        hidden = torch.empty(len(x), 14)
        dist.recv(hidden, other)
        loss = F.mse_loss(self.net.second(hidden.requires_grad_(train)), y)
        if train:
            loss.backward()
            dist.send(hidden.grad, other)
        return loss

    @torch.no_grad()
    def look(self) -> float:
        return mean(self.pass_on(*batch(self.state["steps"]), train=False), weight=2.0)


class Experts(Job):
    """Expert parallel over all ranks of dp x tp: each rank has some experts and their state, all have the router.

    `table` is a DTensor over both axes that nobody trains; its 6 rows are uneven on 4 ranks.
    """

    def __init__(self, world: int, seed: int) -> None:
        super().__init__(world, seed)
        torch.manual_seed(seed)
        embed, router = nn.Embedding(13, 5), nn.Linear(5, EXPERTS)
        every = [nn.Linear(5, 1) for _ in range(EXPERTS)]
        mine = [i for i in range(EXPERTS) if i * world // EXPERTS == self.rank]
        self.model = nn.ModuleDict({"router": router, "experts": nn.ModuleDict({str(i): every[i] for i in mine})})
        self.embed = embed.requires_grad_(False)
        self.optimizer = adamw(self.model.parameters())
        grid = mesh(dp=2, tp=world // 2) if world % 2 == 0 else mesh(dp=world, tp=1)
        table = distribute_tensor(torch.randn(6, 5), grid, [Shard(0), Shard(0)], src_data_rank=None)
        self.state |= {"model": self.model, "embed": embed, "optimizer": self.optimizer, "table": table}

    def step(self, x: Tensor, y: Tensor) -> float:
        self.optimizer.zero_grad()
        part = self.part(x)
        whole = part.detach().clone()
        dist.all_reduce(whole)
        part.backward(2 * (whole - y) / len(y))
        for p in self.model["router"].parameters():
            dist.all_reduce(p.grad)
        self.optimizer.step()
        return float(F.mse_loss(whole, y))

    def part(self, x: Tensor) -> Tensor:
        """What this rank's experts contribute."""
        seen = self.embed(x).mean(1)
        gates = self.model["router"](seen).softmax(-1)
        parts = [gates[:, int(i)] * expert(seen).squeeze(-1) for i, expert in self.model["experts"].items()]
        return torch.stack([*parts, gates[:, 0] * 0]).sum(0)

    exact = False

    def forward(self, x: Tensor) -> Tensor:
        whole = self.part(x)
        dist.all_reduce(whole)
        return whole


class Zero(Job):
    """ZeRO by hand: one flat buffer of all parameters, of which each rank keeps master copy and moments of its slice.

    `align` makes slices longer than they must be; `key` is the name of the master copy.
    """

    key = "master"
    align = 1

    def __init__(self, world: int, seed: int) -> None:
        super().__init__(world, seed)
        model = Net(seed)
        shapes = [(name, p.shape) for name, p in model.named_parameters()]
        self.numel = sum(shape.numel() for _, shape in shapes)
        self.part = -(-self.numel // (world * self.align)) * self.align
        offsets = [sum(shape.numel() for _, shape in shapes[:i]) for i in range(len(shapes))]
        members = [{"name": f"model/{n}", "offset": o, "shape": s} for (n, s), o in zip(shapes, offsets, strict=True)]
        whole = self.padded(parameters_to_vector(model.parameters()).detach())
        self.master = nn.Parameter(whole[self.mine].clone())
        self.adam = adamw([self.master])
        moments = {k: torch.full((self.part,), 7.0) for k in ("exp_avg", "exp_avg_sq")}  # 7: nothing may be left of it
        self.adam.state[self.master] = {"step": torch.tensor(0.0), **moments}
        self.begin(moments)

        def slice_(t: Tensor) -> ckptspec.FlatShard:
            return ckptspec.FlatShard(t, group="zero", offset=self.rank * self.part, numel=self.numel, members=members)

        slices = {self.key: slice_(self.master), **{k: slice_(t) for k, t in moments.items()}}
        self.state |= {"model": model, "zero": slices, "adam_step": self.adam.state[self.master]["step"]}

    def begin(self, moments: dict[str, Tensor]) -> None:
        """A job that is not to be loaded into begins with moments of zero."""
        for t in moments.values() if self.seed == 0 else ():
            t.zero_()

    @property
    def mine(self) -> slice:
        return slice(self.rank * self.part, (self.rank + 1) * self.part)

    def padded(self, flat: Tensor) -> Tensor:
        out = torch.zeros(self.part * self.world)
        out[: self.numel] = flat
        return out

    def step(self, x: Tensor, y: Tensor) -> float:
        model, rows = self.state["model"], ROWS // self.world
        mine = slice(self.rank * rows, (self.rank + 1) * rows)
        loss = F.mse_loss(model(x[mine]), y[mine])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        flat = self.padded(torch.cat([g.flatten() for g in gradients]) / self.world)
        dist.all_reduce(flat)
        self.master.grad = flat[self.mine].clone()
        self.adam.step()
        dist.all_gather(list(flat.chunk(self.world)), self.master.detach())
        vector_to_parameters(flat[: self.numel].clone(), model.parameters())
        return mean(loss)


class Aligned(Zero):
    key, align = "params", 8


FORMS: dict[str, Callable[[int, int], Job]] = {
    "single": Single, "ddp": Ddp, "redundant": Redundant, "fsdp": Fsdp, "meta": Meta, "hsdp": Hsdp,
    "tensor": TensorParallel, "pipeline": Pipeline, "experts": Experts, "zero": Zero, "aligned": Aligned,
}  # fmt: skip

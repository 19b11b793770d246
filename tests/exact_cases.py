"""What each rank does in tests/test_exact_resume.py: a loop under DDP, FSDP2 and ZeRO by hand, stopped and resumed."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch._dynamo  # what optimizers load at their first step: here it is loaded once, not by each rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import ckptspec

STEPS, SAVED = 6, 3
SAMPLES, BATCH = 16, 4  # four batches an epoch: the save is in the middle of one, the second part crosses into the next


class Samples(Dataset[tuple[int, Tensor]]):
    """Numbered samples whose values follow from their number and the rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, Tensor]:
        return i, torch.sin(torch.arange(5.0) * (i + 1) + self._rank)


class Order:
    """A source of samples by hand: numbers shuffled anew each epoch, and a position."""

    def __init__(self, rank: int) -> None:
        self._rank, self.epoch, self.at = rank, 0, 0

    def next(self) -> int:
        if self.at == SAMPLES:
            self.epoch, self.at = self.epoch + 1, 0
        order = random.Random(self._rank * 1000 + self.epoch).sample(range(SAMPLES), SAMPLES)
        self.at += 1
        return order[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Rates:
    """The settings of an optimizer whose tensors are saved as slices: its learning rate and all else but those."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._group = optimizer.param_groups[0]

    def state_dict(self) -> dict[str, Any]:
        return {k: v for k, v in self._group.items() if k != "params"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._group.update(state)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.Dropout(0.4), nn.Linear(9, 3))


class Loop:
    """One training loop: everything a step reads or changes is in `state`."""

    def __init__(self, rank: int, world: int, seed: int) -> None:
        self.rank, self.world = rank, world
        self.model = self.build(net(seed))
        self.scheduler = OneCycleLR(self.optimizer, max_lr=0.1, total_steps=STEPS + 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        samples = Samples(rank)
        # Two generators: one that sampler and loader share is another after an epoch that was resumed (torchdata 0.11),
        # and a loader without one draws from torch's whenever it begins.
        shuffled = RandomSampler(samples, generator=torch.Generator().manual_seed(seed * 100 + rank))
        self.loader = StatefulDataLoader(samples, BATCH, sampler=shuffled, generator=torch.Generator())
        self.order = Order(rank)
        self.ids: list[list[int]] = []
        self.state: dict[str, Any] = {
            **self.parts(),
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "data": ckptspec.Local({"loader": self.loader, "order": self.order}),
            "rng": ckptspec.RNG(),
            "step": 0,
        }
        for sow in (torch.manual_seed, random.seed, numpy.random.seed):
            sow(seed * 1000 + rank)

    optimizer: torch.optim.Optimizer

    def build(self, model: nn.Module) -> nn.Module:
        """Return the model as this kind of parallelism trains it, and set its optimizer."""
        raise NotImplementedError

    def parts(self) -> dict[str, Any]:
        """Return what of the state is of this kind: parameters and moments."""
        return {"model": self.model, "optimizer": self.optimizer}

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def stepped(self) -> None:
        """Finish a step, where the optimizer's own was not all."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from self.loader

    def train(self, steps: int) -> None:
        batches = self.batches()
        for _ in range(steps):
            ids, x = next(batches)
            more = self.order.next()
            self.ids.append([*ids.tolist(), more])
            x = x + 0.1 * random.random() + 0.1 * float(numpy.random.rand()) + 0.01 * more
            self.optimizer.zero_grad()
            self.backward(self.model(x).square().mean())
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.stepped()
            self.scheduler.step()
            self.state["step"] += 1

    def found(self) -> dict[str, Any]:
        """Return everything that must be equal, part by part, to the bit."""
        return {
            "parameters": [raw(p) for p in self.model.parameters()],
            "moments": [[(k, raw(v)) for k, v in s.items()] for s in self.optimizer.state.values()],
            "rates": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "python": random.getstate(),
            "numpy": pickle.dumps(numpy.random.get_state()),
            "torch": raw(torch.get_rng_state()),
            "order": self.order.state_dict(),
            "step": self.state["step"],
            "ids": self.ids[-SAVED:],
        }

    def whole(self) -> list[bytes]:
        """Return the parameters and moments of all ranks together, as every world size has them."""
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [raw(full(t)) for t in [*self.model.parameters(), *moments]]


class Ddp(Loop):
    def build(self, model: nn.Module) -> nn.Module:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return DistributedDataParallel(model)


class Fsdp2(Loop):
    def build(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        for part in (model[0], model):  # type: ignore[index]
            fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model


class Zero(Loop):
    """Each rank keeps the moments and the master copy of its slice of all parameters, one after another."""

    def build(self, model: nn.Module) -> nn.Module:
        shapes = [(name, p.shape) for name, p in model.named_parameters()]
        offsets = [sum(shape.numel() for _, shape in shapes[:i]) for i in range(len(shapes))]
        self.numel = sum(shape.numel() for _, shape in shapes)
        self.members = [
            {"name": f"model/{n}", "offset": o, "shape": s} for (n, s), o in zip(shapes, offsets, strict=True)
        ]
        self.part = -(-self.numel // self.world)
        self.flat = torch.zeros(self.part * self.world)
        self.flat[: self.numel] = parameters_to_vector(model.parameters()).detach()
        self.master = nn.Parameter(self.flat[self.rank * self.part :][: self.part].clone())
        self.optimizer = torch.optim.Adam([self.master], lr=0.01)
        moments = {k: torch.zeros(self.part) for k in ("exp_avg", "exp_avg_sq")}
        self.optimizer.state[self.master] = {"step": torch.tensor(0.0), **moments}
        return model

    def parts(self) -> dict[str, Any]:
        moments = self.optimizer.state[self.master]
        slices = {"master": self.master, "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
        mine = {k: self.slice(t) for k, t in slices.items()}
        return {"model": self.model, "zero": mine, "adam_step": moments["step"], "rates": Rates(self.optimizer)}

    def slice(self, t: Tensor) -> ckptspec.FlatShard:
        at = self.rank * self.part
        return ckptspec.FlatShard(t, group="zero", offset=at, numel=self.numel, members=self.members)

    def backward(self, loss: Tensor) -> None:
        gradients = torch.autograd.grad(self.scaler.scale(loss), list(self.model.parameters()))
        self.flat.zero_()
        self.flat[: self.numel] = torch.cat([g.flatten() for g in gradients]) / self.world
        dist.all_reduce(self.flat)
        self.master.grad = self.flat[self.rank * self.part :][: self.part].clone()

    def stepped(self) -> None:
        dist.all_gather(list(self.flat.chunk(self.world)), self.master.detach())
        vector_to_parameters(self.flat[: self.numel].clone(), self.model.parameters())

    def whole(self) -> list[bytes]:
        found = [p.detach().clone() for p in self.model.parameters()]
        for t in (self.master, *self.optimizer.state[self.master].values()):
            parts = [torch.empty_like(t) for _ in range(self.world)]
            dist.all_gather(parts, t.detach().clone())
            found.append(torch.cat(parts)[: self.numel] if t.dim() else t)
        return [raw(t) for t in found]


LOOPS: dict[str, Callable[[int, int, int], Loop]] = {"ddp": Ddp, "fsdp2": Fsdp2, "zero": Zero}


def raw(t: Tensor) -> bytes:
    return bytes(getattr(t, "_local_tensor", t).detach().contiguous().view(-1).view(torch.uint8).numpy())


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[no-any-return]


def straight(rank: int, world: int, folder: Path) -> None:
    """Six steps, and nothing saved."""
    for name, make in LOOPS.items():
        loop = make(rank, world, 1)
        loop.train(STEPS)
        (folder / f"{name}.straight.{rank}").write_bytes(pickle.dumps(loop.found()))


def begun(rank: int, world: int, folder: Path) -> None:
    """Three steps, a save, and one more step while it is written, which is lost."""
    for name, make in LOOPS.items():
        loop = make(rank, world, 1)
        with ckptspec.Checkpointer(folder / name) as cp:
            loop.train(SAVED)
            lazy = {"staging": "lazy", "optimizers": [loop.optimizer]} if name == "fsdp2" else {}
            whole = loop.whole()
            cp.save(SAVED, loop.state, **lazy)
            loop.train(1)
        (folder / f"{name}.whole.{rank}").write_bytes(pickle.dumps(whole))


def resumed(rank: int, world: int, folder: Path) -> None:
    """New processes with other seeds, the saved state, and three more steps."""
    for name, make in LOOPS.items():
        loop = make(rank, world, 7)
        with ckptspec.Checkpointer(folder / name) as cp:
            result = cp.restore(loop.state)
        assert (result.step, loop.state["step"], loop.scaler.get_scale()) == (SAVED, SAVED, 128.0)
        assert result.load is not None
        assert result.load.private == {}
        loop.train(STEPS - SAVED)
        expected, found = pickle.loads((folder / f"{name}.straight.{rank}").read_bytes()), loop.found()
        print(name, *[part for part in found if found[part] == expected[part]])


def other_size(rank: int, world: int, folder: Path) -> None:
    """Go on on another number of ranks: what all ranks hold together is exact, what each had of its own is told."""
    for name, make in LOOPS.items():
        loop = make(rank, world, 7)
        with ckptspec.Checkpointer(folder / name) as cp:
            result = cp.restore(loop.state)
        assert result.load is not None
        assert loop.whole() == pickle.loads((folder / f"{name}.whole.0").read_bytes())
        assert (loop.state["step"], loop.scaler.get_scale()) == (SAVED, 128.0)
        loop.train(1)
        private = {f"{n.split('/')[0]}={what}" for n, what in result.load.private.items()}
        print(name, *sorted(private))

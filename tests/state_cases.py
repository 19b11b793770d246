"""What each rank does in tests/test_wrapped.py: DDP with BatchNorm, ZeroRedundancyOptimizer, FSDP2, generators."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from states import leaves
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.fetch import Opened
from ckptspec.format.placement import resolve

STATISTICS = ("*.running_mean", "*.running_var", "*.num_batches_tracked")


def net(*, norm: bool) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7) if norm else nn.ReLU(), nn.Linear(7, 3))


class Job:
    """A DDP model under ZeRO and an FSDP2 model under AdamW, which wants to begin on the meta device."""

    def __init__(self, world: int, *, meta: bool = False) -> None:
        self.ddp = DistributedDataParallel(net(norm=True))
        self.zero = ZeroRedundancyOptimizer(self.ddp.parameters(), torch.optim.Adam, lr=0.01, amsgrad=True)
        with torch.device("meta" if meta else "cpu"):
            self.sharded = net(norm=False)
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        fully_shard(self.sharded[0], mesh=mesh)
        fully_shard(self.sharded, mesh=mesh)
        self.adam = torch.optim.AdamW(self.sharded.parameters(), lr=0.01)

    def state(self, ddp: Any = None) -> dict[str, Any]:
        model = ckptspec.Replicated(self.ddp, only=STATISTICS) if ddp is None else ddp
        parts = {"ddp": model, "zero": self.zero, "sharded": self.sharded, "adam": self.adam}
        return {**parts, "rng": ckptspec.RNG()}

    def train(self, steps: int) -> dict[str, Any]:
        """Take steps on this rank's own samples; return the losses and what the generators give next."""
        losses = []
        for _ in range(steps):
            for model, optimizer in ((self.ddp, self.zero), (self.sharded, self.adam)):
                optimizer.zero_grad()
                loss = model(torch.randn(6, 5)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return {"losses": losses, "next": [torch.rand(1), random.random(), numpy.random.rand()]}

    def kept(self) -> dict[str, Any]:
        """Every bit of the state, but the statistics of BatchNorm."""
        found = {
            "ddp": [p.detach().clone() for p in self.ddp.parameters()],
            "sharded": [local(p) for p in self.sharded.parameters()],
            "zero": [dict(s) for s in self.zero.optim.state.values()],
            "adam": [{k: local(v) for k, v in s.items()} for s in self.adam.state.values()],
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.zero.param_groups],
        }
        return leaves(found)

    def statistics(self) -> list[Tensor]:
        return [b.clone() for b in self.ddp.buffers()]


def local(t: Tensor) -> Tensor:
    return getattr(t, "_local_tensor", t).detach().clone()


def seed(rank: int) -> None:
    torch.manual_seed(100 + rank)
    random.seed(rank)
    numpy.random.seed(rank)


def save(rank: int, world: int, folder: Path) -> None:
    job = Job(world)
    seed(rank)
    job.train(3)
    try:
        ckptspec.save(folder / "plain", job.state(job.ddp), step=3)
    except ckptspec.SaveError as e:
        print("refused", str(e).replace("\n", " "))
    ckptspec.save(folder / "local", job.state(ckptspec.Local(job.ddp, only=STATISTICS)), step=3)
    ckptspec.save(folder / "one", job.state(ckptspec.Replicated(job.ddp, 1, STATISTICS)), step=3)
    ckptspec.save(folder / "run", job.state(), step=3)
    expected = {"kept": job.kept(), "statistics": job.statistics(), "train": job.train(2), "after": job.kept()}
    torch.save(expected, folder / f"expected.{rank}")


def load(rank: int, world: int, folder: Path) -> None:
    expected = torch.load(folder / f"expected.{rank}", weights_only=False)
    every = [torch.load(folder / f"expected.{i}", weights_only=False)["statistics"] for i in range(world)]
    job = Job(world, meta=True)
    seed(55 + rank)
    result = ckptspec.load(folder / "run", into=job.state(), materialize="cpu")
    assert result.materialized == tuple(f"sharded/{n}.{k}" for n in (0, 2) for k in ("weight", "bias"))
    assert job.kept() == expected["kept"]
    assert leaves(job.statistics()) == leaves(every[0])
    assert leaves(job.train(2)) == leaves(expected["train"])
    assert job.kept() == expected["after"]
    ckptspec.load(folder / "one", into=job.state(ckptspec.Replicated(job.ddp, 1, STATISTICS)))
    assert leaves(job.statistics()) == leaves(every[1])
    ckptspec.load(folder / "local", into=job.state(ckptspec.Local(job.ddp, only=STATISTICS)))
    assert leaves(job.statistics()) == leaves(every[rank])
    bare = net(norm=True)
    ckptspec.load(folder / "run", into={"ddp": bare}, only=["ddp"])
    assert leaves(list(bare.parameters())) == leaves(list(job.ddp.parameters()))
    assert leaves([b.clone() for b in bare.buffers()]) == leaves(every[0])
    print("equal")


def fail(rank: int, world: int, folder: Path) -> None:
    """Load a checkpoint in which what rank 1 alone reads is damaged."""
    if rank == 0:
        damage(shutil.copytree(folder / "run", folder / "damaged"))
    dist.barrier()
    try:
        ckptspec.load(folder / "damaged", into=Job(world).state(), silence=20)
    except ckptspec.CkptspecError as e:
        print(type(e).__name__, getattr(e, "rank", None), "is now undefined" in str(e), e.where.tensor)


def damage(run: Path) -> None:
    """Flip a bit of the state of rank 1's generator."""
    path, manifest = load_manifest(run)
    index = Opened(path, manifest).document(1).index
    (shard,) = run.rglob("rank-00001.shard")
    data = bytearray(shard.read_bytes())
    data[next(c.start for c in index.chunks if index.names[c.tensor] == "rng/torch")] ^= 1
    shard.write_bytes(data)


def few(rank: int, world: int, folder: Path) -> None:
    """ZeRO with more ranks than parameters: one rank has no state at all."""

    def make() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)

    model, zero = make()
    model(torch.ones(1, 3)).sum().backward()
    zero.step()
    m = ckptspec.save(folder / "few", {"model": model, "zero": zero}, step=1)
    fresh, second = make()
    ckptspec.load(folder / "few", into={"model": fresh, "zero": second})
    assert leaves([dict(s) for s in second.optim.state.values()]) == leaves(
        [dict(s) for s in zero.optim.state.values()]
    )
    layouts = [m.layouts[t.layout] for name, t in m.tensors.items() if name.startswith("zero/")]
    print(len(zero.optim.state), sorted(resolve(layout, m.meshes).ranks() for layout in layouts))

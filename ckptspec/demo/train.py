"""Owns one rank of the demo's training job: `torchrun ... -m ckptspec.demo.train RUN FINAL [options]`."""

from __future__ import annotations

import argparse
import os
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own habit

import ckptspec
from ckptspec.demo.data import batch, corpus
from ckptspec.demo.model import Config, Model
from ckptspec.demo.victim import die_in_save
from ckptspec.demo.zero import ZeroAdam

ROWS = 8
LEARNING_RATE = 3e-3


class Job:
    """Everything one rank needs to train, and the one state tree that a checkpoint keeps of it."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.config, self.text = Config(), corpus()
        torch.manual_seed(0)  # the same parameters everywhere
        self.model = Model(self.config).bfloat16()
        self.optimizer = ZeroAdam(self.model, rank, world, LEARNING_RATE)
        torch.manual_seed(1 + rank)  # but dropout of its own on every rank
        self.step, self.samples, self.losses = 0, 0, list[float]()

    def train_step(self) -> None:
        """Take one step on this rank's own samples; the loss kept is the mean over the ranks."""
        inputs, targets = batch(self.text, self.step, self.rank, ROWS, self.config.context)
        loss = F.cross_entropy(self.model(inputs).float().flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.losses.append(total.item() / self.world)
        self.step += 1
        self.samples += ROWS

    def state(self) -> dict[str, Any]:
        """Return the state tree: tensors are the live ones, so loading into it restores them in place."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state(),
            "rng": ckptspec.Local(torch.get_rng_state()),
            "loader": ckptspec.Local({"samples": self.samples}),
            "progress": {"step": self.step, "losses": self.losses},
            "config": asdict(self.config),
        }

    def save(self, run: Path) -> None:
        """Write step-<8 digits>/ in the run folder; every rank calls this."""
        ckptspec.save(run, self.state(), step=self.step)

    def resume(self, run: Path) -> None:
        """Go back to the newest good checkpoint of the run folder, if it has one."""
        path = ckptspec.latest(run)
        if path is None:
            return
        state = self.state()
        ckptspec.load(path, into=state)
        torch.set_rng_state(state["rng"].value)
        self.samples = state["loader"].value["samples"]
        self.step, self.losses = state["progress"]["step"], state["progress"]["losses"]
        self.optimizer.steps = state["optimizer"]["steps"]
        if self.rank == 0:
            print(f"resumed from {Path(path).name}", flush=True)

    def write_final(self, folder: Path) -> None:
        """Write the live bytes of every part as plain files, with nothing of ckptspec between memory and disk."""
        folder.mkdir(parents=True)
        parts = {
            "parameters": torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]),
            "master": self.optimizer.master,
            "exp_avg": self.optimizer.exp_avg,
            "exp_avg_sq": self.optimizer.exp_avg_sq,
            "rng": torch.get_rng_state(),
        }
        for name, tensor in parts.items():
            (folder / name).write_bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        (folder / "losses").write_bytes(struct.pack(f"<{len(self.losses)}d", *self.losses))


def train(job: Job, run: Path, steps: int, every: int) -> None:
    """Train up to `steps`, saving at every multiple of `every`."""
    while job.step < steps:
        job.train_step()
        if job.rank == 0:
            print(f"step {job.step} loss {job.losses[-1]:.4f}", flush=True)
        if job.step % every == 0:
            job.save(run)


def main() -> None:
    """Run this rank as torchrun started it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("final", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--victim", type=int, help="the rank that dies ...")
    parser.add_argument("--dies-at", type=int, help="... in the middle of saving this step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    job = Job(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    job.resume(options.run)
    if options.victim == job.rank:
        die_in_save(options.run, job.rank, options.dies_at)
    train(job, options.run, options.steps, options.every)
    job.write_final(options.final / f"rank-{job.rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

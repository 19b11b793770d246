"""Owns the measuring of what a background save costs training: `python tools/bench/stall.py [--gib 2] [--rounds 5]`.

One process, in one run, alternating: the stall of a save (from the call to its return), and in lazy mode the wait
before the next step, beside one warm memcpy of the same bytes and torch.distributed.checkpoint's async_save with its
default staging and with its newest stager. Every save is waited for before the next contender's turn, so each stalls
beside an idle disk; then training steps are timed with and without a save going on.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ckptspec

Seconds = dict[str, list[float]]


def job(gib: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer of so many GiB together, stepped once."""
    width = 2048
    layers = max(1, round(gib * 2**30 / (width * width * 4 * 3)))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take one training step."""
    model(torch.ones(8, 2048)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Memcpy:
    """One copy of all bytes of the state into memory whose pages are there already, in this thread."""

    def __init__(self, state: dict[str, Any]) -> None:
        tensors = [*state["model"].parameters()]
        tensors += [t for s in state["optimizer"].state.values() for t in s.values()]
        self._pairs = [(t.detach().numpy(), numpy.zeros_like(t.detach().numpy())) for t in tensors]

    def __call__(self) -> None:
        for source, out in self._pairs:
            numpy.copyto(out, source)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


class Bench:
    """The contenders, each with a folder of its own for every round."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.state = {"model": model, "optimizer": optimizer}
        self.seconds: Seconds = {}
        self.memcpy = Memcpy(self.state)
        self.ours = ckptspec.Checkpointer(folder / "ours", keep_last=1)
        options = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False,
                                 use_non_blocking_copy=False)  # fmt: skip
        self.stager = DefaultStager(options)

    def note(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def theirs(self) -> dict[str, Any]:
        """Return the state as torch.distributed.checkpoint takes it: tensors under names."""
        names = [n for n, _ in self.model.named_parameters()]
        by_name = dict(zip(names, self.optimizer.state.values(), strict=True))
        return {"model": self.model.state_dict(), "optimizer": by_name}

    def round(self, number: int) -> None:
        """Let every contender stall once, in an order that changes with the round."""
        turns = [self.copy, self.default, self.lazy, self.dcp_default, self.dcp_newest]
        for turn in [*turns[number % 5 :], *turns[: number % 5]]:
            turn(number)

    def copy(self, number: int) -> None:
        self.note("memcpy, warm", timed(self.memcpy)[0])

    def default(self, number: int) -> None:
        seconds, _ = timed(lambda: self.ours.save(2 * number, self.state))
        self.note("ckptspec: the call", seconds)
        self.ours.wait()

    def lazy(self, number: int) -> None:
        call = lambda: self.ours.save(2 * number + 1, self.state, staging="lazy", optimizers=[self.optimizer])  # noqa: E731
        self.note("ckptspec lazy: the call", timed(call)[0])
        loss = self.model(torch.ones(8, 2048)).mean()
        loss.backward()
        self.note("ckptspec lazy: the wait before the step", timed(ckptspec.before_mutation)[0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ours.wait()

    def dcp_default(self, number: int) -> None:
        path = self.folder / f"dcp-{number}"
        seconds, future = timed(lambda: dcp.async_save(self.theirs(), checkpoint_id=path))
        self.note("torch.distributed.checkpoint: the call", seconds)
        future.result()
        shutil.rmtree(path)

    def dcp_newest(self, number: int) -> None:
        path = self.folder / f"new-{number}"
        seconds, response = timed(lambda: dcp.async_save(self.theirs(), checkpoint_id=path, async_stager=self.stager))
        self.note("torch.distributed.checkpoint, newest stager: the call", seconds)
        if hasattr(response, "staging_completion"):
            waited, _ = timed(response.staging_completion.result)
            self.note("torch.distributed.checkpoint, newest stager: until staged", seconds + waited)
            response.upload_completion.result()
        else:
            response.result()
        shutil.rmtree(path)

    def slowdown(self, steps: int) -> Iterator[tuple[str, float]]:
        """Yield the median seconds of a step without a save, and with one always going on."""
        alone = [timed(lambda: step(self.model, self.optimizer))[0] for _ in range(steps)]
        yield "a step alone", statistics.median(alone)
        beside, number = [], 10_000
        pending = self.ours.save(number, self.state)
        while len(beside) < steps:
            if pending.done():
                number += 1
                pending = self.ours.save(number, self.state)
            beside.append(timed(lambda: step(self.model, self.optimizer))[0])
        self.ours.wait()
        yield "a step while a save goes on", statistics.median(beside)


@contextmanager
def process_group() -> Iterator[None]:
    """Give this process a process group of one rank, which torch's async_save needs."""
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name, process_group():
        bench = Bench(Path(name), *job(options.gib))
        for number in range(options.rounds + 1):
            bench.round(number)
        bench.ours.wait()
        print(f"state {bench.ours.staging_nbytes / 1e9:.2f} GB, {options.rounds} rounds after the first")
        base = statistics.median(bench.seconds["memcpy, warm"][1:])
        for what, found in sorted(bench.seconds.items()):
            median = statistics.median(found[1:])
            print(f"{what:58} first {found[0]:7.3f} s   median {median:7.3f} s   {median / base:5.2f} memcpy")
        for what, seconds in bench.slowdown(20):
            print(f"{what:58} median {seconds:7.3f} s")
        bench.ours.close()


if __name__ == "__main__":
    main()

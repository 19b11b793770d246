"""Kills ranks of a job that saves in the background and keeps two steps; run as a script by test_async_kills.

Each round starts the job on what the round before left: it resumes, compares every byte, saves on, and loses a rank.
With a mirror the run folder itself is lost at the end.
Usage: async_kills.py RUN WORLD ROUNDS SEED [MIRROR]. Prints one line a round; exits 1 where a promise is broken.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from kills import FAILED, PATIENCE, UNCERTAIN, end, start, wait

import ckptspec
import ckptspec.pytorch.api  # ckptspec's names are lazy: what is loaded here is not loaded by each rank
from ckptspec.engine.locate import newest_manifest

SILENCE = 4.0  # seconds, where the others shall find out that a rank is gone
KEPT = 2
GONE = ("P-SILENCE", "P-AGREE")  # the rules that an error names where another rank is gone


@dataclass(frozen=True)
class Round:
    """One start of the job: the newest step anybody was told of before it, and whether it ends by itself."""

    run: str
    world: int
    number: int
    least: int
    mirror: str | None
    silence: float = PATIENCE
    last: bool = False

    @property
    def notes(self) -> Path:
        """Where the ranks write what they know."""
        return Path(f"{self.run}-notes-{self.number}")

    def note(self, kind: str, rank: int, text: str = "") -> None:
        """Write a line so that it is there whatever becomes of this process."""
        fd = os.open(self.notes / f"{kind}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.write(fd, f"{text}\n".encode())
        os.fsync(fd)
        os.close(fd)

    def noted(self, kind: str) -> list[str]:
        """Return what the ranks wrote of a kind, each rank's lines together."""
        return [line for f in sorted(self.notes.glob(f"{kind}.*")) for line in f.read_text().splitlines()]


def state(step: int, rank: int, world: int) -> dict[str, Any]:
    """What the job holds at a step: all of it changes from step to step."""
    part = -(-5_001 // world)
    whole = torch.arange(part * world, dtype=torch.float32) + step
    return {
        "model": {"w": torch.full((1 << 15,), float(step)), "small": [torch.tensor([step + i]) for i in range(5)]},
        "opt": ckptspec.FlatShard(whole[rank * part :][:part].clone(), group="z", offset=rank * part, numel=5_001),
        "mine": ckptspec.Local(torch.tensor([step, rank])),
        "step": step,
    }


def tensors(held: dict[str, Any]) -> list[torch.Tensor]:
    flat = held["opt"]
    valid = min(len(flat.tensor), max(0, flat.numel - flat.offset))
    return [held["model"]["w"], *held["model"]["small"], flat.tensor[:valid], held["mine"].value]


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    pairs = zip(tensors(a), tensors(b), strict=True)
    return a["step"] == b["step"] and all(torch.equal(x, y) for x, y in pairs)


def work(job: Round, rank: int) -> int:
    """Resume, then save step after step until this rank is killed or told that another was."""
    try:
        saving(job, rank)
    except ckptspec.CommitUncertainError:
        return UNCERTAIN
    except (ckptspec.SaveError, ckptspec.LoadError) as e:
        if e.rule not in GONE:
            raise
        return FAILED
    return 0


def saving(job: Round, rank: int) -> None:
    job.note("in", rank)
    second = {} if job.mirror is None else {"mirror": job.mirror}
    with ckptspec.Checkpointer(job.run, keep_last=KEPT, silence=job.silence, **second) as cp:
        held = state(0, rank, job.world)
        found = cp.restore(held)
        at = found.step or 0
        assert at >= job.least, f"resumed from {at}, but {job.least} was acknowledged"
        assert same(held, state(at, rank, job.world)), f"step {at} is not what was saved"
        job.note("resumed", rank, str(at))
        for step in steps(job, at + 1):
            held = state(step, rank, job.world)
            cp.save(step, held, blocking=step % 4 == 3)
            job.note("saved", rank, str(step if step % 4 == 3 else step - 1))  # the one before, told by this call
            for t in tensors(held):
                t.add_(1)  # training goes on
        cp.wait()


def steps(job: Round, first: int) -> Iterator[int]:
    """Yield step after step: until this process is killed, or in the last round as many as all ranks make."""
    yield from range(first, first + (10 if job.last else 100_000))


def until(job: Round, kind: str, pids: dict[int, int]) -> None:
    """Wait until all ranks have written a line of this kind."""
    late = time.monotonic() + 2 * PATIENCE
    while len(list(job.notes.glob(f"{kind}.*"))) < len(pids):
        if time.monotonic() > late:
            raise AssertionError(f"no rank got as far as {kind!r}; they ended with {wait(pids, 1)}")
        time.sleep(0.005)


def killed(job: Round, dice: random.Random) -> str:
    """Start the job, kill a rank at a random moment, and then the others, or see how they end."""
    hosted, victim, delay = dice.random() < 0.5, dice.randrange(job.world), dice.random() * 0.7
    alone = dice.random() < 0.25
    job = replace(job, silence=SILENCE if alone else PATIENCE)
    pids, keeper = start(job.world, hosted, lambda rank: work(job, rank))
    # Three times in four while it saves, else from the moment on at which all have met: while they resume, mostly.
    until(job, "saved" if dice.random() < 0.75 else "in", pids)
    time.sleep(delay)
    os.kill(pids[victim], signal.SIGKILL)
    if not alone:  # what starts a job's ranks ends them all when it has lost one
        time.sleep(dice.random() * 0.05)
        for rank in set(pids) - {victim}:
            os.kill(pids[rank], signal.SIGKILL)
    codes = wait(pids, 3 * SILENCE + PATIENCE)
    end(keeper)
    assert set(codes.values()) <= {FAILED, UNCERTAIN, -signal.SIGKILL}, codes
    return f"killed rank {victim}{' alone' if alone else ''}, {'agent' if hosted else 'rank 0'} hosts the store"


def ended(job: Round) -> str:
    """Start the job once more and let it end by itself."""
    pids, keeper = start(job.world, False, lambda rank: work(job, rank))
    codes = wait(pids, 2 * PATIENCE)
    end(keeper)
    assert set(codes.values()) == {0}, codes
    return "ended by itself"


def main() -> int:
    run, world, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    mirror = sys.argv[5] if len(sys.argv) > 5 else None
    dice, least = random.Random(seed), 0
    for number in range(rounds + (1 if mirror is None else 2)):
        job = Round(run, world, number, least, mirror, last=number >= rounds)
        job.notes.mkdir()
        if number > rounds:
            shutil.rmtree(run)  # the disk is lost; what ended by itself waited for its copies
        how = ended(job) if job.last else killed(job, dice)
        told = max([least, *map(int, job.noted("saved"))])
        newest = newest_manifest(run)
        assert (newest.step if newest is not None else 0) >= told, f"{newest} is older than {told}"
        resumed = set(job.noted("resumed"))
        assert len(resumed) <= 1, f"ranks resumed from {resumed}"
        print(f"round {number}: {how}; resumed from {resumed or 'nothing yet'}, told of {told}", flush=True)
        least = told
    return 0


if __name__ == "__main__":
    sys.exit(main())

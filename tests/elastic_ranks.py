"""A rank of test_elastic's jobs, started by torchrun: saves, dies in a save, and goes on after the restart.

Usage: elastic_ranks.py RUN. In the first start rank 1 kills itself when its shard of step 3 is written; in the second
one all load, save that step and print what they found.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import ckptspec
from ckptspec.engine.saves import commit
from ckptspec.pytorch import group

LIMIT = 60  # seconds: torchrun starts its workers in sessions of their own, where nobody else would end them


def state(rank: int, world: int, step: int) -> dict[str, Any]:
    return {
        "w": torch.full((100_000,), float(step)),
        "z": ckptspec.FlatShard(torch.full((10,), float(step + rank)), group="z", offset=10 * rank, numel=10 * world),
        "step": step,
    }


def die(path: str) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nobody survives this")


def first_start(run: str, rank: int, world: int) -> None:
    for step in (1, 2, 3):
        if step == 3 and rank == 1:
            commit.sync_staging = die
        ckptspec.save(run, state(rank, world, step), step=step)
    raise AssertionError("rank 1 is dead: the agent ends rank 0, or it is told")


def restarted(run: str, rank: int, world: int) -> None:
    into = state(rank, world, 0)
    found = ckptspec.load(run, into=into)
    expected = state(rank, world, found.step)
    assert torch.equal(into["w"], expected["w"])
    assert torch.equal(into["z"].tensor, expected["z"].tensor)
    assert into["step"] == found.step
    ckptspec.save(run, state(rank, world, found.step + 1), step=found.step + 1)
    print(f"rank {rank} went on from step {found.step}")


def main(run: str) -> None:
    signal.alarm(LIMIT)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    # Over the agent's store there is no group: gloo itself takes the addresses that an older start left in it for new.
    if not group._served_by_agent():
        dist.init_process_group("gloo")
    if rank == 0:
        print("old keys" if group._store().check(["ckptspec/open"]) else "a new store")
    (first_start if first else restarted)(run, rank, world)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

"""Kills ranks of a saving job at random moments and checks what the run folder holds; run as a script by test_kills.

One process imports torch and forks the ranks of every round, so that a round costs a second and not ten.
Usage: kills.py RUN WORLD ROUNDS SEED. Prints one line a round; exits 1 at the first round that breaks a promise.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import free_port

import ckptspec
import ckptspec.pytorch.api  # ckptspec's names are lazy: what is loaded here is not loaded by each rank
from ckptspec.engine.locate import newest_manifest

SILENCE = 2.5
PATIENCE = 30.0  # until all have met, on a machine that may be busy: nobody is killed before the first save is over
FAILED, UNCERTAIN = 7, 8


def state(step: int, rank: int, world: int, *, fill: bool = True) -> dict[str, Any]:
    """What the job holds at a step: all of it changes from step to step."""
    part = -(-50_001 // world)
    whole = torch.arange(part * world, dtype=torch.float32) + step
    mine = whole[rank * part : (rank + 1) * part]
    s = {
        "model": {"w": torch.full((1 << 20,), float(step)), "small": [torch.tensor([step + i]) for i in range(20)]},
        "opt": ckptspec.FlatShard(mine, group="z", offset=rank * part, numel=50_001),
        "mine": ckptspec.Local(torch.tensor([step, rank])),
        "step": step,
    }
    if not fill:
        s["model"] = {"w": torch.zeros(1 << 20), "small": [torch.tensor([0]) for _ in range(20)]}
        s["opt"] = ckptspec.FlatShard(torch.zeros(part), group="z", offset=rank * part, numel=50_001)
        s["mine"], s["step"] = ckptspec.Local(torch.tensor([0, 0])), 0
    return s


def bytes_of(s: dict[str, Any]) -> list[Any]:
    valid = min(len(s["opt"].tensor), max(0, s["opt"].numel - s["opt"].offset))
    tensors = [s["model"]["w"], *s["model"]["small"], s["opt"].tensor[:valid], s["mine"].value]
    return [*(t.numpy().tobytes() for t in tensors), s["step"]]


def join(rank: int, world: int, port: int, hosted: bool) -> None:
    """Join a gloo group over a store that rank 0 hosts, or (hosted) that a process of its own does."""
    master = rank == 0 and not hosted
    store = dist.TCPStore("127.0.0.1", port, None, master, timedelta(seconds=30), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))


def saving(run: str, rank: int, world: int, first: int, acks: Path) -> int:
    """Save step after step until this rank is killed or told that another was; acknowledge each in a file."""
    for step in range(first, first + 200):
        try:
            ckptspec.save(run, state(step, rank, world), step=step, silence=SILENCE if step > first else PATIENCE)
            if step % 3 == 2:  # supersede the step just saved now and then
                acknowledge(acks, rank, step)
                ckptspec.save(run, state(step, rank, world), step=step, silence=SILENCE, on_existing="supersede")
        except ckptspec.CommitUncertainError:
            return UNCERTAIN
        except ckptspec.SaveError as e:
            if e.rank is None and "store the ranks agree over is lost" not in str(e):
                raise
            return FAILED
        acknowledge(acks, rank, step)
        if rolls_back(step) and rank == 0 and step > first:
            ckptspec.rollback(run, step - 1)  # the others are, or will be, waiting in the next save
    return 0


def rolls_back(step: int) -> bool:
    """Tell after which steps the job goes back by one, now and then."""
    return step % 5 == 4


def acknowledge(acks: Path, rank: int, step: int) -> None:
    fd = os.open(acks / str(rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(fd, f"{step}\n".encode())
    os.close(fd)


def checking(run: str, rank: int, world: int, least: int) -> int:
    """Load the newest checkpoint, compare every byte, and save the next step."""
    found = state(0, rank, world, fill=False)
    result = ckptspec.load(run, into=found, silence=PATIENCE)
    assert result.step >= least, f"resumed from {result.step}, but {least} was acknowledged"
    assert bytes_of(found) == bytes_of(state(result.step, rank, world)), f"step {result.step} is not what was saved"
    ckptspec.save(run, state(result.step + 1, rank, world), step=result.step + 1, silence=PATIENCE)
    return 0


def fork(work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # as a process that ends by itself does
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def host(port: int) -> int:
    store = dist.TCPStore("127.0.0.1", port, None, True, timedelta(seconds=30), wait_for_workers=False)
    time.sleep(120)
    del store
    return 0


def wait(pids: dict[int, int], seconds: float) -> dict[int, int]:
    """Return every rank's exit code; kills what still runs after `seconds` and raises."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for rank, pid in pids.items():
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            raise AssertionError(f"ranks {sorted(set(pids) - set(codes))} still ran after {seconds} s")
        time.sleep(0.01)
    return codes


def start(world: int, hosted: bool, work: Callable[[int], int]) -> tuple[dict[int, int], int | None]:
    port = free_port()
    keeper = fork(lambda: host(port)) if hosted else None

    def rank_main(rank: int) -> int:
        torch.set_num_threads(1)
        join(rank, world, port, hosted)
        return work(rank)

    return {rank: fork(lambda rank=rank: rank_main(rank)) for rank in range(world)}, keeper


def end(keeper: int | None) -> None:
    if keeper is not None:
        os.kill(keeper, signal.SIGKILL)
        os.waitpid(keeper, 0)


def until_saved(acks: Path, pids: dict[int, int]) -> None:
    """Wait until the first save is over: all ranks are in."""
    until = time.monotonic() + 2 * PATIENCE
    while not any((acks / str(rank)).exists() for rank in pids):
        if time.monotonic() > until:
            raise AssertionError(f"nothing was saved; the ranks ended with {wait(pids, 1)}")
        time.sleep(0.005)


def one_round(run: str, world: int, dice: random.Random, number: int) -> str:
    acks = Path(f"{run}-acks-{number}")
    acks.mkdir()
    newest = newest_manifest(run)
    first = newest.step + 1 if newest is not None else 1
    hosted, victim, delay = dice.random() < 0.5, dice.randrange(world), dice.random() * 0.6
    pids, keeper = start(world, hosted, lambda rank: saving(run, rank, world, first, acks))
    until_saved(acks, pids)
    time.sleep(delay)
    os.kill(pids[victim], signal.SIGKILL)
    codes = wait(pids, SILENCE * 3 + PATIENCE)
    end(keeper)
    assert codes.pop(victim) == -signal.SIGKILL
    assert set(codes.values()) <= {FAILED, UNCERTAIN}, codes
    said = [int(line) for f in acks.iterdir() for line in f.read_text().split()]
    least = max(said) - rolls_back(max(said))
    pids, keeper = start(world, hosted, lambda rank: checking(run, rank, world, least))
    codes = wait(pids, 60)
    end(keeper)
    assert set(codes.values()) == {0}, codes
    return f"killed rank {victim} of {world} after step {max(said)}, {'agent' if hosted else 'rank 0'} hosts the store"


def main() -> int:
    run, world, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    dice = random.Random(seed)
    for number in range(rounds):
        print(f"round {number}: {one_round(run, world, dice, number)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

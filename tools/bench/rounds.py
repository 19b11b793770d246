"""Owns the measuring: contenders take turns round by round, each saves, loads warm, loads cold, and is checked."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from contenders import Contender, RawDisk, rank, sync_file
from states import State, digest, zero

PHASES = ("save", "load warm", "load cold")


@dataclass(frozen=True)
class Sample:
    """One measured call: the slowest rank's seconds."""

    contender: str
    phase: str
    round: int
    seconds: float


def measure(contenders: Sequence[Contender], state: State, folder: Path, rounds: int) -> Iterator[Sample]:
    """Yield the samples of `rounds` rounds; a contender that loads other bytes than it saved raises RuntimeError.

    The first contender of each round is another one, so that none is always the one to meet a dirty disk.
    """
    expected = digest(state)
    for number in range(rounds):
        turn = number % len(contenders)
        for contender in [*contenders[turn:], *contenders[:turn]]:
            path = folder / f"{number}-{contender.name.replace(' ', '-')}"
            for phase, seconds in _phases(contender, state, path, expected):
                yield Sample(contender.name, phase, number, seconds)
            _on_one(lambda path=path: shutil.rmtree(path))


def _phases(contender: Contender, state: State, path: Path, expected: str) -> Iterator[tuple[str, float]]:
    yield "save", _timed(lambda: contender.save(path, state))
    for phase in PHASES[1:]:
        if phase == "load cold":
            _on_one(lambda: _forget(path))
        if not isinstance(contender, RawDisk):  # it reads into a buffer of its own
            zero(state)
        yield phase, _timed(lambda: contender.load(path, state))
        if digest(state) != expected:
            raise RuntimeError(f"{contender.name}: {phase} gave other bytes than were saved")


def _timed(call: Callable[[], None]) -> float:
    _barrier()
    began = time.perf_counter()
    call()
    _barrier()
    return time.perf_counter() - began


def _forget(path: Path) -> None:
    """Drop every file below `path` from the page cache; only clean pages can go, hence fsync first."""
    for file in path.rglob("*"):
        if file.is_file():
            sync_file(file)
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _on_one(call: Callable[[], None]) -> None:
    _barrier()
    if rank() == 0:
        call()
    _barrier()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()

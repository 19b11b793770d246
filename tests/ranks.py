"""Starts the ranks of a test as real processes, collects what they print, and leaves none behind."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# Once a rank ended as nobody expected, the others get this many seconds before they are killed.
GRACE = 20.0


@dataclass(frozen=True)
class Result:
    """How one rank ended: its exit code (negative: the signal that ended it) and its whole output."""

    rank: int
    returncode: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"--- rank {self.rank} exited {self.returncode}\n{self.out}{self.err}"


def run_ranks(
    script: str | Path,
    world: int,
    *args: str,
    timeout: float = 90,
    expect: Mapping[int, int] | int = 0,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Run `script` (Python source, or the path of a file) on `world` ranks and return how each ended, by rank.

    The ranks find RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set for gloo, and can import what lies in tests/.
    `expect` is the exit code of every rank, or of the ranks it names (the others: 0). Raises AssertionError with
    every rank's output when a rank ends otherwise or `timeout` seconds pass; all processes are gone on return.
    """
    expected = {rank: expect if isinstance(expect, int) else expect.get(rank, 0) for rank in range(world)}
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        path = script if isinstance(script, Path) else folder / "script.py"
        if isinstance(script, str):
            path.write_text(script)
        command = [sys.executable, str(path), *args]
        common = {**os.environ, **_gloo(world), **(env or {})}
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                started.append(_start(command, folder, rank, common))
            late = _wait(started, expected, timeout)
        finally:
            for process in started:
                _end(process)
        results = [_result(folder, rank, process) for rank, process in enumerate(started)]
    wrong = [r.rank for r in results if r.returncode != expected[r.rank]]
    if late or wrong:
        what = f"rank(s) {late} still ran and were killed; " if late else ""
        raise AssertionError(f"{what}expected exit codes {expected}\n" + "\n".join(map(str, results)))
    return results


def start_gloo(timeout: float = 60.0) -> tuple[int, int]:
    """For the scripts: join the gloo process group run_ranks prepared, and return (rank, world size)."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    return dist.get_rank(), dist.get_world_size()


def free_port() -> int:
    """Return a port nobody listens on, below the range the kernel hands out to outgoing connections."""
    while True:
        port = random.randrange(15000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _gloo(world: int) -> dict[str, str]:
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
    }


def _start(command: list[str], folder: Path, rank: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # Files, not pipes: a rank that prints much never waits for us. Own session: its children end with it.
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,
        )


def _wait(started: list[subprocess.Popen[bytes]], expected: Mapping[int, int], timeout: float) -> list[int]:
    """Wait until all ended, time is up, or the grace after an unexpected end is over; return who still runs."""
    stop = time.monotonic() + timeout
    failed = False
    while True:
        codes = [_peek(process) for process in started]
        running = [rank for rank, code in enumerate(codes) if code is None]
        if not failed and any(code not in (None, expected[rank]) for rank, code in enumerate(codes)):
            failed, stop = True, min(stop, time.monotonic() + GRACE)
        if not running or time.monotonic() > stop:
            return running
        time.sleep(0.02)


def _peek(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code without reaping: while the dead leader is unreaped its group's number stays taken."""
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the rank's process group, then reap the rank."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _result(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> Result:
    out, err = ((folder / f"{rank}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    return Result(rank, process.returncode, out, err)

"""Owns the start and the end of a training job: torchrun in its own session, output in a file, ended when late."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT = 120.0


@dataclass(frozen=True)
class Ended:
    """How a job ended: torchrun's exit code, the seconds it took, and the file that holds all it printed."""

    code: int
    seconds: float
    log: Path

    def lines(self, start: str) -> list[str]:
        """Return the printed lines that begin with `start`."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if line.startswith(start)]

    def why(self, count: int = 15) -> list[str]:
        """Return the first traceback of a rank, else the last lines that were printed."""
        said = self.log.read_text(errors="replace").splitlines()
        first = next((n for n, line in enumerate(said) if line.startswith("Traceback")), len(said) - count)
        return said[max(first, 0) :][:count]


def torchrun(arguments: Sequence[str], ranks: int, log: Path) -> Ended:
    """Run ckptspec.demo.train with `arguments` on `ranks` processes of this machine and wait until all have ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), "-m", "ckptspec.demo.train", *arguments]
    began = time.monotonic()
    with log.open("wb") as out:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_environment(), start_new_session=True
        )
        try:
            code = job.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            # torchrun starts each rank in a session of its own and ends them all when it is told to end.
            _end(job)
    return Ended(code, time.monotonic() - began, log)


def _end(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is not None:
        return
    job.terminate()
    try:
        job.wait(40)  # torchrun gives its ranks 30 s
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def _environment() -> dict[str, str]:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return {**os.environ, **quiet, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}

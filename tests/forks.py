"""Runs ranks that are forks of one process which has imported what they need: many processes at the price of one.

A module of tests names functions of (rank, world, folder, *args); `run_phases` runs one after the other, each in new
processes, one a rank. Run as a script this file is the process that forks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parent
GRACE = 20.0  # seconds the others get once one rank has failed


def run_phases(
    module: str, phases: Sequence[tuple[str, int]], folder: Path, *args: Any, timeout: float = 150
) -> dict[str, list[str]]:
    """Run functions of `module`, (name, world size) each, and return what every rank printed, by name.

    Raises AssertionError with the output of all ranks when one fails or `timeout` seconds pass; nobody is left behind.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, **threads, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="forks-") as name:
        command = [sys.executable, __file__, name, module, json.dumps(phases), str(folder), json.dumps(args)]
        process = subprocess.Popen(command, env=env, start_new_session=True)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
            process.wait()
        found = {phase: [_text(Path(name), phase, rank) for rank in range(world)] for phase, world in phases}
    if code:
        said = [f"--- {phase} rank {i}\n{t}" for phase, texts in found.items() for i, t in enumerate(texts) if t]
        raise AssertionError("\n".join([f"ranks failed (exit code {code}, -1 is late)", *said]))
    return found


def _text(folder: Path, phase: str, rank: int) -> str:
    path = folder / f"{phase}.{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def _main(out: str, module: str, phases: str, folder: str, args: str) -> None:
    from ranks import free_port

    importlib.import_module("ckptspec.pytorch.api")  # ckptspec's names are lazy: else each rank would load it by itself
    loaded = importlib.import_module(module)
    for phase, world in json.loads(phases):
        port = free_port()
        pids = []
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                env = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                os.environ.update({key: str(value) for key, value in env.items()})
                function = partial(getattr(loaded, phase), rank, world, Path(folder), *json.loads(args))
                _child(Path(out) / f"{phase}.{rank}", function)
            pids.append(pid)
        if not _all_well(pids):
            sys.exit(1)


def _child(out: Path, function: Callable[[], None]) -> NoReturn:
    import torch.distributed as dist

    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            function()
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        sys.stdout.flush()
    os._exit(0)


def _all_well(pids: Sequence[int]) -> bool:
    """Wait for all children; once one has failed the others get some time and are then killed."""
    left, well, stop = set(pids), True, float("inf")
    while left:
        for pid in sorted(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                if status and well:
                    well, stop = False, time.monotonic() + GRACE
        if time.monotonic() > stop:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            stop = float("inf")
        time.sleep(0.01)
    return well


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    _main(*sys.argv[1:])

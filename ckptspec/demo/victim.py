"""Owns the accident: ends its own process with SIGKILL while that process writes its shard of a checkpoint."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

# Seconds between two looks; also how often the other threads must let this one run.
LOOK = 0.0002


def die_in_save(run: Path, rank: int, step: int) -> None:
    """Arm the accident: this process dies the moment its shard of `step` (or later) has a first byte."""
    sys.setswitchinterval(LOOK)
    threading.Thread(target=_watch, args=(run, f"rank-{rank:05d}.shard", step), daemon=True).start()


def _watch(run: Path, shard: str, step: int) -> None:
    while True:
        for name in os.listdir(run) if run.is_dir() else ():
            if name.startswith(".tmp-") and int(name.split("-")[1]) >= step:
                _die_beside(run / name / shard)
        time.sleep(LOOK)


def _die_beside(shard: Path) -> None:
    try:
        size = shard.stat().st_size
    except FileNotFoundError:
        return
    if size == 0:
        return
    # One write and no buffer: nothing of this process runs after the signal.
    os.write(2, f"victim: pid {os.getpid()} dies writing {shard.parent.name}/{shard.name} ({size:,} bytes)\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)

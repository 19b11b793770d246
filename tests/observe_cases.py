"""What each rank does in tests/test_observed.py: saves that succeed, fail and are skipped, and a restore."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch

import ckptspec


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def watched(rank: int, world: int, folder: Path) -> None:
    """One line and one call of `observe` for each, on every rank, whatever `observe` raises."""
    kept, seen = Kept(), []
    log = logging.getLogger("ckptspec")
    log.setLevel(logging.INFO)
    log.addHandler(kept)

    def observe(result: Any) -> None:
        seen.append(f"{type(result).__name__} {result.step}")
        if len(seen) == 1:
            raise RuntimeError("the metrics are gone")

    state: dict[str, Any] = {"w": torch.ones(1000), "own": ckptspec.Local(torch.ones(3))}
    with ckptspec.Checkpointer(folder / "run", observe=observe, on_error="warn", silence=20) as cp:
        cp.restore(state)
        cp.save(1, state)
        cp.save(2, {**state, "bad": object()} if rank == 1 else state)
        cp.save(3, state, blocking=True)
        cp.restore(state)
    lines = [line for line in kept.lines if re.match("(save|restore) step=", line)]
    which = r"GB/s=[\d.]+ save_id=\w{32} digest=sha256:\w{64}"
    wanted = [
        r"restore step=None run is empty: a fresh start after [\d.]+s",
        rf"save step=1 nbytes=\d+ ranks={world} staged_nbytes=\d+ staged=[\d.]+s "
        rf"written=[\d.]+s committed=[\d.]+s total=[\d.]+s {which}",
        r"save step=2 error=.*",
        rf"save step=3 nbytes=\d+ ranks={world} .* {which}",
        rf"restore step=3 nbytes=\d+ ranks={world} seconds=[\d.]+ {which} path=\S+ skipped=none",
    ]
    assert len(lines) == len(wanted), lines
    for pattern, line in zip(wanted, lines, strict=True):
        assert re.fullmatch(pattern, line, re.DOTALL), line
    assert any("observe failed for step None" in line for line in kept.lines)
    print(seen)

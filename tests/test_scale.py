"""The agreement at scale: two saves and a failure, told alike to every one of thousands of simulated ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def agree(world: int, processes: int, timeout: float) -> None:
    env = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / "many.py"), str(world), str(processes)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.strip() == f"{world} ranks in {processes} processes: {[0] * processes}"


def test_sixty_ranks_agree() -> None:
    agree(60, 2, 120)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_thousand_ranks_agree() -> None:
    agree(2000, 8, 850)

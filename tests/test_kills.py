"""kill -9 of any rank at any moment of a save: the run has the old or the new checkpoint, bit-equal, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptspec

TESTS = Path(__file__).parent


def kill_rounds(run: Path, world: int, rounds: int, seed: int, timeout: float) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, str(TESTS / "kills.py"), str(run), str(world), str(rounds), str(seed)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed rank") == rounds
    assert ckptspec.validate(run, level="bytes").ok


def test_a_killed_rank_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    kill_rounds(tmp_path / "run", 3, 3, 1, 200)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_random_kills(tmp_path: Path, seed: int) -> None:
    kill_rounds(tmp_path / "run", 2 + seed % 3, 50, 100 + seed, 2900)

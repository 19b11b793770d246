"""kill -9 in a loop of background saves with retention and a mirror: what was acknowledged is there, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckptspec
from ckptspec.engine.life.cleaning import clean

TESTS = Path(__file__).parent


def kill_rounds(folder: Path, world: int, rounds: int, seed: int, timeout: float) -> None:
    run, mirror = folder / "run", folder / "mirror"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, str(TESTS / "async_kills.py"), str(run), str(world), str(rounds), str(seed), str(mirror)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("killed rank") == rounds
    assert done.stdout.count("ended by itself") == 2  # once more from the mirror alone
    left = [item for item in clean(run, min_age=0).spared if not item.reason.endswith("goes after 600 s")]
    assert left == []
    steps = [*run.glob("step-*")]
    assert len(steps) == 2  # retention kept what it was told to
    assert all(ckptspec.validate(step, level="bytes").ok for step in steps)


def test_a_run_goes_on_from_no_older_step_than_it_was_told_of(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 2, 10, 1, 200)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(4))
def test_two_hundred_kills_while_saving_in_the_background(tmp_path: Path, seed: int) -> None:
    kill_rounds(tmp_path, 2 + seed % 3, 50, 100 + seed, 2900)

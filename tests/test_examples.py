"""The loops in examples/ are short, and what they save after a restart is what they save without one, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from example_cases import EXAMPLES, NAMES
from forks import run_phases
from ranks import free_port

import ckptspec
from ckptspec.engine.documents import load_manifest


def everything(run: Path) -> Mapping[str, Any]:
    """Return what the checkpoint of the sixth step holds by name: tensors as bytes, each rank's own by rank."""

    def raw(value: Any) -> Any:
        if isinstance(value, dict) and value and all(isinstance(k, int) for k in value):
            return {rank: raw(part) for rank, part in value.items()}
        return (str(value.dtype), value.shape, value.tobytes()) if hasattr(value, "tobytes") else repr(value)

    path, m = load_manifest(run / "step-00000006")
    return {name: raw(value) for name, value in ckptspec.read(path, [*m.tensors, *m.objects]).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all loops ran six steps, and then, in new processes, from the checkpoint of the third step on."""
    folder = tmp_path_factory.mktemp("examples")
    printed = run_phases("example_cases", [("straight", 2), ("resumed", 2)], folder)
    for before, after in zip(printed["straight"], printed["resumed"], strict=True):
        assert before.count("step 3 loss") == before.count("step 6 loss") == len(NAMES) == 3
        last = [line for line in before.splitlines() if "step 6 loss" in line]
        assert [line for line in after.splitlines() if "loss" in line] == last
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_a_restart_and_three_steps_are_six_steps(name: str, folder: Path) -> None:
    found = everything(folder / name / "resumed")
    assert {"rng/torch", "step"} <= found.keys()
    assert found == everything(folder / name / "straight")
    assert ckptspec.validate(folder / name / "resumed", level="bytes").findings == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_loop_is_short_enough_to_read_at_once(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def test_a_loop_runs_as_its_first_line_says(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    arguments = [str(EXAMPLES / "zero.py"), str(tmp_path / "run"), "2", "2"]
    env = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ckptspec.validate(tmp_path / "run").step == 2

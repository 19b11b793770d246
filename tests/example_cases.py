"""Runs the loops of examples/ for tests/test_examples.py, on the process group that is there."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from unittest import mock

import torch.distributed as dist

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))


def run(name: str, folder: Path) -> None:
    """Run a loop of six steps that saves at every third."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        loop.main(str(folder), 6, 3)


def straight(rank: int, world: int, folder: Path) -> None:
    for name in NAMES:
        run(name, folder / name / "straight")


def resumed(rank: int, world: int, folder: Path) -> None:
    for name in NAMES:
        if rank == 0:
            shutil.copytree(folder / name / "straight/step-00000003", folder / name / "resumed/step-00000003")
        dist.barrier()
        run(name, folder / name / "resumed")

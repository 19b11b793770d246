"""A reshard holds no more in memory than it was told, however large the checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from written import World, line, rows, values

from ckptspec.format.manifest import TensorEntry

SCRIPT = """
import resource, sys
from dataclasses import replace
import numpy
from ckptspec.engine.resharding.asking import Request
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.resharding.reshard import run
from ckptspec.format.layout import MeshLayout
from ckptspec.planner.sizing import of_world

folder, manifest = load_manifest(sys.argv[1])
layouts = {"x": MeshLayout("main", ((), ("dp",)))}
target = replace(of_world(manifest, 6), layouts=layouts)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
outcome = run(Request(folder, sys.argv[2], target, memory=int(sys.argv[3])))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print((after - before) << 10, after << 10, outcome.account.nbytes_read, manifest.nbytes)
"""


def measured(tmp_path: Path, tensors: int, memory: int, block_size: int) -> tuple[int, int, int, int]:
    """Reshard so many tensors of 16 MiB from rows to columns; return the growth of resident bytes, their peak, ..."""
    w = World(8, {"main": line(8)}, {"x": rows()}, block_size=block_size)
    content = values("x", "float32", (2048, 2048))
    for i in range(tensors):
        w.tensors[f"model/{i}"] = TensorEntry("float32", (2048, 2048), "x")
        w.arrays[f"model/{i}"] = content
    folder = w.write(tmp_path / "run")
    command = [sys.executable, "-c", SCRIPT, str(folder), str(tmp_path / "out"), str(memory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    growth, peak, read, nbytes = map(int, done.stdout.split())
    return growth, peak, read, nbytes


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    growth, _, read, nbytes = measured(tmp_path, 6, 16 << 20, 1 << 16)
    assert growth <= (16 << 20) + (12 << 20)
    assert read <= 1.05 * nbytes


@pytest.mark.long
@pytest.mark.timeout(900)
def test_four_gib_take_less_than_half_a_gib(tmp_path: Path) -> None:
    _, peak, read, nbytes = measured(tmp_path, 256, 256 << 20, 1 << 20)
    assert nbytes > 4 << 30
    assert peak < 512 << 20
    assert read <= 1.05 * nbytes

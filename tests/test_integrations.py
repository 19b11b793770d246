"""Loops of Lightning, the Hugging Face Trainer and Accelerate go on after a restart as if there had been none."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import run_phases

import ckptspec

PARTS = "parameters moments rates scheduler torch python step losses".split()
LOSSES = {"lightning": 10, "transformers": 5, "accelerate": 5}  # of five steps; Lightning's are of half a step each

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loop_of_another_library_goes_on_to_the_bit(name: str, world: int, tmp_path: Path) -> None:
    phases = [(f"{name}_{phase}", world) for phase in ("straight", "begun", "resumed")]
    printed = run_phases("integration_cases", phases, tmp_path)
    for text in printed[f"{name}_resumed"]:
        equal = next(line.split()[1:] for line in text.splitlines() if line.startswith("equal"))
        assert equal == [*PARTS, str(LOSSES[name])]
    run = tmp_path / f"{name}.run.{world}"
    assert [path.name for path in sorted(run.glob("step-*"))] == ["step-00000003", "step-00000006"]
    assert ckptspec.validate(run, level="bytes").ok

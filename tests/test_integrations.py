"""Loops of Lightning, the Hugging Face Trainer and Accelerate go on after a restart as if there had been none."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import run_phases

import ckptspec

PARTS = ["parameters", "moments", "rates", "scheduler", "torch", "python", "step", "losses"]
LOSSES = {"lightning": 10, "transformers": 5, "accelerate": 5}  # of five steps; Lightning's are of half a step each
MODULES = sorted((Path(__file__).parents[1] / "ckptspec" / "integrations").glob("*.py"))


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Where all loops ran, were stopped, and went on in new processes; and what each rank printed."""
    folder = tmp_path_factory.mktemp("integrations")
    phases = [(f"{name}_{phase}", request.param) for name in LOSSES for phase in ("straight", "begun", "resumed")]
    return folder, run_phases("integration_cases", phases, folder, timeout=230)


@pytest.mark.integrations
@pytest.mark.parametrize("name", LOSSES)
def test_a_loop_of_another_library_goes_on_to_the_bit(name: str, ran: tuple[Path, dict[str, list[str]]]) -> None:
    """The words are what is equal to a loop that was never stopped, and how many losses that is true of."""
    folder, printed = ran
    for text in printed[f"{name}_resumed"]:
        equal = next(line.split()[1:] for line in text.splitlines() if line.startswith("equal"))
        assert equal == [*PARTS, str(LOSSES[name])]
    run = folder / f"{name}.run"
    assert [path.name for path in sorted(run.glob("step-*"))] == ["step-00000003", "step-00000006"]
    assert ckptspec.validate(run, level="bytes").ok


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_an_integration_is_read_in_a_minute(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100

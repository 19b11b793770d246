"""Three steps, a restart and three steps are six steps: parameters, moments, rates, generators, samples, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_phases
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptspec

NAMES = ["ddp", "fsdp2", "zero"]
PARTS = ["parameters", "moments", "rates", "scheduler", "scaler", "python", "numpy", "torch", "order", "step", "ids"]
PHASES = [("straight", 2), ("begun", 2), ("resumed", 2), ("other_size", 1)]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_phases("exact_cases", PHASES, tmp_path_factory.mktemp("exact"))


def said(text: str, name: str) -> list[str]:
    """Return the words after `name` in the line that begins with it."""
    return next(words[1:] for line in text.splitlines() if (words := line.split())[:1] == [name])


@pytest.mark.parametrize("name", NAMES)
def test_a_restart_changes_not_one_bit(name: str, printed: dict[str, list[str]]) -> None:
    """The words are the parts of the state that are equal to those of a run that was never stopped."""
    assert [said(text, name) for text in printed["resumed"]] == [PARTS, PARTS]


@pytest.mark.parametrize("name", NAMES)
def test_on_another_world_size_what_is_not_exact_is_said(name: str, printed: dict[str, list[str]]) -> None:
    """Parameters and moments are compared by the ranks; the words are what was taken over from one rank of many."""
    assert said(printed["other_size"][0], name) == ["data=mapped", "rng=mapped"]


def loader(workers: int) -> StatefulDataLoader[int]:
    return StatefulDataLoader(
        list(range(40)), 4, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(workers)
    )


def take(batches: Iterator[torch.Tensor], count: int) -> list[list[int]]:
    return [next(batches).tolist() for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_goes_on_at_its_next_batch(workers: int, tmp_path: Path) -> None:
    first = loader(workers)
    batches = iter(first)
    seen = take(batches, 3)
    with ckptspec.Checkpointer(tmp_path) as cp:
        cp.save(3, {"loader": first})
        rest = take(batches, 7)
        cp.wait()
        fresh = loader(workers)
        cp.restore({"loader": fresh})
    assert take(iter(fresh), 7) == rest
    assert sorted(i for batch in seen + rest for i in batch) == list(range(40))


class Told:
    """An object whose whole state is one number."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


CONTAINERS: dict[str, Callable[[Told], Any]] = {
    "alone": lambda x: x,
    "list": lambda x: [x],
    "tuple": lambda x: (1, x),
    "dict": lambda x: {"x": x, "y": 5},
    "deep": lambda x: {"a": [{"b": (x, None)}], 3: "three"},
    "local": lambda x: {"p": ckptspec.Local({"x": x})},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_an_object_in_a_container_without_tensors_is_told_what_was_saved(kind: str, tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"in": CONTAINERS[kind](Told(3)), "t": torch.ones(2)}, step=1)
    fresh = Told(0)
    into = {"in": CONTAINERS[kind](fresh), "t": torch.zeros(2)}
    ckptspec.load(tmp_path, into)
    assert fresh.value == 3
    assert repr(into["in"]) == repr(CONTAINERS[kind](fresh))  # the very object stands where it stood


def test_an_object_below_a_key_without_a_name_is_refused(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"in": {2.5: Told(3)}}, step=1)
    with pytest.raises(ckptspec.PlanError, match="neither text nor integers"):
        ckptspec.load(tmp_path, {"in": {2.5: Told(0)}})

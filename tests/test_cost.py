"""What a save and a load cost all ranks together, counted: it grows with tensors + ranks, never with their product.

Simulated ranks run the public functions on threads; nothing here looks at a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated import Ranks, folder_of

import ckptspec

State = Callable[[int, int, int, int], dict[str, Any]]
STORERS = 16  # who store what many hold [T-HOLD]


def sharded(rank: int, world: int, tensors: int, fill: int) -> dict[str, Any]:
    """Every tensor cut over all ranks, as ZeRO and FSDP do, and a value that all share."""
    state: dict[str, Any] = {"step": 7 * fill}
    for i in range(tensors):
        values = torch.full((2,), float(fill * (world * i + rank + 1)))
        state[f"layers.{i}.w"] = ckptspec.FlatShard(values, group=f"layers.{i}", offset=2 * rank, numel=2 * world)
    return state


def replicated(rank: int, world: int, tensors: int, fill: int) -> dict[str, Any]:
    """Every tensor on every rank, as DDP has them."""
    return {"step": 7 * fill, **{f"layers.{i}.w": torch.full((3,), float(fill * (i + 1))) for i in range(tensors)}}


def different(rank: int, world: int, tensors: int, fill: int) -> dict[str, Any]:
    """Four pipeline stages, in each of them eight experts, and pieces over eight ranks: thirty-two kinds of rank."""
    stage, expert = rank * 4 // world, rank % 8
    state: dict[str, Any] = {f"stage{stage}": {"step": 7 * fill}, "norm": torch.full((3,), float(fill))}
    for i in range(tensors // 4):
        state[f"stages.{stage}.{i}.w"] = torch.full((3,), float(fill * (i + stage + 1)))
        state[f"experts.{stage}.{expert}.{i}.w"] = torch.full((3,), float(fill * (i + expert + 1)))
        piece = torch.full((2,), float(fill * (i + expert + 1)))
        state[f"pieces.{i}.w"] = ckptspec.Shard(piece, (16,), [((2 * expert,), (2,))])
    return state


@dataclass(frozen=True)
class Cost:
    """What one save and one load cost, and the bytes of the manifest between them."""

    save: dict[str, int]
    load: dict[str, int]
    manifest: int


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[State, int, int], Cost]]:
    """Measures a kind of state on so many ranks with so many tensors, each once."""
    known: dict[tuple[State, int, int], Cost] = {}
    before = threading.stack_size(512 << 10)

    def measured(state: State, world: int, tensors: int) -> Cost:
        key = (state, world, tensors)
        if key not in known:
            folder = tmp_path_factory.mktemp("run")
            with pytest.MonkeyPatch.context() as patch:
                known[key] = _measure(state, world, tensors, folder, patch)
        return known[key]

    yield measured
    threading.stack_size(before)


def _measure(state: State, world: int, tensors: int, folder: Path, patch: pytest.MonkeyPatch) -> Cost:
    ranks = Ranks(world, patch)
    wrong: list[int] = []

    def load(rank: int) -> None:
        into = state(rank, world, tensors, 0)
        ckptspec.load(folder, into=into)
        if _values(into) != _values(state(rank, world, tensors, 1)):
            wrong.append(rank)

    save_cost = ranks.run(lambda rank: ckptspec.save(folder, state(rank, world, tensors, 1), step=1) and None)
    load_cost = ranks.run(load)
    assert wrong == []
    return Cost(save_cost, load_cost, (folder_of(folder) / "manifest.json").stat().st_size)


def _values(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _values(value) for key, value in state.items()}
    tensor = getattr(state, "tensor", state)
    return tensor.tolist() if isinstance(tensor, torch.Tensor) else tensor


KINDS = {"sharded": sharded, "replicated": replicated, "different": different}
Measured = Callable[[State, int, int], Cost]


@pytest.mark.parametrize("kind", KINDS)
def test_more_tensors_cost_the_same_on_many_ranks_as_on_few(kind: str, cost: Measured) -> None:
    few, many = (
        [cost(KINDS[kind], world, 24).save["message_bytes"] - cost(KINDS[kind], world, 8).save["message_bytes"]]
        for world in (64, 256)
    )
    assert many[0] <= 1.2 * few[0] + 2000  # a product would make it four times as much


@pytest.mark.parametrize("kind", KINDS)
def test_messages_and_their_bytes_are_so_many_for_each_rank(kind: str, cost: Measured) -> None:
    for world in (64, 256):
        found = cost(KINDS[kind], world, 8)
        assert found.save["messages"] <= 9 * world + 300
        assert found.save["message_bytes"] <= 1500 * world + 64_000
        assert found.load["messages"] <= 6 * world + 80
        assert found.load["message_bytes"] <= 150 * world + 2000
        assert (found.save["manifests_made"], found.save["shards_made"]) == (1, world)
        assert found.save.get("shards_opened", 0) == 0  # nobody reads what was just written
        assert found.save.get("manifests_opened", 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_messages_does_not_depend_on_the_tensors(kind: str, cost: Measured) -> None:
    small, large = cost(KINDS[kind], 64, 8), cost(KINDS[kind], 64, 24)
    assert abs(large.save["messages"] - small.save["messages"]) <= 64
    assert large.load["messages"] == small.load["messages"]
    assert large.load["message_bytes"] == small.load["message_bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_grows_with_tensors_plus_ranks(kind: str, cost: Measured) -> None:
    base, tall, wide, both = (cost(KINDS[kind], w, t).manifest for w, t in ((64, 8), (64, 24), (256, 8), (256, 24)))
    assert both - wide <= 1.2 * (tall - base) + 500
    for found in (cost(KINDS[kind], world, 8) for world in (64, 256)):
        world = found.save["shards_made"]
        assert found.load["manifest_bytes"] <= (world + 1) * found.manifest  # once a rank, and once to find it
        assert found.load["manifests_opened"] <= world + 1


def test_a_restore_in_the_same_layout_reads_one_index_on_each_rank(cost: Measured) -> None:
    for world, tensors in ((64, 8), (64, 24), (256, 24)):
        found = cost(sharded, world, tensors).load
        assert (found["index_reads"], found["index_reads_of_a_rank"]) == (world, 1)
        assert found["shards_opened"] == 2 * world  # for the index, then for the bytes


def test_what_many_ranks_hold_is_read_from_no_more_than_sixteen_shards(cost: Measured) -> None:
    for world in (64, 256):
        found = cost(replicated, world, 24).load
        assert found["index_reads_of_a_rank"] <= STORERS + 1
        assert found["index_reads"] <= (STORERS + 1) * world


def test_a_thousand_ranks(cost: Measured) -> None:
    small, large = cost(different, 64, 4), cost(different, 1024, 4)
    for phase, counts in (("save", ("messages", "message_bytes")), ("load", ("messages", "message_bytes"))):
        for count in counts:
            assert getattr(large, phase)[count] <= 16 * getattr(small, phase)[count], (phase, count)
    assert large.load["index_reads"] <= 3 * (STORERS + 1) * 1024  # three groups of holders: all, a stage, a column
    assert large.manifest <= 16 * small.manifest

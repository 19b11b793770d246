"""Real ranks of which one leaves a save or a load out: the others name it, and the next one that all make works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import run_phases

import ckptspec

WORLD, SILENCE = 3, 1.2


def state(rank: int, fill: float) -> dict[str, Any]:
    return {
        "w": torch.full((1000,), fill),
        "z": ckptspec.FlatShard(torch.full((10,), fill + rank), group="z", offset=10 * rank, numel=10 * WORLD),
        "step": int(fill),
    }


def values(s: dict[str, Any]) -> list[Any]:
    return [s["w"].tolist(), s["z"].tensor.tolist(), s["step"]]


def named(error: BaseException, rank: int, absent: int) -> None:
    """Check that an error tells who was missing, and for how long."""
    assert isinstance(error, (ckptspec.SaveError, ckptspec.LoadError))
    assert error.rank == absent, f"rank {rank}: {error}"
    assert f"rank {absent} gave no sign of life for {SILENCE:g} s" in str(error)
    assert not isinstance(error, ckptspec.CommitUncertainError)


def leaving_out(rank: int, folder: Path, absent: int) -> None:
    run = folder / f"without-{absent}"
    if rank != absent:
        with pytest.raises(ckptspec.SaveError, match="did not meet") as never:
            ckptspec.save(run, state(rank, 0), step=0, silence=SILENCE)
        assert never.value.rank == absent
    dist.barrier()
    ckptspec.save(run, state(rank, 1), step=1, silence=30)
    if rank != absent:
        with pytest.raises(ckptspec.SaveError) as caught:
            ckptspec.save(run, state(rank, 2), step=2, silence=SILENCE)
        named(caught.value, rank, absent)
    dist.barrier()
    manifest = ckptspec.save(run, state(rank, 3), step=3, silence=30)
    assert manifest.parent is not None
    assert manifest.parent["step"] == 1
    if rank != absent:
        with pytest.raises((ckptspec.SaveError, ckptspec.LoadError)) as missed:
            ckptspec.load(run, into=state(rank, 0), silence=SILENCE)
        named(missed.value, rank, absent)
    dist.barrier()
    into = state(rank, 0)
    assert ckptspec.load(run, into=into, silence=30).step == 3
    assert values(into) == values(state(rank, 3))
    ckptspec.save(run, state(rank, 4), step=4, silence=30)


def without_1(rank: int, world: int, folder: Path) -> None:
    leaving_out(rank, folder, 1)


def without_0(rank: int, world: int, folder: Path) -> None:
    leaving_out(rank, folder, 0)


def test_after_a_rank_left_a_save_or_a_load_out_the_next_of_all_works(tmp_path: Path) -> None:
    run_phases("test_skips", [("without_1", WORLD), ("without_0", WORLD)], tmp_path, timeout=100)
    for absent in (0, 1):
        run = tmp_path / f"without-{absent}"
        assert {p.name for p in run.iterdir() if p.name.startswith("step-")} == {f"step-0000000{n}" for n in (1, 3, 4)}
        assert ckptspec.validate(run, level="bytes").ok

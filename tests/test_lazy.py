"""Lazy staging: the copy is made while training goes on, a step waits for it, and what is not safe is refused."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptspec
from ckptspec.pytorch import staging
from ckptspec.pytorch.checkpointer import Checkpointer
from ckptspec.pytorch.lazy import before_mutation


def job() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    return model, optimizer, {"model": model, "optimizer": optimizer, "ema": torch.ones(9), "step": 1}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    held = {k: v.clone() for k, v in state["model"].state_dict().items()}
    for i, values in enumerate(state["optimizer"].state.values()):
        held |= {f"{i}.{k}": v.clone() for k, v in values.items()}
    return {**held, "ema": state["ema"].clone()}


@pytest.fixture
def held_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies that are made later wait for this event."""
    go, main, copy = threading.Event(), threading.current_thread(), staging._copy_pairs

    def late(pairs: Any) -> None:
        if threading.current_thread() is not main:
            assert go.wait(20)
        copy(pairs)

    monkeypatch.setattr(staging, "_copy_pairs", late)
    return go


def restored(run: Path, step: int) -> dict[str, torch.Tensor]:
    _, _, state = job()
    ckptspec.load(run / f"step-{step:08d}", state)
    return tensors(state)


def test_a_step_waits_for_the_copies_and_nothing_of_it_is_in_the_checkpoint(
    tmp_path: Path, held_copies: threading.Event
) -> None:
    model, optimizer, state = job()
    with Checkpointer(tmp_path) as cp:
        want = tensors(state)
        begun = time.monotonic()
        cp.save(1, state, staging="lazy", optimizers=[optimizer])
        model(torch.randn(16, 64)).square().mean().backward()  # changes BatchNorm's buffers, which are copied
        state["ema"].mul_(2)
        assert time.monotonic() - begun < 5
        threading.Timer(0.3, held_copies.set).start()
        before = time.monotonic()
        optimizer.step()
        assert time.monotonic() - before > 0.2  # it waited for the copies
        train(model, optimizer)
        cp.wait()
    found = restored(tmp_path, 1)
    assert all(torch.equal(found[k], want[k]) for k in want)


def test_a_change_behind_the_back_fails_the_save_and_commits_nothing(
    tmp_path: Path, held_copies: threading.Event
) -> None:
    model, optimizer, state = job()
    with Checkpointer(tmp_path) as cp:
        cp.save(1, state, staging="lazy", optimizers=[optimizer])
        with torch.no_grad():
            model[0].weight.add_(1)
        held_copies.set()
        with pytest.raises(ckptspec.SaveError, match="was changed before its lazy copy") as e:
            cp.wait()
        assert e.value.where.tensor == "model/0.weight"
        assert ckptspec.latest(tmp_path) is None
        cp.save(2, state, staging="lazy", optimizers=[optimizer])
        optimizer.step()  # the hooks of the failed save hold nothing up
    assert ckptspec.latest(tmp_path) == str(tmp_path / "step-00000002")


def test_before_mutation_waits_for_every_copy(tmp_path: Path, held_copies: threading.Event) -> None:
    model, optimizer, state = job()
    with Checkpointer(tmp_path) as cp:
        want = tensors(state)
        cp.save(1, state, staging="lazy", optimizers=[optimizer])
        threading.Timer(0.2, held_copies.set).start()
        before_mutation()
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        cp.wait()
    found = restored(tmp_path, 1)
    assert all(torch.equal(found[k], want[k]) for k in want)


def test_what_is_not_safe_is_refused_with_the_reason(tmp_path: Path) -> None:
    model, optimizer, state = job()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    hooked = nn.Linear(3, 3)
    hooked.weight.register_post_accumulate_grad_hook(lambda p: None)
    captured = torch.optim.Adam([nn.Parameter(torch.ones(3))], capturable=True)
    cases = [
        (state, [], "no optimizer is listed"),
        ({**state, "other": other}, [optimizer], "not listed"),
        ({"m": hooked}, [torch.optim.SGD(hooked.parameters(), lr=0.1)], "backward"),
        (state, [captured], "CUDA graph"),
    ]
    with Checkpointer(tmp_path) as cp:
        for held, optimizers, reason in cases:
            cp.save(1, held, staging="lazy", optimizers=optimizers)
            with pytest.raises(ckptspec.SaveError, match=reason):
                cp.wait()
        with pytest.raises(ValueError, match="staging"):
            cp.save(1, state, staging="later")
    assert ckptspec.latest(tmp_path) is None

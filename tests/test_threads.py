"""Saving from a thread of one's own beside training, from two threads at once, from inside a save, after a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import run_phases

import ckptspec
from ckptspec.pytorch import group

STEPS = 4


class Saves(threading.Thread):
    """Calls something in a thread, and keeps what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as e:
            self.result = e

    def end(self) -> Any:
        self.join(60)
        assert not self.is_alive(), "it hangs"
        return self.result


def blank() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def copied(value: Any) -> Any:
    """Return a state that training does not change: what whoever saves beside it has to take first."""
    if isinstance(value, dict):
        return {key: copied(v) for key, v in value.items()}
    if isinstance(value, list):
        return [copied(v) for v in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: emptied(v) for key, v in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


def bits(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: bits(v) for key, v in value.items()}
    return value.numpy().tobytes() if isinstance(value, torch.Tensor) else value


def beside_training(rank: int, world: int, folder: Path) -> None:
    """Train with all-reduces in the main thread, and save every step in another, while training goes on."""
    model, optimizer = blank()
    saves, kept = [], []
    busy = 0
    for step in range(1, STEPS + 1):
        model(torch.ones(8, 300) * (rank + step)).square().mean().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        kept.append({"model": copied(model.state_dict()), "optimizer": copied(optimizer.state_dict()), "step": step})
        saves.append(Saves(lambda s=kept[-1]: ckptspec.save(folder, s, step=s["step"])))
        saving = torch.ones(1000)
        while saving.any():
            saving.fill_(float(saves[-1].is_alive()))
            dist.all_reduce(saving)  # both ranks go on until neither saves
            model.weight.data.mul_(0.999)
            busy += 1
    assert busy > STEPS
    assert [save.end().step for save in saves] == [1, 2, 3, 4]
    for state in kept:
        into = emptied(state)
        ckptspec.load(folder / f"step-{state['step']:08d}", into=into)
        assert bits(into) == bits(state) != bits(emptied(state))


def at_once(rank: int, world: int, folder: Path) -> None:
    """Two threads of every rank save at the same time: all ranks in the same order, or in any."""
    state = {"w": torch.arange(100.0), "rank": ckptspec.Local(torch.tensor(rank))}
    ckptspec.save(folder, state, step=1)
    for step in range(2, 12, 2):
        saves = [Saves(lambda s=step + i: ckptspec.save(folder, state, step=s, silence=10)) for i in range(2)]
        told = [save.end() for save in saves]
        assert all(isinstance(t, ckptspec.SaveError) or t.step in (step, step + 1) for t in told)
        assert not any(isinstance(t, ckptspec.CommitUncertainError) for t in told)
        mine = torch.tensor([float(not isinstance(t, Exception)) for t in told])
        all_of_them = mine.clone()
        dist.all_reduce(all_of_them)
        assert torch.equal(all_of_them, mine * world), "one rank was told another end than the other"
        wrong = [str(t) for t in told if isinstance(t, Exception)]
        assert all("ranks ask for different saves" in text for text in wrong), wrong
    assert ckptspec.save(folder, state, step=20).step == 20


def test_a_thread_saves_while_the_main_thread_trains_with_collectives(tmp_path: Path) -> None:
    run_phases("test_threads", [("beside_training", 2)], tmp_path, timeout=100)
    assert ckptspec.validate(tmp_path, level="bytes").ok


def test_two_threads_of_every_rank_that_save_at_once_end_alike_on_all_ranks(tmp_path: Path) -> None:
    run_phases("test_threads", [("at_once", 2)], tmp_path, timeout=100)
    assert ckptspec.validate(tmp_path, level="bytes").ok


def test_threads_of_one_process_save_and_load_one_after_the_other(tmp_path: Path) -> None:
    state = {"w": torch.arange(100_000.0)}
    ckptspec.save(tmp_path / "a", state, step=1)
    into = [{"w": torch.zeros(100_000)} for _ in range(4)]
    saves = [Saves(lambda n=n: ckptspec.save(tmp_path / "ab"[n % 2], state, step=2 + n)) for n in range(6)]
    loads = [Saves(lambda s=s: ckptspec.load(tmp_path / "a", into=s)) for s in into]
    assert sorted(save.end().step for save in saves) == [2, 3, 4, 5, 6, 7]
    assert all(load.end().step >= 1 for load in loads)
    assert all(torch.equal(s["w"], state["w"]) for s in into)
    for name in "ab":
        assert ckptspec.validate(tmp_path / name, level="bytes").ok


class Restless:
    """An object that saves, or loads, when it is asked for its state."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_save_from_inside_a_save_is_refused_and_the_next_one_works(tmp_path: Path) -> None:
    inner = {"w": torch.ones(3)}
    for call in (
        lambda: ckptspec.save(tmp_path / "other", inner, step=1),
        lambda: ckptspec.load(tmp_path, into=inner),
    ):
        with pytest.raises(ckptspec.SaveError, match="from inside another one"):
            ckptspec.save(tmp_path, {"o": Restless(call)}, step=1)
    assert not (tmp_path / "other").exists()
    ckptspec.save(tmp_path, {"o": Restless(lambda: None)}, step=1)


def test_a_fork_taken_while_a_thread_saves_can_load(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"w": torch.ones(3)}, step=1)
    held, go = threading.Event(), threading.Event()
    saving = Saves(lambda: ckptspec.save(tmp_path, {"o": Restless(lambda: (held.set(), go.wait(30)))}, step=2))
    assert held.wait(30)
    with group._opening:
        pid = os.fork()
    if pid == 0:
        into = {"w": torch.zeros(3)}
        found = ckptspec.load(tmp_path / "step-00000001", into=into).step
        os._exit(0 if found == 1 and bool(into["w"].eq(1).all()) else 1)
    waiting = Saves(lambda: os.waitpid(pid, 0)[1])
    assert waiting.end() == 0
    go.set()
    assert saving.end().step == 2

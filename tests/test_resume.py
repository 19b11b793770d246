"""A loop that was saved and resumed in fresh objects goes on as if it had never stopped, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from states import leaves
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as schedulers

import ckptspec

OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "foreach": lambda p: optim.AdamW(p, foreach=True),
    "fused": lambda p: optim.AdamW(p, fused=True),
    "tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: optim.Adagrad(p),
    "adadelta": lambda p: optim.Adadelta(p),
    "adamax": lambda p: optim.Adamax(p),
    "asgd": lambda p: optim.ASGD(p),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "rmsprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": lambda p: optim.Rprop(p),
    "adafactor": lambda p: optim.Adafactor(p),
    "lbfgs": lambda p: optim.LBFGS(p, max_iter=3, history_size=4),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int) -> list[Any]:
    """Take steps on random samples; return the losses and what the generators give next."""
    losses = []
    for _ in range(steps):
        x = torch.randn(5, 4) + random.random() + numpy.random.rand()

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach().clone())
    return [losses, torch.rand(2), random.random(), numpy.random.rand(2).tolist()]


def kept(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return leaves({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_optimizer_goes_on_where_the_saved_one_was(name: str, tmp_path: Path) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    ckptspec.save(tmp_path, {"model": model, "optimizer": optimizer, "rng": ckptspec.RNG(), "step": 3}, step=3)
    saved, after = kept(model, optimizer), train(model, optimizer, 3)
    fresh = net()
    second = OPTIMIZERS[name](fresh.parameters())
    into = {"model": fresh, "optimizer": second, "rng": ckptspec.RNG(), "step": 0}
    ckptspec.load(tmp_path, into=into)
    assert into["step"] == 3
    assert kept(fresh, second) == saved
    assert leaves({"r": train(fresh, second, 3)}) == leaves({"r": after})
    assert kept(fresh, second) == kept(model, optimizer)


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: schedulers.StepLR(o, 2),
    "milestones": lambda o: schedulers.MultiStepLR(o, [2, 2, 5]),
    "linear": lambda o: schedulers.LinearLR(o),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "onecycle": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=10),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "sequence": lambda o: schedulers.SequentialLR(
        o, [schedulers.MultiStepLR(o, [1, 3]), schedulers.CosineAnnealingLR(o, 5)], [2]
    ),
    "chained": lambda o: schedulers.ChainedScheduler([schedulers.StepLR(o, 2), schedulers.ExponentialLR(o, 0.9)]),
    "swa": lambda o: optim.swa_utils.SWALR(o, 0.01),
}


def rates(optimizer: optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    out = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        out.append(float(optimizer.param_groups[0]["lr"]))
    return out


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_schedule_goes_on_where_it_was(name: str, tensor: bool, tmp_path: Path) -> None:
    def make() -> tuple[optim.Optimizer, Any, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = optim.SGD(model.parameters(), lr=torch.tensor(0.5) if tensor else 0.5, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        return optimizer, scheduler, {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    optimizer, scheduler, state = make()
    rates(optimizer, scheduler, 3)
    ckptspec.save(tmp_path, state, step=3)
    expected = rates(optimizer, scheduler, 4)
    second, fresh, into = make()
    ckptspec.load(tmp_path, into=into)
    assert into["scheduler"] is fresh
    assert rates(second, fresh, 4) == expected
    assert fresh.state_dict().keys() == scheduler.state_dict().keys()
    if name == "milestones":
        assert list(fresh.milestones.elements()) == [2, 2, 5]


def test_a_grad_scaler_keeps_its_scale_and_its_count(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    model = nn.Linear(2, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    ckptspec.save(tmp_path, {"scaler": scaler}, step=1)
    fresh = torch.amp.GradScaler("cpu")
    ckptspec.load(tmp_path, into={"scaler": fresh})
    assert fresh.state_dict() == scaler.state_dict()
    assert (fresh.get_scale(), fresh.state_dict()["_growth_tracker"]) == (16.0, 1)

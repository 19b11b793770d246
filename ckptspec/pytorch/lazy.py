"""Owns lazy staging: what optimizers alone change is copied while forward and backward run, and they wait with a step.

It is refused where something else could change those tensors in between, and a change that happens all the same fails
the save.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptspec.errors import SaveError, Where
from ckptspec.pytorch.adapters.optimizers import OptimizerAdapter
from ckptspec.pytorch.record import Capture

Optimizer = torch.optim.Optimizer
_Key = tuple[torch.device, int, int]  # device, address, elements


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def _key(t: Tensor) -> _Key:
    t = _local(t).detach()
    return t.device, t.data_ptr(), t.numel()


def _owned(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield an optimizer's parameters and the tensors it keeps of them."""
    inner = getattr(optimizer, "optim", None)  # ZeroRedundancyOptimizer keeps its state in an optimizer of its own
    for one in (optimizer, inner) if isinstance(inner, Optimizer) else (optimizer,):
        for group in one.param_groups:
            yield from group["params"]
        for state in one.state.values():
            yield from (t for t in state.values() if isinstance(t, Tensor))


def _refuse(message: str, **details: Any) -> SaveError:
    advice = 'save with staging="copy"'
    return SaveError(f"lazy staging is not safe here: {message}", rule="P-STAGING", advice=advice, **details)


def lazy_names(captured: Capture, optimizers: Sequence[Optimizer]) -> frozenset[str]:
    """Return the names of the tensors that the listed optimizers alone change.

    Raises SaveError [P-STAGING] saying why where an optimizer may step at a moment nobody can wait before.
    """
    if not optimizers:
        raise _refuse("no optimizer is listed, and one that steps would not wait")
    for optimizer in optimizers:
        _steps_when_asked(optimizer)
    owned = {_key(t) for optimizer in optimizers for t in _owned(optimizer) if t.numel()}
    names = frozenset(n for n, leaf in captured.leaves.items() if leaf.tensor.numel() and _key(leaf.tensor) in owned)
    listed = {id(optimizer) for optimizer in optimizers}
    for name, adapter in captured.opened.items():
        unlisted = isinstance(adapter, OptimizerAdapter) and id(adapter.value) not in listed
        if unlisted and any(_key(t) in owned for t in _owned(adapter.value) if t.numel()):
            raise _refuse("an optimizer that is not listed owns the same tensors", where=Where(tensor=name))
    return names


def _steps_when_asked(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step no pre-hook can hold up."""
    for group in optimizer.param_groups:
        if group.get("capturable"):
            raise _refuse("a capturable optimizer may step inside a CUDA graph, where no hook runs")
        for p in group["params"]:
            if getattr(p, "_in_backward_optimizers", None) or getattr(p, "_post_accumulate_grad_hooks", None):
                raise _refuse("a parameter has a hook that may step in the backward pass")


@dataclass(frozen=True)
class _Watched:
    """A tensor that is copied later, and how often it had been changed when the save was asked for."""

    name: str
    tensor: Tensor
    version: int


class Gate:
    """Holds up the steps of some optimizers until the tensors they change are copied."""

    def __init__(self, captured: Capture, names: frozenset[str], optimizers: Sequence[Optimizer]) -> None:
        self._watched = [_Watched(n, t, t._version) for n in names if (t := captured.leaves[n].tensor) is not None]
        self._open = threading.Event()
        self._hooks = [o.register_step_pre_hook(self._hold) for o in optimizers]
        _gates.add(self)

    def _hold(self, *args: Any) -> None:
        self._open.wait()

    def wait(self) -> None:
        """Wait until everything is copied."""
        self._open.wait()

    def open(self) -> None:
        """Let the optimizers step; what they change from now on is not in the copy."""
        self._open.set()
        for hook in self._hooks:
            hook.remove()
        _gates.discard(self)

    def check(self) -> None:
        """Raise SaveError [P-STAGING] naming a tensor that was changed before it was copied."""
        for w in self._watched:
            if w.tensor._version != w.version:
                message = "a tensor was changed before its lazy copy was made"
                advice = "call ckptspec.before_mutation() before changing it, or list the optimizer that does"
                raise SaveError(message, rule="P-STAGING", where=Where(tensor=w.name), advice=advice)


_gates: weakref.WeakSet[Gate] = weakref.WeakSet()


def before_mutation() -> None:
    """Wait until every tensor that a lazy save of this process has still to copy is copied.

    For hand-written loops: call it before anything but a listed optimizer changes parameters or optimizer state.
    """
    for gate in list(_gates):
        gate.wait()

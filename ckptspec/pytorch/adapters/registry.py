"""Owns which adapter opens which object, by its class; refuses nothing: what has no adapter is a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckptspec.pytorch.adapters.base import Adapter, Context
from ckptspec.pytorch.adapters.modules import ModuleAdapter
from ckptspec.pytorch.adapters.names import by_class
from ckptspec.pytorch.adapters.objects import ObjectAdapter
from ckptspec.pytorch.adapters.optimizers import OptimizerAdapter
from ckptspec.pytorch.adapters.rng import RngAdapter
from ckptspec.pytorch.adapters.zero import ZeroAdapter

Open = Callable[[Any, Context], Adapter]


def _optimizer(value: Any, context: Context) -> Adapter:
    """Open an optimizer by its parameters, or as any object where it has a state_dict of its own."""
    own = type(value).state_dict is not torch.optim.Optimizer.state_dict
    own = own or type(value).load_state_dict is not torch.optim.Optimizer.load_state_dict
    return (ObjectAdapter if own else OptimizerAdapter)(value, context)


# The class names are those of torch; the nearest class of an object's bases counts.
OPENERS: Mapping[str, Open] = {
    "torch.nn.modules.module.Module": ModuleAdapter,
    "torch.optim.optimizer.Optimizer": _optimizer,
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": ZeroAdapter,
    "ckptspec.pytorch.wrappers.RNG": RngAdapter,
}


def opener(value: Any) -> Open | None:
    """Return what opens an object, None for a plain value."""
    found = by_class(OPENERS, type(value))
    if found is not None:
        return found
    both = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return ObjectAdapter if both and not isinstance(value, type) else None

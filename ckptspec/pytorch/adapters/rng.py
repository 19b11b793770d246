"""Owns the random number generators of a process: python's, numpy's, torch's on the CPU and on every CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy.random
import torch

from ckptspec.pytorch.adapters.base import GENERATORS, Adapter, Context


class RngAdapter(Adapter):
    """All global generators; private to each rank."""

    order = GENERATORS
    role = "rng"
    private = True

    def __init__(self, value: Any, context: Context) -> None:
        super().__init__(value, _states())

    def restore(self) -> Any:
        random.setstate(self.tree["python"])
        numpy.random.set_state(self.tree["numpy"])
        torch.set_rng_state(self.tree["torch"])
        if "cuda" in self.tree:
            torch.cuda.set_rng_state_all(self.tree["cuda"])
        return self.value


def _states() -> dict[str, Any]:
    """Return the states: python's tuple, numpy's dict, and a uint8 tensor of torch's own form for each device."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states

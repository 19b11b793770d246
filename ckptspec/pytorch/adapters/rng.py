"""Owns the random number generators of a process: python's, numpy's, torch's on the CPU and on every CUDA device."""

from __future__ import annotations

import random
from collections.abc import Mapping
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
        super().__init__(value, states())

    def restore(self) -> Any:
        set_states(self.tree)
        return self.value


def set_states(states: Mapping[str, Any]) -> None:
    """Let all generators go on from these states."""
    random.setstate(states["python"])
    numpy.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def states() -> dict[str, Any]:
    """Return the states: python's tuple, numpy's dict, and a uint8 tensor of torch's own form for each device."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found

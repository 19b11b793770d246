"""Owns what stands behind the wrappers that `accelerate.Accelerator.prepare` gives; saves nothing itself."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler


def bare(prepared: Any) -> Any:
    """Return the optimizer or scheduler that was prepared, which a state can hold by parameter names:

        {"model": accelerator.unwrap_model(model), "optimizer": bare(optimizer), "scheduler": bare(scheduler), ...}

    Anything else comes back as it is.
    """
    if isinstance(prepared, AcceleratedOptimizer):
        return prepared.optimizer
    return prepared.scheduler if isinstance(prepared, AcceleratedScheduler) else prepared

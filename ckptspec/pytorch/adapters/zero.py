"""Owns torch's ZeroRedundancyOptimizer in a state: each rank stores the state of the parameters that it owns."""

from __future__ import annotations

from typing import Any

from ckptspec.pytorch.adapters.base import Context
from ckptspec.pytorch.adapters.optimizers import OptimizerAdapter
from ckptspec.pytorch.values import refuse
from ckptspec.pytorch.wrappers import Owned


class ZeroAdapter(OptimizerAdapter):
    """The optimizer gives each parameter whole to one rank: that rank alone holds and stores its state, under the
    parameter's name. The groups are the same on all ranks."""

    def __init__(self, value: Any, context: Context) -> None:
        if value._overlap_with_ddp:
            message = "ZeroRedundancyOptimizer with overlap_with_ddp=True keeps its state where it cannot be found"
            raise refuse(context.name, message, advice="build it without overlap_with_ddp")
        if value.world_size != context.world:
            message = "ZeroRedundancyOptimizer over a part of the ranks cannot be saved"
            raise refuse(context.name, message, expected=f"{context.world} ranks", found=f"{value.world_size} ranks")
        local = value.optim
        own = [p for g in local.param_groups for p in g["params"]]
        super().__init__(value, context, state=local.state, parameters=own)
        self.tree["state"] = Owned(self.tree["state"])

    def _states_of_tree(self) -> Any:
        state = self.tree["state"]
        return state.value if isinstance(state, Owned) else state  # of a rank that owns none, a plain value was loaded

    def restore(self) -> Any:
        """Restore the local optimizer, and the groups of both."""
        self.set_groups(self.value.optim.param_groups)
        return super().restore()

"""Owns nn.Module in a state: its state_dict of live tensors, filled in place; the rest goes through load_state_dict."""

from __future__ import annotations

from typing import Any

from torch import nn

from ckptspec.pytorch.adapters.base import ABSENT, MODULES, Adapter, Context, misfit
from ckptspec.pytorch.adapters.names import Names, by_class, unwrap
from ckptspec.pytorch.adapters.template import Template
from ckptspec.pytorch.pieces import assemble
from ckptspec.pytorch.values import refuse

EXTRA = "_extra_state"
_FSDP1 = {"torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": True}


class ModuleAdapter(Adapter):
    """A module, without what DDP, DataParallel and torch.compile put around it."""

    order = MODULES
    role = "buffer"  # parameters tell themselves

    def __init__(self, value: Any, context: Context) -> None:
        self._module = unwrap(value)
        _refuse_fsdp1(self._module, context.name)
        self._live = self._module.state_dict(keep_vars=True)
        self._name = context.name
        names = Names(self._module)
        self._keys = {names.short(key): key for key in self._live}
        tree = {short: self._live[key] for short, key in self._keys.items()}
        found = context.found
        if context.saved is not None and isinstance(found, dict):
            template = Template(context.saved)
            for short, live in tree.items():
                saved = found.get(short, ABSENT)
                if short.rpartition(".")[2] == EXTRA and saved is not ABSENT:
                    tree[short] = template.like(saved, live, context.join(short))
        super().__init__(value, {k: v for k, v in tree.items() if v is not ABSENT})

    def restore(self) -> Any:
        """Hand the filled state_dict to the module: a live tensor is copied onto itself, hooks and extra state run."""
        filled = type(self._live)(self._live)
        for short, value in self.tree.items():
            filled[self._keys[short]] = assemble(value, f"{self._name}/{short}")
        if hasattr(self._live, "_metadata"):
            filled._metadata = self._live._metadata  # type: ignore[attr-defined]  # versions: those of this code
        result = self._module.load_state_dict(filled, strict=False)
        own = {id(t) for t in (*self._module.parameters(), *self._module.buffers())}
        lost = [k for k in result.unexpected_keys if id(self._live.get(k)) not in own]
        if lost:
            raise misfit(f"{self._name}/{lost[0]}", "load_state_dict of the module did not take this entry")
        return self.value


def _refuse_fsdp1(module: nn.Module, name: str) -> None:
    """Raise StateError for FSDP1 anywhere in a module: its state_dict takes collectives and is not the live memory."""
    for path, inner in module.named_modules():
        if by_class(_FSDP1, type(inner)):
            raise refuse(
                f"{name}/{path}" if path else name,
                "FullyShardedDataParallel has no state that can be saved in place",
                advice="use torch.distributed.fsdp.fully_shard, or describe its flat parameters by ckptspec.FlatShard",
            )

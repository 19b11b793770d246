"""Owns nn.Module in a state: its state_dict of live tensors, filled in place; the rest goes through load_state_dict."""

from __future__ import annotations

from typing import Any

from ckptspec.pytorch.adapters.base import ABSENT, MODULES, Adapter, Context, misfit
from ckptspec.pytorch.adapters.names import Names, unwrap
from ckptspec.pytorch.adapters.template import Template
from ckptspec.pytorch.pieces import assemble
from ckptspec.pytorch.values import refuse

EXTRA = "_extra_state"


class ModuleAdapter(Adapter):
    """A module, without what DDP, DataParallel and torch.compile put around it."""

    order = MODULES
    role = "buffer"  # parameters tell themselves

    def __init__(self, value: Any, context: Context) -> None:
        self._module = unwrap(value)
        self._live = self._module.state_dict(keep_vars=True)
        self._name = context.name
        names = Names(self._module)
        self._keys = {names.short(key): key for key in self._live}
        tree = {short: self._live[key] for short, key in self._keys.items()}
        if context.saved is not None and isinstance(context.found, dict):
            template = Template(context.saved)
            for short, live in tree.items():
                saved = context.found.get(short, ABSENT)
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


def refuse_fsdp1(value: Any, context: Context) -> Adapter:
    """Raise StateError: the state_dict of FSDP1 is made by collectives and is not the live memory."""
    raise refuse(
        context.name,
        "FullyShardedDataParallel has no state that can be saved in place",
        found=type(value).__name__,
        advice="use torch.distributed.fsdp.fully_shard, or describe its flat parameters with ckptspec.FlatShard",
    )

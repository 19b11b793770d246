"""Owns the names of modules' parameters: what wrappers add is left out, so that a bare module has the same names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from ckptspec.format.names import escape
from ckptspec.pytorch.values import refuse
from ckptspec.pytorch.wrappers import Local, Owned, Replicated

T = TypeVar("T")

# Wrapper classes by name, so that none is imported for this, and the name under which they keep the module inside.
_WRAPPERS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
}


def by_class(table: Mapping[str, T], kind: type) -> T | None:
    """Return the entry of the nearest class `kind` is or derives from; the table goes by module and class name."""
    return next((table[n] for c in kind.__mro__ if (n := f"{c.__module__}.{c.__qualname__}") in table), None)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, DataParallel, torch.compile and activation checkpointing."""
    while (inner := by_class(_WRAPPERS, type(module))) is not None:
        module = getattr(module, inner)
    return module


class Names:
    """The names of what lies in one module, without the parts that wrappers inside it add."""

    def __init__(self, module: nn.Module) -> None:
        paths = ((path, by_class(_WRAPPERS, type(m))) for path, m in module.named_modules())
        self._dropped = {f"{path}.{inner}" if path else inner for path, inner in paths if inner is not None}

    def short(self, key: str) -> str:
        """Return a dotted name without them."""
        if not self._dropped:
            return key
        tokens = key.split(".")
        return ".".join(t for i, t in enumerate(tokens) if ".".join(tokens[: i + 1]) not in self._dropped)


class Parameters:
    """The parameters that the modules of one state hold, by identity; plain tensors of the state go by their place."""

    def __init__(self, state: Any) -> None:
        self._found: dict[int, tuple[str, str]] = {}
        self._seen: set[int] = set()
        self._walk(state, "")

    def _walk(self, node: Any, name: str) -> None:
        if isinstance(node, (Local, Replicated, Owned)):
            self._walk(node.value, name)
        elif isinstance(node, Tensor):
            self._found.setdefault(id(node), ("", name))
        elif isinstance(node, nn.Module):
            module = unwrap(node)
            names = Names(module)
            for key, parameter in module.named_parameters():
                self._found.setdefault(id(parameter), (name, names.short(key)))
        elif isinstance(node, (dict, list, tuple)) and id(node) not in self._seen:
            self._seen.add(id(node))
            for token, child in node.items() if isinstance(node, dict) else enumerate(node):
                self._walk(child, f"{name}/{escape(str(token))}" if name else escape(str(token)))

    def of(self, parameters: Sequence[Tensor], place: str) -> Mapping[int, str]:
        """Return the name of each parameter of the optimizer at `place`, by identity.

        It is the name in its module; where that would name two, the module's place goes before it. Raises StateError
        for a parameter that no module of the state holds.
        """
        for number, p in enumerate(parameters):
            if id(p) not in self._found:
                raise refuse(
                    place,
                    "a parameter of the optimizer is in no module of the state, so it has no name",
                    found=f"parameter {number} of {len(parameters)}, shape {list(p.shape)}",
                    advice='put the module itself in the state, {"model": model, "optimizer": optimizer}, or put '
                    "optimizer.state_dict() there, which goes by numbers",
                )
        found = [self._found[id(p)] for p in parameters]
        short = [name for _, name in found]
        if len(set(short)) < len(set(found)):
            short = [f"{module}.{name}" if module else name for module, name in found]
        return {id(p): name for p, name in zip(parameters, short, strict=True)}

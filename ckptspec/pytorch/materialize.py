"""Owns meta tensors in a state that is loaded into: named in an error, or replaced by real memory on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Union

import torch
from torch import Tensor, nn

from ckptspec.errors import PlanError, Where
from ckptspec.format.names import escape
from ckptspec.pytorch.adapters.names import Names, by_class, unwrap
from ckptspec.pytorch.restore import replace_values
from ckptspec.pytorch.wrappers import FlatShard, Local, Owned, Replicated, Shard

Materialize = Union[str, torch.device, Callable[[Tensor], Tensor]]
_SHOWN = 40
_FULLY_SHARD = {"torch.distributed.fsdp._fully_shard._fully_shard.FSDPModule": True}


def materialize(
    state: Any, how: Materialize | None, wanted: Callable[[str], bool], stored: Callable[[str], bool]
) -> tuple[str, ...]:
    """Replace the meta tensors of a state that are to be loaded by real ones, not yet filled, and return their names.

    `how` is a device, or what gives a real tensor for a meta one. Parameters keep their identity, so optimizers and
    ties hold. Raises PlanError naming the meta tensors without `how`, and those that the checkpoint does not have.
    """
    found = {name: (value, owner) for name, value, owner in _meta(state, "") if wanted(name)}
    if not found:
        return ()
    if how is None:
        raise PlanError(
            f"a meta tensor has no memory to load into: {_list(list(found))}",
            rule="R-LAYOUT",
            where=Where(tensor=next(iter(found))),
            advice='pass materialize="cpu", another device, or a function that makes a real tensor of a meta one',
        )
    absent = [name for name in found if not stored(name)]
    if absent:
        message = f"meta tensors that are not in the checkpoint: {_list(absent)}"
        advice = "give them values before the load"
        raise PlanError(message, rule="R-NAME", where=Where(tensor=absent[0]), advice=advice)
    _fill(state, found, how)
    return tuple(found)


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _meta(node: Any, name: str) -> Iterator[tuple[str, Any, nn.Module | None]]:
    """Yield (name, tensor or wrapper of one, module that holds it) of every meta tensor."""
    if isinstance(node, Tensor):
        if node.is_meta:
            yield name, node, None
    elif isinstance(node, (FlatShard, Shard)):
        if node.tensor.is_meta:
            yield name, node, None
    elif isinstance(node, (Local, Replicated, Owned)):
        yield from _meta(node.value, name)
    elif isinstance(node, nn.Module):
        module = unwrap(node)
        names = Names(module)
        for key, value in module.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and value.is_meta:
                yield f"{name}/{escape(names.short(key))}", value, module
    elif isinstance(node, (dict, list, tuple)):
        for token, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _meta(child, f"{name}/{escape(str(token))}" if name else escape(str(token)))


def _fill(state: Any, found: dict[str, tuple[Any, nn.Module | None]], how: Materialize) -> None:
    made: dict[int, Tensor] = {}

    def real(t: Tensor) -> Tensor:
        if id(t) not in made:
            made[id(t)] = _real(t, how)
        return made[id(t)]

    free: dict[str, Any] = {}
    modules: list[nn.Module] = []
    for name, (value, owner) in found.items():
        if owner is not None:
            if id(value) not in made:
                torch.utils.swap_tensors(value, real(value))  # type: ignore[no-untyped-call]
            if not any(m is owner for m in modules):
                modules.append(owner)
        else:
            wrapped = isinstance(value, (FlatShard, Shard))
            free[name] = replace(value, tensor=real(value.tensor)) if wrapped else real(value)
    replace_values(state, "", free)
    for module in modules:
        if any(by_class(_FULLY_SHARD, type(m)) for m in module.modules()):
            module._apply(lambda t: t)  # type: ignore[no-untyped-call]  # fully_shard looks anew at the memory of its parameters


def _real(t: Tensor, how: Materialize) -> Tensor:
    with torch.no_grad():
        made = how(t) if callable(how) and not isinstance(how, torch.device) else torch.empty_like(t, device=how)
    if not isinstance(made, Tensor) or made.is_meta or made.shape != t.shape or made.dtype != t.dtype:
        found = f"{type(made).__name__} {list(getattr(made, 'shape', ()))}"
        expected = f"a real tensor of shape {list(t.shape)}, {t.dtype}"
        raise PlanError("materialize gave another tensor", rule="R-LAYOUT", expected=expected, found=found)
    if isinstance(t, nn.Parameter) and not isinstance(made, nn.Parameter):
        made = nn.Parameter(made, requires_grad=t.requires_grad)
    return made

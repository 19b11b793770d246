"""Owns putting a checkpoint's Python values back into a live state, and telling its objects; moves no tensor bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptspec.format.names import escape
from ckptspec.pytorch.adapters.base import GENERATORS, Adapter
from ckptspec.pytorch.wrappers import Local, Owned, Replicated

_WRAPPERS = (Local, Replicated, Owned)


def replace_values(node: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Put values into `node` in place, by name; return `node`, or what stands in its stead."""
    if name in values:
        value = values[name]
        if type(node) in _WRAPPERS:
            return node if value is node.value else replace(node, value=value)
        return value
    prefix = f"{name}/" if name else ""
    if isinstance(node, dict):
        for key, child in node.items():
            node[key] = replace_values(child, prefix + escape(str(key)), values)
        return node
    if type(node) is list:
        node[:] = [replace_values(child, f"{prefix}{i}", values) for i, child in enumerate(node)]
        return node
    if type(node) is tuple:
        new = tuple(replace_values(child, f"{prefix}{i}", values) for i, child in enumerate(node))
        return node if all(a is b for a, b in zip(node, new, strict=True)) else new
    if type(node) in _WRAPPERS:
        inner = replace_values(node.value, name, values)
        return node if inner is node.value else replace(node, value=inner)
    return node


def settle(state: Any, opened: Mapping[str, Adapter], values: Mapping[str, Any], names: frozenset[str]) -> None:
    """Put every loaded value in its place and give each object what was loaded for it, once all tensors have arrived.

    `names` are all loaded names. An object inside another comes before it; modules before optimizers before other
    objects; random number generators last.
    """
    standing = dict(values)
    touched = {n[:i] for n in names if opened for i, c in enumerate(n) if c == "/"} | names
    for name in _order(opened):
        adapter = opened[name]
        if name in touched:
            adapter.tree = replace_values(adapter.tree, name, standing)
            standing[name] = adapter.restore()
        else:
            standing[name] = adapter.value
    replace_values(state, "", standing)


def below(place: str, name: str) -> bool:
    """Tell whether a name is a place or lies below it."""
    return name == place or name.startswith(place + "/")


def _order(opened: Mapping[str, Adapter]) -> list[str]:
    """Return the names of the objects in the order they are restored."""

    def key(name: str) -> tuple[bool, int, int]:
        level = sum(1 for i, c in enumerate(name) if c == "/" and name[:i] in opened)
        return opened[name].order == GENERATORS, -level, opened[name].order

    return sorted(opened, key=key)

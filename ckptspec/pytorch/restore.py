"""Owns putting a checkpoint's Python values back into the containers of a live state; never touches a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptspec.format.names import escape
from ckptspec.pytorch.wrappers import Local


def replace_values(node: Any, name: str, values: Mapping[str, Any]) -> Any:
    """Put the checkpoint's Python values into `node` in place, by name; return `node`, or what stands in its stead."""
    if name in values:
        return Local(values[name]) if type(node) is Local else values[name]
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
    if type(node) is Local:
        inner = replace_values(node.value, name, values)
        return node if inner is node.value else Local(inner)
    return node

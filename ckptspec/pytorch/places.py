"""Owns the names of what stands in a state's containers, before anything is opened; knows nothing of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptspec.format.names import escape
from ckptspec.pytorch.wrappers import Local, Owned, Replicated


def above(name: str) -> Iterator[str]:
    """Yield the names of the places above a name, outermost first."""
    return (name[:i] for i, c in enumerate(name) if c == "/")


class Places:
    """The places of one state: of tensors, values and objects, whatever lies inside an object."""

    def __init__(self, state: Any) -> None:
        self._leaves = set(_leaves(state, "", set()))
        self._inner = {place for name in self._leaves for place in above(name)}

    def about(self, name: str) -> bool:
        """Tell whether something of the state is at a name, around it or below it."""
        return name in self._leaves or name in self._inner or not self._leaves.isdisjoint(above(name))


def _leaves(node: Any, name: str, seen: set[int]) -> Iterator[str]:
    """Yield the names of what is no container, and of empty ones; `seen` are the containers around the node."""
    if isinstance(node, (Local, Replicated, Owned)):
        yield from _leaves(node.value, name, seen)
    elif isinstance(node, (dict, list, tuple)) and node and id(node) not in seen:
        for token, child in node.items() if isinstance(node, dict) else enumerate(node):
            below = f"{name}/{escape(str(token))}" if name else escape(str(token))
            yield from _leaves(child, below, seen | {id(node)})
    else:
        yield name

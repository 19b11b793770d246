"""Owns tensor subclasses as plain tensors: taking them apart, and putting them together by registered constructors.

A subclass says what it is made of by a method:

    def __ckptspec_pieces__(self): return {"data": self.data, "scale": self.scale}, {"block": 64}, "my.Quantized"

The plain tensors inside by name (live, so that a load can fill them), typed metadata, and the key of a constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ckptspec.errors import PlanError, Where
from ckptspec.pytorch.values import refuse

METHOD = "__ckptspec_pieces__"
MARK = "ckptspec.pieces"  # the key that tells such a tree from a dict of the user
Constructor = Callable[[dict[str, Tensor], Any], Tensor]
_constructors: dict[str, Constructor] = {}


def register_pieces(key: str, constructor: Constructor) -> None:
    """Let `constructor(pieces, metadata)` rebuild the tensors that were saved under `key`.

    Nothing a checkpoint names is ever imported: a key that nobody registered is an error at load. The last constructor
    registered under a key wins.
    """
    _constructors[key] = constructor


def has_pieces(value: Any) -> bool:
    """Tell whether a value says what it is made of."""
    return hasattr(type(value), METHOD)


def take_apart(tensor: Any, name: str) -> dict[str, Any]:
    """Return the tree that stands for a tensor subclass; raises StateError where the method gives something else."""
    given = getattr(tensor, METHOD)()
    if type(given) is tuple and len(given) == 3:
        pieces, metadata, key = given
        if isinstance(pieces, Mapping) and type(key) is str and all(isinstance(p, Tensor) for p in pieces.values()):
            return {MARK: key, "metadata": metadata, "tensors": dict(pieces)}
    expected = "(dict of tensors by name, metadata, key of a constructor)"
    raise refuse(name, f"{METHOD} returned something else", expected=expected, found=type(given).__name__)


def assemble(tree: Any, name: str = "") -> Any:
    """Return a tree with its taken-apart tensors put together; containers without any are returned as they are.

    Raises PlanError [Q-NOCODE] for a key that nobody registered.
    """
    if isinstance(tree, dict):
        parts = {k: assemble(v, f"{name}/{k}") for k, v in tree.items()}
        if MARK in parts:
            return _construct(parts, name)
        return parts if any(parts[k] is not tree[k] for k in parts) else tree
    if type(tree) in (list, tuple):
        items = [assemble(v, f"{name}/{i}") for i, v in enumerate(tree)]
        return type(tree)(items) if any(a is not b for a, b in zip(items, tree, strict=True)) else tree
    return tree


def _construct(parts: Mapping[str, Any], name: str) -> Tensor:
    key = parts[MARK]
    if key not in _constructors:
        raise PlanError(
            "no constructor is registered for this kind of tensor",
            rule="Q-NOCODE",
            where=Where(tensor=name.lstrip("/")),
            expected=f"one of {sorted(_constructors)}" if _constructors else "a registered one",
            found=repr(key),
            advice="call ckptspec.register_pieces(key, constructor) before the load",
        )
    return _constructors[key](parts["tensors"], parts["metadata"])

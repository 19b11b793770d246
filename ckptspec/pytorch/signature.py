"""Owns the signature of a live torch state: names, dtypes and global shapes; reads no byte and talks to no rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptspec.errors import StateError
from ckptspec.format import objects as entries
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.names import escape
from ckptspec.format.objects import TensorRef
from ckptspec.format.signature import Described, Signature
from ckptspec.pytorch import group
from ckptspec.pytorch.adapters.base import Context
from ckptspec.pytorch.adapters.names import Parameters
from ckptspec.pytorch.adapters.pieces import PiecesAdapter
from ckptspec.pytorch.adapters.registry import opener
from ckptspec.pytorch.how import How
from ckptspec.pytorch.pieces import has_pieces
from ckptspec.pytorch.values import PLAIN, SMALL_ARRAY, from_numpy, refuse
from ckptspec.pytorch.wrappers import FlatShard, Local, Owned, Replicated, Shard

_SHAPED = (FlatShard, Shard)


def signature(state: Any, *, objects: bool = False) -> dict[str, Any]:
    """Return what `state` has by name, as the JSON document that `ckptspec validate --signature` reads.

    `state` is what save and load take, or a module by itself; its tensors may be on the meta device. Names are those
    that load would look for: a tensor of which ranks hold parts has its global shape, one that is private to each rank
    has none. What an optimizer has not made yet is not in it. With `objects` the values that are no tensors are named
    too, and a checkpoint must have just these. One rank alone may call it. Raises StateError naming the key of what
    cannot be saved.
    """
    work = _Walk(state)
    if isinstance(state, torch.nn.Module):
        tree = work.opened(state, "", How())
    elif isinstance(state, (dict, list, tuple)):
        tree = work.node(state, "", How())
    else:
        raise StateError("a state is a dict, list or tuple, or a module", rule="P-STATE", found=type(state).__name__)
    kinds = None
    if objects:
        names = (n for n, part in entries.parts(tree) if type(part) is not TensorRef)
        kinds = {n: "rank" if work.own(n) else "same" for n in names}
    return Signature(work.tensors, kinds).document()


class _Walk:
    """One walk over a state; every tensor in the tree it gives is a reference."""

    def __init__(self, state: Any) -> None:
        self.tensors: dict[str, Described] = {}
        self.private: set[str] = set()
        self._state = state
        self._here = group.world()
        self._parameters: Parameters | None = None

    def node(self, value: Any, name: str, how: How) -> Any:
        """Return the tree below one value, its tensors noted."""
        if isinstance(value, dict):
            return {k: self.node(v, _below(name, k), how) for k, v in value.items()}
        if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
            return type(value)([self.node(v, _below(name, i), how) for i, v in enumerate(value)])
        if isinstance(value, numpy.ndarray) and value.nbytes > SMALL_ARRAY and value.dtype.kind in "biufc":
            value = from_numpy(value, name)
        if isinstance(value, (Tensor, *_SHAPED)):
            return self.tensor(value, name, how)
        if isinstance(value, Local):
            if value.only is None:
                self.private.add(name)
            return self.node(value.value, name, how.inside(name, value.only, How(local=True)))
        if isinstance(value, Replicated):
            return self.node(value.value, name, how.inside(name, value.only, How(source=value.source)))
        if isinstance(value, Owned):
            return self.node(value.value, name, how.inside(name, None, How(owner=True)))
        return value if opener(value) is None else self.opened(value, name, how)

    def opened(self, value: Any, name: str, how: How) -> Any:
        """Return the tree of an object that a load opens: a module, an optimizer, whatever has a state_dict."""
        opens = opener(value)
        assert opens is not None
        adapter = opens(value, Context(name, self._here.rank, self._here.size, self._named))
        if adapter.private:
            self.private.add(name)
            how = how.inside(name, None, How(local=True))
        return self.node(adapter.tree, name, how)

    def tensor(self, value: Any, name: str, how: How) -> Any:
        """Note one tensor, and return its reference; one that says what it is made of is opened."""
        local = False
        if isinstance(value, Tensor) and not isinstance(value, DTensor):
            if type(value) not in PLAIN and has_pieces(value):
                return self.opened_pieces(value, name, how)
            local = how.at(name).local
        shape = (value.numel,) if isinstance(value, FlatShard) else value.shape
        inner = value.tensor if isinstance(value, _SHAPED) else value
        dtype = str(inner.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise refuse(name, "this dtype cannot be stored", rule="T-DTYPE", found=dtype)
        if name in self.tensors:
            raise refuse(name, "two keys have one name", rule="P-NAME")
        self.tensors[name] = Described(dtype, None if local else tuple(map(int, shape)))
        return TensorRef(name)

    def own(self, name: str) -> bool:
        """Tell whether a value is each rank's own: it, something around it or something in it is Local."""
        places = (name[:i] for i, c in enumerate(name) if c == "/")
        return any(p == name or p.startswith(name + "/") for p in self.private) or any(
            p in self.private for p in places
        )

    def opened_pieces(self, value: Tensor, name: str, how: How) -> Any:
        """Return the tree of a tensor that is made of others."""
        context = Context(name, self._here.rank, self._here.size, self._named)
        return self.node(PiecesAdapter(value, context).tree, name, how)

    def _named(self, parameters: Sequence[Any], place: str) -> Mapping[int, str]:
        if self._parameters is None:
            self._parameters = Parameters(self._state)
        return self._parameters.of(parameters, place)


def _below(name: str, key: Any) -> str:
    return f"{name}/{escape(str(key))}" if name else escape(str(key))

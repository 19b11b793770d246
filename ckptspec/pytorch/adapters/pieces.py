"""Owns one tensor subclass in a state: filled in place where it stays what it is, else built anew."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ckptspec.format import objects
from ckptspec.pytorch.adapters.base import ABSENT, PIECES, Adapter, Context
from ckptspec.pytorch.adapters.template import Template
from ckptspec.pytorch.pieces import MARK, assemble, take_apart
from ckptspec.pytorch.values import encode_value


class PiecesAdapter(Adapter):
    """A tensor with `__ckptspec_pieces__`."""

    order = PIECES

    def __init__(self, value: Any, context: Context) -> None:
        self._live = take_apart(value, context.name)
        self._context = context
        found = context.found
        marked = isinstance(found, dict) and MARK in found and context.saved is not None
        tree = Template(context.saved).like(found, self._live, context.name) if marked and context.saved else self._live
        super().__init__(value, dict(tree) if tree is not ABSENT else dict(self._live))

    def restore(self) -> Any:
        """Return the tensor itself where the same kind with the same metadata was loaded, else what the constructor
        of the checkpoint's kind makes of the pieces."""
        if self._same_kind() and self._filled(take_apart(self.value, self._context.name)["tensors"]):
            return self.value
        return assemble(self.tree, self._context.name)

    def _same_kind(self) -> bool:
        here, there = ({k: v for k, v in t.items() if k != "tensors"} for t in (self._live, self.tree))
        return objects.pack(here, encode=encode_value) == objects.pack(there, encode=encode_value)

    def _filled(self, now: dict[str, Tensor]) -> bool:
        """Tell whether the tensor still is made of the memory that was filled, not of copies."""
        tensors = self.tree["tensors"]
        return now.keys() == tensors.keys() and all(now[k].data_ptr() == tensors[k].data_ptr() for k in now)

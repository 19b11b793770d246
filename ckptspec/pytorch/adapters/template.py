"""Owns templates: trees shaped as in the checkpoint, of live tensors where there are some, and new ones elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptspec.format.dtypes import dtype
from ckptspec.format.names import escape
from ckptspec.format.objects import TensorRef
from ckptspec.pytorch.adapters.base import ABSENT, Saved, misfit
from ckptspec.pytorch.values import PLAIN

Make = Callable[[str, str, torch.dtype, tuple[int, ...]], Tensor]


def plain(name: str, target: str, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return new memory on the CPU for a tensor nobody holds yet."""
    return torch.empty(shape, dtype=kind)


class Template:
    """Makes templates for one load; `make` gives new tensors: (name here, name stored, dtype, shape) -> Tensor."""

    def __init__(self, saved: Saved, make: Make = plain) -> None:
        self._saved = saved
        self._make = make
        self._taken: dict[tuple[torch.device, int], str] = {}
        self.dropped = False  # whether something was left out because nobody asked for it

    def like(self, saved: Any, live: Any, name: str) -> Any:
        """Return what stands at `name`: shaped as `saved`, of live tensors where `live` has them at the same place.

        What is not wanted stays as it is, or is absent. Raises PlanError where a list would get a hole.
        """
        if type(saved) is TensorRef:
            if isinstance(live, Tensor) and not live.is_meta and self._free(live, saved.name):
                return live
            return self._new(name, saved.name) if self._wanted(name) else ABSENT
        if not _holds_tensor(saved):
            return saved if self._wanted(name) else live
        if isinstance(saved, dict):
            known: Mapping[Any, Any] = live if isinstance(live, dict) else {}
            parts = {k: self.like(v, known.get(k, ABSENT), f"{name}/{escape(str(k))}") for k, v in saved.items()}
            return {k: v for k, v in parts.items() if v is not ABSENT}
        given = live if type(live) is type(saved) and len(live) == len(saved) else [ABSENT] * len(saved)
        items = [self.like(v, x, f"{name}/{i}") for i, (v, x) in enumerate(zip(saved, given, strict=True))]
        if any(x is ABSENT for x in items):
            raise misfit(name, "a part of a list cannot be left out", advice=f"skip all of {name!r}")
        return items if type(saved) is list else tuple(items)

    def _free(self, live: Tensor, target: str) -> bool:
        """Tell whether a live tensor is not yet to be filled from another tensor of the checkpoint."""
        if isinstance(live, DTensor) or type(live) not in PLAIN or not live.numel():
            return True
        return self._taken.setdefault((live.device, live.data_ptr()), target) == target

    def _wanted(self, name: str) -> bool:
        wanted = self._saved.wanted(name)
        self.dropped |= not wanted
        return wanted

    def _new(self, name: str, target: str) -> Tensor:
        entry = self._saved.entry(target)
        shape = self._saved.shapes.get(target, ()) if entry.shape is None else entry.shape
        return self._make(name, target, getattr(torch, dtype(entry.dtype).name), shape)


def _holds_tensor(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(map(_holds_tensor, tree.values()))
    return any(map(_holds_tensor, tree)) if isinstance(tree, (list, tuple)) else type(tree) is TensorRef

"""Owns what a walk over a state records: every tensor by name, what it is declared as, and what is one memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ckptspec.format.box import Box
from ckptspec.format.layout import Layout, Mesh
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.objects import TensorRef
from ckptspec.pytorch.adapters.base import Adapter
from ckptspec.pytorch.holding import TorchHolding
from ckptspec.pytorch.values import dtype_name, refuse, role_of
from ckptspec.pytorch.wrappers import FlatShard


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state as this rank holds it: what it declares, the boxes held, and the local torch tensor.

    `reads` are the boxes a load fills, where those are not the ones held: what another rank stores for all.
    """

    entry: TensorEntry
    boxes: tuple[Box, ...]
    tensor: Tensor
    padding: Tensor | None = None
    reads: tuple[Box, ...] | None = None

    @property
    def holding(self) -> TorchHolding:
        """The bytes of the boxes."""
        return TorchHolding(self.tensor, self.boxes)


@dataclass
class Capture:
    """A walked state: the tree with references for tensors, every leaf by name, and the declared tables.

    `opened` are the objects met, by name, outermost first; `ties` what the caller declared, `walked` all names met.
    """

    rank: int
    world: int
    plain: str
    tree: Any = None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    meshes: dict[str, Mesh] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    groups: dict[str, list[tuple[str, FlatShard]]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    omitted: dict[str, str] = field(default_factory=dict)
    opened: dict[str, Adapter] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    walked: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Declared:
    """What is declared of one tensor: its layout, global shape (None: local), and the boxes held here."""

    layout_name: str
    layout: Layout
    shape: tuple[int, ...] | None
    boxes: tuple[Box, ...]
    role: str | None = None


class Recorder:
    """Enters tensors into a capture; with `tie`, those of one memory become one payload and aliases."""

    def __init__(self, out: Capture, tie: bool) -> None:
        self.out = out
        self._tie = tie
        self._seen: dict[tuple[Any, ...], str] = {}

    def add(
        self,
        t: Tensor,
        name: str,
        declared: Declared,
        *,
        padding: Tensor | None = None,
        reads: tuple[Box, ...] | None = None,
    ) -> TensorRef:
        """Record one tensor and return its reference: to itself, or to the tensor whose memory or tie it shares."""
        dtype = dtype_name(t, name)
        if name in self.out.walked:
            raise refuse(name, "two keys have one name", rule="P-NAME")
        self.out.walked.add(name)
        place = self._place(t, name, declared)
        if place != name:
            self.out.aliases[name] = place
        role = role_of(place, t, declared.layout_name, declared.role)
        entry = TensorEntry(dtype, declared.shape, declared.layout_name, role)
        leaf = Leaf(entry, declared.boxes, t, padding, reads)
        if place in self.out.leaves:
            self._same(name, leaf, place)
        else:
            self.out.layouts.setdefault(declared.layout_name, declared.layout)
            self.out.leaves[place] = leaf
        return TensorRef(place)

    def _place(self, t: Tensor, name: str, declared: Declared) -> str:
        """Return the name under which a tensor is stored: its own, the one it is tied to, or that of its memory."""
        place = self.out.ties.get(name, name)
        if not self._tie or not t.numel():
            return place
        memory = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg())
        first = self._seen.setdefault((*memory, declared.layout_name, declared.shape), place)
        if first != place and place != name:
            advice = f"tie {first!r} as well"
            raise refuse(name, f"it is the memory of {first!r}, but tied to {place!r}", advice=advice)
        return first

    def _same(self, name: str, leaf: Leaf, place: str) -> None:
        """Refuse a tensor that is not the very one under whose name it would be stored."""
        known = self.out.leaves[place]
        if known.tensor is leaf.tensor or known.tensor.data_ptr() == leaf.tensor.data_ptr():
            return
        alike = replace(known.entry, role=leaf.entry.role) == leaf.entry and known.boxes == leaf.boxes
        if not alike or not torch.equal(_raw(known.tensor), _raw(leaf.tensor)):
            found = "other bytes" if alike else str(leaf.entry)
            raise refuse(name, f"it is tied to {place!r} but differs from it", rank=self.out.rank,
                          expected=f"the bytes of {place!r}", found=found)  # fmt: skip


def _raw(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)

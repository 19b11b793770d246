"""Owns the wrappers that tell what a plain tensor is: a slice of a flat buffer, pieces, or private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class FlatShard:
    """This rank's 1-D slice of a ZeRO flat buffer that starts at element `offset`.

    `numel` counts the buffer's logical elements: what lies beyond it in the slice is padding, never stored and zero on
    load. `group` names the buffer; every tensor of one group shares its geometry. `members` tell what lies in the
    buffer: {"name", "offset", "shape", "of"?: {"shape", "offsets"}}, name None for padding inside. `ranks` are the
    ranks that share the buffer, in order (default: all); `bounds` are explicit cuts where the slices are not equal.
    """

    tensor: Tensor
    group: str
    offset: int
    numel: int
    members: Sequence[Mapping[str, Any]] = ()
    ranks: Sequence[int] | None = None
    bounds: Sequence[int] | None = None


@dataclass(frozen=True)
class Shard:
    """A plain tensor that is these `boxes`, (offsets, sizes) pairs, of a larger tensor of `shape`."""

    tensor: Tensor
    shape: Sequence[int]
    boxes: Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class Local:
    """A value or tree that is private to each rank: every rank stores and restores its own."""

    value: Any

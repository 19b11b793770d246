"""Owns the wrappers that tell what a part of a state is: a slice of a flat buffer, pieces, private, one rank's."""

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
    """A value, tree or object that is private to each rank: every rank stores and restores its own.

    With `only`, names and globs below this place such as "*.running_mean", that holds for those tensors alone.
    """

    value: Any
    only: Sequence[str] | None = None


@dataclass(frozen=True)
class Replicated:
    """A tensor, tree or object of which the bytes of rank `source` are stored and every rank reads those.

    Nobody compares what the other ranks hold: DDP's BatchNorm statistics differ between ranks, and rank 0's are those
    that DDP broadcasts. With `only`, names and globs below this place, that holds for those tensors alone. It is about
    plain tensors; Python values in the tree must still be equal on all ranks.
    """

    value: Any
    source: int = 0
    only: Sequence[str] | None = None


@dataclass(frozen=True)
class Owned:
    """A tree of plain tensors that this rank alone holds, under names no other rank uses: it is shared, not private."""

    value: Any


@dataclass(frozen=True)
class RNG:
    """The states of all random number generators of this process: python, numpy, torch on the CPU and on each device.

    They are private to each rank. Put it anywhere in a state; a load sets them last.
    """

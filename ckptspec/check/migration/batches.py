"""Owns the global batch on another number of data-parallel ranks: what keeps it; refuses to call near equal.

The global batch is data-parallel size D times micro-batch B times accumulation A, in samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt, prod
from typing import Any

from ckptspec.format.layout import Mesh

NOTE = "org.ckptspec.batch"  # a manifest's annotation: {"micro": B, "accumulation": A}
LIMIT = 1 << 40


@dataclass(frozen=True)
class Batch:
    """What one data-parallel rank does a step: `micro` samples at a time, `accumulation` times."""

    micro: int
    accumulation: int


@dataclass(frozen=True)
class Choice:
    """A micro-batch and an accumulation for the new ranks, and the global batch they make."""

    micro: int
    accumulation: int
    total: int


@dataclass(frozen=True)
class Batching:
    """How `old` ranks made a global batch of `total`, and what `new` ranks can do; `choices` with `exact` keep it.

    Without `exact` no whole numbers keep it: the choices are near, the nearest first.
    """

    old: int
    new: int
    batch: Batch
    total: int
    exact: bool
    choices: tuple[Choice, ...]

    def text(self) -> str:
        """Return in words what to do, or that nothing keeps the global batch."""
        was = f"global batch {self.total:,} = {self.old} data-parallel ranks x micro-batch {self.batch.micro}"
        was += f" x accumulation {self.batch.accumulation}"
        said = [f"micro-batch {c.micro}, accumulation {c.accumulation}" for c in self.choices]
        if self.exact:
            return f"{was}; on {self.new} it stays the same with {' or '.join(said)}"
        said = [f"{text} makes {c.total:,}" for text, c in zip(said, self.choices, strict=True)]
        return f"{was}; on {self.new} no whole numbers keep it, the nearest: {'; '.join(said)}"


def batching(old: int, new: int, batch: Batch) -> Batching:
    """Return what keeps the global batch when `old` data-parallel ranks become `new`; all numbers are positive.

    The accumulation alone is changed where that works, else a smaller micro-batch is taken: a larger one may not fit
    in memory. Where neither works the choices are near, and not exact.
    """
    if min(old, new, batch.micro, batch.accumulation) < 1:
        raise ValueError("ranks, micro-batch and accumulation are positive")
    total = old * batch.micro * batch.accumulation
    each, left = divmod(total, new)  # samples that one new rank must take
    if left == 0:
        micro = batch.micro if each % batch.micro == 0 else _divisor(each, batch.micro)
        return Batching(old, new, batch, total, True, (Choice(micro, each // micro, total),))
    low = total // (new * batch.micro)
    near = [Choice(batch.micro, a, new * batch.micro * a) for a in (low, low + 1) if a]
    n = each if each and left * 2 <= new else each + 1
    micro = _divisor(n, batch.micro)
    other = Choice(micro, n // micro, new * n)
    if all(abs(c.total - total) > abs(other.total - total) for c in near):
        near.append(other)
    near.sort(key=lambda c: abs(c.total - total))
    return Batching(old, new, batch, total, False, tuple(near))


def _divisor(n: int, most: int) -> int:
    """Return the largest divisor of `n` that is not above `most`."""
    small = (d for i in range(1, isqrt(n) + 1) if n % i == 0 for d in (i, n // i) if d <= most)
    return max(small)


def data_size(world_size: int, meshes: Mapping[str, Mesh]) -> int | None:
    """Return how many data-parallel ranks a world has: the axes of kind data of a mesh over all ranks.

    None where no such mesh tells. Of several the largest counts: experts have fewer data-parallel ranks than the rest.
    """
    sizes = [
        prod(a.size for a in mesh.axes if a.kind == "data")
        for mesh in meshes.values()
        if mesh.size == world_size and any(a.kind == "data" for a in mesh.axes)
    ]
    return max(sizes, default=None)


def noted(annotations: Mapping[str, Any]) -> Batch | None:
    """Return the batch that a checkpoint's annotations tell, None where they tell none, or nonsense."""
    note = annotations.get(NOTE)
    if not isinstance(note, Mapping):
        return None
    micro, accumulation = note.get("micro"), note.get("accumulation")
    if type(micro) is int and type(accumulation) is int and 0 < micro <= LIMIT and 0 < accumulation <= LIMIT:
        return Batch(micro, accumulation)
    return None


def chosen(micro: int | None, accumulation: int | None, annotations: Mapping[str, Any]) -> Batch | None:
    """Return the batch that was asked for, or that the checkpoint notes; an accumulation that nothing tells is 1.

    None where nothing tells the micro-batch.
    """
    known = noted(annotations)
    if known is not None:
        return Batch(micro or known.micro, accumulation or known.accumulation)
    return None if micro is None else Batch(micro, accumulation or 1)

"""Owns the memory a load will fill: finds two tensors of the checkpoint that would land on the same bytes [Q-ALIAS]."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Taken:
    """One destination: its elements counted in its storage, and the tensor of the checkpoint that fills it."""

    stop: int
    tensor: Tensor
    target: str


class Filled:
    """The destinations of one load, by storage and first element."""

    def __init__(self) -> None:
        self._spans: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
        self._taken: dict[tuple[object, ...], list[_Taken]] = defaultdict(list)
        self._longest: dict[tuple[object, ...], int] = defaultdict(int)

    def overlap(self, t: Tensor, target: str) -> str | None:
        """Note a destination, and return the other target that fills some of its elements, if any.

        Two dtypes over one storage are compared in bytes. Destinations that interleave without touching are fine.
        """
        if not t.numel():
            return None
        key = (t.device, t.untyped_storage().data_ptr())
        start = int(t.storage_offset()) * t.element_size()
        stop = start + (_reach(t) + 1) * t.element_size()
        spans, taken = self._spans[key], self._taken[key]
        # Only spans that begin within the longest one's length before `start` can reach it.
        low = bisect_right(spans, (start - self._longest[key], -1))
        for begin, number in spans[low : bisect_right(spans, (stop - 1, len(taken)))]:
            other = taken[number]
            if other.stop > start and other.target != target and _touch(t, start, other.tensor, begin):
                return other.target
        insort(spans, (start, len(taken)))
        taken.append(_Taken(stop, t, target))
        self._longest[key] = max(self._longest[key], stop - start)
        return None


def _reach(t: Tensor) -> int:
    """Return how many elements after its first one a tensor's last one lies."""
    return int(sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))


def _touch(a: Tensor, a_start: int, b: Tensor, b_start: int) -> bool:
    """Tell whether two tensors whose byte ranges overlap share an element."""
    if a.element_size() != b.element_size() or (a.is_contiguous() and b.is_contiguous()):
        return True
    first = min(a_start, b_start) // a.element_size()
    last = max(int(t.storage_offset()) + _reach(t) for t in (a, b))
    marks = torch.zeros(last + 1 - first, dtype=torch.bool)
    marks.as_strided(a.shape, a.stride(), a.storage_offset() - first).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset() - first).any())

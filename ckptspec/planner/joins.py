"""Owns which boxes of two lists meet, in time that grows with the meetings; knows nothing of what the boxes are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptspec.format.box import Box, intersect

FEW = 64  # comparisons that cost less than sorting


def meetings(ones: Sequence[Box], others: Sequence[Box]) -> Iterator[tuple[int, int, Box]]:
    """Yield (i, j, box) for every box that `ones[i]` and `others[j]` share; all boxes are of one tensor, none empty."""
    if len(ones) * len(others) <= FEW:
        candidates: Iterator[tuple[int, int]] = ((i, j) for i in range(len(ones)) for j in range(len(others)))
    else:
        candidates = _along(_finest(ones, others), ones, others)
    for i, j in candidates:
        one, other = ones[i], others[j]
        shared = one if one == other else intersect(one, other)
        if shared is not None:
            yield i, j, shared


def _finest(ones: Sequence[Box], others: Sequence[Box]) -> int:
    """Return the dimension along which the boxes differ most: there the fewest meet by chance."""
    ndim = ones[0].ndim
    counts = [len({b.offsets[d] for b in ones}) + len({b.offsets[d] for b in others}) for d in range(ndim)]
    return max(range(ndim), key=counts.__getitem__)


def _along(axis: int, ones: Sequence[Box], others: Sequence[Box]) -> Iterator[tuple[int, int]]:
    """Yield the pairs that overlap along one dimension: a sweep over where their spans begin."""
    events = [(b.offsets[axis], 0, i) for i, b in enumerate(ones)]
    events += [(b.offsets[axis], 1, j) for j, b in enumerate(others)]
    active: tuple[list[int], list[int]] = ([], [])
    lists = (ones, others)
    for at, side, number in sorted(events):
        rest = 1 - side
        boxes = lists[rest]
        active[rest][:] = [k for k in active[rest] if boxes[k].offsets[axis] + boxes[k].sizes[axis] > at]
        for k in active[rest]:
            yield (number, k) if side == 0 else (k, number)
        active[side].append(number)

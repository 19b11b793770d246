"""Owns arithmetic on many boxes at once, columns of offsets and sizes in numpy; knows no layout, rank or name.

Whoever uses this imports numpy: `plans` does so when a plan is made, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]  # one dimension: a value a row; two: a row a box, a column a dimension
Bools = NDArray[np.bool_]


def ints(values: Any) -> Ints:
    """Return `values` as 64-bit integers."""
    found: Ints = np.asarray(values, np.int64)
    return found


def boxed(values: Any, ndim: int) -> Ints:
    """Return rows of `ndim` integers, of which there may be none."""
    return np.asarray(values, np.int64).reshape(-1, ndim) if ndim else np.zeros((len(values), 0), np.int64)


def numels(sizes: Ints) -> Ints:
    """Return the elements of each box."""
    found: Ints = sizes.prod(axis=1, dtype=np.int64)
    return found


def strides(sizes: Ints) -> Ints:
    """Return the row-major strides of each box, in elements."""
    out = np.ones_like(sizes)
    if sizes.shape[1] > 1:
        np.cumprod(sizes[:, :0:-1], axis=1, out=out[:, -2::-1])
    return out


def places(index: Ints, sizes: Ints) -> Ints:
    """Return where the element at `index` stands in the row-major count of a box of `sizes`."""
    found: Ints = (index * strides(sizes)).sum(axis=1)
    return found


def indexes(place: Ints, sizes: Ints) -> Ints:
    """Return the index of the element that stands at `place` in the row-major count of a box of `sizes`, not empty."""
    out = np.empty((len(place), sizes.shape[1]), np.int64)
    for d in reversed(range(sizes.shape[1])):
        place, out[:, d] = np.divmod(place, sizes[:, d])
    return out


def before(place: Ints, outer: Ints, offsets: Ints, sizes: Ints) -> Ints:
    """Return how many elements of the inner box (offsets, sizes) stand before `place` in the count of `outer`.

    `place` may be as large as the outer box has elements; no box is empty.
    """
    steps, inner = strides(outer), strides(sizes)
    count = np.zeros(len(place), np.int64)
    inside = np.ones(len(place), np.bool_)
    for d in range(outer.shape[1]):
        index, place = np.divmod(place, steps[:, d])
        index = index - offsets[:, d]
        count += np.where(inside, np.clip(index, 0, sizes[:, d]) * inner[:, d], 0)
        inside &= (index >= 0) & (index < sizes[:, d])
    return count if outer.shape[1] else np.minimum(place, 1)


def hulls(first: Ints, last: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """Return offsets and sizes of the least box around the elements from index `first` to `last`, row-major."""
    low, high = first.copy(), last.copy()
    apart = np.zeros(len(first), np.bool_)  # whether the two differ in a dimension before this one
    for d in range(first.shape[1]):
        low[apart, d] = 0
        high[apart, d] = np.broadcast_to(sizes, first.shape)[apart, d] - 1
        apart = apart | (first[:, d] != last[:, d])
    return low, high - low + 1


def repeated(counts: Ints) -> tuple[Ints, Ints]:
    """Return, for `counts` copies of each row, the row of each copy, and its number among the copies of that row."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)


def runs(outer: Ints, offsets: Ints, sizes: Ints, low: Ints, high: Ints, gap: int) -> tuple[Ints, Ints, Ints]:
    """Return (row, start, stop) of the runs of elements that each inner box is, in the count of its outer box.

    Only elements in [low, high) count, of which the first and the last are the box's. A gap of fewer than `gap`
    elements between two of them does not end a run, so that most boxes are one.
    """
    steps = np.broadcast_to(strides(outer), offsets.shape)
    ndim = outer.shape[1]
    length = np.ones((len(offsets), ndim + 1), np.int64)  # of the run that dimensions d and later span
    deep = np.zeros((len(offsets), ndim + 1), np.bool_)  # whether there is a wide gap in dimensions d and later
    for d in reversed(range(ndim)):
        wide = (sizes[:, d] > 1) & (steps[:, d] - length[:, d + 1] >= gap)
        deep[:, d] = deep[:, d + 1] | wide
        length[:, d] = (sizes[:, d] - 1) * steps[:, d] + length[:, d + 1]
    start = (offsets * steps).sum(axis=1)
    rows = np.arange(len(offsets))
    if deep[:, 0].any():
        # Dimensions up to the last wide gap are walked through, the rest is one run.
        walked = np.where(deep[:, :-1], sizes, 1)
        rows, step = repeated(numels(walked))
        start = start[rows] + (indexes(step, walked[rows]) * steps[rows]).sum(axis=1)
    span = length[np.arange(len(offsets)), deep.sum(axis=1)]
    start, stop = np.maximum(start, low[rows]), np.minimum(start + span[rows], high[rows])
    kept = start < stop
    return rows[kept], start[kept], stop[kept]


def order(columns: Sequence[Ints]) -> Ints:
    """Return the order of rows by the columns, the first of them foremost."""
    return np.lexsort(tuple(columns)[::-1])


def changes(columns: Sequence[Ints]) -> Ints:
    """Return the rows, of those in order by the columns, at which one of them has another value than in the row before.

    The first row is one of them.
    """
    new = np.ones(len(columns[0]), np.bool_)
    for i, column in enumerate(columns):
        other = column[1:] != column[:-1]
        new[1:] = other if i == 0 else new[1:] | other
    return np.flatnonzero(new)


def united(groups: Sequence[Ints], low: Ints, high: Ints) -> tuple[list[Ints], Ints, Ints]:
    """Return the union of the intervals [low, high) of each group: the groups' columns, then low and high, in order."""
    by = order([*groups, low])
    groups, low, high = [column[by] for column in groups], low[by], high[by]
    first = np.zeros(len(low), np.bool_)
    first[changes(groups)] = True
    if not (~first[1:] & (high[:-1] >= low[1:])).any():
        return groups, low, high  # nothing meets, as is most often so
    # Ends as small numbers, each group's above those of the groups before: so the largest so far never leaves a group.
    known, ends = np.unique(np.concatenate([low, high]), return_inverse=True)
    shift = np.cumsum(first) * (len(known) + 1)
    begin, end = ends[: len(low)] + shift, np.maximum.accumulate(ends[len(low) :] + shift)
    new = np.ones(len(low), np.bool_)
    new[1:] = begin[1:] > end[:-1]
    last = np.append(np.flatnonzero(new)[1:] - 1, len(new) - 1)
    return [column[new] for column in groups], low[new], known[(end - shift)[last]]

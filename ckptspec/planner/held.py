"""Owns the boxes that many ranks hold by a layout, as columns; what they store of them is `stored`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ckptspec.format.cutting import Chunks, Cutting, Parts, part_size
from ckptspec.format.grid import GridPlacement
from ckptspec.format.layout import BoxesLayout, Layout, Mesh, RankMap
from ckptspec.format.placement import resolve
from ckptspec.planner.columns import Bools, Ints, boxed, indexes, ints


@dataclass(frozen=True)
class Held:
    """Boxes that ranks hold, none empty: by rank, and for one rank in the order it holds them."""

    rank: Ints
    offsets: Ints
    sizes: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def hull(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The least box around all boxes: where it begins, and where it ends; there must be one."""
        stops = (self.offsets + self.sizes).max(axis=0)
        return tuple(self.offsets.min(axis=0).tolist()), tuple(stops.tolist())

    def __getitem__(self, rows: Ints | Bools | slice) -> Held:
        return Held(self.rank[rows], self.offsets[rows], self.sizes[rows])


@dataclass
class Holders:
    """One layout for tensors of one shape: which boxes of it ranks hold; the last answer is kept."""

    layout: Layout
    meshes: Mapping[str, Mesh]
    shape: tuple[int, ...]
    _last: tuple[range, Held] | None = None

    def of(self, ranks: range) -> Held:
        """Return the boxes of `ranks`, which ascend by 1; a local layout has none that other ranks could have."""
        if self._last is None or self._last[0] != ranks:
            self._last = ranks, self._of(ranks)
        return self._last[1]

    def _of(self, ranks: range) -> Held:
        place = resolve(self.layout, self.meshes)
        if isinstance(place, GridPlacement):
            return _of_grid(place, self.shape, ranks)
        if not isinstance(self.layout, BoxesLayout):
            return Held(ints([]), boxed([], len(self.shape)), boxed([], len(self.shape)))
        low, high = np.searchsorted(self._listed.rank, [ranks.start, ranks.stop])
        return self._listed[slice(low, high)]

    @cached_property
    def _listed(self) -> Held:
        assert isinstance(self.layout, BoxesLayout)
        listed = [(rank, box) for rank, box in self.layout.boxes if not box.empty]
        listed.sort(key=lambda pair: pair[0])
        columns = ([box.offsets for _, box in listed], [box.sizes for _, box in listed])
        offsets, sizes = (boxed(column, len(self.shape)) for column in columns)
        return Held(ints([rank for rank, _ in listed]), offsets, sizes)


def _of_grid(place: GridPlacement, shape: Sequence[int], ranks: range) -> Held:
    at, rank = coordinates(place.mesh, ints(ranks))
    taking = np.ones(len(rank), np.bool_)
    for axis, i in place.pins.items():
        taking &= at[:, axis] == i
    at, rank = at[taking], rank[taking]
    rules = {c.dim: (c.rule, at[:, list(c.axes)]) for c in place.cuts}
    whole = Chunks(()), at[:, :0]
    spans = [spans_at(*rules.get(dim, whole), n) for dim, n in enumerate(shape)]
    # A rank's boxes are the product of its spans, row-major: every choice of one span a dimension.
    widths = boxed([[offsets.shape[1] for offsets, _ in spans]], len(shape))
    count = prod(int(n) for n in widths[0])
    choice = indexes(np.arange(count), widths)
    offsets, sizes = (np.empty((len(rank), count, len(shape)), np.int64) for _ in range(2))
    for d, (starts, lengths) in enumerate(spans):
        offsets[:, :, d], sizes[:, :, d] = starts[:, choice[:, d]], lengths[:, choice[:, d]]
    flat = len(rank) * count, len(shape)
    held = Held(np.repeat(rank, count), offsets.reshape(flat), sizes.reshape(flat))
    return held[np.flatnonzero((held.sizes > 0).all(axis=1))]


def coordinates(mesh: Mesh, ranks: Ints) -> tuple[Ints, Ints]:
    """Return the coordinates, a column an axis, of those `ranks` that the mesh has, and these ranks [T-MESH]."""
    rest = ranks
    if isinstance(mesh.ranks, RankMap):
        rest = ranks - mesh.ranks.offset
    elif mesh.ranks is not None:
        known = np.full(max(mesh.ranks) + 2, -1, np.int64)
        known[list(mesh.ranks)] = np.arange(len(mesh.ranks))
        rest = known[np.minimum(ranks, len(known) - 1)]
    at = np.zeros((len(ranks), len(mesh.axes)), np.int64)
    there = np.ones(len(ranks), np.bool_)
    for i in mesh.order:
        at[:, i], rest = np.divmod(rest, mesh.strides[i])
        there &= (at[:, i] >= 0) & (at[:, i] < mesh.shape[i])
    there &= rest == 0
    return at[there], ranks[there]


def spans_at(rule: Cutting, at: Ints, n: int) -> tuple[Ints, Ints]:
    """Return offsets and sizes of the spans of `n` elements at each row of coordinates, a column a block [T-DIMS]."""
    if isinstance(rule, Parts):
        return _parts_at(rule, at, n)
    lengths = ints((n,) if rule.blocks is None else rule.blocks)
    starts = np.tile(np.cumsum(lengths) - lengths, (len(at), 1))
    sizes = np.tile(lengths, (len(at), 1))
    for axis, k in enumerate(rule.sizes):
        step = -(-sizes // k)
        skipped = np.minimum(at[:, axis : axis + 1] * step, sizes)
        starts += skipped
        sizes = np.minimum(step, sizes - skipped)
    return starts, sizes


def _parts_at(rule: Parts, at: Ints, n: int) -> tuple[Ints, Ints]:
    part = np.zeros((len(at), 1), np.int64)
    for axis, k in enumerate(rule.sizes):
        part = part * k + at[:, axis : axis + 1]
    if rule.bounds is not None:
        bounds = ints(rule.bounds)
        return bounds[part], bounds[part + 1] - bounds[part]
    size = part_size(n, prod(rule.sizes), rule.align)
    starts = np.minimum(part * size, n)
    return starts, np.minimum(size, n - starts)

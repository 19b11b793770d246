"""Boxes are cut, compared and walked as numpy would see them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import view

from ckptspec.format.box import (
    CHUNK_LIMIT,
    Box,
    contains,
    cut,
    cut_piece,
    intersect,
    iter_pieces,
    pieces,
    runs,
    split,
)


@st.composite
def boxes(draw: st.DrawFn, ndim: int | None = None, least: int = 0) -> Box:
    ndim = draw(st.integers(0, 4)) if ndim is None else ndim
    offsets = draw(st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim))
    sizes = draw(st.lists(st.integers(least, 6), min_size=ndim, max_size=ndim))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def nested(draw: st.DrawFn) -> tuple[Box, Box]:
    """A box and a box inside it."""
    outer = draw(boxes())
    offsets, sizes = [], []
    for offset, size in zip(outer.offsets, outer.sizes, strict=True):
        start = draw(st.integers(0, size))
        offsets.append(offset + start)
        sizes.append(draw(st.integers(0, size - start)))
    return outer, Box(tuple(offsets), tuple(sizes))


@pytest.mark.parametrize(
    ("box", "numel", "empty", "stops"),
    [
        (Box((), ()), 1, False, ()),
        (Box((2,), (0,)), 0, True, (2,)),
        (Box((1, 0), (3, 4)), 12, False, (4, 4)),
    ],
)
def test_box_counts_its_elements(box: Box, numel: int, empty: bool, stops: tuple[int, ...]) -> None:
    assert (box.numel, box.empty, box.stops, box.ndim) == (numel, empty, stops, len(stops))


def test_the_whole_of_a_shape_begins_at_zero() -> None:
    assert Box.whole([3, 0, 2]) == Box((0, 0, 0), (3, 0, 2))


@given(boxes(ndim=2), boxes(ndim=2))
def test_intersection_is_the_common_elements(a: Box, b: Box) -> None:
    canvas = np.zeros((12, 12), int)
    view(canvas, a)[...] += 1
    view(canvas, b)[...] += 1
    common = intersect(a, b)
    assert common == intersect(b, a)
    if common is None:
        assert not (canvas == 2).any()
    else:
        assert common.numel == (canvas == 2).sum()
        assert (view(canvas, common) == 2).all()
        assert contains(a, common)
        assert contains(b, common)


@given(nested())
def test_a_box_contains_what_lies_inside(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    assert contains(outer, inner)
    assert contains(inner, outer) == (inner == outer)


@given(st.integers(0, 40), st.integers(1, 9))
def test_split_is_chunks_of_the_ceiling(n: int, k: int) -> None:
    step = -(-n // k)
    naive = [list(range(n))[i * step : (i + 1) * step] for i in range(k)]
    ours = [split(n, k, i) for i in range(k)]
    assert [list(range(offset, offset + size)) for offset, size in ours] == naive


@given(boxes(), st.integers(1, 8))
def test_cut_tiles_the_box_along_its_first_long_axis(box: Box, k: int) -> None:
    parts = cut(box, k)
    assert len(parts) <= k
    assert sum(part.numel for part in parts) == box.numel
    assert not any(part.empty for part in parts)
    assert list(parts) == [cut_piece(box, k, i) for i in range(len(parts))]
    assert all(cut_piece(box, k, i) is None for i in range(len(parts), k))
    long = [axis for axis, size in enumerate(box.sizes) if size > 1]
    if long and not box.empty:
        found = [(part.offsets[long[0]] - box.offsets[long[0]], part.sizes[long[0]]) for part in parts]
        assert found == [s for s in (split(box.sizes[long[0]], k, i) for i in range(k)) if s[1]]


def test_cut_leaves_what_has_no_long_axis_to_the_first() -> None:
    assert cut(Box((), ()), 3) == (Box((), ()),)
    assert cut(Box((4, 2), (1, 1)), 3) == (Box((4, 2), (1, 1)),)


@given(boxes(), st.integers(1, 8), st.integers(1, 64))
def test_pieces_are_ordered_contiguous_and_within_the_limit(box: Box, itemsize: int, limit: int) -> None:
    found = pieces(box, itemsize, limit)
    place = 0
    for piece in found:
        assert list(runs(box, piece, itemsize)) == [(place, piece.numel * itemsize)]
        assert piece.numel * itemsize <= limit or piece.numel == 1
        place += piece.numel * itemsize
    assert place == box.numel * itemsize


def test_pieces_hold_as_many_rows_as_fit() -> None:
    assert [p.sizes for p in pieces(Box.whole((5, 10)), 4, 80)] == [(2, 10), (2, 10), (1, 10)]
    assert [p.sizes for p in pieces(Box.whole((1, 2, 10)), 4, 24)] == [(1, 1, 6), (1, 1, 4)] * 2
    assert [p.sizes for p in pieces(Box.whole((2**20, 2**9)), 4)] == [(2**19, 2**9)] * 2
    assert pieces(Box.whole((3, 0)), 4) == ()
    assert CHUNK_LIMIT == 2**30


def test_pieces_of_an_absurd_shape_are_lazy() -> None:
    first = next(iter_pieces(Box.whole((2**20, 2**40)), 1))
    assert first == Box((0, 0), (1, CHUNK_LIMIT))


@given(nested(), st.integers(1, 5))
def test_runs_are_the_bytes_numpy_selects(pair: tuple[Box, Box], itemsize: int) -> None:
    outer, inner = pair
    places = np.arange(outer.numel * itemsize).reshape(*outer.sizes, itemsize)
    moved = Box(tuple(i - o for i, o in zip(inner.offsets, outer.offsets, strict=True)), inner.sizes)
    found = list(runs(outer, inner, itemsize))
    assert [b for start, nbytes in found for b in range(start, start + nbytes)] == view(places, moved).ravel().tolist()
    assert all(start + nbytes < following for (start, nbytes), (following, _) in pairwise(found)), "runs are maximal"

"""A view is a run of elements seen as a box: what it tiles, how few pieces it makes, and the hull of a part of it."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.format.box import Box
from ckptspec.planner.views import View

sizes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn, shape: st.SearchStrategy[tuple[int, ...]] = sizes) -> View:
    found = draw(shape)
    offsets = tuple(draw(st.integers(0, 9)) for _ in found)
    return View(draw(st.integers(0, 50)), Box(offsets, found))


def numbered(view: View) -> dict[tuple[int, ...], int]:
    """Which element of the one-dimensional tensor each index of the box is, counted one by one."""
    places = np.ndindex(*view.box.sizes)
    indices = (tuple(int(i) + o for i, o in zip(at, view.box.offsets, strict=True)) for at in places)
    return {index: view.start + n for n, index in enumerate(indices)}


@given(views(), st.integers(-5, 1400), st.integers(-5, 1400))
def test_pieces_tile_a_run_in_order_and_are_few(view: View, start: int, stop: int) -> None:
    whole = numbered(view)
    found = list(view.within(start, stop))
    elements = [e for piece in found for e in range(piece.start, piece.stop)]
    assert elements == [e for e in whole.values() if start <= e < stop]
    for piece in found:
        assert not piece.box.empty
        assert numbered(piece).items() <= whole.items()  # a run, and the same elements as in the whole
    assert len(found) <= max(1, 2 * view.box.ndim - 1)


@given(views(), st.data())
def test_cuts_at_any_places_put_together_are_the_whole(view: View, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(view.start, view.stop), max_size=4).map(sorted))
    bounds = [view.start, *places, view.stop]
    pieces = [p for a, b in pairwise(bounds) for p in view.within(a, b)]
    assert [e for p in pieces for e in numbered(p).values()] == list(range(view.start, view.stop))


@given(views(), st.data())
def test_the_hull_is_from_the_first_element_of_a_part_to_its_last(view: View, data: st.DataObject) -> None:
    start = [data.draw(st.integers(0, n - 1)) for n in view.box.sizes]
    part = tuple(data.draw(st.integers(1, n - a)) for n, a in zip(view.box.sizes, start, strict=True))
    box = Box(tuple(a + o for a, o in zip(start, view.box.offsets, strict=True)), part)
    own = [e for index, e in numbered(view).items() if _inside(box, index)]
    assert view.hull(box) == (min(own), max(own) + 1)


def _inside(box: Box, index: tuple[int, ...]) -> bool:
    return all(o <= i < s for o, i, s in zip(box.offsets, index, box.stops, strict=True))


@given(views(), st.data())
def test_a_view_without_elements_has_no_pieces(view: View, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, view.box.ndim))
    offsets, sizes = view.box.offsets, view.box.sizes
    empty = View(view.start, Box((*offsets[:at], 2, *offsets[at:]), (*sizes[:at], 0, *sizes[at:])))
    assert empty.stop == empty.start
    for start, stop in ((0, 100), (view.start, view.start), (view.start, 100), (0, view.start), (view.start + 1, 100)):
        assert list(empty.within(start, stop)) == []


def test_one_element_whatever_its_dimensions() -> None:
    for box in (Box((), ()), Box((3,), (1,)), Box((1, 2, 0), (1, 1, 1))):
        view = View(7, box)
        assert (view.stop, view.hull(box)) == (8, (7, 8))
        assert list(view.within(0, 100)) == list(view.within(7, 8)) == [view]
        for start, stop in ((0, 7), (8, 100), (8, 7), (7, 7)):
            assert list(view.within(start, stop)) == []


def test_all_of_a_view_is_the_view_itself() -> None:
    view = View(10, Box((2, 3), (4, 5)))
    assert list(view.within(10, 30)) == list(view.within(-1, 99)) == [view]


@pytest.mark.parametrize("ndim", range(1, 9))
def test_a_ragged_run_makes_as_many_pieces_as_it_has_to(ndim: int) -> None:
    view = View(0, Box.whole((3,) * ndim))
    found = list(view.within(1, prod(view.box.sizes) - 1))
    assert len(found) == 2 * ndim - 1
    assert sum(p.box.numel for p in found) == prod(view.box.sizes) - 2


def test_a_run_of_a_tensor_beyond_all_memory_is_cut_in_no_time() -> None:
    view = View(5, Box((0, 0, 0), (1 << 40, 1 << 20, 3)))
    found = list(view.within(6, view.stop - 1))
    assert len(found) <= 5
    assert sum(p.box.numel for p in found) == view.box.numel - 2

"""What a schema cannot say of meshes and layouts is found, with its rule; what fits has no fault."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import World, flat_cases, mesh_cases, worlds

from ckptspec.format.box import Box, cut
from ckptspec.format.faults import Fault, fit_faults, layout_faults, mesh_faults
from ckptspec.format.layout import Axis, BoxesLayout, FlatLayout, Layout, LocalLayout, Mesh, MeshLayout, RankMap
from ckptspec.format.placement import resolve
from ckptspec.format.tiling import overlap, tiled

GRID = (Axis("dp", 2), Axis("tp", 3))
MESHES = {"main": Mesh(GRID)}


@given(worlds())
def test_a_mesh_with_a_rank_for_each_coordinate_has_no_fault(world: World) -> None:
    assert list(mesh_faults(world.mesh, world.size)) == []
    assert any(mesh_faults(world.mesh, int(world.grid.max())))


@pytest.mark.parametrize(
    ("mesh", "part"),
    [
        (Mesh((Axis("dp", 2), Axis("dp", 3))), "'dp' is there twice"),
        (Mesh((Axis("dp", 2**50), Axis("tp", 2**50))), "the world 8"),
        (Mesh(GRID, (0, 1, 2, 3, 4)), "5 ranks are listed for a mesh of 6"),
        (Mesh(GRID, (0, 1, 2, 3, 4, 8)), "rank 8 is outside"),
        (Mesh(GRID, (0, 1, 2, 3, 4, -1)), "rank -1 is outside"),
        (Mesh(GRID, (0, 1, 2, 3, 4, 4)), "rank 4 is listed twice"),
        (Mesh(GRID, RankMap(0, (3,))), "1 strides are given for 2 axes"),
        (Mesh(GRID, RankMap(0, (2, 1))), "stride 2 of axis 'dp' is not above 2"),
        (Mesh(GRID, RankMap(0, (0, 1))), "stride 0 of axis 'dp'"),
        (Mesh(GRID, RankMap(6, (-3, 1))), "stride -3 of axis 'dp'"),
        (Mesh(GRID, RankMap(3, (3, 1))), "ranks from 3 to 8"),
        (Mesh(GRID, RankMap(-1, (3, 1))), "ranks from -1 to 4"),
    ],
)
def test_a_mesh_that_does_not_fit_its_world_is_found(mesh: Mesh, part: str) -> None:
    faults = list(mesh_faults(mesh, 8))
    assert [fault.rule for fault in faults] == ["T-MESH"]
    assert part in str(faults[0])


@given(st.one_of(mesh_cases(), flat_cases()))
def test_a_layout_that_fits_has_no_fault(case: tuple[World, MeshLayout | FlatLayout, tuple[int, ...]]) -> None:
    world, layout, shape = case
    assert list(layout_faults(layout, world.meshes, shape, world.size)) == []
    listed = tuple((rank, box) for box, ranks in resolve(layout, world.meshes).parts(shape) for rank in ranks)
    assert list(layout_faults(BoxesLayout(listed), {}, shape, world.size)) == []


def listed(*boxes: tuple[int, tuple[int, ...], tuple[int, ...]]) -> BoxesLayout:
    return BoxesLayout(tuple((rank, Box(offsets, sizes)) for rank, offsets, sizes in boxes))


@pytest.mark.parametrize(
    ("layout", "rule", "part"),
    [
        (MeshLayout("other"), "T-LAYOUT", "mesh 'other' does not exist"),
        (MeshLayout("main", (("pp",),)), "T-LAYOUT", "no axis 'pp'"),
        (MeshLayout("main", (), {"pp": 0}), "T-LAYOUT", "no axis 'pp'"),
        (FlatLayout("main", ("pp",)), "T-LAYOUT", "no axis 'pp'"),
        (MeshLayout("main", (), {"tp": 3}), "T-LAYOUT", "'tp' is pinned at 3, its size is 3"),
        (MeshLayout("main", (("tp",), ("tp",))), "T-DIMS", "cuts twice along axis 'tp'"),
        (MeshLayout("main", (("tp", "tp"),)), "T-DIMS", "cuts twice along axis 'tp'"),
        (MeshLayout("main", (("tp",),), {"tp": 0}), "T-DIMS", "both pins and cuts"),
        (FlatLayout("main", ("tp",), {"tp": 0}), "T-FLAT", "both pins and cuts"),
        (MeshLayout("main", (("dp",), (), ())), "T-DIMS", "3 dimensions, the tensor 2"),
        (MeshLayout("main", (("dp",),), blocks={0: (3, 2)}), "T-DIMS", "add up to 5, its size is 6"),
        (MeshLayout("main", ((), ("dp",)), blocks={0: (3, 3)}), "T-DIMS", "no axis cuts it"),
        (MeshLayout("main", (("dp",),), blocks={1: (3, 1)}), "T-DIMS", "no axis cuts it"),
        (MeshLayout("main", (("dp",),), blocks={0: (6,) + (0,) * 65_536}), "T-DIMS", "more than 65536"),
        (listed((0, (0, 0), (6, 4)), (6, (0, 0), (6, 4))), "T-BOXES", "rank 6 is outside the world"),
        (listed((0, (0, 0), (6, 4)), (0, (0, 0), (6, 4))), "T-BOXES", "twice"),
        (listed((0, (0,), (6,))), "T-BOXES", "1 dimensions, the tensor 2"),
        (listed((0, (0, 0), (6, 5))), "T-BOXES", "not inside shape [6, 4]"),
        (listed((0, (0, 0), (6, 3))), "T-BOXES", "at least 6 of 24 elements uncovered"),
        (listed(), "T-BOXES", "at least 24 of 24"),
        (listed((0, (0, 0), (4, 4)), (1, (3, 0), (3, 4))), "T-BOXES", "overlap without being equal"),
        (listed((0, (0, 0), (4, 4)), (1, (3, 0), (2, 4))), "T-BOXES", "box at [0, 0] of [4, 4] and box at [3, 0]"),
    ],
)
def test_a_layout_that_does_not_fit_is_found(layout: Layout, rule: str, part: str) -> None:
    shape = (24,) if isinstance(layout, FlatLayout) else (6, 4)
    faults = list(layout_faults(layout, MESHES, shape, 6))
    assert [fault.rule for fault in faults] == [rule]
    assert part in faults[0].message


@pytest.mark.parametrize(
    ("bounds", "part"),
    [
        ((0, 3), "2 bounds are given for 2 parts, which have 3"),
        ((1, 3, 7), "begin at 1"),
        ((0, 8, 7), "fall from 8 to 7"),
        ((0, 3, 6), "end at 6, the tensor at 7"),
    ],
)
def test_bounds_that_do_not_add_up_are_found(bounds: tuple[int, ...], part: str) -> None:
    faults = list(layout_faults(FlatLayout("main", ("dp",), bounds=bounds), MESHES, (7,)))
    assert "T-FLAT" in {fault.rule for fault in faults}
    assert part in faults[0].message


def test_a_flat_layout_is_for_one_dimension() -> None:
    fault = Fault("T-FLAT", "a flat layout is for one dimension, the tensor has 2")
    assert list(fit_faults(FlatLayout("main", ("dp",)), (6, 4))) == [fault]


def test_a_layout_is_asked_about_itself_once_and_about_each_shape() -> None:
    layout = MeshLayout("main", (("dp",), ("tp",)))
    assert list(layout_faults(layout, MESHES)) == []
    assert list(fit_faults(layout, (4, 4))) == []
    assert list(fit_faults(layout, (4,))) == [Fault("T-DIMS", "the layout has 2 dimensions, the tensor 1")]
    assert list(layout_faults(LocalLayout(), {}, (4,))) == []


small = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 4), st.integers(1, 4))


@given(st.lists(small, max_size=6), st.booleans())
def test_tiling_agrees_with_painting(drawn: list[tuple[int, int, int, int]], fill: bool) -> None:
    boxes = [Box((a, b), (min(c, 4 - a), min(d, 4 - b))) for a, b, c, d in drawn]
    painted = np.zeros((4, 4), int)
    for box in boxes:
        painted[box.offsets[0] : box.stops[0], box.offsets[1] : box.stops[1]] += 1
    if fill:
        gaps = [Box((int(i), int(j)), (1, 1)) for i, j in np.argwhere(painted == 0)]
        boxes, painted = boxes + gaps, np.maximum(painted, 1)
    assert tiled(Box.whole((4, 4)), boxes) == bool((painted == 1).all())
    assert (overlap(boxes) is not None) == bool((painted > 1).any())


def test_tiling_is_linear_and_the_search_for_an_overlap_bounded() -> None:
    columns = cut(Box.whole((2, 20_000, 1)), 2)[0]  # one row; its columns all overlap along the first dimension
    boxes = [Box((0, i, 0), (2, 1, 1)) for i in range(columns.sizes[1])]
    assert tiled(Box.whole((2, 20_000, 1)), boxes)
    assert not tiled(Box.whole((2, 20_000, 1)), boxes[:-1])
    assert overlap([*boxes, Box((1, 19_999, 0), (1, 1, 1))]) is None

"""Meshes resolve ranks and coordinates by arithmetic; meshes and layouts survive their JSON forms."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import World, flat_cases, mesh_cases, worlds

from ckptspec.errors import FormatError
from ckptspec.format.box import Box
from ckptspec.format.layout import (
    Axis,
    BoxesLayout,
    FlatLayout,
    LocalLayout,
    Mesh,
    MeshLayout,
    RankMap,
    coordinate,
    layout_document,
    layout_from_document,
    members,
    mesh_document,
    mesh_from_document,
    rank_at,
    ranks_where,
)


@given(worlds())
def test_ranks_and_coordinates_are_those_of_the_grid(world: World) -> None:
    mesh, grid = world.mesh, world.grid
    assert (mesh.shape, mesh.size) == (grid.shape, grid.size)
    assert list(members(mesh)) == sorted(grid.ravel().tolist())
    for coord, rank in np.ndenumerate(grid):
        assert rank_at(mesh, coord) == rank
    for rank in range(-3, world.size + 3):
        places = [tuple(map(int, place)) for place in np.argwhere(grid == rank)]
        assert coordinate(mesh, rank) == (places[0] if places else None)


@given(worlds(), st.data())
def test_ranks_where_fixes_some_axes(world: World, data: st.DataObject) -> None:
    fixed = {i: data.draw(st.integers(0, n - 1)) for i, n in enumerate(world.grid.shape) if data.draw(st.booleans())}
    chosen = tuple(fixed.get(i, slice(None)) for i in range(world.grid.ndim))
    assert list(ranks_where(world.mesh, fixed)) == sorted(np.ravel(world.grid[chosen]).tolist())


def test_axes_are_found_by_name_or_refused() -> None:
    mesh = Mesh((Axis("dp", 2, "data"), Axis("tp", 4, "tensor")))
    assert mesh.axis("tp") == Axis("tp", 4, "tensor")
    assert mesh.index("tp") == 1
    with pytest.raises(FormatError, match="pp") as caught:
        mesh.index("pp")
    assert caught.value.rule == "T-LAYOUT"


def test_a_large_mesh_costs_nothing_until_its_ranks_are_listed() -> None:
    mesh = Mesh((Axis("dp", 2**40), Axis("tp", 8)))
    assert coordinate(mesh, 8 * 12345 + 3) == (12345, 3)
    assert rank_at(mesh, (2**40 - 1, 7)) == mesh.size - 1
    assert members(mesh)[-1] == mesh.size - 1


@given(worlds())
def test_meshes_survive_json(world: World) -> None:
    assert mesh_from_document(json.loads(json.dumps(mesh_document(world.mesh)))) == world.mesh


@given(st.one_of(mesh_cases(), flat_cases()))
def test_mesh_and_flat_layouts_survive_json(case: tuple[World, MeshLayout | FlatLayout, tuple[int, ...]]) -> None:
    assert layout_from_document(json.loads(json.dumps(layout_document(case[1])))) == case[1]


@pytest.mark.parametrize(
    ("layout", "document"),
    [
        (MeshLayout("main", (("dp",), ())), {"kind": "mesh", "mesh": "main", "at": {}, "dims": [["dp"], []]}),
        (
            MeshLayout("main", (("tp",),), {"pp": 1}, {0: (6, 2)}),
            {"kind": "mesh", "mesh": "main", "at": {"pp": 1}, "dims": [["tp"]], "blocks": {"0": [6, 2]}},
        ),
        (
            FlatLayout("main", ("dp",), {"tp": 0}, align=2),
            {"kind": "flat", "mesh": "main", "at": {"tp": 0}, "axes": ["dp"], "align": 2},
        ),
        (
            FlatLayout("main", ("dp",), bounds=(0, 3, 7)),
            {"kind": "flat", "mesh": "main", "at": {}, "axes": ["dp"], "bounds": [0, 3, 7]},
        ),
        (
            BoxesLayout(((0, Box((0, 0), (4, 8))), (1, Box((4, 0), (4, 8))))),
            {"kind": "boxes", "boxes": [[0, [0, 0], [4, 8]], [1, [4, 0], [4, 8]]]},
        ),
        (LocalLayout(), {"kind": "local"}),
    ],
)
def test_the_json_forms_are_those_of_the_standard(layout: object, document: dict[str, object]) -> None:
    assert layout_document(layout) == document
    assert layout_from_document(document) == layout


def test_the_json_form_of_a_mesh_names_its_ranks_only_when_they_are_out_of_order() -> None:
    axes = (Axis("dp", 2, "data"), Axis("tp", 2))
    written = [{"name": "dp", "size": 2, "kind": "data"}, {"name": "tp", "size": 2, "kind": "other"}]
    assert mesh_document(Mesh(axes)) == {"axes": written}
    assert mesh_document(Mesh(axes, (3, 2, 1, 0))) == {"axes": written, "ranks": [3, 2, 1, 0]}
    computed = mesh_document(Mesh(axes, RankMap(4, (1, 2))))
    assert computed == {"axes": written, "ranks": {"offset": 4, "strides": [1, 2]}}


def test_an_unknown_kind_of_layout_is_refused() -> None:
    with pytest.raises(FormatError) as caught:
        layout_from_document({"kind": "ring"})
    assert caught.value.rule == "M-LAYOUT"

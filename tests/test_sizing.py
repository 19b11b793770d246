"""A checkpoint's own layouts on other sizes: what follows, what stays, what is refused and which sizes are named."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import World, flat_cases, mesh_cases, view

from ckptspec.check.targets import judge
from ckptspec.errors import PlanError
from ckptspec.format.box import Box
from ckptspec.format.faults import layout_faults, mesh_faults
from ckptspec.format.layout import (
    KINDS,
    Axis,
    BoxesLayout,
    FlatLayout,
    Layout,
    LocalLayout,
    Mesh,
    MeshLayout,
    RankMap,
    members,
)
from ckptspec.format.manifest import FlatGroup, Manifest, Member, TensorEntry
from ckptspec.format.placement import boxes_at
from ckptspec.format.target import Target, of_manifest
from ckptspec.planner.destination import Destination, destination
from ckptspec.planner.sizing import of_axes, of_world, unit

DATA, TENSOR, STAGE = "data", "tensor", "pipeline"


def mesh(ranks: tuple[int, ...] | RankMap | None = None, **axes: tuple[int, str]) -> Mesh:
    return Mesh(tuple(Axis(name, size, kind) for name, (size, kind) in axes.items()), ranks)


def checkpoint(world: int, meshes: Mapping[str, Mesh], layouts: Mapping[str, Layout], **shapes: Any) -> Manifest:
    """A manifest with one tensor for each layout that `shapes` names (a shape, None for a local one)."""
    tensors = {name: TensorEntry("float32", shape, name) for name, shape in shapes.items()}
    return Manifest("0" * 32, 7, world, meshes=meshes, layouts=layouts, tensors=tensors)


def sound(m: Manifest, target: Target) -> Target:
    """Check that a target fits itself, leaves nothing open, and has every element of every tensor."""
    assert None not in vars(target).values()
    meshes, layouts = target.meshes or {}, target.layouts or {}
    for grid in meshes.values():
        assert list(mesh_faults(grid, target.world_size)) == []
    for layout in layouts.values():
        assert list(layout_faults(layout, meshes, None, target.world_size)) == []
    assert "R-TARGET" not in {f.code for f in judge(m, target).findings}
    assert (target.tensors, target.objects, target.aliases) == (m.tensors, m.objects, m.aliases)
    for entry in m.tensors.values():
        if entry.shape is not None:
            assert (held(layouts[entry.layout], meshes, entry.shape, target.world_size) > 0).all()
    return target


def held(layout: Layout, meshes: Mapping[str, Mesh], shape: tuple[int, ...], world: int) -> np.ndarray:
    """How many ranks of the world hold each element."""
    times = np.zeros(shape, int)
    for rank in range(world):
        for box in boxes_at(layout, meshes, shape, rank):
            view(times, box)[...] += 1
    return times


def sizes(target: Target, name: str) -> dict[str, int]:
    return {axis.name: axis.size for axis in (target.meshes or {})[name].axes}


def refused(ask: Any, *words: str) -> PlanError:
    with pytest.raises(PlanError) as caught:
        ask()
    assert caught.value.rule == "R-TARGET"
    for word in words:
        assert word in str(caught.value)
    return caught.value


# ---- any world -------------------------------------------------------------------------------------------------------


@given(st.one_of(mesh_cases(), flat_cases()), st.data())
def test_any_layout_on_any_world_is_sound_or_refused_with_sizes_that_work(case: Any, data: st.DataObject) -> None:
    world: World = case[0]
    kinds = data.draw(st.lists(st.sampled_from([DATA, DATA, TENSOR, STAGE]), min_size=4, max_size=4))
    axes = tuple(replace(a, kind=k) for a, k in zip(world.mesh.axes, kinds, strict=False))
    m = checkpoint(world.size, {"main": replace(world.mesh, axes=axes)}, {"x": case[1]}, x=case[2])
    size = data.draw(st.integers(1, 2 * world.size))
    assert all(k in KINDS for k in kinds)
    try:
        target = sound(m, of_world(m, size))
    except PlanError as e:
        named = [int(n) for n in re.findall(r"\d+", str(e.expected).partition(",")[0])]
        assert (e.rule, named != [], size in named) == ("R-TARGET", True, False)  # noqa: PT017 - it need not be raised
        for n in named:
            sound(m, of_world(m, n))
        return
    assert target.world_size == size
    if size == world.size:
        assert target == of_manifest(m)
    if world.mesh.size == world.size:
        resized = sizes(target, "main")
        assert prod(resized.values()) == size
        assert all(resized[a.name] == a.size for a in axes if a.kind != DATA)
        assert size % unit(m) == 0


@given(mesh_cases(), st.data())
def test_any_axes_at_any_size_are_sound_or_refused(case: Any, data: st.DataObject) -> None:
    world: World = case[0]
    m = checkpoint(world.size, world.meshes, {"x": case[1]}, x=case[2])
    names = data.draw(st.sets(st.sampled_from([a.name for a in world.mesh.axes]), min_size=1))
    wanted = {name: data.draw(st.integers(1, 4)) for name in sorted(names)}
    same = all(world.mesh.axis(name).size == n for name, n in wanted.items())
    if world.mesh.size != world.size and not same:
        refused(lambda: of_axes(m, wanted))
        return
    target = sound(m, of_axes(m, wanted))
    assert sizes(target, "main") == {a.name: wanted.get(a.name, a.size) for a in world.mesh.axes}
    assert target.world_size == (world.size if same else prod(sizes(target, "main").values()))


# ---- one kind after the other ----------------------------------------------------------------------------------------


def test_a_plain_data_mesh_takes_any_number() -> None:
    layouts = {"rows": MeshLayout("main", (("dp",),)), "copies": MeshLayout("main")}
    m = checkpoint(4, {"main": mesh(dp=(4, DATA))}, layouts, rows=(7, 5), copies=(3,))
    assert unit(m) == 1
    for world in (1, 2, 3, 5, 8, 11, 64):
        target = sound(m, of_world(m, world))
        assert sizes(target, "main") == {"dp": world}
        assert target == of_axes(m, {"dp": world})


def test_beside_tensor_parallelism_only_the_data_axis_changes() -> None:
    m = checkpoint(8, {"main": mesh(dp=(4, DATA), tp=(2, TENSOR))}, {"x": MeshLayout("main", (("tp", "dp"),))}, x=(9,))
    assert sizes(sound(m, of_world(m, 6)), "main") == {"dp": 3, "tp": 2}
    assert sizes(sound(m, of_world(m, 2)), "main") == {"dp": 1, "tp": 2}
    for world, near in ((7, "6 or 8"), (1, "2"), (9, "8 or 10")):
        refused(
            lambda world=world: of_world(m, world), f"expected {near}, the nearest", f"found {world} ranks", "--mesh"
        )
    assert sizes(sound(m, of_axes(m, {"tp": 4})), "main") == {"dp": 4, "tp": 4}
    assert of_axes(m, {"tp": 1, "dp": 3}).world_size == 3
    assert sizes(sound(m, of_axes(m, {"dp": 2, "tp": 4})), "main") == {"dp": 2, "tp": 4}


def test_of_two_data_axes_the_outer_one_follows_and_where_it_cannot_the_inner() -> None:
    """HSDP: replicas of groups that share out the parameters."""
    grid = mesh(dp_replicate=(2, DATA), dp_shard=(4, DATA))
    m = checkpoint(8, {"main": grid}, {"x": MeshLayout("main", (("dp_shard",),))}, x=(10,))
    for world, expected in ((4, (1, 4)), (12, (3, 4)), (2, (2, 1)), (6, (2, 3)), (3, (1, 3)), (1, (1, 1)), (7, (1, 7))):
        target = sound(m, of_world(m, world))
        assert tuple(sizes(target, "main").values()) == expected
    assert sizes(of_axes(m, {"dp_replicate": 1}), "main") == {"dp_replicate": 1, "dp_shard": 4}


def test_all_meshes_over_all_ranks_follow_together() -> None:
    """A mesh of torch's beside the plain world, and one that counts its ranks in another order."""
    meshes = {
        "world": mesh(rank=(8, DATA)),
        "dp=4,tp=2": mesh(dp=(4, DATA), tp=(2, TENSOR)),
        "ep": mesh((0, 4, 1, 5, 2, 6, 3, 7), edp=(2, DATA), ep=(4, "expert")),
    }
    layouts = {
        "zero": FlatLayout("world", ("rank",), align=4),
        "x": MeshLayout("dp=4,tp=2", (("dp",), ("tp",))),
        "e": MeshLayout("ep", (("ep",),)),
    }
    m = checkpoint(8, meshes, layouts, zero=(35,), x=(9, 4), e=(8,))
    assert unit(m) == 4
    target = sound(m, of_world(m, 12))
    assert {n: sizes(target, n) for n in meshes} == {
        "world": {"rank": 12},
        "dp=4,tp=2": {"dp": 6, "tp": 2},
        "ep": {"edp": 3, "ep": 4},
    }
    refused(lambda: of_world(m, 6), "4 or 8", "multiples of 4", "'ep'")
    target = sound(m, of_axes(m, {"dp": 6}))
    assert target == of_world(m, 12)
    refused(lambda: of_axes(m, {"dp": 3}), "6 ranks")
    refused(lambda: of_axes(m, {"dp": 3, "ep": 5}), "6, 10", "one world size")
    target = sound(m, of_axes(m, {"dp": 2, "tp": 4}))
    assert target.world_size == 8
    assert (target.meshes or {})["ep"] == meshes["ep"]


def test_a_mesh_over_all_ranks_without_a_data_axis_stays_as_it_is() -> None:
    m = checkpoint(
        4, {"main": mesh(dp=(4, DATA)), "tp": mesh(tp=(4, TENSOR))}, {"x": MeshLayout("tp", (("tp",),))}, x=(8,)
    )
    for world in (2, 5, 6, 8):
        error = refused(lambda world=world: of_world(m, world), "'tp'", "kind data")
        assert "4 ranks" in str(error.expected)
    assert sizes(sound(m, of_axes(m, {"dp": 8, "tp": 8})), "tp") == {"tp": 8}
    refused(lambda: of_axes(m, {"dp": 8}), "'tp'")


def test_pins_are_kept_inside_their_axis() -> None:
    grid = mesh(pp=(4, STAGE), dp=(2, DATA))
    layouts = {f"s{i}": MeshLayout("main", (("dp",),), {"pp": i}) for i in range(4)}
    m = checkpoint(8, {"main": grid}, layouts, **{f"s{i}": (5, 2) for i in range(4)})
    target = sound(m, of_axes(m, {"pp": 2, "dp": 3}))
    assert [(target.layouts or {})[f"s{i}"].at for i in range(4)] == [{"pp": 0}, {"pp": 1}, {"pp": 0}, {"pp": 1}]
    target = sound(m, of_world(m, 12))
    assert target.layouts == m.layouts
    assert sizes(target, "main") == {"pp": 4, "dp": 3}


def test_meshes_over_some_ranks_keep_those_that_are_left() -> None:
    meshes = {
        "main": mesh(dp=(8, DATA)),
        "odd": mesh(RankMap(1, (2,)), ep=(4, "expert")),
        "low": mesh(cp=(2, "context")),
        "listed": mesh((6, 2, 7), dp2=(3, DATA)),
    }
    layouts: dict[str, Layout] = {n: MeshLayout(n, ((a.name,),)) for n, g in meshes.items() for a in g.axes}
    layouts["pinned"] = MeshLayout("odd", at={"ep": 3})
    layouts["cut"] = FlatLayout("odd", ("ep",), bounds=(0, 1, 1, 8, 9))
    m = checkpoint(8, meshes, layouts, main=(8,), odd=(9,), low=(3,), listed=(5,), pinned=(2,), cut=(9,))
    target = sound(m, of_world(m, 16))
    assert all((target.meshes or {})[n] == meshes[n] for n in ("odd", "low", "listed"))
    assert (target.layouts or {})["cut"] == layouts["cut"]
    target = sound(m, of_world(m, 4))
    found = target.meshes or {}
    assert [tuple(members(found[n])) for n in ("odd", "low", "listed")] == [(1, 3), (0, 1), (2, 3)]
    assert (target.layouts or {})["pinned"].at == {"ep": 1}
    assert (target.layouts or {})["cut"] == FlatLayout("odd", ("ep",), {}, 1)
    sound(m, of_world(m, 1))
    two = replace(
        m, meshes={**meshes, "odd": mesh((4, 5, 6, 7), dp=(2, DATA), ep=(2, "expert"))}, layouts={}, tensors={}
    )
    refused(lambda: of_world(two, 6), "'odd'", "at least 8 ranks")
    sound(two, of_world(two, 9))


def test_an_axis_of_a_mesh_over_some_ranks_is_not_resized_in_silence() -> None:
    meshes = {"main": mesh(dp=(4, DATA)), "some": mesh((1, 3), ep=(2, "expert"))}
    m = checkpoint(4, meshes, {"x": MeshLayout("some", (("ep",),))}, x=(4,))
    for wanted in ({"ep": 4}, {"ep": 1}, {"ep": 4, "dp": 8}):
        refused(lambda wanted=wanted: of_axes(m, wanted), "'some'")
    assert of_axes(m, {"ep": 2}) == of_manifest(m)
    both = replace(m, meshes={**meshes, "half": mesh((1, 3), dp=(2, DATA))})
    target = sound(both, of_axes(both, {"dp": 8}))  # the mesh over all ranks follows, and the other keeps its ranks
    assert (target.meshes or {})["half"] == both.meshes["half"]


def test_flat_parts_are_cut_anew_with_their_alignment_and_without_their_bounds() -> None:
    layouts = {
        "aligned": FlatLayout("main", ("dp",), {"tp": 1}, align=8),
        "bound": FlatLayout("main", ("dp",), bounds=(0, 3, 3, 11, 11)),
        "joined": FlatLayout("main", ("dp", "tp"), align=2),
    }
    m = checkpoint(8, {"main": mesh(dp=(4, DATA), tp=(2, TENSOR))}, layouts, aligned=(30,), bound=(11,), joined=(9,))
    target = sound(m, of_world(m, 6))
    assert target.layouts == {
        "aligned": layouts["aligned"],
        "bound": FlatLayout("main", ("dp",)),
        "joined": layouts["joined"],
    }
    assert of_world(m, 8).layouts == layouts


def test_listed_boxes_go_to_the_ranks_that_are_left() -> None:
    top, left, right = Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((2, 2), (2, 2))
    layout = BoxesLayout(((0, top), (2, top), (1, left), (3, right)))
    m = checkpoint(4, {}, {"x": layout, "local": LocalLayout()}, x=(4, 4), local=None)
    assert sound(m, of_world(m, 9)).layouts == m.layouts
    two = sound(m, of_world(m, 2))
    assert (two.layouts or {})["x"] == BoxesLayout(((0, top), (1, left), (1, right)))
    sound(m, of_world(m, 1))
    assert unit(m) == 1


def test_what_is_no_size_is_refused() -> None:
    m = checkpoint(4, {"main": mesh(dp=(4, DATA))}, {"x": MeshLayout("main", (("dp",),))}, x=(4,))
    for world in (0, -4):
        refused(lambda world=world: of_world(m, world), "1 or more")
        refused(lambda world=world: of_axes(m, {"dp": world}), "1 or more")
    refused(lambda: of_axes(m, {"tp": 2}), "one of dp", "tp")
    refused(lambda: of_axes(replace(m, meshes={}), {"tp": 2}), "no mesh")
    assert of_axes(m, {}) == of_manifest(m)


# ---- a destination ---------------------------------------------------------------------------------------------------


def group_checkpoint() -> Manifest:
    layouts = {"x": MeshLayout("main", (("dp",),)), "flat": FlatLayout("main", ("dp",)), "local": LocalLayout()}
    m = checkpoint(4, {"main": mesh(dp=(4, DATA))}, layouts, x=(7, 5), flat=(35,), local=None)
    groups = {"zero": FlatGroup(35, (Member("x", 0, (7, 5)),), {"exp_avg": "flat"})}
    tensors = {**m.tensors, "x": TensorEntry("float32", (7, 5), "x", "parameter", {"org.note": 1})}
    return replace(m, tensors=tensors, flat_groups=groups, aliases={"y": "x"}, objects={"step": "same", "rng": "rank"})


def test_a_target_that_says_a_world_size_alone_is_the_checkpoint_on_that() -> None:
    m = group_checkpoint()
    d = destination(m, Target(3))
    assert (d.world_size, d.same_world) == (3, False)
    assert d.meshes == of_world(m, 3).meshes
    assert (d.tensors, d.objects, d.flat_groups, d.aliases) == (m.tensors, m.objects, m.flat_groups, m.aliases)
    assert list(d.private()) == ["local", "rng"]
    assert destination(m, of_manifest(m)).same_world
    assert d.routes.find("optimizer/state/x/exp_avg") is not None


def test_a_target_with_tensors_of_its_own_has_those_and_the_roles_of_the_checkpoint() -> None:
    m = group_checkpoint()
    entry = TensorEntry("float32", (7, 5), "cols")
    wanted = Target(
        2, {"grid": mesh(tp=(2, TENSOR))}, {"cols": MeshLayout("grid", ((), ("tp",)))}, {"x": entry, "z": entry}
    )
    d = destination(m, wanted)
    assert d.tensors == {"x": replace(entry, role="parameter", annotations={"org.note": 1}), "z": entry}
    assert (set(d.meshes), set(d.layouts)) == ({"grid"}, {"cols"})
    assert (d.flat_groups, d.aliases, d.objects) == ({}, {"y": "x"}, m.objects)


def every_element(d: Destination) -> None:
    for entry in d.tensors.values():
        if entry.shape is not None:
            assert (held(d.layouts[entry.layout], d.meshes, entry.shape, d.world_size) > 0).all()


def test_a_target_with_meshes_alone_keeps_the_layouts_on_them() -> None:
    m = group_checkpoint()
    d = destination(m, Target(6, {"main": mesh(dp=(6, DATA))}))
    every_element(d)
    assert d.layouts == {n: x for n, x in m.layouts.items() if n in ("x", "flat", "local")}


@pytest.mark.parametrize(
    "target",
    [
        Target(2, {"main": mesh(dp=(4, DATA))}),
        Target(2, {}),
        Target(4, {"main": mesh(tp=(4, TENSOR))}),
        Target(4, {"main": mesh((0, 0, 1, 2), dp=(4, DATA))}),
        Target(4, None, {"x": MeshLayout("main", (("dp",), ("dp",)))}),
        Target(4, None, {"x": MeshLayout("other", (("dp",),))}),
        Target(4, None, {"x": MeshLayout("main", ((), (), ("dp",)))}),
        Target(4, None, {"flat": FlatLayout("main", ("dp",), bounds=(0, 1, 2, 3, 4))}),
        Target(4, None, {"flat": FlatLayout("main", ("dp",), {"dp": 4})}),
        Target(3, None, {"x": BoxesLayout(((0, Box((0, 0), (7, 5))), (3, Box((0, 0), (7, 5)))))}),
        Target(4, None, {"x": BoxesLayout(((0, Box((0, 0), (6, 5))),))}),
        Target(4, {}, {}, {"x": TensorEntry("float32", (7, 5), "gone")}),
        Target(4, {}, {"x": MeshLayout("gone")}, {"x": TensorEntry("float32", (7, 5), "x")}),
    ],
)
def test_a_target_at_odds_with_itself_or_with_what_it_keeps_is_refused(target: Target) -> None:
    refused(lambda: destination(group_checkpoint(), target))

"""Any layout to any other, through destination, routes, plan and executor, against slices of the logical arrays."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import make
import numpy as np
import pytest
from fixtures import build
from flats import Arrays, Form, cut, forms, in_order
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logical import BLOCK, POOL, bits, check, fetched, held, placed, write

from ckptspec.engine.fetch import Opened, fetch
from ckptspec.errors import IntegrityError, PlanError
from ckptspec.format import manifest as manifests
from ckptspec.format.box import Box
from ckptspec.format.layout import Axis, FlatLayout, Layout, LocalLayout, Mesh, MeshLayout
from ckptspec.format.manifest import Manifest, Member, TensorEntry
from ckptspec.format.target import Target, from_document
from ckptspec.planner.destination import Destination, destination
from ckptspec.planner.transfers import Need

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
WORLDS = (1, 2, 3, 4, 5, 8)
SAVE_ID = "0123456789abcdef" * 2
SHAPES = ((7, 5), (1,), (3,), (0, 4), (1025,), (257, 64), (), (2, 3, 4), (3, 2, 2, 5), (1, 1, 6))
DTYPES = ("bfloat16", "float32", "int64", "uint8", "complex128", "float8_e4m3fn", "bool")


def manifest(world: int, meshes: Any, layouts: Any, tensors: Any, groups: Any, copies: int = 1) -> Manifest:
    producer = {"name": "tests", "version": "1"}
    return Manifest(
        SAVE_ID,
        7,
        world,
        run_id="oracle",
        producer=producer,
        copies=copies,
        block_size=BLOCK,
        meshes=meshes,
        layouts=layouts,
        tensors=tensors,
        flat_groups=groups,
    )


def target(d: Manifest) -> Target:
    """What a manifest asks for, by way of the target's document."""
    return from_document(Target(d.world_size, d.meshes, d.layouts, d.tensors, {}, d.flat_groups, {}).document())


# ---- random states ---------------------------------------------------------------------------------------------------


@st.composite
def states(draw: st.DrawFn) -> tuple[Form, Form]:
    """One state in two forms: parameters by name or flat, and optimizer state by name or flat, for each form anew."""
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5))
    names = {f"model/layers.{i}.w": shape for i, shape in enumerate(shapes)}
    kind = draw(st.sampled_from(DTYPES))
    params = {name: bits(shape, kind, i) for i, (name, shape) in enumerate(names.items())}
    moments = {
        kind: {name: bits(shape, "float32", 100 * k + i) for i, (name, shape) in enumerate(names.items())}
        for k, kind in enumerate(draw(st.sampled_from([("exp_avg",), ("exp_avg", "master")])), 1)
    }
    both = []
    for _ in range(2):
        one = draw(forms(names, {"params": params}, draw(st.sampled_from(["fsdp", "model/flat"]))))
        two = draw(forms(names, moments, draw(st.sampled_from(["optimizer", "opt"]))))
        both.append(Form(one.tensors | two.tensors, one.groups | two.groups, one.arrays | two.arrays))
    return both[0], both[1]


def any_to_any(folder: Path, data: st.DataObject) -> None:
    have, want = data.draw(states())
    world, other = data.draw(st.sampled_from(WORLDS)), data.draw(st.sampled_from(WORLDS))
    copies = data.draw(st.integers(1, 2))
    m = manifest(world, *data.draw(placed(world, have.tensors, have.groups)), have.groups, copies)
    m = write(folder, m, have.arrays)
    meshes, layouts, tensors = data.draw(placed(other, want.tensors, want.groups))
    d = destination(m, target(manifest(other, meshes, layouts, tensors, want.groups)))
    near = data.draw(st.booleans())
    check(Opened(str(folder), m), d, want.arrays, lambda rank: rank if near and rank < world else None)
    assert list(d.routes.leftover()) == []


@settings(max_examples=50, suppress_health_check=SLOW)
@given(st.data())
def test_any_layout_of_any_form_is_loaded_as_any_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    any_to_any(tmp_path_factory.mktemp("any"), data)


@pytest.mark.long
@settings(max_examples=int(os.environ.get("ORACLE_EXAMPLES", "1500")), derandomize=False, suppress_health_check=SLOW)
@given(st.data())
def test_any_layout_of_any_form_is_loaded_as_any_other_for_long(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    any_to_any(tmp_path_factory.mktemp("any"), data)


# ---- every pair of world sizes ---------------------------------------------------------------------------------------

PARAMETERS = {"a": (7, 5), "b": (1,), "c": (3,), "none": (0, 4), "d": (1025,), "wte": (2057, 64)}
MOMENTS = ("exp_avg", "exp_avg_sq", "master")
FORMS = ("rows", "columns", "flat", "flats")


@cache
def logical(rows: int) -> tuple[Arrays, dict[str, Arrays]]:
    """bf16 parameters with Adam moments and masters, all bits random; `wte` has so many rows."""
    shapes = {f"model/{n}": (rows, *s[1:]) if n == "wte" else s for n, s in PARAMETERS.items()}
    params = {name: bits(shape, "bfloat16", i) for i, (name, shape) in enumerate(shapes.items())}
    moments = {
        kind: {name: bits(shape, "float32", 10 * k + i) for i, (name, shape) in enumerate(shapes.items())}
        for k, kind in enumerate(MOMENTS, 1)
    }
    return params, moments


def acceptance(world: int, how: str, rows: int) -> tuple[Manifest, Arrays]:
    """The state on one data axis: by rows or columns, or with the optimizer in one flat group, or one a parameter."""
    params, moments = logical(rows)
    form = Form()
    for name, array in params.items():
        form.add(name, array)
    if how in ("flat", "flats"):
        members = [Member(name, 0, array.shape) for name, array in params.items()]
        padded = [in_order(*members[::-1], 3)] if how == "flat" else [in_order(m) for m in members]
        for i, several in enumerate(padded):
            form.add_group(f"optimizer/{how}.{i}", several, moments)
    else:
        for kind in MOMENTS:
            for name, array in moments[kind].items():
                form.add(f"optimizer/state/{name[6:]}/{kind}", array)
    layouts: dict[str, Layout] = {
        "rows": MeshLayout("main", (("dp",),)),
        "columns": MeshLayout("main", ((), ("dp",))),
        "flat": FlatLayout("main", ("dp",), align=4),
    }
    named = "columns" if how == "columns" else "rows"
    tensors = {}
    for name, t in form.tensors.items():
        whole = named if len(t.shape or ()) > 1 else "rows"
        tensors[name] = replace(t, layout="flat" if t.layout == "flat" else whole)
    return manifest(world, {"main": Mesh((Axis("dp", world, "data"),))}, layouts, tensors, form.groups), form.arrays


def every_pair(folder: Path, world: int, rows: int, worlds: tuple[int, ...] = WORLDS) -> None:
    for how in FORMS:
        m, arrays = acceptance(world, how, rows)
        m = write(folder / how, m, arrays)
        opened = Opened(str(folder / how), m)
        for other in worlds:
            for form in FORMS:
                wanted, expected = acceptance(other, form, rows)
                check(opened, destination(m, target(wanted)), expected)


@pytest.mark.parametrize("world", WORLDS)
def test_parameters_moments_and_masters_on_every_other_number_of_ranks(world: int, tmp_path: Path) -> None:
    every_pair(tmp_path, world, 2057)


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_a_large_embedding_on_every_other_number_of_ranks(world: int, tmp_path: Path) -> None:
    every_pair(tmp_path, world, 50_257)


@pytest.mark.parametrize("world", WORLDS)
def test_a_world_size_alone_is_enough(world: int, tmp_path: Path) -> None:
    for how in FORMS:
        m, arrays = acceptance(4, how, 257)
        m = write(tmp_path / how, m, arrays)
        check(Opened(str(tmp_path / how), m), destination(m, Target(world)), arrays)


# ---- what a fetch must not get wrong ---------------------------------------------------------------------------------


def local_checkpoint(folder: Path) -> Opened:
    """Two ranks, each with a tensor of its own, and one that both have."""
    tensors = {"rng": TensorEntry("uint8", None, "local"), "x": TensorEntry("float32", (3,), "whole")}
    layouts = {"local": LocalLayout(), "whole": MeshLayout("main")}
    m = manifest(2, {"main": Mesh((Axis("dp", 2, "data"),))}, layouts, tensors, {})
    files = build.build(build.Plan(m, {"rng": {0: (5,), 1: (5,)}}))
    make.write(folder, files)
    return Opened(str(folder), manifests.parse(files[manifests.NAME]))


def test_a_local_tensor_is_that_of_the_rank_it_is_asked_of_whoever_asks(tmp_path: Path) -> None:
    opened = local_checkpoint(tmp_path / "local")
    for prefer in (None, 0, 1):
        outs = [np.zeros(5, np.uint8) for _ in range(2)]
        wants = [(Need("rng", Box((0,), (5,)), rank), held(out, (0,))) for rank, out in enumerate(outs)]
        fetch(opened, wants, POOL, prefer=prefer)
        assert [out.tobytes() for out in outs] == [build.content("rng", 5, rank) for rank in range(2)]


def test_one_need_may_have_several_destinations(tmp_path: Path) -> None:
    opened = local_checkpoint(tmp_path / "local")
    need = Need("x", Box((1,), (2,)))
    outs = [np.zeros(2, "float32") for _ in range(3)]
    assert fetch(opened, [(need, held(out, (1,))) for out in outs], POOL) == 24
    assert [out.tobytes() for out in outs] == [build.content("x", 12)[4:]] * 3


def test_rows_of_a_flat_tensor_open_no_more_shards_than_hold_them(tmp_path: Path) -> None:
    m, arrays = acceptance(8, "flats", 257)
    m = write(tmp_path, m, arrays)
    wanted, expected = acceptance(8, "rows", 257)
    name = "optimizer/state/wte/master"
    d = destination(m, target(replace(wanted, tensors={name: wanted.tensors[name]})))
    for rank in range(8):
        opened = Opened(str(tmp_path), m)
        (boxes,) = fetched(opened, d, rank).values()
        assert len(opened.documents) <= 2
        assert all(array.tobytes() == cut(expected[name], box).tobytes() for box, array in boxes.items())


@pytest.mark.parametrize("how", FORMS)
def test_with_two_copies_any_one_shard_may_be_gone(how: str, tmp_path: Path) -> None:
    """Of what the ranks replicate nothing is lost; of what one alone held, an error says so."""
    m, arrays = acceptance(4, how, 257)
    grid = Mesh((Axis("hsdp", 2, "data"), Axis("dp", 2, "data")))
    m = write(tmp_path, replace(m, meshes={"main": grid}, copies=2), arrays)
    for gone in range(4):
        path = tmp_path / f"rank-{gone:05d}.shard"
        data = path.read_bytes()
        path.unlink()
        check(Opened(str(tmp_path), m), destination(m, Target(4)), arrays, lambda rank: rank)
        path.write_bytes(data[: len(data) // 2])
        check(Opened(str(tmp_path), m), destination(m, Target(2)), arrays)
        path.write_bytes(data)
    for rank in (0, 2):
        (tmp_path / f"rank-{rank:05d}.shard").unlink()
    with pytest.raises((IntegrityError, PlanError)):
        fetched(Opened(str(tmp_path), m), _on(m, 1), 0)


def _on(m: Manifest, world: int) -> Destination:
    return destination(m, Target(world))

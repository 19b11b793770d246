"""A wanted tensor is found in whatever form the checkpoint has it, all of it or not at all, and nothing is guessed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from flats import KINDS, Form, cut, delivered, forms, in_order, laid_out, named, parameters, values
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.errors import PlanError
from ckptspec.format.box import Box
from ckptspec.format.layout import LocalLayout
from ckptspec.format.manifest import Member, TensorEntry
from ckptspec.planner.renames import Renames, parse, renames
from ckptspec.planner.routes import Route, Routes
from ckptspec.planner.views import View

W, B = "model/w", "model/b"
SHAPES = {W: (4, 6), B: (5,)}


def spread(*shape: int, base: int = 1) -> np.ndarray:
    return (base + np.arange(int(np.prod(shape, dtype=int)))).reshape(shape).astype("float32")


def flat_form(*members: Member | int, kinds: tuple[str, ...] = ("exp_avg",), group: str = "optimizer/zero") -> Form:
    form = Form()
    shapes = {m.name: m.of_shape or m.shape for m in members if isinstance(m, Member) and m.name is not None}
    form.add_group(group, in_order(*members), {kind: values(shapes, kind) for kind in kinds})
    return form


def found(routes: Routes, name: str) -> Route:
    route = routes.find(name)
    assert route is not None
    return route


def whole(route: Route, form: Form) -> np.ndarray:
    return delivered(route, form.arrays, Box.whole(route.shape))


# ---- any form to any form --------------------------------------------------------------------------------------------


def parts_of(data: st.DataObject, shape: tuple[int, ...]) -> Box:
    start = [data.draw(st.integers(0, n)) for n in shape]
    sizes = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True))
    return Box(tuple(start), sizes)


@given(st.data())
def test_any_form_is_found_in_any_other(data: st.DataObject) -> None:
    shapes = parameters(data.draw(st.integers(1, 9)))
    kinds = data.draw(st.sampled_from([KINDS, ("params",), ("params", "exp_avg")]))
    have, want = (
        data.draw(forms(shapes, kinds)),
        data.draw(forms(shapes, kinds, data.draw(st.sampled_from(["optimizer", "opt"])))),
    )
    routes = Routes(have.manifest(), want.groups)
    for name in data.draw(st.permutations(list(want.tensors))):
        route = found(routes, name)
        expected = want.arrays[name]
        assert (route.dtype, route.shape) == (str(expected.dtype), expected.shape)
        assert set(route.sources) <= set(have.tensors)
        box = parts_of(data, expected.shape)
        assert np.array_equal(delivered(route, have.arrays, box), cut(expected, box))
        assert np.array_equal(whole(route, have), expected)
    assert list(routes.leftover()) == []


@given(st.data())
def test_what_nobody_asked_for_is_said_to_the_last_member(data: st.DataObject) -> None:
    shapes = parameters(data.draw(st.integers(1, 6)))
    have = data.draw(forms(shapes))
    everything = [(kind, name) for kind in KINDS for name in shapes]
    asked = data.draw(st.sets(st.sampled_from(everything)))
    routes = Routes(have.manifest())
    for kind, name in asked:
        found(routes, named("optimizer", name, kind))
    expected = {named("optimizer", name, kind) for kind, name in everything if (kind, name) not in asked}
    if have.groups:
        expected = set()
        for group in have.groups.values():
            members = {m.name for m in group.members if m.name is not None}
            for kind, flat in group.tensors.items():
                left = {name for name in members if (kind, name) not in asked}
                expected |= {flat} if left == members else {f"{flat}: {name}" for name in left}
    assert sorted(routes.leftover()) == sorted(expected)


# ---- one form, one place ---------------------------------------------------------------------------------------------


def test_a_name_that_both_have_is_the_tensor_of_that_name() -> None:
    form = Form()
    form.add(W, spread(4, 6))
    routes = Routes(form.manifest())
    route = found(routes, W)
    assert (route.shape, route.sources, route.lands) == ((4, 6), (W,), ())
    assert [a.need.box for a in route.asks(Box((1, 2), (2, 3)))] == [Box((1, 2), (2, 3))]
    assert list(route.asks(Box((1, 2), (0, 3)))) == []
    assert routes.find("model/other") is None


def test_optimizer_state_by_name_comes_out_of_a_flat_tensor() -> None:
    form = flat_form(Member(B, 0, (5,)), 3, Member(W, 0, (4, 6)), 1, kinds=KINDS)
    routes = Routes(form.manifest())
    for kind in KINDS:
        assert np.array_equal(whole(found(routes, f"optimizer/state/w/{kind}"), form), values(SHAPES, kind)[W] + 1000)
    (ask,) = found(routes, "optimizer/state/w/master").asks(Box((1, 0), (2, 6)))
    assert (ask.need.name, ask.need.view, ask.land) == ("optimizer/zero/master", View(8, Box.whole((4, 6))), None)
    assert list(routes.leftover()) == [f"optimizer/zero/{kind}: {B}" for kind in KINDS]


def test_a_flat_tensor_is_put_together_from_tensors_by_name_and_its_padding_is_zero() -> None:
    form, want = Form(), Form()
    state = values(SHAPES, "exp_avg")
    for name, array in state.items():
        form.add(f"optimizer/state/{name[6:]}/exp_avg", array)
    want.add_group("zero", in_order(2, Member(B, 0, (5,)), 3, Member(W, 0, (4, 6)), 1), {"exp_avg": state})
    route = found(Routes(form.manifest(), want.groups), "zero/exp_avg")
    assert np.array_equal(whole(route, form), want.arrays["zero/exp_avg"])
    assert list(route.padding(0, 35)) == [(0, 2), (7, 10), (34, 35)]
    assert list(route.padding(1, 8)) == [(1, 2), (7, 8)]
    assert list(route.padding(3, 6)) == list(route.padding(12, 30)) == []
    assert list(route.padding(34, 40)) == [(34, 40)]
    assert list(found(Routes(form.manifest()), "optimizer/state/w/exp_avg").padding(0, 24)) == []


def test_columns_of_one_parameter_in_two_groups_and_one_that_both_hold() -> None:
    """ZeRO under tensor parallelism, read as state by name, and in groups of another number."""
    norm = "model/norm"
    shapes = {W: (4, 6), norm: (3,)}
    state = values(shapes, "master")
    form = Form()
    for tp, (at, n) in enumerate(((0, 4), (4, 2))):
        members = in_order(Member(W, 0, (4, n), (4, 6), (0, at)), 1, Member(norm, 0, (3,)))
        form.add_group(f"optimizer/zero.tp{tp}", members, {"master": state})
    routes = Routes(form.manifest())
    for name in shapes:
        assert np.array_equal(whole(found(routes, f"optimizer/state/{name[6:]}/master"), form), state[name])
    assert list(routes.leftover()) == []
    (near,) = found(routes, "optimizer/state/norm/master").asks(Box((0,), (3,)))
    assert near.need.name == "optimizer/zero.tp0/master"
    want = Form()
    for tp, (at, n) in enumerate(((0, 1), (1, 3))):
        members = in_order(Member(norm, 0, (3,)), Member(W, 0, (n, 6), (4, 6), (at, 0)))
        want.add_group(f"optimizer/zero.tp{tp}", members, {"master": state})
    routes = Routes(form.manifest(), want.groups)
    for name in want.tensors:
        assert np.array_equal(whole(found(routes, name), form), want.arrays[name])
    second = found(routes, "optimizer/zero.tp1/master")
    sources = [a.need.name for a in second.asks(Box((0,), (3,)))]
    assert sources == ["optimizer/zero.tp1/master"]  # of two that hold the same, the one with the like name


def test_what_two_groups_hold_is_used_with_one_of_them_and_what_one_holds_is_not() -> None:
    norm = "model/norm"
    state = values({W: (4, 6), norm: (3,)}, "exp_avg")
    form = Form()
    for tp in range(2):
        form.add_group(f"zero.tp{tp}/norm", in_order(Member(norm, 0, (3,))), {"exp_avg": state})
        half = Member(W, 0, (2, 6), (4, 6), (2 * tp, 0))
        form.add_group(f"zero.tp{tp}/w", in_order(half), {"exp_avg": state})
    one = {name: group for name, group in form.groups.items() if name.startswith("zero.tp0")}
    routes = Routes(form.manifest(), one)
    for name in one:
        assert found(routes, f"{name}/exp_avg").lands == ()
    assert list(routes.leftover()) == ["zero.tp1/w/exp_avg"]
    want = Form()
    want.add_group("zero.tp0/w", in_order(1, Member(W, 0, (2, 6), (4, 6), (0, 0))), {"exp_avg": state})
    routes = Routes(form.manifest(), want.groups)
    assert np.array_equal(whole(found(routes, "zero.tp0/w/exp_avg"), form), want.arrays["zero.tp0/w/exp_avg"])
    assert list(routes.leftover()) == ["zero.tp0/norm/exp_avg", "zero.tp1/norm/exp_avg", "zero.tp1/w/exp_avg"]


def test_a_group_of_another_order_under_the_same_name_is_not_read_as_it_is() -> None:
    members = (Member(B, 0, (5,)), Member(W, 0, (4, 6)))
    form = flat_form(*members)
    same = Routes(form.manifest(), form.groups)
    assert found(same, "optimizer/zero/exp_avg").lands == ()
    want = flat_form(*reversed(members))
    want.arrays["optimizer/zero/exp_avg"] = laid_out(
        in_order(*reversed(members)), values({B: (5,), W: (4, 6)}, "exp_avg")
    )
    route = found(Routes(form.manifest(), want.groups), "optimizer/zero/exp_avg")
    assert np.array_equal(whole(route, form), want.arrays["optimizer/zero/exp_avg"])


def test_where_nobody_knows_what_lies_in_a_group_it_is_read_as_it_is() -> None:
    form = flat_form(Member(B, 0, (5,)))
    for have, want in ((), form.groups["optimizer/zero"].members), (form.groups["optimizer/zero"].members, ()):
        groups = {"optimizer/zero": replace(form.groups["optimizer/zero"], members=have)}
        manifest = replace(form.manifest(), flat_groups=groups)
        wanted = {"optimizer/zero": replace(form.groups["optimizer/zero"], members=want)}
        route = found(Routes(manifest, wanted), "optimizer/zero/exp_avg")
        assert (route.sources, route.lands) == (("optimizer/zero/exp_avg",), ())
    assert Routes(manifest, {}).find("optimizer/state/b/exp_avg") is not None
    assert Routes(replace(manifest, flat_groups={}), wanted).find("optimizer/zero/other") is None


def test_a_flat_parameter_is_the_parameters_and_the_reverse() -> None:
    state = values(SHAPES, "params")
    flat, plain = Form(), Form()
    for kind in ("flat_param", "params", "parameter"):
        flat = Form()
        flat.add_group("fsdp", in_order(Member(W, 0, (4, 6)), Member(B, 0, (5,))), {kind: state})
        routes = Routes(flat.manifest())
        assert np.array_equal(whole(found(routes, W), flat), state[W])
        assert np.array_equal(whole(found(routes, B), flat), state[B])
        assert list(routes.leftover()) == []
    for name, array in state.items():
        plain.add(name, array)
    back = Routes(plain.manifest(), flat.groups)
    assert np.array_equal(whole(found(back, "fsdp/parameter"), plain), flat.arrays["fsdp/parameter"])
    assert list(back.leftover()) == []


def test_a_group_for_each_parameter_even_for_one_without_elements() -> None:
    shapes = {W: (4, 6), "model/none": (0, 4), "model/scale": ()}
    state = values(shapes, "exp_avg")
    flat, plain = Form(), Form()
    for name, shape in shapes.items():
        flat.add_group(f"zero/{name[6:]}", in_order(Member(name, 0, shape)), {"exp_avg": state})
        plain.add(f"optimizer/state/{name[6:]}/exp_avg", state[name])
    routes = Routes(flat.manifest())
    for name, array in plain.arrays.items():
        route = found(routes, name)
        assert route.shape == array.shape
        assert np.array_equal(whole(route, flat), array)
    assert list(routes.leftover()) == []
    back = Routes(plain.manifest(), flat.groups)
    for name, array in flat.arrays.items():
        route = found(back, name)
        assert (route.dtype, route.shape) == ("float32", array.shape)
        assert np.array_equal(whole(route, plain), array)
    assert list(back.leftover()) == []


def test_a_flat_tensor_with_only_members_without_elements_has_padding_all_the_same() -> None:
    form = Form()
    form.add("optimizer/state/none/exp_avg", spread(0, 4))
    want = flat_form(Member("model/none", 0, (0, 4)), 3, group="zero")
    route = found(Routes(form.manifest(), want.groups), "zero/exp_avg")
    assert list(route.padding(0, 3)) == [(0, 3)]
    assert list(route.asks(Box((0,), (3,)))) == []


def test_aliases_stand_for_the_tensor_they_point_at() -> None:
    form = Form()
    form.add(W, spread(4, 6))
    form.add("optimizer/state/w/exp_avg", spread(4, 6, base=500))
    manifest = form.manifest(aliases={"model/head": W})
    routes = Routes(manifest)
    assert found(routes, "model/head").sources == (W,)
    assert list(routes.leftover()) == ["optimizer/state/w/exp_avg"]
    want = flat_form(Member("model/head", 0, (4, 6)), kinds=("params",), group="fsdp")
    assert np.array_equal(whole(found(Routes(manifest, want.groups), "fsdp/params"), form), spread(4, 6).reshape(-1))
    routes = Routes(manifest)
    found(routes, W)
    assert "model/head" in [*routes.leftover()]  # a second place of the state that this one lacks


def test_state_of_a_tied_parameter_is_found_under_either_name() -> None:
    form = flat_form(Member(W, 0, (4, 6)))
    form.add(W, spread(4, 6))
    routes = Routes(form.manifest(aliases={"model/head.weight": W}))
    expected = values({W: (4, 6)}, "exp_avg")[W]
    assert np.array_equal(whole(found(routes, "optimizer/state/head.weight/exp_avg"), form), expected)
    want = flat_form(Member("model/head.weight", 0, (4, 6)), group="zero")
    route = found(Routes(form.manifest(aliases={"model/head.weight": W}), want.groups), "zero/exp_avg")
    assert np.array_equal(whole(route, form), expected.reshape(-1))


def test_a_local_tensor_is_asked_for_by_rank() -> None:
    manifest = replace(
        Form().manifest(), tensors={"rng": TensorEntry("uint8", None, "local")}, layouts={"local": LocalLayout()}
    )
    route = found(Routes(manifest), "rng")
    (ask,) = route.asks(Box((0, 0), (3, 4)), 2)
    assert (ask.need.name, ask.need.box, ask.need.rank) == ("rng", Box((0, 0), (3, 4)), 2)
    assert list(route.asks(Box((0,), (0,)), 2)) == []


# ---- nothing is guessed ----------------------------------------------------------------------------------------------


def refused(routes: Routes, name: str) -> PlanError:
    with pytest.raises(PlanError) as caught:
        routes.find(name)
    assert caught.value.rule == "R-NAME"
    assert caught.value.where.tensor == name
    return caught.value


def test_two_parameters_that_could_be_meant_are_an_error_that_names_both() -> None:
    form = flat_form(Member("a/net.w", 0, (2,)), Member("b/net.w", 0, (2,)))
    error = refused(Routes(form.manifest()), "optimizer/state/net.w/exp_avg")
    assert "a/net.w" in str(error)
    assert "b/net.w" in str(error)
    assert "map" in str(error.advice)
    two = Form()
    for place in ("x", "y"):
        two.add(f"{place}/state/w/exp_avg", spread(4, 6))
    want = flat_form(Member(W, 0, (4, 6)), group="zero")
    error = refused(Routes(two.manifest(), want.groups), "zero/exp_avg")
    assert "'x/state/w/exp_avg', 'y/state/w/exp_avg'" in str(error)


def test_of_two_optimizers_each_is_asked_for_its_own() -> None:
    form, want = Form(), Form()
    for place, base in (("gen", 1), ("disc", 500)):
        form.add_group(
            f"{place}/adam/zero",
            in_order(Member(f"{place}/w", 0, (3,))),
            {"exp_avg": {f"{place}/w": spread(3, base=base)}},
        )
        want.add(f"{place}/adam/state/w/exp_avg", spread(3, base=base))
    routes = Routes(form.manifest())
    for name, array in want.arrays.items():
        assert np.array_equal(whole(found(routes, name), form), array)
    back = Routes(want.manifest(), form.groups)
    for name, array in form.arrays.items():
        assert np.array_equal(whole(found(back, name), want), array)


@pytest.mark.parametrize("known", ["tensor", "member"])
def test_the_state_of_one_parameter_is_never_that_of_another_with_a_like_end(known: str) -> None:
    """`weight` and `enc.weight` are two parameters; only one has state."""
    short, long = "model/weight", "model/enc.weight"
    form = flat_form(Member(long, 0, (3,)))
    if known == "tensor":
        form.add(short, spread(3))
    else:
        form.add_group("fsdp", in_order(Member(short, 0, (3,))), {"params": {short: spread(3)}})
    assert Routes(form.manifest()).find("optimizer/state/weight/exp_avg") is None
    assert Routes(form.manifest()).find("optimizer/state/enc.weight/exp_avg") is not None
    plain, want = Form(), flat_form(Member(long, 0, (3,)), group="zero")
    plain.add("optimizer/state/weight/exp_avg", spread(3))
    plain.add(short, spread(3))
    assert Routes(plain.manifest(), want.groups).find("zero/exp_avg") is None
    plain.add("optimizer/state/enc.weight/exp_avg", spread(3, base=9))
    assert np.array_equal(whole(found(Routes(plain.manifest(), want.groups), "zero/exp_avg"), plain), spread(3, base=9))


@pytest.mark.parametrize(
    ("parameter", "path"),
    [
        ("model/layers.0.w", "layers.0.w"),
        ("model/layers/0/w", "layers.0.w"),
        ("model/layers/0/w", "w"),
        ("model/module.layers.0.w", "layers.0.w"),
        ("model/layers.0.w", "model/layers.0.w"),
        ("nets/gen/layers.0.w", "nets/gen.layers.0.w"),
        ("model/a~1b.w", "a/b.w"),
        ("model/x~1w", "x/w"),
        ("model/0", "0"),
        ("m/" + ".".join("abcdefghijklmnop"), ".".join("abcdefghijklmnop")),
        ("m/" + ".".join("abcdefghijklmnop"), ".".join("cdefghijklmnop")),
    ],
)
def test_an_optimizer_may_call_a_parameter_by_any_end_of_its_name(parameter: str, path: str) -> None:
    token = path.replace("~", "~0").replace("/", "~1")
    flat = flat_form(Member(parameter, 0, (3, 2)))
    state = values({parameter: (3, 2)}, "exp_avg")[parameter]
    assert np.array_equal(whole(found(Routes(flat.manifest()), f"opt/state/{token}/exp_avg"), flat), state)
    plain = Form()
    plain.add(f"opt/state/{token}/exp_avg", state)
    back = Routes(plain.manifest(), flat.groups)
    assert np.array_equal(whole(found(back, "optimizer/zero/exp_avg"), plain), state.reshape(-1))


def test_a_number_is_no_end_of_a_name() -> None:
    """`optimizer.state_dict()` numbers its parameters; `params.0` need not be the first of them."""
    flat = flat_form(Member("model/params.0", 0, (3,)))
    assert Routes(flat.manifest()).find("optimizer/state/0/exp_avg") is None
    plain = Form()
    plain.add("optimizer/state/0/exp_avg", spread(3))
    assert Routes(plain.manifest(), flat.groups).find("optimizer/zero/exp_avg") is None


def test_a_tensor_of_which_groups_hold_only_a_part_is_an_error() -> None:
    half = flat_form(Member(W, 0, (2, 6), (4, 6), (0, 0)))
    assert "12 of 24 elements" in str(refused(Routes(half.manifest()), "optimizer/state/w/exp_avg"))
    twice = flat_form(Member(W, 0, (2, 6), (4, 6), (0, 0)), Member(W, 0, (3, 6), (4, 6), (1, 0)))
    assert "overlap" in str(refused(Routes(twice.manifest()), "optimizer/state/w/exp_avg"))


def test_pieces_that_do_not_go_together_are_an_error() -> None:
    form = flat_form(Member(W, 0, (2, 6), (4, 6), (0, 0)), group="zero.tp0")
    other = flat_form(Member(W, 0, (2, 6), (5, 6), (2, 0)), group="zero.tp1")
    form.tensors |= other.tensors
    form.groups |= other.groups
    assert "shapes" in str(refused(Routes(form.manifest()), "optimizer/state/w/exp_avg"))
    form.groups["zero.tp1"] = replace(form.groups["zero.tp0"], tensors=other.groups["zero.tp1"].tensors)
    form.tensors["zero.tp1/exp_avg"] = TensorEntry("bfloat16", (12,), "flat")
    assert "dtypes" in str(refused(Routes(form.manifest()), "optimizer/state/w/exp_avg"))


def test_a_flat_tensor_of_which_only_some_members_are_stored_is_an_error_that_names_the_rest() -> None:
    form = Form()
    form.add("optimizer/state/w/exp_avg", spread(4, 6))
    want = flat_form(Member(W, 0, (4, 6)), *(Member(f"model/m{i}", 0, (2,)) for i in range(8)), group="zero")
    error = refused(Routes(form.manifest(), want.groups), "zero/exp_avg")
    assert "model/m0" in str(error)
    assert "and 3 more" in str(error)
    assert Routes(form.manifest(), want.groups).find("zero/other") is None
    other = flat_form(Member(B, 0, (5,)), group="zero")
    assert Routes(form.manifest(), other.groups).find("zero/exp_avg") is None


def test_a_member_stored_in_another_shape_is_an_error_even_where_it_has_no_elements() -> None:
    for stored, wanted in (((4, 6), (6, 4)), ((0, 5), (0, 4)), ((4, 6), (24,))):
        form = Form()
        form.add("optimizer/state/w/exp_avg", spread(*stored))
        want = flat_form(Member(W, 0, wanted), group="zero")
        assert str(list(stored)) in str(refused(Routes(form.manifest(), want.groups), "zero/exp_avg"))


def test_members_stored_in_two_dtypes_are_an_error() -> None:
    form = Form()
    form.add("optimizer/state/w/exp_avg", spread(4, 6))
    form.add("optimizer/state/b/exp_avg", spread(5).astype("float64"))
    want = flat_form(Member(W, 0, (4, 6)), Member(B, 0, (5,)), group="zero")
    assert "float64" in str(refused(Routes(form.manifest(), want.groups), "zero/exp_avg"))


# ---- an explicit map -------------------------------------------------------------------------------------------------


def test_a_map_names_tensors_members_and_state() -> None:
    state = values({"model/old": (4, 6)}, "exp_avg")
    plain = Form()
    plain.add("model/old", spread(4, 6))
    plain.add("optimizer/state/old/exp_avg", state["model/old"])
    names = renames({"model/new": "model/old", "opt/state/new/*": "optimizer/state/old/*"})
    routes = Routes(plain.manifest(), names=names)
    assert np.array_equal(whole(found(routes, "model/new"), plain), spread(4, 6))
    assert np.array_equal(whole(found(routes, "opt/state/new/exp_avg"), plain), state["model/old"])
    assert routes.renamed == {"model/new": "model/old", "opt/state/new/exp_avg": "optimizer/state/old/exp_avg"}
    assert list(routes.leftover()) == []
    want = flat_form(Member("model/new", 0, (4, 6)), group="zero")
    routes = Routes(plain.manifest(), want.groups, renames({"model/new": "model/old"}))
    assert np.array_equal(whole(found(routes, "zero/exp_avg"), plain), state["model/old"].reshape(-1))
    assert routes.renamed == {"model/new": "model/old"}
    flat = flat_form(Member("model/old", 0, (4, 6)))
    routes = Routes(flat.manifest(), names=names)
    assert np.array_equal(whole(found(routes, "opt/state/new/exp_avg"), flat), state["model/old"])
    assert Routes(flat.manifest()).find("opt/state/new/exp_avg") is None


def test_a_map_says_which_of_two_is_meant_and_another_kind() -> None:
    form = Form()
    for place, base in (("a", 1), ("b", 50)):
        form.add_group(
            f"{place}/zero",
            in_order(Member(W, 0, (3,))),
            {"exp_avg": {W: spread(3, base=base)}, "ema": {W: spread(3, base=base + 20)}},
        )
    for wanted, stored, base in (("a", "b", 50), ("b", "a", 1)):
        names = renames({f"{wanted}/state/w/exp_avg": f"{stored}/state/w/exp_avg"})
        route = found(Routes(form.manifest(), names=names), f"{wanted}/state/w/exp_avg")
        assert np.array_equal(whole(route, form), spread(3, base=base))
    want = flat_form(1, Member(W, 0, (3,)), group="a/zero")
    names = renames({"a/zero/exp_avg": "b/zero/ema"})
    route = found(Routes(form.manifest(), want.groups, names), "a/zero/exp_avg")
    assert np.array_equal(whole(route, form), [0, *spread(3, base=70)])


def test_a_map_that_leads_nowhere_finds_nothing() -> None:
    form = Form()
    form.add(W, spread(4, 6))
    assert Routes(form.manifest(), names=renames({W: "model/gone"})).find(W) is None


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("a", "x"),
        ("module.w", "w"),
        ("module.layers.1.w", "layers.1.w"),
        ("module.", ""),
        ("p/1/q", "r1"),
        ("p/q", "p/q"),
        ("p/long/1/q", "s/1"),
        ("other", "other"),
    ],
)
def test_an_exact_name_goes_before_patterns_and_a_longer_pattern_before_a_shorter(name: str, stored: str) -> None:
    table = {"module.*": "*", "p/*/q": "r*", "a": "x", "a*": "y*", "p/long/*/q": "s/*"}
    assert renames(table).of(name) == stored


@given(st.text("ab/.", min_size=0, max_size=4), st.text("ab/.", max_size=4), st.text("ab/.*", max_size=6))
def test_what_a_star_stands_for_comes_back_unchanged(head: str, tail: str, middle: str) -> None:
    names = renames({f"{head}*{tail}": "new-*-name"})
    assert names.of(head + middle + tail) == f"new-{middle}-name"
    assert names == parse(json.dumps({f"{head}*{tail}": "new-*-name"}).encode())
    assert bool(names)


@pytest.mark.parametrize("table", [{"a**": "b"}, {"a": "b*"}, {"a*": "**"}, {"": "a"}, {"a": ""}, {"a": 1}])
def test_what_is_no_map_is_refused(table: Mapping[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        renames(table)
    assert caught.value.rule == "X-MAP"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"a": 1}', b"{" * 100_000, b"\xff", b'{"a": {"b": "c"}}', b'{"a":"b","a":"c"}']
)
def test_bytes_that_are_no_map_are_refused(data: bytes) -> None:
    with pytest.raises(PlanError) as caught:
        parse(data, file="map.json")
    assert caught.value.rule == "X-MAP"
    assert not renames(None)
    assert renames({}) == Renames()


# ---- size ------------------------------------------------------------------------------------------------------------


def test_many_parameters_with_one_last_word_are_told_apart_without_looking_at_all_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ckptspec.planner import members

    calls: list[str] = []
    end = members._last_token
    monkeypatch.setattr(members, "_last_token", lambda path, name: (calls.append(path), end(path, name))[1])
    shapes = {f"model/layers.{i}.experts.{j}.weight": (2,) for i in range(20) for j in range(40)}
    flat = Form()
    flat.add_group(
        "zero", in_order(*(Member(n, 0, s) for n, s in shapes.items())), {"exp_avg": values(shapes, "exp_avg")}
    )
    plain = Form()
    for name, array in values(shapes, "exp_avg").items():
        plain.add(named("optimizer", name, "exp_avg"), array)
    routes = Routes(flat.manifest())
    assert all(routes.find(name) is not None for name in plain.tensors)
    assert Routes(plain.manifest(), flat.groups).find("zero/exp_avg") is not None
    assert len(calls) < 20 * len(shapes)

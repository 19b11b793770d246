"""Random flat groups over named tensors, and what routes deliver, by hand: arrays cut and put together with numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ckptspec.format.box import Box
from ckptspec.format.layout import FlatLayout, MeshLayout
from ckptspec.format.manifest import FlatGroup, Manifest, Member, TensorEntry
from ckptspec.planner.routes import Route
from ckptspec.planner.views import View

Arrays = dict[str, np.ndarray]


@dataclass
class Form:
    """Tensors as one side has them: entries and groups, as in a manifest, and the values of every tensor."""

    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    groups: dict[str, FlatGroup] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)

    def add(self, name: str, array: np.ndarray, layout: str = "whole") -> None:
        self.tensors[name] = TensorEntry(str(array.dtype), array.shape, layout)
        self.arrays[name] = array

    def add_group(self, name: str, members: Sequence[Member], kinds: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Add a group called `name`, its tensors `name/kind`, made of the members' tensors of each kind."""
        flat = {f"{name}/{kind}": laid_out(members, values) for kind, values in kinds.items()}
        self.groups[name] = FlatGroup(length(members), tuple(members), {k.rpartition("/")[2]: k for k in flat})
        for key, array in flat.items():
            self.add(key, array, "flat")

    def manifest(self, **fields: Any) -> Manifest:
        layouts = {"whole": MeshLayout("main"), "flat": FlatLayout("main", ("dp",))}
        return Manifest("0" * 32, 7, 1, layouts=layouts, tensors=self.tensors, flat_groups=self.groups, **fields)


def length(members: Sequence[Member]) -> int:
    return sum(prod(m.shape) for m in members)


def in_order(*pieces: Member | int) -> list[Member]:
    """Members one after another; a number is so much padding. Their own offsets do not count."""
    out, at = [], 0
    for p in pieces:
        member = Member(None, at, (p,)) if isinstance(p, int) else p
        out.append(Member(member.name, at, member.shape, member.of_shape, member.of_offsets))
        at += prod(member.shape)
    return out


def laid_out(members: Sequence[Member], values: Mapping[str, np.ndarray]) -> np.ndarray:
    """The flat tensor of these members, padding 0."""
    kind = next((values[m.name].dtype for m in members if m.name is not None), np.dtype("float32"))
    flat = np.zeros(length(members), kind)
    for m in members:
        if m.name is not None:
            flat[m.offset : m.offset + prod(m.shape)] = cut(values[m.name], box_of(m)).reshape(-1)
    return flat


def box_of(m: Member) -> Box:
    return Box((0,) * len(m.shape) if m.of_offsets is None else m.of_offsets, m.shape)


def cut(array: np.ndarray, box: Box, origin: Sequence[int] | None = None) -> np.ndarray:
    origin = (0,) * box.ndim if origin is None else origin
    return array[(*(slice(a - o, b - o) for a, b, o in zip(box.offsets, box.stops, origin, strict=True)), ...)]


def delivered(route: Route, arrays: Arrays, box: Box) -> np.ndarray:
    """What a route brings of `box`, every element once: padding is zero."""
    out = np.zeros(box.sizes, route.dtype)
    times = np.zeros(box.sizes, int)
    for ask in route.asks(box):
        need = ask.need
        value = seen(arrays[need.name], need.view, need.box)
        for target in (out, times):
            part = cut(target, need.box, box.offsets) if ask.land is None else landed(target, ask.land, need.box, box)
            part[...] = value if target is out else part + 1
    for start, stop in route.padding(box.offsets[0], box.stops[0]) if box.ndim == 1 else ():
        assert not out[start - box.offsets[0] : stop - box.offsets[0]].any()
        times[start - box.offsets[0] : stop - box.offsets[0]] += 1
    assert (times == 1).all()
    return out


def seen(array: np.ndarray, view: View | None, box: Box) -> np.ndarray:
    if view is None:
        return cut(array, box)
    return cut(array[view.start : view.stop].reshape(view.box.sizes), box, view.box.offsets)


def landed(out: np.ndarray, land: View, box: Box, whole: Box) -> np.ndarray:
    at = land.start - whole.offsets[0]
    return cut(out[at : at + land.box.numel].reshape(land.box.sizes), box, land.box.offsets)


# ---- random forms ----------------------------------------------------------------------------------------------------

SHAPES = ((7, 5), (1,), (3,), (0, 4), (9, 2), (), (2, 3, 4), (5,), (1, 6))
KINDS = ("exp_avg", "exp_avg_sq", "master")


def parameters(count: int) -> dict[str, tuple[int, ...]]:
    return {f"model/layers.{i}.w": SHAPES[i % len(SHAPES)] for i in range(count)}


def values(shapes: Mapping[str, tuple[int, ...]], kind: str) -> Arrays:
    """A value for each parameter, no two elements alike, 0 none of them."""
    base = 1 + 100_000 * (1 + (*KINDS, "params").index(kind))
    out = {}
    for i, (name, shape) in enumerate(shapes.items()):
        out[name] = (base + 1000 * i + np.arange(prod(shape))).reshape(shape).astype("float32")
    return out


@st.composite
def pieces(draw: st.DrawFn, shapes: Mapping[str, tuple[int, ...]], parts: int) -> list[list[Member]]:
    """For each of `parts` the pieces it has: of a tensor that is cut a range along one axis, else all of it."""
    out: list[list[Member]] = [[] for _ in range(parts)]
    for name, shape in shapes.items():
        axis = draw(st.integers(-1, len(shape) - 1)) if parts > 1 else -1
        if axis < 0:
            for own in out:
                own.append(Member(name, 0, shape))
            continue
        inner = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=parts - 1, max_size=parts - 1)))
        for own, a, b in zip(out, [0, *inner], [*inner, shape[axis]], strict=True):
            sizes = (*shape[:axis], b - a, *shape[axis + 1 :])
            own.append(Member(name, 0, sizes, shape, tuple(a if d == axis else 0 for d in range(len(shape)))))
    return out


@st.composite
def forms(
    draw: st.DrawFn,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Sequence[str] | Mapping[str, Arrays] = KINDS,
    place: str = "optimizer",
) -> Form:
    """The parameters' values as tensors by name, or in flat groups: of any order, number, padding and parallelism."""
    form = Form()
    by_kind = kinds if isinstance(kinds, Mapping) else {kind: values(shapes, kind) for kind in kinds}
    if draw(st.integers(0, 3)) == 0:
        for kind, several in by_kind.items():
            for name, array in several.items():
                form.add(named("optimizer", name, kind), array)
        return form
    for part, own in enumerate(draw(pieces(shapes, draw(st.integers(1, 3))))):
        groups: list[list[Member | int]] = [[] for _ in range(draw(st.integers(1, 3)))]
        for member in draw(st.permutations(own)):
            group = groups[draw(st.integers(0, len(groups) - 1))]
            group += [draw(st.integers(1, 4)), member] if draw(st.integers(0, 3)) == 0 else [member]
        for i, group in enumerate(g for g in groups if any(isinstance(m, Member) for m in g)):
            form.add_group(f"{place}/zero{i}.tp{part}", in_order(*group, *[2] * draw(st.integers(0, 1))), by_kind)
    return form


def named(place: str, parameter: str, kind: str) -> str:
    return parameter if kind == "params" else f"{place}/state/{parameter.partition('/')[2]}/{kind}"

"""Who holds and who stores which elements is what cutting index arrays by hand gives, rank by rank."""

from __future__ import annotations

import gc
from collections import Counter
from fractions import Fraction
from math import prod
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import World, flat_cases, held, mesh_cases, view

from ckptspec.errors import FormatError
from ckptspec.format import grid, placement
from ckptspec.format.box import Box, cut, intersect
from ckptspec.format.cutting import part_size
from ckptspec.format.layout import Axis, BoxesLayout, FlatLayout, Layout, LocalLayout, Mesh, MeshLayout
from ckptspec.format.placement import boxes_at, holders, local_boxes, local_shape, resolve, stored_at, storers

MIB = 1 << 20
Case = tuple[World, "MeshLayout | FlatLayout", tuple[int, ...]]
cases = st.one_of(mesh_cases(), flat_cases())


def elements(shape: tuple[int, ...]) -> np.ndarray:
    """A tensor whose elements are their own places."""
    return np.arange(prod(shape)).reshape(shape)


@given(cases)
def test_boxes_are_what_cutting_by_hand_gives(case: Case) -> None:
    world, layout, shape = case
    for rank in range(world.size + 1):
        own = held(world, layout, shape, rank)
        boxes = boxes_at(layout, world.meshes, shape, rank)
        if own is None:
            assert boxes == ()
            assert local_shape(layout, world.meshes, shape, rank) is None
            continue
        local = elements(shape)[np.ix_(*own)]
        places = local_boxes(layout, world.meshes, shape, rank)
        assert local_shape(layout, world.meshes, shape, rank) == local.shape
        painted = np.zeros(local.shape, int)
        for box, place in zip(boxes, places, strict=True):
            assert not box.empty
            assert (view(elements(shape), box) == view(local, place)).all()
            view(painted, place)[...] += 1
        assert (painted == 1).all()


@given(cases)
def test_every_element_is_held(case: Case) -> None:
    world, layout, shape = case
    painted = np.zeros(shape, int)
    for rank in range(world.size):
        for box in boxes_at(layout, world.meshes, shape, rank):
            view(painted, box)[...] += 1
    assert (painted > 0).all()


@given(cases)
def test_holders_are_the_ranks_that_have_the_box(case: Case) -> None:
    world, layout, shape = case
    by_rank = {rank: boxes_at(layout, world.meshes, shape, rank) for rank in range(world.size)}
    for rank, boxes in by_rank.items():
        for box in boxes:
            naive = tuple(other for other, theirs in by_rank.items() if box in theirs)
            assert holders(layout, world.meshes, shape, rank, box) == naive
    stranger = Box.whole((*shape, 1))
    assert holders(layout, world.meshes, shape, 0, stranger) == ()


@given(cases, st.integers(1, 4), st.sampled_from([1, MIB // 3, MIB, 5 * MIB]), st.text(max_size=5))
def test_every_element_is_stored_as_often_as_asked_and_never_twice_by_a_rank(
    case: Case, copies: int, itemsize: int, name: str
) -> None:
    world, layout, shape = case
    held_by, stored_by = np.zeros(shape, int), np.zeros(shape, int)
    for rank in range(world.size):
        own = np.zeros(shape, int)
        for box in boxes_at(layout, world.meshes, shape, rank):
            view(held_by, box)[...] += 1
            view(own, box)[...] += 1
        kept = np.zeros(shape, int)
        for box in stored_at(layout, world.meshes, shape, itemsize, name, copies, rank):
            view(kept, box)[...] += 1
        assert (kept <= own).all()
        stored_by += kept
    assert (stored_by == np.minimum(held_by, copies)).all()


def naive_stored(
    layout: Layout, world: World, shape: tuple[int, ...], itemsize: int, name: str, copies: int
) -> Counter:
    """(rank, box) of all that is stored, by the words of the rule [T-HOLD]."""
    everyone = {rank: boxes_at(layout, world.meshes, shape, rank) for rank in range(world.size)}
    found: Counter[tuple[int, Box]] = Counter()
    for box in {box for boxes in everyone.values() for box in boxes}:
        ranks = [rank for rank in sorted(everyone) if box in everyone[rank]]
        k = len(ranks)
        if k > max(16, copies):
            w = max(16, copies)
            ranks = [ranks[int(Fraction(i * k, w))] for i in range(w)]
        w = len(ranks)
        for copy in range(min(copies, w)):
            if k > 1 and box.numel * itemsize >= w * MIB:
                found.update((ranks[(i + copy) % w], piece) for i, piece in enumerate(cut(box, w)))
            else:
                found[ranks[(crc32(name.encode()) + copy) % w], box] += 1
    return found


@given(cases, st.integers(1, 4), st.sampled_from([1, MIB, 5 * MIB]), st.text(max_size=5))
def test_storing_follows_the_holder_rule(case: Case, copies: int, itemsize: int, name: str) -> None:
    world, layout, shape = case
    arguments = (layout, world.meshes, shape, itemsize, name, copies)
    by_rank = Counter((rank, box) for rank in range(world.size) for box in stored_at(*arguments, rank))
    assert by_rank == naive_stored(layout, world, shape, itemsize, name, copies)
    assert by_rank == Counter(storers(*arguments))


@given(st.integers(1, 70), st.integers(1, 3), st.sampled_from([1, 40]), st.sampled_from([1, MIB]), st.text(max_size=3))
def test_of_many_holders_sixteen_store(dp: int, tp: int, copies: int, itemsize: int, name: str) -> None:
    mesh = Mesh((Axis("dp", dp, "data"), Axis("tp", tp, "tensor")))
    world, layout = World(mesh, np.arange(dp * tp).reshape(dp, tp), dp * tp), MeshLayout("main", (("tp",),))
    arguments = (layout, world.meshes, (60,), itemsize, name, copies)
    by_rank = Counter((rank, box) for rank in range(world.size) for box in stored_at(*arguments, rank))
    assert by_rank == naive_stored(layout, world, (60,), itemsize, name, copies)
    assert by_rank == Counter(storers(*arguments))
    places = {rank // tp for rank, _ in by_rank}
    assert len(places) <= max(16, copies)
    covered = np.zeros(60, int)
    for _, box in by_rank.elements():
        view(covered, box)[...] += 1
    assert (covered == min(copies, dp)).all()


@given(cases, st.data())
def test_parts_within_a_box_are_those_that_meet_it(case: Case, data: st.DataObject) -> None:
    world, layout, shape = case
    start = [data.draw(st.integers(0, n)) for n in shape]
    within = Box(tuple(start), tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, start, strict=True)))
    placed = resolve(layout, world.meshes)
    everything = list(placed.parts(shape))
    assert len(set(everything)) == len(everything)
    met = [(box, ranks) for box, ranks in everything if intersect(box, within)]
    assert sorted(placed.parts(shape, within), key=repr) == sorted(met, key=repr)


@given(st.integers(0, 500), st.integers(1, 9), st.integers(1, 16))
def test_flat_parts_are_the_ceiling_rounded_up(numel: int, k: int, align: int) -> None:
    size = part_size(numel, k, align)
    assert size % align == 0
    assert size >= -(-numel // k) > size - align
    mesh = {"main": Mesh((Axis("dp", k),))}
    parts = [boxes_at(FlatLayout("main", ("dp",), align=align), mesh, (numel,), rank) for rank in range(k)]
    spans = [(min(i * size, numel), min((i + 1) * size, numel)) for i in range(k)]
    assert parts == [(Box((a,), (b - a,)),) if b > a else () for a, b in spans]


def two_by(k: int) -> dict[str, Mesh]:
    return {"main": Mesh((Axis("dp", 2, "data"), Axis("tp", k, "tensor")))}


def test_two_axes_on_one_dimension_cut_the_piece_of_the_piece() -> None:
    # DTensor's [Shard(0), Shard(0)] on (dp, tp): seven rows go 4 + 3 to dp, and those 2 + 2 + 0 and 1 + 1 + 1 to tp.
    plain = MeshLayout("main", (("dp", "tp"),))
    spans = [boxes_at(plain, two_by(3), (7,), rank) for rank in range(6)]
    assert spans == [(Box((0,), (2,)),), (Box((2,), (2,)),), (), *((Box((i,), (1,)),) for i in (4, 5, 6))]
    # FSDP2 x TP, [_StridedShard(0), Shard(0)]: tp cuts first, so dp's pieces of a tp piece lie side by side.
    strided = MeshLayout("main", (("tp", "dp"),))
    spans = [boxes_at(strided, two_by(3), (7,), rank) for rank in range(6)]
    assert [box.offsets[0] for (box,) in (s for s in spans if s)] == [0, 3, 6, 2, 5]
    assert spans[5] == ()


def test_chunks_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    for n in range(1, 14):
        for rank in range(6):
            rows = torch.arange(n)
            for k, i in ((2, rank // 3), (3, rank % 3)):
                pieces = rows.chunk(k) if len(rows) else ()
                rows = pieces[i] if i < len(pieces) else rows[:0]
            found = boxes_at(MeshLayout("main", (("dp", "tp"),)), two_by(3), (n,), rank)
            assert rows.tolist() == [i for box in found for i in range(box.offsets[0], box.stops[0])]


def test_blocks_give_a_rank_an_ordered_list_of_boxes() -> None:
    fused = MeshLayout("main", (("tp",),), blocks={0: (6, 2, 2)})
    assert boxes_at(fused, two_by(2), (10, 4), 1) == (
        Box((3, 0), (3, 4)),
        Box((7, 0), (1, 4)),
        Box((9, 0), (1, 4)),
    )
    assert local_shape(fused, two_by(2), (10, 4), 1) == (5, 4)
    assert [b.offsets[0] for b in local_boxes(fused, two_by(2), (10, 4), 1)] == [0, 3, 4]


def test_an_empty_share_is_in_the_layout_and_has_a_shape() -> None:
    rows = MeshLayout("main", (("tp",),))
    assert boxes_at(rows, two_by(3), (2, 5), 2) == ()
    assert local_shape(rows, two_by(3), (2, 5), 2) == (0, 5)
    assert 2 in resolve(rows, two_by(3)).ranks()


def test_listed_boxes_that_are_equal_are_replicas() -> None:
    top, left, right = Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((2, 2), (2, 2))
    layout = BoxesLayout(((5, top), (1, top), (1, left), (3, right), (4, Box((4, 0), (0, 4)))))
    assert boxes_at(layout, {}, (4, 4), 1) == (top, left)
    assert holders(layout, {}, (4, 4), 1, top) == (1, 5)
    assert holders(layout, {}, (4, 4), 3, top) == ()
    assert boxes_at(layout, {}, (4, 4), 0) == ()
    assert local_shape(layout, {}, (4, 4), 0) is None
    assert (boxes_at(layout, {}, (4, 4), 4), local_shape(layout, {}, (4, 4), 4)) == ((), (0, 4))
    assert resolve(layout, {}).ranks() == (1, 3, 4, 5)
    first = crc32(b"w") % 2
    assert sorted(storers(layout, {}, (4, 4), 4, "w", 1), key=repr) == sorted(
        [((1, 5)[first], top), (1, left), (3, right)], key=repr
    )
    assert [box for box, _ in resolve(layout, {}).parts((4, 4), Box((0, 3), (4, 1)))] == [top, right]


def test_the_own_tensor_of_listed_boxes_is_their_grid_or_else_one_dimension() -> None:
    columns = BoxesLayout(((0, Box((0, 0), (4, 2))), (0, Box((0, 5), (4, 1)))))
    assert local_shape(columns, {}, (4, 6), 0) == (4, 3)
    assert [b.offsets for b in local_boxes(columns, {}, (4, 6), 0)] == [(0, 0), (0, 2)]
    slice_of_flat = BoxesLayout(((0, Box((0, 4), (1, 2))), (0, Box((1, 0), (2, 6))), (0, Box((3, 0), (1, 1)))))
    assert local_shape(slice_of_flat, {}, (4, 6), 0) == (15,)
    by_columns = BoxesLayout(tuple((0, Box((i, j), (2, 3))) for j in (0, 3) for i in (0, 2)))
    assert local_shape(by_columns, {}, (4, 6), 0) == (24,)
    assert local_boxes(slice_of_flat, {}, (4, 6), 0) == (Box((0,), (2,)), Box((2,), (12,)), Box((14,), (1,)))


def test_a_local_tensor_is_whole_on_its_rank_and_shared_out_to_nobody() -> None:
    local = LocalLayout()
    assert boxes_at(local, {}, (3, 2), 7) == (Box.whole((3, 2)),)
    assert local_boxes(local, {}, (3, 2), 7) == (Box.whole((3, 2)),)
    assert boxes_at(local, {}, (0,), 7) == ()
    assert local_shape(local, {}, (0,), 7) == (0,)
    assert holders(local, {}, (3, 2), 7, Box.whole((3, 2))) == (7,)
    for ask in (
        lambda: stored_at(local, {}, (3, 2), 4, "x", 1, 7),
        lambda: list(storers(local, {}, (3, 2), 4, "x", 1)),
        resolve(local, {}).ranks,
    ):
        with pytest.raises(FormatError) as caught:
            ask()
        assert caught.value.rule == "T-LOCAL"


@pytest.mark.parametrize(
    ("layout", "shape", "rule"),
    [
        (MeshLayout("other"), (4,), "T-LAYOUT"),
        (MeshLayout("main", (("pp",),)), (4,), "T-LAYOUT"),
        (MeshLayout("main", (), {"pp": 0}), (4,), "T-LAYOUT"),
        (MeshLayout("main", ((), ("dp",))), (4,), "T-DIMS"),
        (FlatLayout("main", ("dp",)), (), "T-DIMS"),
    ],
)
def test_a_layout_without_its_mesh_axis_or_dimension_is_refused(
    layout: Layout, shape: tuple[int, ...], rule: str
) -> None:
    with pytest.raises(FormatError) as caught:
        boxes_at(layout, two_by(2), shape, 0)
    assert caught.value.rule == rule
    with pytest.raises(FormatError):
        list(storers(layout, two_by(2), shape, 4, "x", 1))


def test_a_layout_is_resolved_once_for_each_mesh_and_forgotten_with_it() -> None:
    layout, meshes = MeshLayout("main"), two_by(2)
    assert resolve(layout, meshes) is resolve(layout, meshes)
    assert resolve(layout, two_by(3)).ranks() == tuple(range(6))
    key = id(layout)
    assert key in placement._resolved
    del layout
    gc.collect()
    assert key not in placement._resolved


def test_the_ranks_are_gone_through_once_a_layout_never_once_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(mesh: Mesh, fixed: dict[int, int]) -> tuple[int, ...]:
        calls.append(1)
        return original(mesh, fixed)

    original = grid.ranks_where
    monkeypatch.setattr(grid, "ranks_where", counted)
    meshes = {"world": Mesh((Axis("dp", 16_384),))}
    layout = MeshLayout("world")
    for i in range(500):
        stored_at(layout, meshes, (1024, 8), 4, f"layer.{i}", 2, 77)
        assert len(list(storers(layout, meshes, (1024, 8), 4, f"layer.{i}", 2))) == 2
    assert len(calls) == 1

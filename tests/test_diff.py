"""Two checkpoints are compared by what they hold, whatever their layouts: nothing that differs stays unsaid."""

from __future__ import annotations

import json
import math
import os
import struct
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import crc32c
import make
import numpy as np
import pytest
from fixtures import plans, surgery
from fixtures.world import PerRank, Tensors, World, pattern, world
from hypothesis import given, settings
from hypothesis import strategies as st
from make import builder
from worlds import World as Ranks
from worlds import worlds

import ckptspec
from ckptspec.check.comparing.differences import Comparison, Difference
from ckptspec.check.comparing.leaves import leaves
from ckptspec.cli.main import main
from ckptspec.engine.comparing import diff as engine
from ckptspec.engine.comparing.diff import LEAST_MEMORY, diff
from ckptspec.errors import CkptspecError, IntegrityError, PlanError
from ckptspec.format import objects
from ckptspec.format.box import Box
from ckptspec.format.dtypes import dtype
from ckptspec.format.layout import BoxesLayout, FlatLayout, Layout, LocalLayout, MeshLayout
from ckptspec.format.manifest import FlatGroup, Member
from ckptspec.planner.transfers import Locator, Need, needed

Files = Mapping[str, bytes]


@pytest.fixture
def compare(tmp_path: Path) -> Any:
    """Compare two checkpoints that are given as files in memory."""
    numbers = iter(range(1000))

    def call(a: Files, b: Files, **options: Any) -> Comparison:
        folder = tmp_path / str(next(numbers))
        return diff(make.write(folder / "a", a), make.write(folder / "b", b), **options)

    return call


def kinds(c: Comparison) -> list[tuple[str, str, int | None]]:
    return [(d.kind, d.name, d.rank) for d in c.differences]


def tensors(size: int, entries: Tensors, layout: Layout | None = None, **fields: Any) -> Files:
    """A checkpoint of tensors by rows, or in `layout`, and the object `step`."""
    layouts = {"rows": layout or MeshLayout("main", (("dp",),))}
    return world(size, layouts, entries, **fields).files()


def whole(entries: Mapping[str, tuple[str, tuple[int, ...]]], **fields: Any) -> Files:
    """A checkpoint of one rank."""
    return tensors(1, {name: (*entry, "rows") for name, entry in entries.items()}, MeshLayout("main"), **fields)


# Any layouts


@st.composite
def layouts(draw: st.DrawFn, ranks: Ranks, shape: tuple[int, ...]) -> Layout:
    """Any layout of the mesh that a tensor of `shape` fits: by axes, flat where it is one-dimensional, or listed."""
    kind = draw(st.sampled_from(["mesh", "mesh", "flat", "boxes"]))
    axes = [axis.name for axis in ranks.mesh.axes]
    if kind == "boxes" and shape and shape[0] > 1:
        cut = draw(st.integers(1, shape[0] - 1))
        low = Box((0,) * len(shape), (cut, *shape[1:]))
        high = Box((cut, *(0,) * (len(shape) - 1)), (shape[0] - cut, *shape[1:]))
        return BoxesLayout(tuple((draw(st.integers(0, ranks.size - 1)), box) for box in (low, high) if not box.empty))
    if kind == "flat" and len(shape) == 1:
        return FlatLayout("main", tuple(axes[: draw(st.integers(0, len(axes)))]), align=draw(st.integers(1, 5)))
    dims: list[list[str]] = [[] for _ in shape]
    for name in draw(st.permutations(axes)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            dims[dim].append(name)
    return MeshLayout("main", tuple(map(tuple, dims)))


@st.composite
def saves(draw: st.DrawFn, shapes: Mapping[str, tuple[int, ...]]) -> Files:
    """A checkpoint of float32 tensors, whose bytes depend on their names only, on random ranks in random layouts."""
    ranks = draw(worlds())
    chosen = {f"l/{name}": draw(layouts(ranks, shape)) for name, shape in shapes.items()}
    entries: Tensors = {name: ("float32", shape, f"l/{name}") for name, shape in shapes.items()}
    fields = {
        "copies": draw(st.integers(1, 2)),
        "block": draw(st.sampled_from(["xxh3-128", "crc32c", "blake3", "sha256"])),
        "block_size": draw(st.sampled_from([64, 4096])),
    }
    return world(ranks.size, chosen, entries, meshes=ranks.meshes, **fields).files()


SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4)


@settings(max_examples=60)
@given(st.data())
def test_one_state_in_any_two_layouts_is_equal_and_one_flipped_bit_is_found_at_its_element(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("d")
    shapes = {f"t{i}": shape for i, shape in enumerate(data.draw(SHAPES))}
    files = [data.draw(saves(shapes)) for _ in range(2)]
    a, b = (make.write(folder / side, f) for side, f in zip("ab", files, strict=True))
    same = diff(a, b)
    assert same.differences == ()
    assert same.by_digest + same.by_bytes == sum(math.prod(s) * 4 for s in shapes.values())

    full = [name for name, shape in shapes.items() if math.prod(shape)]
    if not full:
        return
    name = data.draw(st.sampled_from(full))
    at, bit = data.draw(st.integers(0, math.prod(shapes[name]) * 4 - 1)), data.draw(st.integers(0, 7))
    before = builder.content(name, math.prod(shapes[name]) * 4)
    changed = surgery.filled(files[1], name, surgery.flipped(before, at, bit))
    (found,) = diff(a, make.write(folder / "c", changed)).differences
    assert (found.kind, found.name, found.count, found.total) == ("values", name, 1, math.prod(shapes[name]))
    assert found.index == tuple(int(i) for i in np.unravel_index(at // 4, shapes[name] or (1,)))[: len(shapes[name])]
    assert found.places is not None
    first = at // 4 * 4
    wanted = [before, surgery.flipped(before, at, bit)]
    for where, contents, whole_tensor in zip(found.places, (files[0], changed), wanted, strict=True):
        assert where.file is not None
        assert where.range is not None
        assert contents[where.file][slice(*where.range)] == whole_tensor[first : first + 4]


@pytest.mark.parametrize("name", plans.WORLDS)
def test_every_world_of_the_suite_equals_itself_and_a_save_in_other_blocks(name: str, compare: Any) -> None:
    made = plans.WORLDS[name]()
    other = replace(made.plan.manifest, block="sha256", block_size=128)
    again = World(replace(made.plan, manifest=other), made.contents).files()
    by_digest = compare(made.files(), made.files())
    by_bytes = compare(made.files(), again, stats=True)
    assert by_digest.differences == by_bytes.differences == ()
    proved = by_digest.by_bytes if name == "digest-crc32c" else by_digest.by_digest
    assert proved == by_bytes.by_bytes == by_digest.by_digest + by_digest.by_bytes


def test_what_is_no_difference_is_said_and_not_counted(compare: Any) -> None:
    changes: dict[str, Any] = {"step": 9, "run_id": "other", "save_id": "9" * 32, "annotations": {"a.b": 1}}
    changes["producer"] = {"name": "other", "version": "2"}
    found = compare(make.files(2), builder.build(replace_plan(builder.sample(2), **changes)))
    assert found.differences == ()
    assert {f.what for f in found.facts} == set(changes)
    assert compare(make.files(2), make.files(2)).facts == ()


def replace_plan(plan: Any, **changes: Any) -> Any:
    return replace(plan, manifest=replace(plan.manifest, **changes))


# By digests


def test_where_chunks_and_digests_agree_no_payload_is_read(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "fetch", None)
    files = plans.WORLDS["mesh-blocks"]().files()
    assert compare(files, builder.edit(files, lambda d: d.update(run_id="x"))).equal


def test_only_the_shards_that_store_what_is_compared_are_opened(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptspec.engine.comparing import sides

    read: list[tuple[str, int]] = []
    open_shard = sides.open_shard

    def counted(folder: str, entry: Any, *rest: Any, **options: Any) -> Any:
        read.append((os.path.basename(folder), entry.rank))
        return open_shard(folder, entry, *rest, **options)

    monkeypatch.setattr(sides, "open_shard", counted)
    spread: dict[str, Layout] = {"rows": MeshLayout("main", (("dp",),)), "whole": MeshLayout("main")}
    files = world(16, spread, {"a": ("float32", (32,), "rows"), "b": ("float32", (4,), "whole")}).files()
    assert compare(files, files, only=["b"]).equal
    assert len(read) == 2
    assert compare(files, files).equal
    assert len(read) == 2 + 2 * 16


def test_equal_crc32c_is_no_proof(compare: Any) -> None:
    text = b"abcdefgh"
    other = int.from_bytes(text, "little") ^ (1 | 0x82F63B78 << 1)  # plus the polynomial that crc32c divides by
    pair = (text, other.to_bytes(8, "little"))
    assert crc32c.crc32c(pair[0]) == crc32c.crc32c(pair[1])
    files = [whole({"x": ("uint8", (8,))}, contents={"x": x}, block="crc32c") for x in pair]
    shards = [surgery.apart(f["rank-00000.shard"]).index() for f in files]
    assert shards[0].digests == shards[1].digests
    assert kinds(compare(*files)) == [("values", "x", None)]


def test_of_a_large_chunk_only_the_blocks_that_differ_are_read(compare: Any) -> None:
    n = 1 << 20
    entry: dict[str, tuple[str, tuple[int, ...]]] = {"x": ("int32", (64, n // 256))}
    before = pattern("x", n)
    a = whole(entry, contents={"x": before}, block_size=1 << 16)
    b = surgery.filled(a, "x", surgery.flipped(before, n // 2 + 5))
    found = compare(a, b)
    assert [(d.count, d.index) for d in found.differences] == [(1, (32, 1))]
    assert found.by_bytes == 1 << 16
    assert found.by_digest == n - (1 << 16)
    every = surgery.filled(a, "x", bytes(255 - x for x in before))
    assert compare(a, every).by_bytes == n


def test_a_shard_whose_chunks_overlap_proves_nothing(compare: Any) -> None:
    """Two chunks that hold as many elements as the tensor but not each of them are no proof of the rest."""
    from ckptspec.engine.comparing.likeness import Item, Likeness

    item = Item("x", "x", "x", dtype("uint8"), (4,))
    stored = {Box((0,), (2,)): b"1", Box((1,), (2,)): b"2"}
    assert Likeness(1, 64, {("x", None): stored}, {("x", None): stored}).unsettled(item) == (item.whole,)


def test_a_dtype_without_numbers_is_compared_and_said_to_have_no_distances(compare: Any) -> None:
    a = whole({"x": ("float4_e2m1fn_x2", (3,))})
    found = compare(a, surgery.filled(a, "x", bytes(3)), stats=True)
    assert found.differences[0].distance is None
    assert found.notes == ("float4_e2m1fn_x2 has no distances: two values in a byte",)


# In bounded memory


def test_tensors_larger_than_memory_are_compared_in_pieces_within_it(tmp_path: Path) -> None:
    rows, columns = 3 << 10, 16 << 10
    nbytes = rows * columns
    data = pattern("x", nbytes)
    changed = surgery.flipped(data, nbytes - 7)
    layout = MeshLayout("main", ((), ("dp",)))
    a = make.write(tmp_path / "a", tensors(2, {"x": ("uint8", (rows, columns), "rows")}, contents={"x": data}))
    b = make.write(
        tmp_path / "b",
        tensors(3, {"x": ("uint8", (rows, columns), "rows")}, layout, contents={"x": changed}, block_size=1 << 16),
    )
    del data, changed
    memory = LEAST_MEMORY + (2 << 20)
    pool, capacity = engine._shares(memory, 1 << 16)
    assert nbytes > memory > pool.threads * pool.buffer_nbytes + 2 * capacity
    done: list[int] = []
    diff(tmp_path / "a", tmp_path / "a")  # whatever is imported once is there now
    tracemalloc.start()
    found = diff(a, b, memory=memory, stats=True, progress=lambda n, total: done.append(n))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(d.index, d.count) for d in found.differences] == [((rows - 1, columns - 7), 1)]
    assert peak + pool.threads * pool.buffer_nbytes <= memory
    assert found.by_bytes == nbytes == done[-1]
    assert len(done) == -(-nbytes // (capacity // columns * columns))


def test_many_small_tensors_are_read_together(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = engine.fetch
    batches: list[int] = []

    def counted(side: Any, wants: Any, *rest: Any, **options: Any) -> int:
        batches.append(len(wants))
        return fetch(side, wants, *rest, **options)

    monkeypatch.setattr(engine, "fetch", counted)
    entries: dict[str, tuple[str, tuple[int, ...]]] = {f"t{i}": ("float32", (i % 5,)) for i in range(300)}
    a, b = whole(entries), whole(entries, block="sha256")
    assert compare(a, b).equal
    assert batches == [240, 240]
    monkeypatch.setattr(engine, "MOST", 100)
    assert compare(a, b).equal
    assert batches[2:] == [100, 100, 100, 100, 40, 40]


def test_too_little_memory_for_a_block_is_refused_with_what_it_takes(tmp_path: Path) -> None:
    path = make.checkpoint(tmp_path / "a", 1, block_size=1 << 24)
    with pytest.raises(PlanError) as e:
        diff(path, path, memory=LEAST_MEMORY)
    assert e.value.expected == f">= {LEAST_MEMORY + (2 << 24)} bytes"
    assert diff(path, path, memory=LEAST_MEMORY + (2 << 24)).equal


# Damage


@pytest.mark.parametrize("side", ["A", "B"])
def test_damaged_bytes_are_an_error_that_names_the_side_and_never_a_difference(tmp_path: Path, side: str) -> None:
    made = {"A": make.files(2), "B": make.files(3, block="blake3")}
    index = surgery.apart(made[side]["rank-00001.shard"]).index()
    row = next(i for i, c in enumerate(index.chunks) if index.names[c.tensor] == "model/embed")
    at = index.chunks[row].start + 3
    made[side]["rank-00001.shard"] = surgery.flipped(made[side]["rank-00001.shard"], at)
    paths = [make.write(tmp_path / letter, files) for letter, files in made.items()]
    with pytest.raises(IntegrityError, match=rf"in {side} \({tmp_path / side}\): bytes differ") as e:
        diff(*paths)
    where = e.value.where
    assert (where.file, where.tensor, where.rank, e.value.rule) == ("rank-00001.shard", "model/embed", 1, "B-DIGEST")
    assert where.range is not None
    assert where.range[0] <= at < where.range[1]


def test_damage_is_an_error_where_another_copy_is_whole_as_well(compare: Any) -> None:
    plan = plans.WORLDS["copies-2"]().plan
    a, b = builder.build(plan), builder.build(replace_plan(plan, block="sha256"))
    read = needed(Locator(builder.catalog(a).manifest), [Need("weight", Box.whole((5, 4)))])
    assert len(read) == 2
    for rank in range(4):
        name = f"rank-0000{rank}.shard"
        index = surgery.apart(a[name]).index()
        row = next(i for i, c in enumerate(index.chunks) if index.names[c.tensor] == "weight")
        bad = {**a, name: surgery.flipped(a[name], index.chunks[row].start)}
        if rank in read:
            with pytest.raises(IntegrityError) as e:
                compare(bad, b)
            assert (e.value.where.file, e.value.where.tensor) == (name, "weight")
        else:
            assert compare(bad, b).equal  # the damage is in a copy that was not read


def test_a_checkpoint_that_is_not_whole_is_an_error_that_names_the_side(tmp_path: Path) -> None:
    good, bad = make.checkpoint(tmp_path / "good"), make.checkpoint(tmp_path / "bad")
    (bad / "rank-00001.shard").unlink()
    with pytest.raises(IntegrityError, match=r"in B .*missing") as e:
        diff(good, bad)
    assert (e.value.where.file, e.value.rule) == ("rank-00001.shard", "S-MISSING")
    (bad / "manifest.json").write_bytes(b"{}")
    with pytest.raises(CkptspecError, match="in A ") as f:
        diff(bad, good)
    assert f.value.where.file == "manifest.json"
    (bad / "manifest.json").unlink()
    with pytest.raises(ckptspec.NotCommittedError, match="in A "):
        diff(bad, good)


# Names, kinds, dtypes, shapes


def test_names_of_one_side_and_what_is_otherwise_there_are_listed_in_the_order_of_a_and_then_of_b(compare: Any) -> None:
    a = whole(
        {"gone": ("float32", (3,)), "kind": ("int8", (1,)), "type": ("int32", (2,)), "shape": ("int8", (2, 3))},
        values={"old": 1},
    )
    b = whole(
        {"shape": ("int8", (6,)), "new": ("uint8", ()), "type": ("float32", (2,))},
        values={"kind": 1},
        aliases={"other": "type"},
    )
    found = compare(a, b)
    assert kinds(found) == [
        ("only_a", "gone", None),
        ("kind", "kind", None),
        ("dtype", "type", None),
        ("shape", "shape", None),
        ("only_a", "old", None),
        ("only_b", "new", None),
        ("only_b", "other", None),
    ]
    texts = {d.name: (d.a, d.b) for d in found.differences}
    assert texts["gone"] == ("float32 [3]", None)
    assert texts["kind"] == ("int8 [1]", "an object")
    assert texts["type"] == ("int32", "float32")
    assert texts["shape"] == ("[2, 3]", "[6]")
    assert texts["other"] == (None, "float32 [2], an alias of 'type'")
    assert found.counts == {"only_a": 2, "only_b": 2, "kind": 1, "dtype": 1, "shape": 1}


def test_an_alias_and_a_tensor_of_the_same_bytes_are_no_difference(compare: Any) -> None:
    data = pattern("x", 24)
    tied = whole({"x": ("float32", (6,))}, aliases={"y": "x"}, contents={"x": data})
    apart = whole({"x": ("float32", (6,)), "y": ("float32", (6,))}, contents={"x": data, "y": data})
    for pair, sides in (((tied, apart), "AB"), ((apart, tied), "BA")):
        found = compare(*pair)
        assert found.equal
        assert found.notes == (f"'y' is an alias of 'x' in {sides[0]}, a tensor of its own in {sides[1]}",)
    other = surgery.filled(apart, "y", bytes(24))
    assert kinds(compare(tied, other)) == [("values", "y", None)]
    changed = surgery.filled(tied, "x", bytes(24))
    (both,) = compare(tied, changed).differences
    assert (both.name, both.also) == ("x", ("y",))
    assert compare(changed, other, only=["y"]).equal


def test_a_name_left_out_on_purpose_is_explained(compare: Any) -> None:
    a = whole({"m/x": ("int8", (1,))}, omitted={"o": "never_stepped"})
    b = whole({"m/x": ("int8", (1,)), "o/x/avg": ("int8", (1,)), "o/y/avg": ("int8", (1,))})
    found = compare(a, b)
    assert found.counts == {"only_b": 2}
    assert found.notes == ("A left 'o' out on purpose: never_stepped",)


def test_only_and_skip_choose_names_prefixes_and_globs(compare: Any) -> None:
    a = whole({"m/x": ("int8", (1,)), "m/y": ("int8", (1,)), "o/z": ("int8", (4,))})
    b = whole({"m/x": ("int8", (1,)), "m/y": ("int8", (2,)), "o/w": ("int8", (1,))}, values={"step": 8})
    assert len(compare(a, b).differences) == 4
    assert compare(a, b, skip=["o", "m/y", "step"]).equal
    only = compare(a, b, only=["m/*"])
    assert (kinds(only), only.left_out) == ([("shape", "m/y", None)], 3)
    assert compare(a, b, only="m/x").equal
    assert kinds(compare(a, b, only="o", skip="o/w")) == [("only_a", "o/z", None)]
    with pytest.raises(PlanError) as e:
        compare(a, b, only=["m", "modle"])
    assert (e.value.rule, e.value.where.tensor) == ("R-NAME", "modle")


# Flat groups


def zero(numel: int, members: tuple[Member, ...], world_size: int = 2, align: int = 1) -> Files:
    layout = FlatLayout("main", ("dp",), align=align)
    groups = {"g": FlatGroup(numel, members, {"master": "o/flat"})}
    return tensors(world_size, {"o/flat": ("float32", (numel,), "rows")}, layout, flat_groups=groups)


def test_a_flat_tensor_is_compared_where_its_group_has_the_same_members(compare: Any) -> None:
    members = (Member("w", 0, (2, 3)), Member(None, 6, (1,)))
    a = zero(7, members)
    assert compare(a, zero(7, members, 5, 2)).equal
    (found,) = compare(a, zero(7, (Member("w", 0, (3, 2)), Member(None, 6, (1,))))).differences
    assert (found.kind, found.name) == ("members", "o/flat")
    assert found.a == "member 0: w [2, 3] from element 0"
    unknown = compare(a, zero(7, ()))
    assert unknown.equal
    assert unknown.notes == ("only A says what lies in the flat tensor 'o/flat': compared element by element",)


def test_flat_values_beside_named_ones_are_noted(compare: Any) -> None:
    named = tensors(2, {"o/w/master": ("float32", (2, 3), "rows")})
    found = compare(named, zero(7, (Member("w", 0, (2, 3)), Member(None, 6, (1,)))))
    assert kinds(found) == [("only_a", "o/w/master", None), ("only_b", "o/flat", None)]
    (note,) = found.notes
    assert note.startswith("B holds 1 of these in flat groups (the first: 'o/flat'); A may hold the same")


# Local tensors and objects


def local(ranks: Mapping[int, tuple[int, ...]], size: int = 3, **fields: Any) -> Files:
    return world(size, {"l": LocalLayout()}, {"rng": ("uint8", None, "l")}, local={"rng": ranks}, **fields).files()


def test_local_tensors_are_compared_rank_by_rank(compare: Any) -> None:
    a = local({0: (5,), 1: (6,), 2: (2, 3)})
    assert compare(a, a).by_digest == 17
    b = local({0: (5,), 1: (2, 3)}, 4, block="sha256")
    found = compare(a, b)
    assert kinds(found) == [("shape", "rng", 1), ("only_a", "rng", 2)]
    assert found.by_bytes == 5
    changed = surgery.operate(b, 0, surgery.Change(parts=lambda p: replace(p, payloads=(bytes(5), *p.payloads[1:]))))
    (first, *_) = compare(a, changed, stats=True).differences
    assert (first.kind, first.rank, first.total) == ("values", 0, 5)
    assert first.places is not None
    assert [where.rank for where in first.places] == [0, 0]
    shared = tensors(2, {"rng": ("uint8", (5,), "rows")})
    (found,) = compare(a, shared).differences
    assert (found.kind, found.a, found.b) == ("shape", "local to each rank", "[5]")


def with_values(size: int = 2, **values: Any) -> Files:
    return world(size, {}, {}, values=values).files()


def test_objects_are_compared_by_their_packed_bytes_and_the_first_leaf_is_shown(compare: Any) -> None:
    a = with_values(groups=[{"lr": 0.1, "b": (0.9, 1)}, {"lr": 1}], nan=float("nan"), zero=0.0, same={"x": [1]})
    b = with_values(3, groups=[{"lr": 0.2, "b": (0.9, True)}, {"lr": 1}], nan=float("nan"), zero=-0.0, same={"x": [1]})
    found = compare(a, b)
    assert kinds(found) == [("object", "groups", None), ("object", "zero", None)]
    groups, negative = found.differences
    assert (groups.path, groups.a, groups.b, groups.count) == ("groups/0/lr", "0.1", "0.2", 2)
    assert (negative.path, negative.a, negative.b) == ("zero", "0.0", "-0.0")
    assert found.objects == 4


def test_objects_of_each_rank_are_compared_with_the_same_rank(compare: Any) -> None:
    a = with_values(3, rng=PerRank({0: 1, 1: 2, 2: 3}))
    assert compare(a, with_values(3, rng=PerRank({0: 1, 1: 2, 2: 3}))).equal
    found = compare(a, with_values(2, rng=PerRank({0: 1, 1: 5})))
    assert kinds(found) == [("object", "rng", 1), ("only_a", "rng", 2)]
    assert [(d.a, d.b) for d in found.differences] == [("2", "5"), ("3", None)]
    mixed = compare(with_values(2, rng=1), with_values(2, rng=PerRank({0: 1, 1: 5})))
    assert kinds(mixed) == [("object", "rng", 1)]
    assert mixed.notes == ("'rng' is an object in A, an object of each rank in B: compared rank by rank",)
    assert compare(with_values(2, rng=PerRank({0: 1, 1: 1})), with_values(2, rng=1)).equal


def test_an_object_that_no_shard_has_is_an_error(compare: Any) -> None:
    good = with_values(x=1)
    bad = builder.edit(good, lambda d: d["objects"].update(y="same"))
    with pytest.raises(ckptspec.ShardError, match=r"in A .*no shard has the object 'y'"):
        compare(bad, bad)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers(0, 3) | st.booleans() | st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES, VALUES)
def test_leaves_are_found_exactly_where_the_packing_differs(a: Any, b: Any) -> None:
    assert list(leaves(a, a, "x")) == []
    found = list(leaves(a, b, "x"))
    assert bool(found) == (objects.pack(a) != objects.pack(b))
    for path, first, second in found:
        assert path.startswith("x")
        assert len(first) < 200 > len(second)


def test_leaves_show_large_values_in_few_characters() -> None:
    values: list[Any] = [10**6000, "x" * 10**6, [[i] for i in range(10**5)], {i: {} for i in range(1000)}]
    values += [objects.NumpyValue("uint32", (624,), bytes(2496)), objects.DTypeValue("bfloat16"), b"\x00" * 1000]
    for value in values:
        ((_, first, second),) = leaves(value, None, "x")
        assert 0 < len(first) <= 80
        assert second == "None"
    assert list(leaves({"a": 1, "b": 2}, {"b": 2, "a": 1}, "x")) == [
        ("x", "keys in the order ['a', 'b']", "['b', 'a']")
    ]
    assert list(leaves({"a/b": 1}, {"c": [1]}, "x")) == [("x/a~1b", "1", "nothing"), ("x/c", "nothing", "[1]")]


# The command line


class Ran:
    """How the command ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err
        assert "Traceback" not in out + err


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Any:
    """Run `ckptspec diff` in this process."""

    def call(*arguments: object) -> Ran:
        capfd.readouterr()
        return Ran(main(["diff", *map(str, arguments)]), *capfd.readouterr())

    return call


def test_equal_checkpoints_are_exit_code_0_and_different_ones_1(command: Any, tmp_path: Path) -> None:
    a, b = make.checkpoint(tmp_path / "a", 2), make.checkpoint(tmp_path / "b", 4)
    done = command(a, b, "--skip", "rng")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[:3] == [f"A: {a}", f"B: {b}", "not counted: world size: A 2, B 4"]
    assert lines[-1].startswith("equal: 5 tensors and 2 objects compared, ")
    assert lines[-1].endswith("2 names left out")
    made = surgery.filled(make.files(4), "model/norm", np.arange(24, dtype="f4").tobytes())
    c = make.write(tmp_path / "c", surgery.filled(made, "model/scale", bytes(4)))
    done = command(b, c, "--stats")
    assert done.code == 1
    lines = done.out.splitlines()
    assert lines[2].startswith("values differ: 'model/norm': 24 of 24 elements, first at [0]: A ")
    assert "; at most " in lines[2]
    assert "apart, relatively " in lines[2]
    assert lines[3].startswith("  A: rank ")
    assert ", tensor 'model/norm', bytes " in lines[4]
    assert lines[5].startswith("values differ: 'model/scale': 1 of 1 element, first at []: A ")
    assert lines[-1] == "different: 2 in values"


def test_json_has_all_that_text_has_and_more(command: Any, tmp_path: Path) -> None:
    entries: dict[str, tuple[str, tuple[int, ...]]] = {f"t{i:02}": ("float32", (2,)) for i in range(30)}
    a = make.write(tmp_path / "a", whole(entries, contents={f"t{i:02}": struct.pack("<2f", 0, 1) for i in range(30)}))
    b = make.write(
        tmp_path / "b", whole(entries, contents={f"t{i:02}": struct.pack("<2f", math.inf, 1) for i in range(30)})
    )
    done = command(a, b)
    assert done.out.count("values differ: ") == 21
    assert "values differ: and 10 more (--format json has them all)" in done.out.splitlines()
    document = json.loads(command(a, b, "--format", "json", "--stats").out)
    assert (document["equal"], document["counts"], len(document["differences"])) == (False, {"values": 30}, 30)
    first = document["differences"][0]
    assert (first["name"], first["count"], first["total"], first["index"]) == ("t00", 1, 2, [0])
    assert first["distance"]["absolute"] == "inf"
    assert first["places"]["a"]["file"] == "rank-00000.shard"
    assert document["compared"]["bytes_read"] == 240


def test_a_damaged_or_absent_checkpoint_is_an_error_on_stderr(command: Any, tmp_path: Path) -> None:
    a, b = make.checkpoint(tmp_path / "a"), make.checkpoint(tmp_path / "b")
    data = (b / "rank-00000.shard").read_bytes()
    (b / "rank-00000.shard").write_bytes(data[:-1])
    done = command(a, b)
    assert (done.code, done.out) == (1, "")
    place = f"rank-00000.shard, bytes {len(data) - 1}..{len(data)}"
    assert done.err.startswith(f"error: {place}: in B ({b}): partial write")
    assert command(tmp_path / "nowhere", a).code == 3
    (tmp_path / "run").mkdir()
    empty = command(a, tmp_path / "run")
    assert (empty.code, empty.out) == (4, "")
    assert "in B (" in empty.err


@pytest.mark.parametrize(
    "options", [(), ("B", "C"), ("B", "--memory", "1MiB"), ("B", "--memory", "lots"), ("B", "--format", "xml")]
)
def test_a_wrong_use_is_exit_code_2(command: Any, tmp_path: Path, options: tuple[str, ...]) -> None:
    path = make.checkpoint(tmp_path / "a")
    done = command(path, *(path if o in "BC" else o for o in options))
    assert (done.code, done.out) == (2, "")
    assert command(path, path, "--memory", "64 mib").code == command(path, path, "--memory", "40000000").code == 0


def test_progress_is_shown_to_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckptspec.cli import difference

    with difference._progress() as progress:
        assert progress is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with difference._progress() as progress:
        assert progress is not None
        progress(1, 2)


def test_nothing_of_a_checkpoint_reaches_the_terminal_raw(command: Any, tmp_path: Path) -> None:
    evil = "\u202egnp[red]x"
    a = make.write(tmp_path / "a", whole({"x": ("int8", (1,))}, values={"v": evil, evil: 1}))
    b = make.write(tmp_path / "b", whole({"x": ("int8", (1,))}, values={"v": "\x1b[31m"}, run_id=evil))
    out = command(a, b).out
    assert "\u202e" not in out
    assert "\x1b" not in out
    assert "gnp[red]x" in out
    assert command(a, b, "--format", "json").out.isascii()


def test_a_difference_without_news_has_a_short_document() -> None:
    assert Difference("only_a", "x", a="int8 [1]").document() == {"kind": "only_a", "name": "x", "a": "int8 [1]"}

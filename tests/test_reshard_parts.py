"""The parts a reshard is made of: states put together anew, boxes that meet, digests of pieces, shares of the work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written import World, documents, line, states

import ckptspec
from ckptspec.engine.resharding.asking import Outcome, Request
from ckptspec.engine.resharding.blocks import Blocks
from ckptspec.engine.resharding.carries import Half
from ckptspec.engine.resharding.reshard import run
from ckptspec.engine.resharding.tables import Table
from ckptspec.engine.resharding.trees import Forest, Grown, leaves
from ckptspec.errors import PlanError, ShardError
from ckptspec.format import digest, running
from ckptspec.format.box import Box, intersect
from ckptspec.format.layout import Axis, Mesh, MeshLayout
from ckptspec.format.objects import TensorRef
from ckptspec.format.shard import Extent, Index
from ckptspec.format.target import Target
from ckptspec.planner import joins
from ckptspec.planner.joins import meetings
from ckptspec.planner.strips import share

MEMORY = 16 << 20


def moved(folder: Path, out: Path, target: Target, **options: Any) -> Outcome:
    outcome = run(Request(str(folder), str(out), target, memory=MEMORY, **options))
    report = ckptspec.validate(outcome.folder, level="bytes")
    assert report.findings == (), [str(f) for f in report.findings]
    return outcome


# ---- states ----------------------------------------------------------------------------------------------------------


def stages() -> World:
    """Two pipeline stages of two data ranks; each stage has its own tensors, and objects beside them."""
    w = World(4, {"main": Mesh((Axis("pp", 2, "pipeline"), Axis("dp", 2, "data")))})
    w.layouts = {f"stage{i}": MeshLayout("main", (("dp",),), {"pp": i}) for i in range(2)}
    for i in range(2):
        w.add(f"model/{i}", "float32", (9, 3), f"stage{i}")
        w.add(f"opt/state/{i}/m", "float32", (9, 3), f"stage{i}")
    w.add("list/0", "int32", (2,), "stage0")
    w.add("list/2/0", "int32", (2,), "stage1")
    w.objects = {
        "opt/state/0/step": ("same", 5),
        "opt/state/1/step": ("same", 6),
        "list/1": ("same", "between"),
        "list/2/1": ("same", "x"),
        "step": ("same", 9),
        "own": ("rank", {0: 0, 3: 3}),
    }
    w.aliases = {"model/tied": "model/0"}
    return w


def state_of_stage(rank: int) -> dict[str, Any]:
    """What a rank of a stage holds: what is of the other stage has no name here."""
    i = rank // 2
    ref = TensorRef
    tree: dict[str, Any] = {"model": {str(i): ref(f"model/{i}")}, "opt": {"state": {}}}
    if i == 0:
        tree["model"]["tied"] = ref("model/0")
    tree["opt"]["state"][str(i)] = {"m": ref(f"opt/state/{i}/m"), "step": 5 + i}
    if i == 0:
        tree["list"] = [ref("list/0"), "between"]
    else:
        tree["list"] = {1: "between", 2: (ref("list/2/0"), "x")}
    tree["step"] = 9
    if rank in (0, 3):
        tree["own"] = rank
    return tree


def test_stages_come_together_and_part_again(tmp_path: Path) -> None:
    w = stages()
    folder = w.write(tmp_path / "run", state=state_of_stage)
    assert ckptspec.validate(folder, level="bytes").findings == ()
    m = documents(folder)[0]
    one = {n: replace(x, at={}) for n, x in m.layouts.items() if isinstance(x, MeshLayout)}
    mesh = {"main": Mesh((Axis("pp", 1, "pipeline"), Axis("dp", 2, "data")))}
    together = moved(folder, tmp_path / "one", Target(2, mesh, one, m.tensors, m.objects, {}, m.aliases))
    found = states(Path(together.folder))
    ref = TensorRef
    assert found[1] == {
        "model": {"0": ref("model/0"), "tied": ref("model/0"), "1": ref("model/1")},
        "opt": {"state": {str(i): {"m": ref(f"opt/state/{i}/m"), "step": 5 + i} for i in range(2)}},
        "list": [ref("list/0"), "between", (ref("list/2/0"), "x")],
        "step": 9,
    }
    assert found[0] == {**found[1], "own": 0}
    assert [(p.name, p.gone, p.without) for p in together.private] == [("own", (3,), (1,))]
    objects = dict(together.manifest.objects)
    back = Target(4, m.meshes, m.layouts, m.tensors, objects, {}, m.aliases)
    apart = states(Path(moved(Path(together.folder), tmp_path / "two", back).folder))
    assert apart[0] == state_of_stage(0)
    assert apart[2] == {k: v for k, v in state_of_stage(2).items() if k != "own"}


def test_an_object_is_called_by_the_largest_subtree_without_a_tensor(tmp_path: Path) -> None:
    folder = stages().write(tmp_path / "run", state=state_of_stage)
    m = documents(folder)[0]
    tensors = {n: e for n, e in m.tensors.items() if not n.startswith("opt")}
    target = Target(4, m.meshes, m.layouts, tensors, m.objects, {}, m.aliases)
    outcome = moved(folder, tmp_path / "out", target, drop=("opt",))
    assert dict(outcome.manifest.objects) == {
        "list/1": "same",
        "list/2/1": "same",
        "opt": "same",
        "own": "rank",
        "step": "same",
    }
    assert states(Path(outcome.folder))[3]["opt"] == {"state": {"0": {"step": 5}, "1": {"step": 6}}}


def test_an_object_where_another_rank_has_tensors_keeps_its_entries(tmp_path: Path) -> None:
    w = World(2, {"main": line(2)}, {"first": MeshLayout("main", (), {"dp": 0}), "all": MeshLayout("main", ())})
    w.add("opt/state/w/m", "float32", (4,), "first")
    w.add("model/w", "float32", (4,), "all")
    w.objects = {"opt/state": ("same", {"note": [1, {}], "w": {"left": 2}}), "opt/lr": ("same", 0.5)}

    def state(rank: int) -> dict[str, Any]:
        model = {"model": {"w": TensorRef("model/w")}}
        if rank == 0:
            return {**model, "opt": {"state": {"w": {"m": TensorRef("opt/state/w/m")}}, "lr": 0.5}}
        return {**model, "opt": {"state": {"note": [1, {}], "w": {"left": 2}}, "lr": 0.5}}

    # On rank 1 no tensor lies below `opt`, which therefore is one object there.
    w.objects = {"opt": ("same", None), "opt/lr": ("same", 0.5)}
    folder = w.write(tmp_path / "run", state=state)
    assert ckptspec.validate(folder, level="bytes").findings == ()
    outcome = moved(folder, tmp_path / "out", Target(1, {"main": line(1)}))
    (found,) = states(Path(outcome.folder))
    held = {"m": TensorRef("opt/state/w/m"), "left": 2}
    assert found["opt"] == {"state": {"w": held, "note": [1, {}]}, "lr": 0.5}
    assert dict(outcome.manifest.objects) == {"opt/lr": "same", "opt/state/note": "same", "opt/state/w/left": "same"}
    again = moved(folder, tmp_path / "same", Target(2))
    assert states(Path(again.folder)) == [
        {"model": {"w": TensorRef("model/w")}, "opt": found["opt"]},
        state(1),
    ]


def test_ranks_that_tell_different_values_of_one_object_are_refused() -> None:
    forest = Forest()
    forest.add(0, {"step": 1}, {"step": "same"})
    forest.add(1, {"step": 1}, {"step": "same"})
    for state in ({"step": 1.0}, {"other": 1}):
        with pytest.raises(ShardError, match="O-KIND"):
            forest.add(2, state, {"step": "same"})


def test_a_tensor_below_a_tensor_is_refused(tmp_path: Path) -> None:
    folder = stages().write(tmp_path / "run", state=state_of_stage)
    m = documents(folder)[0]
    tensors = {**m.tensors, "model/0/more": m.tensors["model/0"]}
    with pytest.raises(PlanError, match="R-NAME"):
        run(
            Request(
                str(folder), str(tmp_path / "out"), Target(4, m.meshes, m.layouts, tensors, m.objects, {}, m.aliases)
            )
        )


keys = st.one_of(st.text(min_size=1, max_size=3), st.integers(-3, 12))
values = st.one_of(st.none(), st.integers(), st.builds(dict), st.just(TensorRef("t")))
trees = st.recursive(
    values, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3))
)


@given(tree=st.dictionaries(keys, trees, max_size=4))
@settings(max_examples=200, deadline=None)
def test_what_is_taken_apart_is_put_together_the_same(tree: dict[Any, Any]) -> None:
    try:
        found = list(leaves(tree))
    except ShardError:
        return  # two keys of one name, or a name that is none
    grown = Grown(dict)
    for name, steps, part in found:
        grown.put(name, steps, part)
    made = grown.state()
    assert made == tree
    assert [(n, s) for n, s, _ in leaves(made)] == [(n, s) for n, s, _ in found]


# ---- boxes that meet -------------------------------------------------------------------------------------------------

boxes = st.builds(
    lambda o, s: Box(tuple(o), tuple(s)),
    st.lists(st.integers(0, 9), min_size=2, max_size=2),
    st.lists(st.integers(1, 6), min_size=2, max_size=2),
)


@given(ones=st.lists(boxes, max_size=12), others=st.lists(boxes, max_size=12), few=st.sampled_from([0, 64]))
@settings(deadline=None)
def test_meetings_are_all_pairs_that_share_something(ones: list[Box], others: list[Box], few: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joins, "FEW", few)
        found = list(meetings(ones, others))
    pairs = [(i, j, intersect(a, b)) for i, a in enumerate(ones) for j, b in enumerate(others)]
    assert sorted(found, key=lambda f: f[:2]) == [p for p in pairs if p[2] is not None]


def test_meetings_of_many_pieces_cost_as_many_steps() -> None:
    rows = [Box((i, 0), (1, 4000)) for i in range(4000)]
    blocks = [Box((4 * i, 0), (4, 4000)) for i in range(1000)]
    candidates = list(joins._along(joins._finest(rows, blocks), rows, blocks))
    assert len(candidates) == len(list(meetings(rows, blocks))) == 4000


# ---- digests of pieces -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", digest.ALGORITHMS)
def test_a_running_digest_is_that_of_all_bytes(name: str) -> None:
    data = bytes(range(256)) * 5
    made = running.start(name)
    for start, stop in ((0, 1), (1, 1), (1, 700), (700, len(data))):
        made.update(memoryview(data)[start:stop])
    assert made.digest() == digest.algorithm(name).of(data)


@given(data=st.data(), nbytes=st.integers(1, 300), block=st.integers(1, 100))
@settings(deadline=None)
def test_blocks_know_what_came_in_a_row_and_nothing_wrong(data: st.DataObject, nbytes: int, block: int) -> None:
    index = Index(("t",), ("uint8",), ((nbytes,),), (_row(nbytes),), Extent(4096 + nbytes, 1), 100, b"", b"")
    table = Table(0, index, {"t": 0}, block)
    (chunk,) = table.of(0)
    content = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8).tobytes()
    blocks = Blocks([table], "sha256", block)
    stops = sorted({0, nbytes, *data.draw(st.lists(st.integers(0, nbytes), max_size=6))})
    pieces = list(pairwise(stops))
    order = data.draw(st.permutations(pieces))
    for start, stop in order:
        blocks.take(chunk, start, memoryview(content)[start:stop])
    expected = [digest.algorithm("sha256").of(content[i : i + block]) for i in range(0, nbytes, block)]
    unknown = set(blocks.unknown(0))
    if order == pieces:
        assert unknown == set()
    found = blocks.digests(0)
    for i, e in enumerate(expected):
        assert i in unknown or found[32 * i : 32 * (i + 1)] == e
    other = Blocks([table], "sha256", block)
    other.adopt(blocks.fresh())
    assert (set(other.unknown(0)), other.known()) == (unknown, blocks.known())
    assert blocks.fresh() == {}


def _row(nbytes: int) -> Any:
    from ckptspec.format.shard import ChunkRow

    return ChunkRow(0, Box((0,), (nbytes,)), 4096, nbytes)


def test_half_of_the_memory_is_given_out_once() -> None:
    half = Half(100)
    half.take(60)[:] = b"x" * 60
    with pytest.raises(MemoryError):
        half.take(41)
    half.clear()
    assert bytes(half.take(100)[:61]) == b"x" * 60 + b"\0"


# ---- shares ----------------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 100), max_size=30), count=st.integers(1, 9))
def test_shares_are_runs_that_are_as_equal_as_whole_units_allow(sizes: list[int], count: int) -> None:
    found = share(sizes, count)
    assert [i for r in found for i in r] == list(range(len(sizes)))
    assert len(found) == count
    for r in found:
        assert sum(sizes[i] for i in r) <= sum(sizes) / count + max(sizes, default=0)

"""Any layout becomes any other: what a reshard writes is what numpy would, and every byte of it passes."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from written import (
    World,
    columns,
    flat,
    job,
    line,
    manifest_of,
    payloads,
    rows,
    states,
    tensor_parallel_zero,
    values,
    whole,
)

import ckptspec
from ckptspec.engine import pool
from ckptspec.engine.resharding.asking import Outcome, Request
from ckptspec.engine.resharding.batches import LEAD
from ckptspec.engine.resharding.reshard import run
from ckptspec.engine.resharding.sweep import Budget
from ckptspec.errors import PlanError, SaveError
from ckptspec.format.box import Box, split
from ckptspec.format.layout import Axis, BoxesLayout, Layout, Mesh, MeshLayout
from ckptspec.format.manifest import Member, TensorEntry
from ckptspec.format.objects import TensorRef
from ckptspec.format.target import Target, of_manifest
from ckptspec.planner.renames import renames
from ckptspec.planner.sizing import of_axes, of_world

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model/a": ("float32", (7, 5)),
    "model/b": ("float64", (1,)),
    "model/c": ("uint8", (3,)),
    "model/d": ("int16", (0, 4)),
    "model/e": ("float32", (1025,)),
    "model/f": ("bfloat16", (257, 64)),
    "model/g": ("complex128", (4, 3, 5)),
    "model/h": ("float16", ()),
}
LEAST = 4 << 20  # bytes of memory, enough for blocks up to 128 KiB


@pytest.fixture(autouse=True)
def _no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Durability has tests of its own; here a flush is time alone."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def moved(folder: Path, out: Path, target: Target, **options: Any) -> Outcome:
    """Reshard, and have every byte of the result checked."""
    outcome = run(Request(str(folder), str(out), target, **{"memory": LEAST, **options}))
    report = ckptspec.validate(outcome.folder, level="bytes")
    assert report.findings == (), [str(f) for f in report.findings]
    assert sorted(p.name for p in out.iterdir()) == [Path(outcome.folder).name]
    return outcome


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Two readings hold the same bytes of the same tensors."""
    assert a.keys() == b.keys()
    for name, array in a.items():
        assert array.shape == b[name].shape, name
        assert array.tobytes() == b[name].tobytes(), name


# ---- any layout to any layout ----------------------------------------------------------------------------------------


def grid(world: int) -> Mesh:
    """Two axes, the second of two where that goes."""
    second = 2 if world % 2 == 0 else 1
    return Mesh((Axis("dp", world // second, "data"), Axis("tp", second, "tensor")))


@st.composite
def layouts(draw: st.DrawFn, world: int, shape: tuple[int, ...]) -> Layout:
    """Some layout that a tensor of this shape can have on a mesh of two axes."""
    kinds = ["replicated", "mesh"] + (["flat"] if len(shape) == 1 else []) + (["boxes", "blocks"] if shape else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "flat":
        return flat(axis=draw(st.sampled_from(["dp", "tp"])), align=draw(st.integers(1, 5)))
    if kind == "boxes":
        return boxes(draw, world, shape)
    dims: list[list[str]] = [[] for _ in shape]
    if kind == "mesh":
        for axis in draw(st.permutations(["dp", "tp"])):
            dim = draw(st.integers(-1, len(shape) - 1))
            if dim >= 0:
                dims[dim].append(axis)
    if kind == "blocks":
        dims[0].append("dp")
        at = draw(st.integers(0, shape[0]))
        return MeshLayout("main", tuple(map(tuple, dims)), {}, {0: (at, shape[0] - at)})
    return MeshLayout("main", tuple(map(tuple, dims)))


def boxes(draw: st.DrawFn, world: int, shape: tuple[int, ...]) -> BoxesLayout:
    """Rows cut anywhere, each piece held by one or two ranks."""
    stops = sorted({0, shape[0], *draw(st.lists(st.integers(0, shape[0]), max_size=3))})
    listed = []
    for start, stop in pairwise(stops):
        box = Box((start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:]))
        ranks = draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=2))
        listed += [(rank, box) for rank in sorted(ranks)]
    return BoxesLayout(tuple(listed) or ((0, Box((0,) * len(shape), shape)),))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A checkpoint of all SHAPES, each in some layout, on 1 to 8 ranks."""
    size = draw(st.integers(1, 8))
    w = World(size, {"main": grid(size)})
    w.copies = draw(st.sampled_from([1, 1, 2, 3]))
    w.block = draw(st.sampled_from(["xxh3-128", "crc32c", "blake3", "sha256"]))
    w.block_size = draw(st.sampled_from([64, 100, 1000, 4096, 1 << 17]))
    for name, (kind, shape) in SHAPES.items():
        w.layouts[name] = draw(layouts(size, shape))
        w.add(name, kind, shape, name)
    w.objects = {"step": ("same", 12), "own": ("rank", {r: [1, r] for r in range(size)})}
    return w


def target_of(w: World) -> Target:
    """The target that a world is."""
    return Target(w.size, w.meshes, w.layouts, w.tensors, {n: k for n, (k, _) in w.objects.items()}, w.groups, {})


@given(source=worlds(), wanted=worlds())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_layout_becomes_every_other_and_is_read_once(
    source: World, wanted: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    any_to_any(source, wanted, tmp_path_factory.mktemp("pair"))


@given(source=worlds(), wanted=worlds(), blocks=st.integers(4, 40), slots=st.sampled_from([0, 1, 100]))
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_next_to_no_memory_changes_nothing_but_the_time(
    source: World, wanted: World, blocks: int, slots: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    squeezed(source, wanted, blocks, slots, tmp_path_factory.mktemp("pair"))


@pytest.mark.long
@given(source=worlds(), wanted=worlds())
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_layout_becomes_every_other_for_longer(
    source: World, wanted: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    any_to_any(source, wanted, tmp_path_factory.mktemp("pair"))


@pytest.mark.long
@given(source=worlds(), wanted=worlds(), blocks=st.integers(4, 40), slots=st.sampled_from([0, 1, 100]))
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_next_to_no_memory_changes_nothing_for_longer(
    source: World, wanted: World, blocks: int, slots: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    squeezed(source, wanted, blocks, slots, tmp_path_factory.mktemp("pair"))


def squeezed(source: World, wanted: World, blocks: int, slots: int, root: Path) -> None:
    folder = source.write(root / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "LEAST_BUFFER", 1)
        room = max(blocks * source.block_size, 1000)
        tight = Budget(room, slots, wanted.block_size + 2 * LEAD, 2)
        patch.setattr(Budget, "of", lambda *_: tight)
        there = moved(folder, root / "there", target_of(wanted), **form_of(wanted))
    same(whole(folder), whole(Path(there.folder)))


def any_to_any(source: World, wanted: World, root: Path) -> None:
    folder = source.write(root / "run")
    there = moved(folder, root / "there", target_of(wanted), **form_of(wanted))
    same(whole(folder), whole(Path(there.folder)))
    stored = sum(len(data) for shard in payloads(folder) for data in shard.values())
    assert there.account.dropped_blocks == 0
    assert there.account.nbytes_read <= there.source.nbytes
    back = moved(Path(there.folder), root / "back", target_of(source), **form_of(source))
    assert payloads(Path(back.folder)) == payloads(folder)
    assert sum(len(data) for shard in payloads(Path(back.folder)) for data in shard.values()) == stored


def form_of(w: World) -> dict[str, Any]:
    return {"copies": w.copies, "block": w.block, "block_size": w.block_size}


# ---- a checkpoint as jobs write them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_another_world_size_cuts_data_axes_and_flat_groups_anew(tmp_path: Path, world: int) -> None:
    folder = job().write(tmp_path / "run")
    m = manifest_of(folder)
    outcome = moved(folder, tmp_path / "out", of_world(m, world))
    found, before = whole(Path(outcome.folder)), whole(folder)
    private = before.pop("rng/torch"), found.pop("rng/torch")
    same(before, found)
    assert {r: a.tobytes() for r, a in private[1].items()} == {r: private[0][r].tobytes() for r in range(min(world, 4))}
    made = outcome.manifest
    assert (made.step, made.run_id, made.wall_clock_seconds) == (m.step, "run", 17)
    assert made.parent == {"step": m.step, "save_id": m.save_id}
    note = {"save_id": m.save_id, "manifest_digest": m.digest, "world_size": 4}
    assert made.annotations == {"org.example.cluster": "a", "io.ckptspec.reshard": note}
    gone, without = tuple(range(world, 4)), tuple(range(4, world))
    expected = [("rng/torch", gone, without), ("rng/python", gone, without)] if world != 4 else []
    assert [(p.name, p.gone, p.without) for p in outcome.private] == expected


def test_states_keep_their_structure_and_hold_what_their_rank_holds(tmp_path: Path) -> None:
    w = job(4)
    folder = w.write(tmp_path / "run")
    outcome = moved(folder, tmp_path / "out", of_world(manifest_of(folder), 6))
    found = states(Path(outcome.folder))
    assert found[:4] == states(folder)
    less = w.state(0)
    del less["rng"]
    assert found[4] == found[5] == less


def test_the_same_target_gives_back_the_shards_but_for_the_save(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    outcome = moved(folder, tmp_path / "out", of_manifest(manifest_of(folder)))
    for entry, other in zip(manifest_of(folder).shards, outcome.manifest.shards, strict=True):
        old, new = ((Path(f) / entry.path).read_bytes() for f in (folder, outcome.folder))
        assert old.replace(outcome.source.save_id.encode(), b"") != new  # the digest of the header differs as well
        assert (entry.nbytes, entry.index_offset) == (other.nbytes, other.index_offset)
        start = manifest_of(folder).digest and 200
        assert old[start : entry.index_offset] == new[start : entry.index_offset]


def test_zero_state_becomes_state_by_parameter_and_comes_back(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    m = manifest_of(folder)
    names = {f"optimizer/state/{p}/{k}": (p, k) for p in ("w", "v") for k in ("exp_avg", "exp_avg_sq")}
    tensors = {n: e for n, e in m.tensors.items() if "zero" not in n}
    for name, (p, _) in names.items():
        tensors[name] = replace(m.tensors[f"model/{p}"], dtype="float32", role="other")
    target = Target(3, {"main": line(3)}, {n: x for n, x in m.layouts.items() if n != "zero"}, tensors)
    there = moved(folder, tmp_path / "there", target)
    found = whole(Path(there.folder))
    for name, (p, k) in names.items():
        shape = m.tensors[f"model/{p}"].shape or ()
        assert found[name].tobytes() == values(f"model/{p}.{k}", "float32", shape).tobytes(), name
    state = states(Path(there.folder))[0]
    assert state["optimizer"]["state"]["w"] == {
        k: TensorRef(f"optimizer/state/w/{k}") for k in ("exp_avg", "exp_avg_sq")
    }
    assert "zero" not in state["optimizer"]
    assert there.account.nbytes_read <= there.source.nbytes
    back = moved(Path(there.folder), tmp_path / "back", of_manifest(m))
    before, after = whole(folder), whole(Path(back.folder))
    assert before["optimizer/zero/exp_avg"].tobytes() == after["optimizer/zero/exp_avg"].tobytes()
    assert [m.tensors[n].role for n in m.tensors] == [back.manifest.tensors[n].role for n in m.tensors]


@pytest.mark.parametrize(("one", "other"), [((2, 2), (4, 1)), ((4, 1), (1, 3)), ((1, 2), (2, 3)), ((2, 1), (2, 2))])
def test_flat_groups_under_tensor_parallelism_are_read_once(
    tmp_path: Path, one: tuple[int, int], other: tuple[int, int]
) -> None:
    source, wanted = tensor_parallel_zero(*one), tensor_parallel_zero(*other)
    folder = source.write(tmp_path / "run")
    outcome = moved(folder, tmp_path / "out", target_of(wanted))
    same(whole(wanted.write(tmp_path / "expected")), whole(Path(outcome.folder)))
    assert outcome.account.nbytes_read <= outcome.source.nbytes
    assert outcome.account.dropped_blocks == 0


def test_what_no_member_of_a_wanted_group_holds_is_zero(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    m = manifest_of(folder)
    numel = 257 * 64 + 35 + 6
    members = (
        Member(None, 0, (2,)),
        Member("model/v", 2, (7, 5)),
        Member(None, 37, (3,)),
        Member("model/w", 40, (257, 64)),
        Member(None, 40 + 257 * 64, (1,)),
    )
    group = replace(m.flat_groups["optimizer/zero"], numel=numel, members=members)
    tensors = {n: replace(e, shape=(numel,)) if n in group.tensors.values() else e for n, e in m.tensors.items()}
    target = replace(of_world(m, 3), tensors=tensors, flat_groups={"optimizer/zero": group})
    found = whole(Path(moved(folder, tmp_path / "out", target).folder))["optimizer/zero/exp_avg"]
    v, w = (values(f"model/{p}.exp_avg", "float32", s).reshape(-1) for p, s in (("v", (7, 5)), ("w", (257, 64))))
    zeros = np.zeros(3, found.dtype)
    assert found.tobytes() == np.concatenate([zeros[:2], v, zeros, w, zeros[:1]]).tobytes()


# ---- flat groups and named state -------------------------------------------------------------------------------------

PARAMETERS = {"w": (9, 8), "u": (16, 4), "b": (5,), "s": (), "z": (0, 3)}


@st.composite
def optimizers(draw: st.DrawFn) -> World:
    """Adam's moments of PARAMETERS, by name or in flat groups, one for each tensor rank, in any order, with padding."""
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4))
    w = World(tp * dp, {"main": Mesh((Axis("dp", dp, "data"), Axis("tp", tp, "tensor")))})
    w.block_size = draw(st.sampled_from([64, 100, 4096]))
    w.copies = draw(st.sampled_from([1, 1, 2]))
    kinds = ("exp_avg", "exp_avg_sq")
    w.layouts["all"] = MeshLayout("main", ())
    w.add("model/bias", "float32", (3,), "all")
    if draw(st.booleans()):
        for name, shape in PARAMETERS.items():
            w.layouts[name] = draw(layouts(w.size, shape))
            for kind in kinds:
                w.tensors[f"optimizer/state/{name}/{kind}"] = TensorEntry("float32", shape, name)
                w.arrays[f"optimizer/state/{name}/{kind}"] = values(f"model/{name}.{kind}", "float32", shape)
        return w
    order = draw(st.permutations(list(PARAMETERS)))
    cuts = {name: draw(st.integers(0, len(shape) - 1)) for name, shape in PARAMETERS.items() if shape}
    for i in range(tp):
        members, at = [], 0
        for name in order:
            shape = PARAMETERS[name]
            offsets, sizes = [0] * len(shape), list(shape)
            if name in cuts:
                d = cuts[name]
                offsets[d], sizes[d] = split(shape[d], tp, i)
            elif i:
                continue  # what cannot be cut lies in the first group
            members.append(Member(f"model/{name}", at, tuple(sizes), shape, tuple(offsets)))
            at += int(np.prod(sizes))
            if pad := draw(st.integers(0, 3)):
                members.append(Member(None, at, (pad,)))
                at += pad
        w.layouts[f"zero{i}"] = replace(flat(align=draw(st.integers(1, 4))), at={"tp": i})
        w.add_group(f"zero{i}", f"zero{i}", members, {k: f"optimizer/zero{i}/{k}" for k in kinds}, "float32")
    return w


@given(source=optimizers(), wanted=optimizers())
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_moments_in_any_form_become_those_of_any_other(
    source: World, wanted: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    forms(source, wanted, tmp_path_factory.mktemp("forms"))


@pytest.mark.long
@given(source=optimizers(), wanted=optimizers())
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
def test_moments_in_any_form_become_those_of_any_other_for_longer(
    source: World, wanted: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    forms(source, wanted, tmp_path_factory.mktemp("forms"))


def forms(source: World, wanted: World, root: Path) -> None:
    folder = source.write(root / "run")
    outcome = moved(folder, root / "there", target_of(wanted), **form_of(wanted))
    same(whole(wanted.write(root / "expected")), whole(Path(outcome.folder)))
    assert outcome.account.nbytes_read <= outcome.source.nbytes


# ---- bounded memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [("rows", "columns"), ("columns", "rows"), ("rows", "rows")])
def test_a_checkpoint_larger_than_memory_is_read_once(tmp_path: Path, one: str, other: str) -> None:
    known = {"rows": rows(), "columns": columns()}
    w = World(5, {"main": line(5)}, {"x": known[one]}, block_size=10_000)
    for i in range(3):
        w.add(f"model/{i}", "float32", (700, 1001), "x")
    folder = w.write(tmp_path / "run")
    target = replace(of_world(manifest_of(folder), 4), layouts={"x": known[other]})
    outcome = moved(folder, tmp_path / "out", target, memory=2 << 20, block_size=12_000)
    same(whole(folder), whole(Path(outcome.folder)))
    assert outcome.account.nbytes_read <= 1.01 * outcome.source.nbytes


def test_where_memory_is_short_for_all_columns_some_are_written_after_the_others(tmp_path: Path) -> None:
    w = World(24, {"main": line(24)}, {"x": columns()}, block_size=1 << 16)
    w.add("model/0", "float32", (3000, 240), "x")
    folder = w.write(tmp_path / "run")
    target = replace(of_world(manifest_of(folder), 2), layouts={"x": rows()})
    outcome = moved(folder, tmp_path / "out", target, memory=2 << 20)
    same(whole(folder), whole(Path(outcome.folder)))
    assert outcome.account.nbytes_read <= 1.01 * outcome.source.nbytes


def test_memory_that_cannot_hold_a_few_blocks_is_refused(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    with pytest.raises(ValueError, match="too small"):
        ckptspec.reshard(folder, tmp_path / "out", 2, memory=1 << 20)
    assert not (tmp_path / "out").exists()


# ---- refusals --------------------------------------------------------------------------------------------------------


def refused(folder: Path, target: Target, rule: str, **options: Any) -> PlanError:
    out = folder.parent.parent / "refused"
    with pytest.raises(PlanError) as e:
        run(Request(str(folder), str(out), target, **options))
    assert e.value.rule == rule
    assert not out.exists()
    return e.value


def test_nothing_is_lost_cast_or_filled_in_silence(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    m = manifest_of(folder)
    t = of_manifest(m)
    w = m.tensors["model/w"]
    fewer = replace(t, tensors={n: e for n, e in m.tensors.items() if n not in ("model/v", "rng/torch")})
    assert "model/v" in str(refused(folder, fewer, "R-NAME"))
    assert "rng/torch" in str(refused(folder, fewer, "R-NAME", drop=("model/v",)))
    assert "step" in str(refused(folder, replace(t, objects={"rng/python": "rank"}), "R-NAME"))
    refused(folder, t, "R-NAME", drop=("model/v",))  # the target asks for it
    more = replace(t, tensors={**m.tensors, "model/ww": w})
    assert "model/w is near" in str(refused(folder, more, "R-NAME"))
    refused(folder, replace(t, objects={**m.objects, "epoch": "same"}), "R-NAME")
    refused(folder, replace(t, objects={**m.objects, "rng/python": "same"}), "R-NAME")
    refused(folder, replace(t, tensors={**m.tensors, "model/w": replace(w, dtype="float16")}), "R-DTYPE")
    refused(folder, replace(t, tensors={**m.tensors, "model/w": replace(w, shape=(64, 257))}), "R-SHAPE")
    local = replace(m.tensors["rng/torch"], shape=(16,), layout="all")
    refused(folder, replace(t, tensors={**m.tensors, "rng/torch": local}), "R-SHAPE")


def test_what_is_named_may_be_left_out(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    m = manifest_of(folder)
    fewer = replace(
        of_world(m, 2),
        tensors={n: e for n, e in m.tensors.items() if n.startswith("model")},
        objects={"step": "same"},
        aliases={},
    )
    drop = ("optimizer", "rng", "model/h*")
    outcome = moved(folder, tmp_path / "out", fewer, drop=drop)
    assert set(outcome.manifest.tensors) == {"model/w", "model/v"}
    assert outcome.dropped[0] == "optimizer/zero/exp_avg"
    assert {"rng/torch", "rng/python", "model/head", "optimizer/groups"} <= set(outcome.dropped)
    assert states(Path(outcome.folder))[1] == {
        "model": {"w": TensorRef("model/w"), "v": TensorRef("model/v")},
        "step": 12,
    }


def test_a_map_gives_names(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    m = manifest_of(folder)
    tensors = {("net/" + n[6:] if n.startswith("model") else n): e for n, e in m.tensors.items()}
    target = replace(of_world(m, 2), tensors=tensors, aliases={"net/head": "net/w"})
    outcome = moved(folder, tmp_path / "out", target, names=renames({"net/*": "model/*"}))
    assert whole(Path(outcome.folder))["net/w"].tobytes() == whole(folder)["model/w"].tobytes()
    assert outcome.renamed == {"net/w": "model/w", "net/v": "model/v"}
    assert states(Path(outcome.folder))[1]["net"] == {
        "w": TensorRef("net/w"),
        "v": TensorRef("net/v"),
        "head": TensorRef("net/w"),
    }


def test_the_source_is_never_replaced_and_a_step_only_when_asked(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    m = manifest_of(folder)
    t = of_world(m, 2)
    for out in (folder.parent, folder, folder / "inside", tmp_path / "new" / "step-00000009"):
        for on_existing in ("refuse", "supersede"):
            with pytest.raises(SaveError, match="P-EXISTING"):
                run(Request(str(folder), str(out), t, on_existing=on_existing))
    first = moved(folder, tmp_path / "out", t)
    with pytest.raises(SaveError, match="there already"):
        moved(folder, tmp_path / "out", of_world(m, 3))
    assert manifest_of(Path(first.folder)).save_id == first.manifest.save_id
    second = moved(folder, tmp_path / "out", of_world(m, 3), on_existing="supersede")
    assert manifest_of(Path(first.folder)).save_id == second.manifest.save_id


def test_a_target_at_odds_with_itself_is_refused(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    m = manifest_of(folder)
    refused(folder, replace(of_manifest(m), world_size=2), "R-TARGET")
    clash = {**m.tensors, "step": m.tensors["model/v"]}
    target = replace(of_manifest(m), tensors=clash)
    refused(folder, target, "R-NAME", names=renames({"step": "model/v"}))


def test_python_takes_a_number_of_ranks_and_axes_by_target(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    made = ckptspec.reshard(tmp_path / "run", tmp_path / "out", 2, memory=64 << 20)
    assert (made.world_size, made.meshes["main"]) == (2, line(2))
    m = manifest_of(folder)
    assert ckptspec.reshard(folder, tmp_path / "other", of_axes(m, {"dp": 2})).tensors == made.tensors
    assert ckptspec.latest(tmp_path / "out") == str(tmp_path / "out" / "step-00000007")

"""For every target the report says what will happen, what it costs, what is lost, and the command to run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import make
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make import builder

import ckptspec
from ckptspec.check.migration import batches, moving, parts, ranges
from ckptspec.check.migration.asking import Answer, Asking, answer
from ckptspec.check.migration.batches import Batch, batching
from ckptspec.check.migration.nearness import Nearness, distance, nearest
from ckptspec.check.migration.pairs import pairs
from ckptspec.check.verdicts import losses, verdicts
from ckptspec.cli.main import COMMANDS, main
from ckptspec.engine.verify import validate
from ckptspec.errors import PlanError, StateError
from ckptspec.format import schemas, signature
from ckptspec.format.box import Box
from ckptspec.format.layout import Axis, FlatLayout, LocalLayout, Mesh, MeshLayout
from ckptspec.format.manifest import FlatGroup, Manifest, Member, TensorEntry
from ckptspec.format.report import Range, Report, Verdict
from ckptspec.format.signature import Described, Signature
from ckptspec.format.target import Target, of_manifest
from ckptspec.planner.renames import renames
from ckptspec.pytorch.signature import signature as signature_of

SAMPLE = builder.sample(4).manifest
FILES = make.files(4)


def manifest(**changes: Any) -> Manifest:
    """Return the sample's manifest of four ranks, changed."""
    return replace(SAMPLE, **changes)


def asked(m: Manifest, target: Target | None, **more: Any) -> Answer:
    """Return the answer to a target, or to what else `more` says."""
    return answer(Asking(target, words=("--world-size", "9"), **more), m)


def by_part(found: tuple[Verdict, ...]) -> dict[str, str]:
    """Return verdicts by part."""
    return {v.part: v.verdict for v in found}


def severities(a: Answer) -> dict[str, str]:
    """Return the severity of each code of an answer."""
    return {f.code: f.severity for f in a.findings}


# ---- the global batch ------------------------------------------------------------------------------------------------

SIZES = st.integers(1, 40)


@given(SIZES, SIZES, SIZES, SIZES)
def test_what_is_said_to_keep_the_global_batch_keeps_it_and_nothing_near_is_called_equal(
    old: int, new: int, micro: int, accumulation: int
) -> None:
    found = batching(old, new, Batch(micro, accumulation))
    assert found.total == old * micro * accumulation
    assert found.choices
    for choice in found.choices:
        assert choice.total == new * choice.micro * choice.accumulation
        assert 1 <= choice.micro <= micro
        assert choice.accumulation >= 1
        assert (choice.total == found.total) == found.exact
    possible = any(found.total == new * m * (found.total // (new * m)) for m in range(1, micro + 1))
    assert found.exact == possible
    nearby = range(max(1, found.total // new), found.total // new + 2)
    best = min(abs(new * n - found.total) for n in nearby)
    assert abs(found.choices[0].total - found.total) == best


def test_the_accumulation_is_changed_before_the_micro_batch() -> None:
    assert batching(1024, 768, Batch(2, 3)).choices == (batches.Choice(2, 4, 6144),)
    assert batching(4, 8, Batch(2, 1)).choices == (batches.Choice(1, 1, 8),)
    assert "no whole numbers keep it" in batching(4, 3, Batch(1, 1)).text()
    with pytest.raises(ValueError, match="positive"):
        batching(4, 0, Batch(1, 1))


def test_a_batch_is_what_was_asked_for_or_what_the_checkpoint_notes_and_never_invented() -> None:
    note = {"org.ckptspec.batch": {"micro": 2, "accumulation": 4}}
    assert batches.chosen(None, None, {}) is None
    assert batches.chosen(None, None, note) == Batch(2, 4)
    assert batches.chosen(3, None, note) == Batch(3, 4)
    assert batches.chosen(3, None, {}) == Batch(3, 1)
    assert batches.chosen(None, 3, {}) is None
    for wrong in ({"micro": 0, "accumulation": 1}, {"micro": True, "accumulation": 1}, {"micro": 1}, [2, 4], None):
        assert batches.noted({"org.ckptspec.batch": wrong}) is None


def test_data_parallel_ranks_are_those_of_a_mesh_over_all_ranks() -> None:
    main, experts = (
        Mesh((Axis("dp", 4, "data"), Axis("tp", 2, "tensor"))),
        Mesh((Axis("edp", 2, "data"), Axis("ep", 4))),
    )
    assert batches.data_size(8, {"main": main, "experts": experts}) == 4
    assert batches.data_size(16, {"main": main}) is None
    assert batches.data_size(8, {"tp": Mesh((Axis("tp", 8, "tensor"),))}) is None


# ---- names -----------------------------------------------------------------------------------------------------------


def naive(a: str, b: str) -> int:
    """Return the edit distance by the whole table."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        new = [i]
        for j, y in enumerate(b, 1):
            new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (x != y)))
        row = new
    return row[-1]


@given(st.text("abc.", max_size=12), st.text("abc.", max_size=12), st.integers(0, 8))
def test_edits_are_counted_right_and_no_further_than_asked(a: str, b: str, limit: int) -> None:
    assert distance(a, b, limit) == min(naive(a, b), limit + 1)


def test_the_nearest_name_is_named_only_where_it_is_near_and_alone() -> None:
    assert nearest("layers.0.weight", ["layers.1.weights", "layers.0.weights", "norm.weight"]) == "layers.0.weights"
    assert nearest("aa1", ["aa2", "aa3"]) is None
    assert nearest("entirely", ["different", "words"]) is None
    spent = Nearness(left=10)
    assert spent.nearest("names", [f"names{i}" for i in range(1000)]) is None
    assert spent.left < 10


def fits(wanted: str, stored: str) -> bool:
    """Say that any two tensors could be the same."""
    return True


@pytest.mark.parametrize(
    ("wanted", "stored", "parts_of_it"),
    [
        ("model/module.a.weight", "model/a.weight", ("module.", "")),
        ("model/a.weight", "model/_orig_mod.a.weight", ("", "_orig_mod.")),
        ("a.weight", "model/a.weight", ("", "model/")),
        ("model/l.0._fsdp_wrapped_module.w", "model/l.0.w", ("_fsdp_wrapped_module.", "")),
        ("optimizer/state/module.a/exp_avg", "optimizer/state/a/exp_avg", ("module.", "")),
    ],
)
def test_what_wrappers_add_is_known(wanted: str, stored: str, parts_of_it: tuple[str, str]) -> None:
    (pair,) = pairs([wanted], [stored], fits)
    assert (pair.wanted, pair.stored, pair.kind) == (wanted, stored, "prefix")
    assert (pair.wanted_part, pair.stored_part) == parts_of_it


def test_a_prefix_that_many_names_exchange_is_found_and_what_is_ambiguous_is_left() -> None:
    layers = [f"{i}.{part}" for i in range(4) for part in ("q", "k", "norm.weight")]
    found = pairs([f"encoder.{n}" for n in layers], [f"backbone.blocks.{n}" for n in layers], fits)
    assert {(p.wanted, p.stored) for p in found} == {(f"encoder.{n}", f"backbone.blocks.{n}") for n in layers}
    assert {(p.wanted_part, p.stored_part) for p in found} == {("encoder.", "backbone.blocks.")}
    assert pairs(["model/module.a"], ["model/a", "a"], fits) == []
    (near,) = pairs(["model/head.weights"], ["model/head.weight", "other"], fits)
    assert near.kind == "near"
    assert pairs(["model/head.weights"], ["model/head.weight"], lambda a, b: False) == []


@given(st.lists(st.text("ab./", min_size=1, max_size=6), max_size=8), st.lists(st.text("ab./", min_size=1), max_size=8))
def test_no_name_is_in_two_pairs(missing: list[str], surplus: list[str]) -> None:
    found = pairs(missing, surplus, fits)
    assert len({p.wanted for p in found}) == len(found) == len({p.stored for p in found})
    assert {p.wanted for p in found} <= set(missing)
    assert {p.stored for p in found} <= set(surplus)


def model_of(m: Manifest, prefix: str = "") -> dict[str, Described]:
    """Return the model's tensors of a manifest as a signature has them, under other names."""
    names = [n for n in m.tensors if n.startswith("model/")]
    return {n.replace("model/", f"model/{prefix}"): Described(m.tensors[n].dtype, m.tensors[n].shape) for n in names}


def signed(m: Manifest, tensors: Mapping[str, Described], **more: Any) -> Answer:
    """Return the answer to a signature."""
    return answer(Asking(signature=Signature(tensors), **more), m)


def test_a_signature_of_the_model_fits_and_what_else_is_stored_is_a_warning() -> None:
    a = signed(SAMPLE, model_of(SAMPLE))
    assert {(f.code, f.severity, f.where.tensor) for f in a.findings} == {
        ("R-NAME", "warning", "optimizer"),
        ("R-NAME", "warning", "rng"),
    }
    whole = Signature({n: Described(t.dtype, t.shape) for n, t in SAMPLE.tensors.items()}, SAMPLE.objects)
    assert answer(Asking(signature=whole), SAMPLE).findings == ()


def test_names_that_differ_by_a_prefix_are_explained_once_and_the_map_makes_them_fit() -> None:
    tensors = model_of(SAMPLE, "module.")
    a = signed(SAMPLE, tensors)
    (told,) = [f for f in a.findings if f.severity == "error"]
    assert "4 names differ by a prefix alone: the model has 'module.' in them" in told.message
    assert a.names is not None
    assert a.names.proposed == {n: n.replace("module.", "") for n in tensors}
    again = signed(SAMPLE, tensors, names=renames(a.names.proposed))
    assert {f.severity for f in again.findings} == {"warning"}
    assert again.names is not None
    assert again.names.renamed == a.names.proposed


def test_only_pairs_of_one_dtype_and_shape_are_proposed() -> None:
    tensors = model_of(SAMPLE, "module.")
    tensors["model/module.norm"] = Described("float16", (24,))
    tensors["model/module.embed"] = Described("bfloat16", (24, 7))
    a = signed(SAMPLE, tensors)
    assert a.names is not None
    assert set(a.names.proposed) == {"model/module.scale", "model/module.empty"}
    told = {f.code: f.message for f in a.findings if f.code in ("R-DTYPE", "R-SHAPE")}
    assert told.keys() == {"R-DTYPE", "R-SHAPE"}
    assert told["R-SHAPE"].endswith("it is transposed")


def test_both_lists_are_printed_each_with_a_limit_of_its_own() -> None:
    tensors = {f"a{i}": Described("int8", (i,)) for i in range(400)}
    stored = {f"model/z{i}z": TensorEntry("int64", (i, 1, 1), "replicated") for i in range(400)}
    m = manifest(tensors=stored, objects={}, aliases={}, flat_groups={})
    found = [f for f in answer(Asking(signature=Signature(tensors, {})), m).findings if f.code == "R-NAME"]
    assert sum("which the checkpoint has not" in f.message for f in found) == 100
    assert sum("which the model has not" in f.message for f in found) == 100
    assert sum("300 more" in f.message for f in found) == 2


def test_a_map_that_leads_nowhere_or_that_nothing_uses_is_told() -> None:
    tensors = model_of(SAMPLE)
    a = signed(SAMPLE, tensors, names=renames({"model/norm": "model/gone", "model/nrom": "model/norm"}))
    told = {(f.code, f.severity): f.where.tensor for f in a.findings}
    assert told["R-NAME", "error"] in ("model/norm", "model/gone")
    assert told["X-MAP", "warning"] == "model/nrom"
    assert any("leads to nothing" in f.message for f in a.findings)


def test_a_reason_is_given_for_what_was_left_out_on_purpose() -> None:
    tensors = {**model_of(SAMPLE), "model/frozen/bias": Described("float32", (3,))}
    a = signed(manifest(omitted={"model/frozen": "frozen"}), tensors)
    assert any("'model/frozen' was omitted as frozen" in f.message for f in a.findings)


# ---- targets ---------------------------------------------------------------------------------------------------------


def test_another_world_size_reshards_and_says_what_each_part_becomes() -> None:
    a = asked(SAMPLE, Target(6))
    assert severities(a) == {"R-WORLD": "warning"}
    assert by_part(a.verdicts) == {
        parts.RANDOM: "approximate",
        "model": "lossless",
        "flat groups": "lossless",
        parts.VALUES: "lossless",
    }
    assert severities(asked(SAMPLE, Target(6), exact=True)) == {"R-WORLD": "error"}


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 70))
def test_what_each_rank_reads_is_what_its_boxes_hold(old: int, new: int) -> None:
    m = builder.sample(old).manifest
    a = asked(m, Target(new))
    assert a.found is not None
    d = a.found.destination
    got = []
    for rank in range(new):
        rows = sum(prod(b.sizes) for b in parts.resolve(d.layouts["rows"], d.meshes).boxes((7, 24), rank)) * 2
        got.append(rows + 24 * 4 + 4)
    (model,) = [v for v in a.verdicts if v.part == "model"]
    least, most = model.bytes_read or (0, 0)
    assert min(got) <= least <= most <= max(got)
    if new <= parts.RANKS:
        assert (least, most) == (min(got), max(got))
    assert model.peak_memory == most + min(most, parts.BUFFERS)


def test_of_very_many_ranks_some_are_asked_the_first_and_the_last_among_them() -> None:
    looked = parts.looked_at(16_384, 50)
    assert len(looked) == parts.RANKS
    assert {looked[0], looked[-1]} == {0, 16_383}
    assert len(parts.looked_at(16_384, 60_000)) == 2
    assert list(parts.looked_at(3, 10)) == [0, 1, 2]
    assert list(parts.looked_at(1, 10)) == [0]


def test_a_tensor_that_a_route_reaches_is_no_missing_name_and_what_is_left_over_is() -> None:
    shapes = {"embed": (7, 24), "norm": (24,)}
    m = manifest(tensors={"optimizer/master": SAMPLE.tensors["optimizer/master"]}, aliases={}, objects={})
    kinds = {"exp_avg": "optimizer/master"}
    m = replace(m, flat_groups={"g": replace(SAMPLE.flat_groups["optimizer/main"], tensors=kinds)})
    named = {f"o/state/model~1{n}/exp_avg": TensorEntry("float32", s, "whole") for n, s in shapes.items()}
    meshes, layouts = {"main": Mesh((Axis("dp", 2, "data"),))}, {"whole": MeshLayout("main")}
    target = Target(2, meshes, layouts, named, {}, {}, {})
    a = asked(m, target)
    assert severities(a) == {"R-WORLD": "warning"}
    assert by_part(a.verdicts) == {"optimizer state": "lossless"}
    assert severities(asked(m, target, exact=True)) == {"R-WORLD": "error", "R-NAME": "error"}
    less = replace(target, tensors={n: t for n, t in named.items() if "norm" not in n})
    assert severities(asked(m, less))["R-NAME"] == "error"
    assert by_part(asked(m, less).verdicts)["stored optimizer/master: model/norm"] == "lost"


def test_layouts_that_change_on_the_same_ranks_are_told_once_for_all_their_tensors() -> None:
    many = {f"model/w{i}": TensorEntry("float32", (8, 8), "rows", "parameter") for i in range(50)}
    m = manifest(tensors=many, aliases={}, objects={}, flat_groups={})
    target = replace(of_manifest(m), layouts={"rows": MeshLayout("main", ((), ("dp",)))})
    (found,) = asked(m, target).findings
    assert (found.code, found.severity) == ("R-LAYOUT", "warning")
    assert "and 49 more" in found.message
    (found,) = asked(m, target, exact=True).findings
    assert (found.code, found.severity) == ("R-LAYOUT", "error")


def test_one_memory_for_two_tensors_of_the_checkpoint_is_refused() -> None:
    target = of_manifest(SAMPLE)
    tensors = {n: t for n, t in SAMPLE.tensors.items() if n != "model/scale"}
    a = asked(
        SAMPLE, replace(target, tensors=tensors, aliases={"model/scale": "model/norm", "model/head": "model/embed"})
    )
    assert severities(a)["Q-ALIAS"] == "error"


def test_a_world_size_that_does_not_divide_is_told_with_those_that_do() -> None:
    mesh = Mesh((Axis("dp", 2, "data"), Axis("tp", 4, "tensor")))
    m = manifest(world_size=8, meshes={"main": mesh})
    a = asked(m, Target(10))
    assert [f.code for f in a.findings] == ["R-TARGET"]
    assert a.sizes == (8, 12)
    advice = a.advice("run/x", "run")["R-TARGET"]
    assert [x.argv for x in advice] == [("ckptspec", "validate", "run/x", "--world-size", str(n)) for n in (8, 12)]
    assert asked(m, Target(3)).sizes == (4,)


def test_private_state_maps_by_rank_and_what_it_is_decides_what_that_means() -> None:
    layouts = {"local": LocalLayout(), "whole": MeshLayout("main")}
    tensors = {"gen/cpu": TensorEntry("uint8", None, "local", "rng"), "w": TensorEntry("int8", (3,), "whole")}
    objects = {"gen/python": "rank", "train_loader": "rank", "scratch": "rank", "step": "same"}
    m = manifest(layouts=layouts, tensors=tensors, objects=objects, aliases={}, flat_groups={})
    for new, expected in ((6, ["approximate"] * 3), (2, ["approximate", "lost", "lost"]), (4, ["lossless"] * 3)):
        found = by_part(asked(m, Target(new)).verdicts)
        assert [found[part] for part in (parts.RANDOM, parts.LOADER, parts.OWN)] == expected
    a = asked(m, Target(6))
    assert a.found is not None
    assert parts.owned(a.found.destination)[parts.RANDOM] == ["gen/cpu", "gen/python"]
    (data,) = [x for x in a.advice("p", None)["R-WORLD"] if x.id == "data"]
    assert "does not tell" in data.text
    (data,) = [x for x in a.advice("p", None, 512)["R-WORLD"] if x.id == "data"]
    assert data.params == {"samples": 512}


def test_samples_are_counted_only_where_the_state_says_so_once() -> None:
    none: frozenset[str] = frozenset()
    assert moving.counted({"trainer": {"consumed_samples": 7}}, none) == 7
    assert moving.counted({"a": {"consumed_samples": 7}, "b": {"samples_seen": 8}}, none) is None
    assert moving.counted({"a": {"consumed_samples": True}}, none) is None
    assert moving.counted({"a": {"consumed_samples": 7}}, frozenset({"a"})) is None
    assert moving.counted({"a": {"b": {"c": {"consumed_samples": 7}}}}, none, left=2) is None
    assert moving.noted(manifest(annotations={"org.ckptspec.consumed_samples": 9})) == 9
    assert moving.noted(manifest(annotations={"org.ckptspec.consumed_samples": "9"})) is None


def test_advice_is_ranked_and_each_command_exists_and_names_nothing_from_the_checkpoint(tmp_path: Path) -> None:
    folder = make.write(tmp_path / "run" / "step-00000007", FILES)
    report = validate(folder, target=Target(3), words=("--world-size", "3"), micro_batch=1)
    assert [a.id for a in report.advice] == ["load", "reshard", "reseed", "batch", "same-world"]
    load, reshard, reseed, batch, _ = report.advice
    assert load.argv == ("ckptspec", "plan", str(folder), "--world-size", "3")
    out = f"{tmp_path / 'run'}-3-ranks"
    assert reshard.argv == ("ckptspec", "reshard", str(folder), out, "--world-size", "3")
    assert {load.argv[1], reshard.argv[1]} <= COMMANDS.keys()
    assert reseed.params == {"ranks": [3, 4]}
    assert batch.params["exact"] is False
    assert load.cost.bytes_read > 0
    assert load.loses == f"part of the {parts.RANDOM}"
    assert report.findings[0].advice == tuple(a.id for a in report.advice)
    assert list(schemas.check("report", report.document())) == []


def test_what_cannot_be_loaded_is_not_advised_to_be(tmp_path: Path) -> None:
    folder = make.write(tmp_path / "c", FILES)
    target = of_manifest(SAMPLE)
    tensors = dict(target.tensors or {})
    tensors["model/norm"] = replace(tensors["model/norm"], dtype="float16")
    report = validate(folder, target=replace(target, tensors=tensors))
    assert (report.decision, report.exit_code) == ("stop", 1)
    assert not {"load", "reshard"} & {a.id for a in report.advice}
    assert ("tensor model/norm", "impossible") in {(v.part, v.verdict) for v in report.verdicts}


def test_a_target_made_of_the_manifest_that_cannot_be_is_a_finding(tmp_path: Path) -> None:
    def make_target(m: Manifest) -> Target:
        raise PlanError("no such mesh", rule="R-TARGET")

    report = validate(make.write(tmp_path / "c", FILES), target=make_target)
    assert [(f.code, f.where.file) for f in report.findings] == [("R-TARGET", "target")]
    assert (report.decision, report.step) == ("stop", 7)


# ---- what is gone ----------------------------------------------------------------------------------------------------


def test_a_lost_part_of_a_flat_tensor_is_said_in_elements_of_its_members() -> None:
    members = (
        Member("w", 0, (3, 4), (6, 4), (3, 0)),
        Member(None, 12, (4,)),
        Member("b", 16, (5,)),
        Member("c", 21, (7,)),
    )
    group = FlatGroup(28, members, {"master": "o/master"})
    tensors = {"o/master": TensorEntry("float32", (28,), "zero"), "w": TensorEntry("float32", (6, 4), "whole")}
    layouts = {"zero": FlatLayout("main", ("dp",)), "whole": MeshLayout("main")}
    m = manifest(layouts=layouts, tensors=tensors, objects={}, aliases={}, flat_groups={"g": group})
    loss = losses(m, {1, 2})
    assert loss.boxes["o/master"] == (Box((7,), (14,)),)
    found = list(ranges.ranges(m, "o/master", loss.boxes["o/master"]))
    assert found == [Range("w", (3, 0), (3, 4), (7, 12)), Range("b", (0,), (5,), None)]
    assert ranges.text(m, found) == "w[3:6, :] elements [7:12], b"
    (first,) = [v for v in verdicts(m, loss) if v.part == "tensor o/master"]
    assert first.gone == tuple(found)
    assert "only by ranks 1, 2" in first.reason


@given(st.integers(1, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=1, max_size=6), st.data())
def test_lost_ranges_are_exactly_the_elements_that_the_members_have_there(
    world: int, sizes: list[tuple[bool, int]], data: st.DataObject
) -> None:
    members, at = [], 0
    for i, (named, n) in enumerate(sizes):
        members.append(Member(f"m{i}" if named else None, at, (n,)))
        at += n
    group = FlatGroup(at, tuple(members), {"x": "flat"})
    layout = FlatLayout("main", ("dp",), align=data.draw(st.integers(1, 4)))
    m = Manifest(builder.SAVE_ID, 1, world, meshes={"main": Mesh((Axis("dp", world, "data"),))},
                 layouts={"f": layout}, tensors={"flat": TensorEntry("int8", (at,), "f")},
                 flat_groups={"g": group})  # fmt: skip
    bad = data.draw(st.sets(st.integers(0, world - 1), min_size=1))
    boxes = losses(m, bad).boxes.get("flat", ())
    flat = {i for b in boxes for i in range(b.offsets[0], b.stops[0])}
    expected = {(x.name, i - x.offset) for x in members for i in flat if x.name and 0 <= i - x.offset < x.shape[0]}
    found = [(r.tensor, i) for r in ranges.ranges(m, "flat", boxes) for i in range(*(r.elements or (0, r.sizes[0])))]
    assert set(found) == expected
    assert len(found) == len(expected)


def replicated(world: int, copies: int) -> tuple[builder.Plan, dict[str, bytes]]:
    """Return a checkpoint in which all ranks hold the same, and its files."""
    tensors = {f"model/w{i}": TensorEntry("float32", (6, 4), "replicated", "parameter") for i in range(4)}
    plan = builder.sample(world, copies=copies, tensors=tensors, objects={"step": "same"}, aliases={}, flat_groups={})
    plan = builder.Plan(plan.manifest, {}, {"step": 7})
    return plan, builder.build(plan)


def test_a_missing_shard_of_which_all_has_another_copy_is_repaired_first(tmp_path: Path) -> None:
    _, files = replicated(3, 2)
    run = tmp_path / "run"
    folder = make.write(run / "step-00000007", files)
    make.write(run / "step-00000003", make.files(3, step=3, save_id="3" * 32))
    (folder / "rank-00001.shard").unlink()
    report = validate(folder)
    assert (report.decision, report.exit_code) == ("repair", 1)
    assert report.advice[0].id == "repair"
    argv = ("ckptspec", "reshard", str(folder), f"{run}-repaired", "--world-size", "3")
    assert report.advice[0].argv == argv
    assert report.advice[0].loses == "nothing"
    assert {v.verdict for v in report.verdicts} == {"lossless"}
    assert [a.id for a in report.advice][-1] == "fallback"
    moved = validate(folder, target=Target(2), words=("--world-size", "2"))
    assert moved.advice[0].argv[-2:] == ("--world-size", "2")
    assert (moved.decision, by_part(moved.verdicts)["model"]) == ("repair", "lossless")
    (folder / "rank-00000.shard").unlink()
    (folder / "rank-00002.shard").unlink()
    assert validate(folder).decision == "fallback"


@pytest.mark.parametrize("gone", [1, 2])
def test_a_load_by_path_recovers_what_the_advice_says_it_does(tmp_path: Path, gone: int) -> None:
    plan, files = replicated(3, 2)
    folder = make.write(tmp_path / "run" / "step-00000007", files)
    (folder / f"rank-{gone:05}.shard").unlink()
    assert "recover" in {a.id for a in validate(folder).advice}
    into = {"model": {f"w{i}": torch.zeros(6, 4) for i in range(4)}, "step": 0}
    result = ckptspec.load(folder, into=into)
    assert into["step"] == 7
    for name, tensor in into["model"].items():
        assert tensor.numpy().tobytes() == builder.content(f"model/{name}", 96)
    assert result.step == plan.manifest.step


def test_the_commands_of_the_advice_do_what_it_says(tmp_path: Path, capfdbinary: Any) -> None:
    _, files = replicated(3, 2)
    folder = make.write(tmp_path / "run" / "step-00000007", files)
    (folder / "rank-00001.shard").unlink()
    repair = validate(folder).advice[0]
    assert main(list(repair.argv[1:])) == 0
    whole = validate(repair.argv[3], level="bytes")
    assert (whole.outcome, whole.step, whole.verdicts) == ("ok", 7, ())
    report = validate(repair.argv[3], target=Target(2), words=("--world-size", "2"))
    load, reshard = report.advice[:2]
    assert main(list(load.argv[1:])) == 0
    assert main(list(reshard.argv[1:])) == 0
    assert validate(reshard.argv[3], target=Target(2), exact=True, level="bytes").outcome == "ok"


def test_damage_in_a_payload_names_its_elements_and_whether_another_copy_is_there(tmp_path: Path) -> None:
    for copies, decision in ((1, "stop"), (2, "repair")):
        _, files = replicated(3, copies)
        content = builder.content("model/w0", 96)
        name = min(n for n, data in files.items() if content in data)
        at = files[name].index(content) + 41
        broken = {**files, name: files[name][:at] + b"\xff" + files[name][at + 1 :]}
        report = validate(make.write(tmp_path / str(copies), broken), level="bytes")
        assert [f.code for f in report.findings] == ["B-DIGEST"]
        assert report.decision == decision
        gone = [r for v in report.verdicts for r in v.gone]
        assert gone == ([] if copies == 2 else [Range("model/w0", (0, 0), (6, 4))])


def test_damaged_state_of_a_rank_is_never_mended_by_copies_of_tensors(tmp_path: Path) -> None:
    folder = make.checkpoint(tmp_path / "run" / "step-00000007", 3, copies=2)
    (folder / "rank-00001.shard").unlink()
    report = validate(folder)
    assert report.decision == "stop"
    assert by_part(report.verdicts)["state private to a rank"] == "lost"
    assert {"tensor model/embed", "tensor optimizer/master"} <= by_part(report.verdicts).keys()


def test_the_work_that_an_older_step_costs_is_told_in_minutes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = make.write(run / "step-00000900", make.files(2, step=900, save_id="9" * 32))
    make.write(run / "step-00000100", make.files(2, step=100, save_id="1" * 32))
    (folder / "rank-00001.shard").unlink()
    (back,) = [a for a in validate(folder).advice if a.id == "fallback"]
    assert (back.loses, back.cost.seconds_lost) == ("800 steps, 133 minutes of work", 8000)


# ---- the signature of a live state, and what load says of the same ---------------------------------------------------


class Net(torch.nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 3)
        self.second = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def test_a_signature_is_made_of_a_live_state_and_of_one_on_the_meta_device() -> None:
    live, (meta,) = signature_of({"model": Net()}), [None]
    with torch.device("meta"):
        meta = signature_of({"model": Net()})
    assert live == meta
    assert list(schemas.check("signature", live)) == []
    assert live["tensors"]["model/second.weight"] == {"dtype": "bfloat16", "shape": [2, 3]}
    assert set(signature_of(Net())["tensors"]) == {n.removeprefix("model/") for n in live["tensors"]}
    assert signature.from_document(live).document() == live


def test_wrappers_objects_and_slices_are_what_load_takes_them_for() -> None:
    state = {
        "model": torch.nn.DataParallel(Net()),
        "flat": ckptspec.FlatShard(torch.zeros(8), group="g", offset=0, numel=6),
        "piece": ckptspec.Shard(torch.zeros(2, 4), shape=(4, 4), boxes=[((0, 0), (2, 4))]),
        "rng": ckptspec.RNG(),
        "own": ckptspec.Local({"at": 3, "t": torch.zeros(2)}),
        "some": ckptspec.Local({"running": torch.zeros(2), "w": torch.zeros(2)}, only=["running"]),
        "one": ckptspec.Replicated(torch.zeros(2)),
        "step": 3,
    }
    found = signature_of(state, objects=True)
    tensors = found["tensors"]
    assert "model/first.weight" in tensors
    shapes = {n: tensors[n]["shape"] for n in ("flat", "piece", "own/t", "some/running", "some/w", "one")}
    assert shapes == {"flat": [6], "piece": [4, 4], "own/t": None, "some/running": None, "some/w": [2], "one": [2]}
    assert tensors["rng/torch"]["shape"] is None
    assert {n: found["objects"][n] for n in ("step", "own/at", "rng/python")} == {
        "step": "same",
        "own/at": "rank",
        "rng/python": "rank",
    }
    with pytest.raises(StateError):
        signature_of(3)
    with pytest.raises(StateError, match="two keys"):
        signature_of({"a": {1: torch.zeros(1), "1": torch.zeros(1)}})


def state(prefix: str = "", **changes: torch.Tensor) -> dict[str, Any]:
    """Return a model's state under names with a prefix, with other tensors in it."""
    return {"model": {prefix + n: t for n, t in {**Net().state_dict(), **changes}.items()}}


CASES = {
    "same": state(),
    "wrapped": state("module."),
    "more": state(extra=torch.zeros(2)),
    "less": {"model": {"first.weight": torch.zeros(3, 4)}},
    "dtype": state(**{"first.bias": torch.zeros(3, dtype=torch.float16)}),
    "shape": state(**{"first.bias": torch.zeros(4)}),
    "bare": dict(Net().state_dict()),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model alone."""
    run = tmp_path_factory.mktemp("saved") / "run"
    ckptspec.save(run, {"model": Net()}, step=1)
    return run


@pytest.mark.parametrize("name", CASES)
def test_what_the_validator_says_of_a_signature_is_what_load_does(name: str, saved: Path) -> None:
    into = CASES[name]
    report = validate(saved, signature=signature_of(into))
    try:
        ckptspec.load(saved, into=into)
        fails = set()
    except PlanError as e:
        fails = {e.rule}
    told = {f.code for f in report.findings if f.severity == "error"}
    assert bool(told) == bool(fails)
    assert fails <= told or not fails


@pytest.mark.parametrize("name", ["wrapped", "bare"])
def test_the_map_that_is_proposed_lets_load_fill_the_state(name: str, saved: Path, tmp_path: Path) -> None:
    into = CASES[name]
    file, proposed = tmp_path / "signature.json", tmp_path / "map.json"
    file.write_text(json.dumps(signature_of(into)))
    assert main(["validate", str(saved), "--signature", str(file), "--write-map", str(proposed)]) == 1
    names = json.loads(proposed.read_text())
    assert main(["validate", str(saved), "--signature", str(file), "--map", str(proposed)]) == 0
    result = ckptspec.load(saved, into=into, names=names)
    assert result.renamed == names
    whole = ckptspec.read(saved)
    for wanted, stored in names.items():
        value = into[wanted] if name == "bare" else into["model"][wanted.removeprefix("model/")]
        assert value.view(torch.uint8).numpy().tobytes() == whole[stored].tobytes()


# ---- text ------------------------------------------------------------------------------------------------------------


def said(capfdbinary: pytest.CaptureFixture[bytes], *arguments: object) -> tuple[int, list[str], str]:
    """Return exit code, lines and standard error of the command line."""
    capfdbinary.readouterr()
    code = main([str(a) for a in arguments])
    out, err = capfdbinary.readouterr()
    return code, out.decode().splitlines(), err.decode()


def test_a_report_on_a_target_is_short_and_plain(tmp_path: Path, capfdbinary: Any) -> None:
    folder = make.write(tmp_path / "run" / "step-00000007", FILES)
    code, lines, _ = said(capfdbinary, "validate", folder, "--world-size", 3, "--micro-batch", 2, "--accumulation", 3)
    assert code == 0
    assert len(lines) <= 14
    assert lines[0].endswith("[R-WORLD] (warning)")
    assert any("global batch 24 = 4 data-parallel ranks" in line for line in lines)
    assert any(line.startswith("lossless: flat groups: ZeRO is cut anew, 4 ranks to 3") for line in lines)
    assert any("a rank reads 148 B to 244 B, peak memory 488 B" in line for line in lines)
    assert lines[-1].endswith("ok with 1 warning; decision: reshard")


def test_a_map_is_written_and_said_and_what_it_did_is_listed(tmp_path: Path, capfdbinary: Any) -> None:
    folder = make.write(tmp_path / "c", FILES)
    file, out = tmp_path / "s.json", tmp_path / "m.json"
    file.write_text(json.dumps(Signature(model_of(SAMPLE, "module.")).document()))
    code, lines, err = said(capfdbinary, "validate", folder, "--signature", file, "--write-map", out)
    assert (code, err) == (1, f"{out}: 4 names written; read them before you load with them\n")
    assert f"advice: run  ckptspec validate {folder} --signature {file} --write-map map.json" in lines
    code, lines, _ = said(capfdbinary, "validate", folder, "--signature", file, "--map", out)
    assert code == 0
    assert "renamed: 'model/module.norm' is 'model/norm' in the checkpoint, by the map" in lines
    code, lines, _ = said(capfdbinary, "validate", folder, "--signature", file, "--map", file)
    assert code == 1
    assert "[X-MAP]" in lines[0]


def test_a_signature_without_a_version_of_its_own_is_one_of_the_first(tmp_path: Path) -> None:
    document = {"format": "ckptspec-signature", "tensors": {"w": {"dtype": "int8", "shape": [2]}}}
    assert signature.from_document(document).tensors == {"w": Described("int8", (2,))}
    for wrong in (b"[]", b"{", b"\xff", json.dumps({**document, "schema_version": "2.0"}).encode()):
        with pytest.raises(PlanError):
            signature.parse(wrong)


def test_asking_loads_neither_torch_nor_numpy(tmp_path: Path) -> None:
    folder = make.write(tmp_path / "c", FILES)
    script = (
        "import sys\n"
        "from ckptspec.cli.main import main\n"
        "code = main(['validate', sys.argv[1], '--world-size', '3'])\n"
        "heavy = sorted({'torch', 'numpy', 'ml_dtypes', 'rich'} & set(sys.modules))\n"
        "assert code == 0 and not heavy, (code, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_a_verdict_comes_back_from_its_document() -> None:
    verdict = Verdict(
        "tensor w", "lost", "no copy", (1, 2), 3, (Range("w", (0,), (4,), (1, 2)), Range("b", (1,), (2,)))
    )
    assert Verdict.from_document(verdict.document()) == verdict
    plain = Verdict("model", "lossless", "whole")
    assert plain.document() == {"part": "model", "verdict": "lossless", "reason": "whole"}
    assert Verdict.from_document(plain.document()) == plain
    assert Report("x", "bytes").document().keys().isdisjoint({"names"})

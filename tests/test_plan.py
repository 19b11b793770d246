"""A plan says exactly what moves where, whatever the layouts: as each element by itself would have it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import make
import pytest
from fixtures import documents
from hypothesis import given, settings
from plan_cases import Case, Row, named, regrouped, slow

import ckptspec
from ckptspec.errors import PlanError
from ckptspec.format import holding, manifest, schemas
from ckptspec.format.box import Box, intersect, iter_pieces, runs
from ckptspec.format.catalog import Catalog
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import Axis, BoxesLayout, Layout, Mesh, MeshLayout
from ckptspec.format.manifest import Manifest, TensorEntry
from ckptspec.format.placement import resolve
from ckptspec.format.target import Target, of_manifest
from ckptspec.planner import sizing
from ckptspec.planner.destination import destination
from ckptspec.planner.planned import Columns, Plan
from ckptspec.planner.plans import needed, parse, plan, transfers, verify
from ckptspec.planner.renames import renames
from ckptspec.planner.transfers import Locator

SPEC = Path(__file__).resolve().parents[1] / "schema" / "v1" / "SPEC.md"


@contextmanager
def small_boxes_shared_out() -> Iterator[None]:
    """Cut boxes among their holders from a few bytes on, so that small tensors meet the rule for large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holding, "CUT_FROM", 3)
        patch.setattr(holding, "STORERS", 3)
        yield


def rows(found: Iterable[Columns]) -> dict[tuple[str, str], list[Row]]:
    """Return transfers as rows by wanted and stored tensor."""
    out: dict[tuple[str, str], list[Row]] = {}
    for c in found:
        columns = zip(c.rank, c.source_rank, c.offsets, c.sizes, c.elements, strict=True)
        out.setdefault((c.tensor, c.source), []).extend(columns)
    return out


def located(m: Manifest, target: Target) -> Counter[tuple[str, str, int, int]]:
    """Return the elements that move by wanted tensor, stored tensor and both ranks, as a load looks for them."""
    d, out = destination(m, target), Counter[tuple[str, str, int, int]]()
    for name, t in d.tensors.items():
        route, place = d.routes.find(name), resolve(d.layouts[t.layout], d.meshes)
        if route is None or t.shape is None:
            continue
        for rank in range(d.world_size):
            locator = Locator(m, prefer=rank)
            for ask in (ask for box in place.boxes(t.shape, rank) for ask in route.asks(box)):
                for part in locator.parts(ask.need):
                    if ask.need.view is None:
                        count = part.box.numel
                    else:
                        views = ask.need.view.within(part.box.offsets[0], part.box.stops[0])
                        shared = (intersect(view.box, ask.need.box) for view in views)
                        count = sum(box.numel for box in shared if box is not None)
                    out[name, ask.need.name, rank, locator.choose(part)] += count
    return +out


def summed(found: Mapping[tuple[str, str], list[Row]]) -> Counter[tuple[str, str, int, int]]:
    """Return rows in the form of `located`."""
    out = Counter[tuple[str, str, int, int]]()
    for (wanted, source), several in found.items():
        for rank, source_rank, _, _, elements in several:
            out[wanted, source, rank, source_rank] += elements
    return out


def compare(case: Case) -> None:
    """Compare a plan with what each element by itself says, and with what a load looks for."""
    m, expected = case.manifest, slow(case)
    assert rows(transfers(m, case.target)) == expected.rows
    assert summed(expected.rows) == located(m, case.target)
    made = plan(m, case.target)
    world = range(case.target.world_size)
    flat = [(source, row) for (_, source), several in expected.rows.items() for row in several]
    size = {name: DTYPES[t.dtype].itemsize for name, t in m.tensors.items()}
    by_rank = [[(source, row) for source, row in flat if row[0] == rank] for rank in world]
    assert made.ranks.transfers == tuple(map(len, by_rank))
    assert made.ranks.bytes_delivered == tuple(sum(size[s] * row[4] for s, row in mine) for mine in by_rank)
    assert made.ranks.shards_opened == tuple(len({row[1] for _, row in mine}) for mine in by_rank)

    def nbytes(source: str, piece: int, blocks: set[int]) -> int:
        whole, b = expected.nbytes[source, piece], m.block_size
        return sum(min(whole, (i + 1) * b) - i * b for i in blocks)

    read = [0 for _ in world]
    once: dict[tuple[str, int], set[int]] = {}
    for (rank, source, piece), blocks in expected.blocks.items():
        read[rank] += nbytes(source, piece, blocks)
        once.setdefault((source, piece), set()).update(blocks)
    assert made.ranks.bytes_read == tuple(read)
    assert made.totals.bytes_read_once == sum(nbytes(*key, blocks) for key, blocks in once.items())
    for rank in (0, case.target.world_size - 1):
        assert needed(m, case.target, rank) == tuple(sorted({row[1] for _, row in by_rank[rank]}))
        one = rows(transfers(m, case.target, rank=rank))
        assert one == {k: v for k, several in expected.rows.items() if (v := [r for r in several if r[0] == rank])}


@settings(max_examples=100, deadline=None)
@given(named())
def test_from_any_layout_to_any_other(case: Case) -> None:
    with small_boxes_shared_out():
        compare(case)


@settings(max_examples=100, deadline=None)
@given(regrouped())
def test_between_flat_groups_and_parameters(case: Case) -> None:
    with small_boxes_shared_out():
        compare(case)


@settings(max_examples=60, deadline=None)
@given(regrouped())
def test_a_plan_that_was_written_is_read_and_holds(case: Case) -> None:
    made = plan(case.manifest, case.target)
    document = made.document()
    assert list(schemas.check("plan", document)) == []
    again = parse(json.dumps(document).encode())
    assert again.document() == document
    verify(again, case.manifest)


# ---- sizes at which boxes are cut ------------------------------------------------------------------------------------

AXES = {"a": 2, "b": 3}
BIG: dict[str, tuple[tuple[int, ...], Layout, Layout]] = {
    "chunks of one rank": ((3, 700 << 20), MeshLayout("one"), MeshLayout("main", ((), ("b",)))),
    "rows of chunks": ((5, 3, 200 << 20), MeshLayout("one"), MeshLayout("main", (("a",), (), ("b",)))),
    "cut among six": ((64 << 20,), MeshLayout("main"), MeshLayout("main", (("b", "a"),))),
    "not cut": ((1, 3, 1 << 20), MeshLayout("main"), MeshLayout("main", ((), ("b",)))),
    "columns": ((64, 3 << 20), MeshLayout("main", (("a",),)), MeshLayout("main", ((), ("b",)))),
    "listed": ((8 << 20,), MeshLayout("main", (("a",),)), BoxesLayout(((1, Box((0,), (8 << 20,))),))),
}


@pytest.mark.parametrize("case", BIG)
@pytest.mark.parametrize("copies", [1, 2])
def test_large_boxes_are_cut_and_read_in_whole_blocks(case: str, copies: int) -> None:
    shape, layout, aim = BIG[case]
    main, one = Mesh(tuple(Axis(n, k) for n, k in AXES.items())), Mesh((Axis("a", 1),))
    tensors = {"w": TensorEntry("float32", shape, "x")}
    meshes = {"main": main, "one": one}
    m = Manifest("5" * 32, 1, 6, copies=copies, meshes=meshes, layouts={"x": layout}, tensors=tensors)
    target = Target(6, {"main": main}, {"x": aim}, tensors)
    made, found = plan(m, target), rows(transfers(m, target))
    assert summed(found) == located(m, target)
    place = resolve(layout, meshes)
    pieces = {box for _, box in place.storers(shape, 4, "w", copies)}
    read, once = [0] * 6, set[tuple[Box, int]]()
    for rank, _, offsets, sizes, elements in found["w", "w"]:
        assert elements == Box(offsets, sizes).numel
        (piece,) = (p for p in pieces if intersect(p, Box(offsets, sizes)) is not None)
        blocks = touched(piece, Box(offsets, sizes), m.block_size)
        read[rank] += sum(blocks.values())
        once |= {(piece, at) for at in blocks}
        assert made.ranks.bytes_read[rank] >= sum(blocks.values())
    assert made.ranks.bytes_read == tuple(read)
    everything = {(p, at): n for p in pieces for at, n in touched(p, p, m.block_size).items()}
    assert made.totals.bytes_read_once == sum(everything[key] for key in once)


def touched(piece: Box, box: Box, block: int) -> dict[int, int]:
    """Return the bytes of each block of a piece that holds something of a box, by where it begins."""
    out, start = {}, 0
    for chunk in iter_pieces(piece, 4):
        shared = intersect(chunk, box)
        for at, n in runs(chunk, shared, 4) if shared is not None else ():
            for i in range(at // block, -(-(at + n) // block)):
                out[start + i * block] = min(block, chunk.numel * 4 - i * block)
        start += chunk.numel * 4
    return out


# ---- what a plan says ------------------------------------------------------------------------------------------------


def appendix() -> tuple[Manifest, Any]:
    """Return the manifest of SPEC.md's appendix C, and the plan that it shows."""
    text = SPEC.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^<!-- schema: plan -->\n```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^<!-- schema: manifest -->\n```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return manifest.parse(found[0].encode()), json.loads(shown)


def test_the_plan_that_the_standard_shows_is_the_one_that_is_made() -> None:
    m, shown = appendix()
    made = plan(m, sizing.of_world(m, 2)).document()
    assert {**made, "verdicts": []} == {**shown, "verdicts": []}
    verify(parse(json.dumps(shown).encode()), m)
    row = r"^\| `(.*?)` \| `(.*?)` \| (\d) \| (\d) \| (\[.*?\]) \| (\[.*?\]) \| (\d+) \|$"
    listed = re.findall(row, SPEC.read_text(encoding="utf-8"), re.MULTILINE)
    found = {(k, r) for k, several in rows(transfers(m, sizing.of_world(m, 2))).items() for r in several}
    assert len(listed) == 6
    for wanted, stored, *numbers in listed:
        rank, source_rank, offsets, sizes, elements = map(json.loads, numbers)
        assert ((wanted, stored), (rank, source_rank, tuple(offsets), tuple(sizes), elements)) in found


def test_the_plan_of_the_conformance_suite_is_the_one_that_is_made() -> None:
    mesh = Mesh((Axis("dp", 2, "data"),))
    layouts: dict[str, Layout] = {"rows": MeshLayout("main", (("dp",),))}
    tensors = {"w": TensorEntry("bfloat16", (51, 6), "rows")}
    save, digest = documents.PLAN["source"]["save_id"], documents.PLAN["source"]["manifest_digest"]
    m = Manifest(save, 7, 2, meshes={"main": mesh}, layouts=layouts, tensors=tensors, digest=digest)
    verify(parse(json.dumps(documents.PLAN).encode()), m)


CHANGES: dict[str, tuple[Any, str]] = {
    "another save": (lambda d: d["source"].update(save_id="0" * 32), "another checkpoint"),
    "another manifest": (lambda d: d["source"].update(manifest_digest="sha256:" + "0" * 64), "another checkpoint"),
    "an open target": (lambda d: d["target"].pop("objects"), "leaves something open"),
    "other transfers": (lambda d: d.update(transfers_digest="sha256:" + "0" * 64), "transfers"),
    "another layout": (lambda d: d["target"]["layouts"]["tp"].update(dims=[[], ["tp"]]), "transfers"),
    "fewer bytes": (lambda d: d["totals"].update(bytes_read=0), "figures"),
    "another column": (lambda d: d["ranks"].update(shards_opened=[1, 1]), "figures"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_does_not_hold_is_refused(change: str) -> None:
    m, shown = appendix()
    edit, message = CHANGES[change]
    edit(shown)
    with pytest.raises(PlanError, match=message) as e:
        verify(parse(json.dumps(shown).encode()), m)
    assert e.value.rule == "X-PLAN"


def test_estimates_and_opinions_may_differ() -> None:
    m, shown = appendix()
    shown["totals"].update(peak_memory=1, private_bytes=5)
    shown["verdicts"] = []
    verify(parse(json.dumps(shown).encode()), m)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"{", "X-PLAN"),
        (b"[1]", "X-PLAN"),
        (b'{"format": "ckptspec-plan", "format": "ckptspec-plan"}', "X-PLAN"),
        (json.dumps({**documents.PLAN, "ranks": {k: [1.0] for k in documents.PLAN["ranks"]}}).encode(), "X-PLAN"),
        (b'{"format": "ckptspec-plan"}', "M-FIELD"),
        (json.dumps({**documents.PLAN, "ranks": {k: [1, 1] for k in documents.PLAN["ranks"]}}).encode(), "X-PLAN"),
        (json.dumps({**documents.PLAN, "names": {"w": ""}}).encode(), "X-PLAN"),
        (json.dumps({**documents.PLAN, "names": {"w": "v*"}}).encode(), "X-MAP"),
    ],
)
def test_what_is_no_plan_is_refused(data: bytes, rule: str) -> None:
    with pytest.raises(PlanError) as e:
        parse(data, file="plan.json")
    assert e.value.rule == rule


# ---- from a checkpoint on disk ---------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two ranks."""
    return make.checkpoint(tmp_path / "step-00000007", 2)


def test_the_public_function_plans_for_a_folder(folder: Path) -> None:
    m = manifest.parse((folder / "manifest.json").read_bytes())
    made = ckptspec.plan(folder, Target(3))
    assert isinstance(made, Plan)
    assert made.possible
    assert (made.source.world_size, made.target.world_size) == (2, 3)
    assert made.transfers_digest == plan(m, Target(3)).transfers_digest
    assert {v.verdict for v in made.verdicts} == {"lossless", "approximate"}
    assert made.totals.private_bytes is None
    assert made.totals.read_amplification_with_exchange == 1
    verify(made, m)


def test_a_module_of_the_package_leaves_the_function_callable(folder: Path) -> None:
    import ckptspec.planner.views

    assert ckptspec.planner.views.View
    assert ckptspec.plan(folder, Target(2)).ranks.shards_opened == (1, 2)


def test_what_cannot_be_had_is_said_and_not_moved(folder: Path) -> None:
    m = manifest.parse((folder / "manifest.json").read_bytes())
    t = of_manifest(m)
    assert t.tensors is not None
    wanted = {
        **t.tensors,
        "model/new": TensorEntry("float32", (3,), "rows"),
        "model/embed": replace(t.tensors["model/embed"], dtype="float32"),
    }
    made = ckptspec.plan(folder, replace(t, tensors=wanted))
    assert not made.possible
    faults = {v.part: v.reason for v in made.verdicts if v.verdict == "impossible"}
    assert faults["tensor model/new"] == "the checkpoint does not hold it"
    assert "nothing is cast in silence" in faults["tensor model/embed"]
    moved = {c.tensor for c in transfers(m, made.target)}
    assert moved == {n for n, e in m.tensors.items() if e.shape is not None and n != "model/embed" and 0 not in e.shape}


def test_a_map_of_names_is_kept_in_the_plan(folder: Path) -> None:
    m = manifest.parse((folder / "manifest.json").read_bytes())
    t = of_manifest(m)
    wanted = {name.replace("model/", "net/"): e for name, e in (t.tensors or {}).items()}
    made = ckptspec.plan(folder, replace(t, tensors=wanted), names={"net/*": "model/*"})
    assert made.possible
    assert made.document()["names"] == {"net/*": "model/*"}
    verify(parse(json.dumps(made.document()).encode()), m)
    assert {(c.tensor, c.source) for c in transfers(m, made.target, renames(made.names.document()))} >= {
        ("net/embed", "model/embed")
    }


def test_indexes_tell_the_bytes_that_are_private_to_ranks(folder: Path) -> None:
    from ckptspec.engine.documents import open_shard

    m = manifest.parse((folder / "manifest.json").read_bytes())
    shards = {e.rank: open_shard(str(folder), e, m) for e in m.shards}
    indexes = [document.index for document in shards.values()]
    local = {n for n, t in m.tensors.items() if t.shape is None}
    found = [sum(c.nbytes for c in i.chunks if i.names[c.tensor] in local) for i in indexes]
    assert local
    assert plan(Catalog(m, shards), Target(3)).totals.private_bytes == sum(found)
    assert plan(Catalog(m, shards), Target(1)).totals.private_bytes == found[0]
    assert plan(Catalog(m, {0: shards[0]}), Target(2)).totals.private_bytes is None


def test_a_rank_that_the_target_has_not_is_refused(folder: Path) -> None:
    m = manifest.parse((folder / "manifest.json").read_bytes())
    for call in (lambda: needed(m, Target(2), 2), lambda: transfers(m, Target(2), rank=-1)):
        with pytest.raises(PlanError, match="no such rank"):
            call()

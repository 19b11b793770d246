"""The pure rules find each breach, name only the rule that is broken, and stay quiet on what is sound."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make import builder

from ckptspec.check import catalogs, contents, manifests, shards, targets, worlds
from ckptspec.check.catalogs import Gathered, finish
from ckptspec.check.manifests import check_manifest
from ckptspec.check.shards import check_shard
from ckptspec.check.targets import judge, nearest
from ckptspec.check.verdicts import losses
from ckptspec.format import schemas
from ckptspec.format.box import Box
from ckptspec.format.catalog import Catalog, ShardDocument
from ckptspec.format.layout import Axis, BoxesLayout, Mesh, MeshLayout
from ckptspec.format.manifest import Manifest, TensorEntry, from_document
from ckptspec.format.objects import TensorRef
from ckptspec.format.report import Finding
from ckptspec.format.shard import ChunkRow
from ckptspec.format.target import Target, of_manifest
from ckptspec.planner.sizing import of_axes

FILES = builder.build(builder.sample(4))
WIDE = builder.build(builder.sample(4, copies=2))
Document = dict[str, Any]


def codes(findings: Any) -> set[str]:
    """Return the rule ids of findings."""
    return {f.code for f in findings}


def manifest(change: Callable[[Document], Any] = lambda d: None) -> Manifest:
    """Return the sample's manifest with its document changed in place."""
    document = json.loads(FILES["manifest.json"])
    change(document)
    return from_document(document)


def check_catalog(catalog: Catalog) -> Iterable[Finding]:
    """Return what is found in single shards; where that is nothing, what is found in all of them together."""
    gathered = Gathered(catalog.manifest)
    single = [f for rank in sorted(catalog.shards) for f in gathered.add(rank, catalog.shards[rank])]
    return single or list(finish(gathered))


def check_target(m: Manifest, target: Target) -> Iterable[Finding]:
    """Return what stands between a sound checkpoint and loading it on `target`, resharding allowed."""
    return judge(m, target).findings


def put(path: str, value: Any) -> Callable[[Document], None]:
    """Return a change that sets the place called a.b.0 of a document."""

    def change(document: Document) -> None:
        *way, last = path.split(".")
        node: Any = document
        for token in way:
            node = node[int(token)] if isinstance(node, list) else node[token]
        node[int(last) if isinstance(node, list) else last] = value

    return change


def drop(path: str) -> Callable[[Document], None]:
    """Return a change that removes the place called a.b.0 of a document."""

    def change(document: Document) -> None:
        *way, last = path.split(".")
        node: Any = document
        for token in way:
            node = node[int(token)] if isinstance(node, list) else node[token]
        node.pop(int(last) if isinstance(node, list) else last)

    return change


GROUP = "flat_groups.optimizer/main."
TENSOR = {"dtype": "float32", "shape": [8, 4], "layout": "x", "role": "other"}


def odd_layout(layout: Document, shape: list[int]) -> Callable[[Document], None]:
    """Return a change that adds a tensor with a layout of its own."""

    def change(document: Document) -> None:
        document["layouts"]["x"] = layout
        document["tensors"]["x"] = {**TENSOR, "shape": shape}

    return change


MESH = {"kind": "mesh", "mesh": "main", "at": {}}
FLAT = {"kind": "flat", "mesh": "main", "at": {}, "axes": ["dp"]}
BREACHES = [
    ("W-COUNT", drop("shards.2")),
    ("W-COUNT", put("world_size", 5)),
    ("W-RANKS", put("shards.3.rank", 0)),
    ("W-RANKS", put("shards.3.rank", 4)),
    ("W-PATH", put("shards.3.path", "../rank-00003.shard")),
    ("W-PATH", put("shards.3.path", "RANK-00002.shard")),
    ("W-INDEX", put("shards.1.index.offset", 64)),
    ("T-MESH", put("meshes.main.axes.0.size", 5)),
    ("T-MESH", put("meshes.main.ranks", [0, 1, 2, 2])),
    ("T-LAYOUT", put("tensors.model/norm.layout", "nowhere")),
    ("T-LAYOUT", put("layouts.rows.mesh", "nowhere")),
    ("T-LAYOUT", put("layouts.rows.dims", [["tp"]])),
    ("T-LAYOUT", put("layouts.replicated.at", {"dp": 4})),
    ("T-DIMS", odd_layout({**MESH, "dims": [[], [], ["dp"]]}, [8, 4])),
    ("T-DIMS", odd_layout({**MESH, "dims": [["dp"]], "blocks": {"0": [5, 4]}}, [8, 4])),
    ("T-DIMS", odd_layout({**MESH, "dims": [["dp"], ["dp"]]}, [8, 4])),
    ("T-BOXES", odd_layout({"kind": "boxes", "boxes": [[0, [0, 0], [7, 4]]]}, [8, 4])),
    ("T-BOXES", odd_layout({"kind": "boxes", "boxes": [[0, [0, 0], [8, 3]], [1, [0, 2], [8, 2]]]}, [8, 4])),
    ("T-BOXES", odd_layout({"kind": "boxes", "boxes": [[4, [0, 0], [8, 4]]]}, [8, 4])),
    ("T-FLAT", odd_layout({**FLAT, "align": 1}, [8, 4])),
    ("T-FLAT", odd_layout({**FLAT, "bounds": [0, 4, 2, 8, 9]}, [9])),
    ("T-DTYPE", put("tensors.model/norm.dtype", "float17")),
    ("T-SHAPE", put("tensors.model/norm.shape", None)),
    ("T-SHAPE", put("tensors.rng/torch.shape", [5])),
    ("T-SHAPE", put("tensors.model/norm.shape", [1 << 40, 1 << 40])),
    ("G-TENSOR", put(GROUP + "tensors.second", "optimizer/none")),
    ("G-TENSOR", put(GROUP + "tensors.second", "model/norm")),
    ("G-TILE", put(GROUP + "members.1.offset", 169)),
    ("G-TILE", put(GROUP + "members.1.offset", 167)),
    ("G-TILE", drop(GROUP + "members.2")),
    ("G-OF", put(GROUP + "members.0.of", {"shape": [7, 24], "offsets": [1, 0]})),
    ("G-OF", put(GROUP + "members.1", {"name": "model/embed", "offset": 168, "shape": [1, 24],
                                       "of": {"shape": [7, 24], "offsets": [6, 0]}})),
    ("N-NAME", put("objects.a\nb", "same")),
    ("N-NAME", put(GROUP + "members.0.name", "a~2")),
    ("N-UNIQUE", put("objects.model/norm", "same")),
    ("N-UNIQUE", put("aliases.step", "model/norm")),
    ("N-ALIAS", put("aliases.model/second", "model/head")),
    ("N-ALIAS", put("aliases.model/head", "model/none")),
    ("N-OMITTED", put("omitted.model/embed/lower", "frozen")),
    ("D-ALG", put("digest.block", "md5")),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "change"), BREACHES, ids=[f"{i}-{b[0]}" for i, b in enumerate(BREACHES)])
def test_a_manifest_that_breaks_one_rule_is_told_that_rule_and_no_other(rule: str, change: Any) -> None:
    found = list(check_manifest(manifest(change)))
    assert codes(found) == {rule}
    assert all(f.where.file == "manifest.json" and f.where.pointer for f in found)


def test_every_manifest_rule_has_a_breach_that_it_finds() -> None:
    assert set(manifests.CODES) == {rule for rule, _ in BREACHES}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("copies", [1, 2, 7])
def test_a_sound_checkpoint_has_no_findings_on_any_world(world: int, copies: int) -> None:
    catalog = builder.catalog(builder.build(builder.sample(world, copies=copies)))
    assert list(check_manifest(catalog.manifest)) == []
    assert list(check_catalog(catalog)) == []


def test_every_registered_rule_is_a_rule_of_the_standard() -> None:
    registered = {*manifests.CODES, *shards.rule.codes, *catalogs.rule.codes, *targets.rule.codes}
    assert registered <= schemas.rules().keys()
    assert {"W-COUNT", "T-COVER", "S-SAVE", "R-WORLD"} <= registered
    assert worlds.rule.codes
    assert contents.rule.codes


def test_findings_of_one_rule_are_capped_and_the_rest_counted() -> None:
    many = manifest(lambda d: d["objects"].update({f"bad{i}\n": "same" for i in range(5000)}))
    found = [f for f in check_manifest(many) if f.code == "N-NAME"]
    assert len(found) == 101
    assert "4900 more" in found[-1].message


# One shard by itself


def shard_of(rank: int, **index: Any) -> tuple[Manifest, ShardDocument]:
    """Return the sample's manifest and one shard's documents with fields of its index changed."""
    catalog = builder.catalog(FILES)
    document = catalog.shards[rank]
    return catalog.manifest, replace(document, index=replace(document.index, **index))


@pytest.mark.parametrize("change", [{"save_id": "f" * 32}, {"step": 8}, {"rank": 2}, {"world_size": 5}])
def test_a_shard_of_another_save_or_rank_is_told_apart(change: dict[str, Any]) -> None:
    m, document = shard_of(1)
    stale = replace(document, header=replace(document.header, **change), state={})
    assert codes(check_shard(m, 1, stale)) == {"S-SAVE"}


def test_a_shard_with_another_block_digest_is_refused() -> None:
    m, document = shard_of(1)
    other = replace(document, header=replace(document.header, block="sha256"))
    assert codes(check_shard(m, 1, other)) == {"D-ALG"}


def test_an_index_that_disagrees_with_the_manifest_is_refused() -> None:
    m, document = shard_of(0)
    row = document.index.names.index("model/embed")
    dtypes = tuple("float16" if i == row else d for i, d in enumerate(document.index.dtypes))
    shapes = tuple((24, 7) if i == row else s for i, s in enumerate(document.index.shapes))
    assert codes(check_shard(*_with(m, 0, document, dtypes=dtypes))) == {"T-MATCH"}
    assert codes(check_shard(*_with(m, 0, document, shapes=shapes))) == {"T-MATCH"}


def _with(m: Manifest, rank: int, document: ShardDocument, **index: Any) -> tuple[Manifest, int, ShardDocument]:
    return m, rank, replace(document, index=replace(document.index, **index))


@pytest.mark.parametrize(
    ("state", "rule"),
    [
        ({"model": {"embed": TensorRef("model/none")}}, "S-REF"),
        ({"model": {"other": TensorRef("model/embed")}}, "S-REF"),
        ({"model": {}}, "O-KIND"),
        ({"extra": 1}, "O-KIND"),
    ],
)
def test_a_state_that_names_what_the_manifest_has_not_is_refused(state: Any, rule: str) -> None:
    m, document = shard_of(1)
    merged = {**document.state, **{k: v for k, v in state.items() if k != "model"}}
    merged["model"] = {**document.state["model"], **state.get("model", {})} if state.get("model") else merged["model"]
    if state == {"model": {}}:
        merged["empty"] = {}
    assert codes(check_shard(m, 1, replace(document, state=merged))) == {rule}


def test_a_reference_by_a_rank_that_has_no_part_in_the_layout_is_refused() -> None:
    meshes = {"main": Mesh((Axis("pp", 2), Axis("dp", 2)))}
    tensors = {"first": TensorEntry("float32", (4,), "one"), "second": TensorEntry("float32", (4,), "two")}
    layouts = {"one": MeshLayout("main", (), {"pp": 0}), "two": MeshLayout("main", (), {"pp": 1})}
    plan = builder.sample(4, meshes=meshes, layouts=layouts, tensors=tensors, objects={}, aliases={}, flat_groups={})
    catalog = builder.catalog(builder.build(plan))
    assert list(check_catalog(catalog)) == []
    for rank, other in ((1, "second"), (2, "first")):
        state = {**catalog.shards[rank].state, other: TensorRef(other)}
        found = list(check_shard(catalog.manifest, rank, replace(catalog.shards[rank], state=state)))
        assert [(f.code, f.where.tensor) for f in found] == [("S-REF", other)]


def test_a_stored_tensor_that_the_state_does_not_refer_to_is_refused() -> None:
    m, document = shard_of(1)
    model = {k: v for k, v in document.state["model"].items() if k not in ("embed", "head")}
    found = list(check_shard(m, 1, replace(document, state={**document.state, "model": model})))
    assert codes(found) == {"S-REF"}
    assert found[0].where.tensor == "model/embed"


def test_two_keys_of_one_name_in_a_state_are_refused() -> None:
    m, document = shard_of(1)
    state = {**document.state, "twice": {1: TensorRef("model/embed"), "1": TensorRef("model/embed")}}
    assert "S-STATE" in codes(check_shard(m, 1, replace(document, state=state)))


def test_a_tensor_without_a_chunk_is_not_listed_unless_it_is_local() -> None:
    m, document = shard_of(1)
    row = document.index.names.index("model/embed")
    rest = tuple(c for c in document.index.chunks if c.tensor != row)
    found = list(check_shard(*_with(m, 1, document, chunks=rest)))
    assert [(f.code, f.where.tensor) for f in found] == [("T-MATCH", "model/embed")]


def test_a_local_tensor_is_stored_whole_and_once() -> None:
    m, document = shard_of(1)
    row = document.index.names.index("rng/torch")
    mine = [c for c in document.index.chunks if c.tensor == row]
    others = tuple(c for c in document.index.chunks if c.tensor != row)
    half = ChunkRow(row, Box((0,), (3,)), mine[0].start, 3)
    assert codes(check_shard(*_with(m, 1, document, chunks=(*others, half)))) == {"T-LOCAL"}
    assert codes(check_shard(*_with(m, 1, document, chunks=(*others, *mine, *mine)))) == {"T-LOCAL"}
    assert codes(check_shard(*_with(m, 1, document, chunks=others))) == {"T-LOCAL"}


# All shards together


def moved(files: dict[str, bytes], move: Callable[[dict[int, list[ChunkRow]], dict[str, int]], None]) -> Catalog:
    """Return the files' catalog with chunk rows changed; every index gets a row for every tensor, so rows may move."""
    catalog = builder.catalog(files)
    m = catalog.manifest
    names = tuple(n for n, t in m.tensors.items() if t.shape is not None)
    rows = {n: i for i, n in enumerate(names)}
    chunks: dict[int, list[ChunkRow]] = {}
    for rank, d in catalog.shards.items():
        kept = [c for c in d.index.chunks if d.index.names[c.tensor] in rows]
        chunks[rank] = [replace(c, tensor=rows[d.index.names[c.tensor]]) for c in kept]
    move(chunks, rows)
    entries = [m.tensors[n] for n in names]
    shards = {}
    for rank, d in catalog.shards.items():
        index = replace(
            d.index,
            names=names,
            dtypes=tuple(e.dtype for e in entries),
            shapes=tuple(e.shape or () for e in entries),
            chunks=tuple(chunks[rank]),
        )
        shards[rank] = replace(d, index=index)
    return Catalog(m, shards)


def judged(catalog: Catalog) -> set[str]:
    """Return the rules that the placement of chunks breaks."""
    gathered = catalogs.Gathered(catalog.manifest)
    for rank, document in catalog.shards.items():
        list(gathered.add(rank, document))
    return codes(catalogs.coverage(gathered)) | codes(catalogs.placement(gathered))


def first(chunks: dict[int, list[ChunkRow]], row: int) -> tuple[int, ChunkRow]:
    """Return the first chunk of a tensor and the rank that stores it."""
    return next((rank, c) for rank, mine in sorted(chunks.items()) for c in mine if c.tensor == row)


@pytest.mark.parametrize("files", [FILES, WIDE], ids=["one copy", "two copies"])
def test_rows_in_another_order_are_the_same_checkpoint(files: dict[str, bytes]) -> None:
    def turn(chunks: dict[int, list[ChunkRow]], rows: dict[str, int]) -> None:
        for mine in chunks.values():
            mine.reverse()

    assert judged(moved(files, turn)) == set()


@pytest.mark.parametrize("files", [FILES, WIDE], ids=["one copy", "two copies"])
def test_a_chunk_at_another_rank_breaks_the_holder_rule_only(files: dict[str, bytes]) -> None:
    def swap(chunks: dict[int, list[ChunkRow]], rows: dict[str, int]) -> None:
        rank, c = first(chunks, rows["model/norm"])
        chunks[rank].remove(c)
        free = next(r for r in chunks if r != rank and all(x.tensor != c.tensor for x in chunks[r]))
        chunks[free].append(c)

    assert judged(moved(files, swap)) == {"T-HOLD"}


def test_a_box_cut_where_it_need_not_be_breaks_the_holder_rule_only() -> None:
    def cut(chunks: dict[int, list[ChunkRow]], rows: dict[str, int]) -> None:
        rank, c = first(chunks, rows["model/norm"])
        chunks[rank].remove(c)
        chunks[rank] += [replace(c, box=Box((0,), (10,))), replace(c, box=Box((10,), (14,)))]

    assert judged(moved(FILES, cut)) == {"T-HOLD"}


@pytest.mark.parametrize("files", [FILES, WIDE], ids=["one copy", "two copies"])
def test_a_chunk_that_is_gone_or_there_twice_is_no_cover(files: dict[str, bytes]) -> None:
    def lose(chunks: dict[int, list[ChunkRow]], rows: dict[str, int]) -> None:
        rank, c = first(chunks, rows["model/embed"])
        chunks[rank].remove(c)

    def double(chunks: dict[int, list[ChunkRow]], rows: dict[str, int]) -> None:
        rank, c = first(chunks, rows["model/embed"])
        chunks[(rank + 3) % 4].append(c)

    def shrink(chunks: dict[int, list[ChunkRow]], rows: dict[str, int]) -> None:
        rank, c = first(chunks, rows["model/embed"])
        chunks[rank][chunks[rank].index(c)] = replace(c, box=Box(c.box.offsets, (c.box.sizes[0], 23)))

    assert [judged(moved(files, change)) for change in (lose, double, shrink)] == [{"T-COVER"}] * 3


def test_two_copies_in_one_rank_are_no_second_copy() -> None:
    def again(chunks: dict[int, list[ChunkRow]], rows: dict[str, int]) -> None:
        rank, c = first(chunks, rows["model/norm"])
        other = next(r for r in chunks if r != rank and any(x.tensor == c.tensor for x in chunks[r]))
        chunks[other] = [x for x in chunks[other] if x.tensor != c.tensor]
        chunks[rank].append(c)

    assert judged(moved(WIDE, again)) == {"T-COVER"}


def test_a_shard_that_is_not_there_makes_no_noise_about_cover() -> None:
    catalog = builder.catalog(FILES)
    for gone in range(4):
        rest = {rank: d for rank, d in catalog.shards.items() if rank != gone}
        assert list(check_catalog(Catalog(catalog.manifest, rest))) == []


def test_a_shape_of_which_nothing_is_stored_is_judged_in_bounded_time() -> None:
    catalog = builder.catalog(builder.build(builder.sample(1)))
    tensors = {"huge": TensorEntry("uint8", (1 << 62,), "replicated")}
    gathered = catalogs.Gathered(replace(catalog.manifest, tensors=tensors))
    gathered.indexes = {0: catalog.shards[0].index}
    assert codes(catalogs.coverage(gathered)) == {"T-COVER"}


def test_an_object_that_is_the_same_everywhere_but_in_one_rank_is_found() -> None:
    catalog = builder.catalog(FILES)
    for value in (7.0, 8, True):
        other = replace(catalog.shards[2], state={**catalog.shards[2].state, "step": value})
        found = list(check_catalog(Catalog(catalog.manifest, {**catalog.shards, 2: other})))
        assert codes(found) == {"O-KIND"}
        assert found[0].where.rank == 2


def test_what_no_state_holds_is_found_when_all_shards_are_there() -> None:
    catalog = builder.catalog(FILES)
    m = catalog.manifest
    more = replace(m, objects={**m.objects, "lost": "same"})
    assert codes(check_catalog(Catalog(more, catalog.shards))) == {"O-KIND"}
    empty = TensorEntry("float32", (0,), "replicated")
    more = replace(m, tensors={**m.tensors, "unheld": empty})
    assert codes(check_catalog(Catalog(more, catalog.shards))) == {"S-REF"}


@given(st.integers(1, 5), st.sampled_from([1, 2, 3]), st.integers(0, 4))
def test_what_is_lost_is_what_no_other_rank_stores(world: int, copies: int, gone: int) -> None:
    m = builder.sample(world, copies=copies).manifest
    catalog = builder.catalog(builder.build(builder.sample(world, copies=copies)))
    bad = {gone % world}
    kept: dict[str, set[tuple[int, ...]]] = {}
    for rank, d in catalog.shards.items():
        for c in d.index.chunks:
            if rank not in bad:
                cells = kept.setdefault(d.index.names[c.tensor], set())
                cells |= set(_cells(c.box))
    loss = losses(m, bad)
    for name, t in m.tensors.items():
        if t.shape is not None:
            lost = len(set(_cells(Box.whole(t.shape))) - kept.get(name, set()))
            assert loss.tensors.get(name, 0) == lost * {"bfloat16": 2, "float32": 4}[t.dtype]


def _cells(box: Box) -> list[tuple[int, ...]]:
    cells: list[tuple[int, ...]] = [()]
    for start, stop in zip(box.offsets, box.stops, strict=True):
        cells = [(*cell, i) for cell in cells for i in range(start, stop)]
    return cells


# Targets


def test_a_checkpoint_fits_itself() -> None:
    m = manifest()
    assert list(check_target(m, of_manifest(m))) == []
    assert list(check_target(m, Target(4))) == []


def test_another_world_size_is_named_with_both_numbers() -> None:
    (found,) = check_target(manifest(), Target(8))
    assert (found.code, found.severity) == ("R-WORLD", "warning")
    (found,) = judge(manifest(), Target(8), exact=True).findings
    assert (found.code, found.severity) == ("R-WORLD", "error")
    assert "4 ranks" in str(found.expected)
    assert "8 ranks" in str(found.found)


def test_each_difference_of_a_target_has_its_own_rule() -> None:
    m = manifest()
    t = of_manifest(m)
    assert t.tensors is not None
    assert t.layouts is not None
    norm = t.tensors["model/norm"]
    other = {**t.tensors, "model/norm": replace(norm, dtype="float16")}
    assert codes(check_target(m, replace(t, tensors=other))) == {"R-DTYPE"}
    other = {**t.tensors, "model/norm": replace(norm, shape=(25,))}
    assert codes(check_target(m, replace(t, tensors=other))) == {"R-SHAPE"}
    other = {**t.tensors, "model/norm": replace(norm, layout="rows")}
    assert codes(check_target(m, replace(t, tensors=other))) == {"R-LAYOUT"}
    other = {**t.tensors, "model/norm": replace(norm, layout="none")}
    assert codes(check_target(m, replace(t, tensors=other))) == {"R-TARGET"}
    assert codes(check_target(m, replace(t, objects={}))) == {"R-NAME"}


def test_names_that_differ_are_listed_on_both_sides_with_the_nearest() -> None:
    m = manifest()
    t = of_manifest(m)
    assert t.tensors is not None
    renamed = {n.replace("model/norm", "model/norms"): x for n, x in t.tensors.items()}
    found = list(check_target(m, replace(t, tensors=renamed)))
    assert codes(found) == {"R-NAME"}
    assert [f.where.tensor for f in found] == ["model/norms", "model/norm"]
    assert "model/norm" in str(found[0].found)
    assert nearest("entirely", ["different", "words"]) is None


def test_a_layout_is_the_same_when_it_places_the_same_whatever_it_is_called() -> None:
    m = manifest()
    t = of_manifest(m)
    assert t.tensors is not None
    mesh = {"grid": Mesh((Axis("a", 2), Axis("b", 2)))}
    layouts = {**(t.layouts or {}), "both": MeshLayout("grid", (("a", "b"),)), "one": MeshLayout("grid", (("a",),))}
    meshes = {**(t.meshes or {}), **mesh}
    even = {**m.tensors, "model/embed": replace(m.tensors["model/embed"], shape=(8, 24))}
    m = replace(m, tensors=even)
    for layout, expected in (("both", set()), ("one", {"R-LAYOUT"})):
        entry = replace(m.tensors["model/embed"], layout=layout)
        wanted = Target(4, meshes, layouts, {**m.tensors, "model/embed": entry})
        assert codes(check_target(m, wanted)) == expected


def test_axes_are_resized_by_name_and_unknown_ones_refused() -> None:
    m = manifest()
    assert codes(check_target(m, of_axes(m, {"dp": 2}))) == {"R-WORLD"}
    assert codes(check_target(m, of_axes(m, {"dp": 4}))) == set()
    with pytest.raises(Exception, match="no mesh of the checkpoint has this axis"):
        of_axes(m, {"tp": 2})


def test_a_boxes_layout_is_judged_like_any_other() -> None:
    layout = BoxesLayout(((0, Box((0, 0), (4, 4))), (1, Box((4, 0), (4, 4))), (2, Box((0, 0), (4, 4)))))
    plan = builder.sample(4, layouts={"odd": layout}, tensors={"x": TensorEntry("float32", (8, 4), "odd")},
                          objects={}, aliases={}, flat_groups={})  # fmt: skip
    catalog = builder.catalog(builder.build(plan))
    assert list(check_manifest(catalog.manifest)) == []
    assert list(check_catalog(catalog)) == []

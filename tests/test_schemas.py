"""The schemas say what SPEC.md says, name a rule for every refusal, and mean the same to two validators."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.errors import FormatError, Where
from ckptspec.format import digest, manifest, schemas, shard
from ckptspec.format.box import Box
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import KINDS
from ckptspec.format.report import LEVELS, SEVERITIES, Advice, Finding, Names, Range, Report, Verdict

ASSERTING = {
    "type", "const", "enum", "pattern", "required", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "minProperties", "maxProperties",
    "contains", "dependentRequired", "not",
}  # fmt: skip
DIGEST = "sha256:" + "0" * 64
SAVE = "0123456789abcdef0123456789abcdef"


def valid_manifest() -> dict[str, Any]:
    """Return a schema-valid manifest that uses every kind of part once."""
    return {
        "format": "ckptspec",
        "schema_version": "1.0",
        "required_features": [],
        "run_id": "a run",
        "save_id": SAVE,
        "parent": {"step": 3, "save_id": SAVE},
        "step": 4,
        "created_at": "2026-02-28T23:59:59Z",
        "wall_clock_seconds": 12,
        "producer": {"name": "x", "version": "1", "torch": "2.13.0"},
        "commit": "rename",
        "world_size": 2,
        "copies": 1,
        "meshes": {
            "main": {"axes": [{"name": "dp", "size": 2, "kind": "data"}]},
            "listed": {"axes": [{"name": "dp", "size": 2, "kind": "data"}], "ranks": [1, 0]},
            "strided": {"axes": [{"name": "dp", "size": 2, "kind": "data"}], "ranks": {"offset": 0, "strides": [1]}},
        },
        "digest": {"block": "xxh3-128", "block_size": 1048576},
        "shards": [
            {
                "rank": 0,
                "path": "rank-00000.shard",
                "nbytes": 400,
                "index": {"offset": 200, "nbytes": 136, "digest": DIGEST},
                "annotations": {"org.example.host": "n1"},
            }
        ],
        "layouts": {
            "rows": {"kind": "mesh", "mesh": "main", "at": {}, "dims": [["dp"], []]},
            "fused": {"kind": "mesh", "mesh": "main", "at": {"tp": 1}, "dims": [["dp"]], "blocks": {"0": [4, 2]}},
            "flat": {"kind": "flat", "mesh": "main", "at": {}, "axes": ["dp"], "align": 2},
            "cuts": {"kind": "flat", "mesh": "main", "at": {}, "axes": ["dp"], "bounds": [0, 3, 8]},
            "odd": {"kind": "boxes", "boxes": [[0, [0, 0], [4, 8]]]},
            "own": {"kind": "local"},
        },
        "tensors": {
            "model/w": {"dtype": "bfloat16", "shape": [6, 4], "layout": "rows", "role": "parameter"},
            "rng": {"dtype": "uint8", "shape": None, "layout": "own", "role": "rng", "annotations": {"a.b": [1, {}]}},
        },
        "objects": {"lr": "same", "rng/python": "rank"},
        "flat_groups": {
            "zero": {
                "numel": 26,
                "members": [
                    {"name": "model/w", "offset": 0, "shape": [3, 4], "of": {"shape": [6, 4], "offsets": [0, 0]}},
                    {"name": None, "offset": 24, "shape": [2]},
                ],
                "tensors": {"master": "zero/master"},
            }
        },
        "aliases": {"model/head": "model/w"},
        "omitted": {"model/frozen": "frozen"},
        "annotations": {"org.example.note": "x"},
        "manifest_digest": DIGEST,
    }


def valid_target() -> dict[str, Any]:
    """Return a schema-valid target with every table."""
    m = valid_manifest()
    tables = {k: m[k] for k in ("meshes", "layouts", "objects", "flat_groups", "aliases")}
    tensors = {n: {k: t[k] for k in ("dtype", "shape", "layout")} for n, t in m["tensors"].items()}
    return {"format": "ckptspec-target", "schema_version": "1.0", "world_size": 2, **tables, "tensors": tensors}


def valid_report() -> dict[str, Any]:
    """Return the document of a report with one of everything."""
    finding = Finding("S-NBYTES", "error", "cut short", Where("a.shard", None, None, 0, (4, 9)), "9", "4", ("f",))
    advice = Advice("f", "S-NBYTES", "fall back", {"step": 3}, ("ckptspec", "latest", "runs"), "1 step")
    gone = (Range("model/w", (0, 0), (3, 4), (2, 7)), Range("model/b", (0,), (4,)))
    verdicts = (Verdict("model", "lost", "no copy", (3, 5), 9, gone), Verdict("rng", "lossless", "it is there"))
    report = Report("run", "shards", (finding,), (advice,), verdicts, "fallback", SAVE, 4)
    names = Names({"model/w": "w"}, {})
    return replace(report, manifest_digest=DIGEST, bytes_total=9, names=names).document()


def valid_plan() -> dict[str, Any]:
    """Return a schema-valid plan."""
    columns = ("bytes_delivered", "bytes_read", "shards_opened", "transfers")
    totals = ("payload_bytes", "bytes_delivered", "bytes_read", "bytes_read_once", "transfers", "peak_memory")
    return {
        "format": "ckptspec-plan",
        "schema_version": "1.0",
        "source": {"save_id": SAVE, "step": 4, "manifest_digest": DIGEST, "world_size": 2},
        "target": {"format": "ckptspec-target", "schema_version": "1.0", "world_size": 2},
        "names": {},
        "verdicts": [{"part": "model", "verdict": "lossless", "reason": "it is all there"}],
        "totals": dict.fromkeys(totals, 7),
        "ranks": {column: [1, 2] for column in columns},
        "transfers_digest": DIGEST,
    }


def valid_signature() -> dict[str, Any]:
    """Return a schema-valid signature with every member."""
    tensors = {"model/w": {"dtype": "bfloat16", "shape": [6, 4]}, "rng": {"dtype": "uint8", "shape": None}}
    return {
        "format": "ckptspec-signature",
        "schema_version": "1.0",
        "tensors": tensors,
        "objects": {"lr": "same", "rng/python": "rank"},
    }


def valid_header() -> dict[str, Any]:
    """Return the header that the shard codec writes, as a document."""
    values = ("ckptspec-shard", "1.0", SAVE, 4, 0, 2, "crc32c", 4096)
    return dict(zip(shard.HEADER_KEYS, values, strict=True))


def valid_index() -> dict[str, Any]:
    """Return an index in its JSON form: each bin as hex text."""
    chunk = shard.ChunkRow(0, Box((2,), (4,)), 192, 16)
    index = shard.Index(("w",), ("float32",), ((6,),), (chunk,), shard.Extent(256, 9), 129, b"abcd", b"efghijkl")
    import msgpack

    document = msgpack.unpackb(shard.encode_index(index))
    document["header"][1] = document["header"][1].hex()
    return {**document, "digests": document["digests"].hex()}


VALID = {
    "manifest": valid_manifest(),
    "target": valid_target(),
    "report": valid_report(),
    "plan": valid_plan(),
    "signature": valid_signature(),
    "shard-header": valid_header(),
    "shard-index": valid_index(),
}


def subschemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, subschema) of every part that can refuse something; what is under `if` or `not` only decides."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for keyword in ("items", "additionalProperties", "propertyNames", "then", "else", "contains"):
        yield from subschemas(schema.get(keyword), f"{path}/{keyword}")
    for keyword in ("properties", "$defs", "patternProperties", "dependentSchemas"):
        for name, part in schema.get(keyword, {}).items():
            yield from subschemas(part, f"{path}/{keyword}/{name}")
    for keyword in ("prefixItems", "allOf"):
        for i, part in enumerate(schema.get(keyword, [])):
            yield from subschemas(part, f"{path}/{keyword}/{i}")


def asserts(part: dict[str, Any]) -> bool:
    """Tell whether a subschema refuses something by itself."""
    closed = any(part.get(k) is False for k in ("additionalProperties", "items", "unevaluatedProperties"))
    return closed or not ASSERTING.isdisjoint(part)


def test_there_are_seven_schemas_and_each_has_a_valid_document() -> None:
    assert schemas.names() == tuple(sorted(VALID))
    for name, document in VALID.items():
        assert [str(f) for f in schemas.check(name, document)] == []


@pytest.mark.parametrize("name", VALID)
def test_a_schema_is_valid_against_its_meta_schema_and_named(name: str) -> None:
    schema = schemas.load(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"urn:ckptspec:v1:{name}"
    assert schema["title"]
    assert schema["description"]


@pytest.mark.parametrize("name", VALID)
def test_whatever_can_refuse_names_its_rule(name: str) -> None:
    silent = [path for path, part in subschemas(schemas.load(name)) if asserts(part) and "$comment" not in part]
    assert silent == []
    named = {part["$comment"] for _, part in subschemas(schemas.load(name)) if "$comment" in part}
    assert named <= schemas.rules().keys()


@pytest.mark.parametrize("name", VALID)
def test_a_schema_has_one_way_through_and_nothing_unused(name: str) -> None:
    text = schemas.text(name)
    for keyword in ("oneOf", "anyOf", "unevaluatedProperties", "$dynamicRef", "format"):
        assert f'"{keyword}": [' not in text
        assert keyword in ("format",) or f'"{keyword}"' not in text
    schema = schemas.load(name)
    for definition in schema.get("$defs", {}):
        assert f'"$ref": "#/$defs/{definition}"' in text
    assert text.count('"$ref"') == text.count('"$ref": "#/$defs/')


def test_manifest_and_target_share_their_language() -> None:
    ours, theirs = schemas.load("manifest"), schemas.load("target")
    for name in theirs["$defs"].keys() - {"tensor"}:
        assert theirs["$defs"][name] == ours["$defs"][name], name
    for name in ("meshes", "layouts", "objects", "flat_groups", "aliases", "world_size", "annotations"):
        assert theirs["properties"][name] == ours["properties"][name], name
    plan = schemas.load("plan")["$defs"]
    assert {k: plan["target"][k] for k in ("required", "properties")} == {
        k: theirs[k] for k in ("required", "properties")
    }
    assert all(plan[name] == theirs["$defs"][name] for name in theirs["$defs"])


def test_the_closed_sets_are_those_of_the_code() -> None:
    m, report = schemas.load("manifest"), schemas.load("report")
    assert m["$defs"]["tensor"]["properties"]["dtype"]["enum"] == list(DTYPES)
    assert schemas.load("shard-index")["properties"]["dtypes"]["items"]["enum"] == list(DTYPES)
    assert m["$defs"]["digest"]["properties"]["block"]["enum"] == list(digest.ALGORITHMS)
    assert schemas.load("shard-header")["properties"]["block"]["enum"] == list(digest.ALGORITHMS)
    assert m["$defs"]["axis"]["properties"]["kind"]["enum"] == list(KINDS)
    assert m["properties"]["required_features"]["maxItems"] == len(manifest.FEATURES)
    assert report["properties"]["level"]["enum"] == list(LEVELS)
    assert report["$defs"]["finding"]["properties"]["severity"]["enum"] == list(SEVERITIES)
    assert schemas.load("shard-header")["required"] == list(shard.HEADER_KEYS)
    assert schemas.load("shard-index")["required"] == list(shard.INDEX_KEYS)


def test_what_the_writers_write_obeys_the_schemas() -> None:
    empty = Report("x", "lexical")
    assert list(schemas.check("report", empty.document())) == []
    m = manifest.from_document(VALID["manifest"])
    assert list(schemas.check("manifest", {**manifest.document(m), "manifest_digest": DIGEST})) == []


# Each line: where in the valid manifest, what is put there, the rule that must answer, and where it points.
REFUSED: list[tuple[str, Any, str, str]] = [
    ("/format", "other", "M-FORMAT", "/format"),
    ("/schema_version", "2.0", "M-VERSION", "/schema_version"),
    ("/schema_version", "1.01", "M-VERSION", "/schema_version"),
    ("/required_features", ["x"], "M-FEATURE", "/required_features"),
    ("/run_id", "a\nb", "M-RUN", "/run_id"),
    ("/run_id", "", "M-RUN", "/run_id"),
    ("/save_id", SAVE.upper(), "M-SAVE-ID", "/save_id"),
    ("/parent", 3, "M-PARENT", "/parent"),
    ("/parent/step", -1, "M-PARENT", "/parent/step"),
    ("/step", True, "M-STEP", "/step"),
    ("/step", "4", "M-STEP", "/step"),
    ("/step", 1 << 53, "M-STEP", "/step"),
    ("/step", 10**40, "M-STEP", "/step"),
    ("/created_at", "2026-02-28 23:59:59Z", "M-TIME", "/created_at"),
    ("/created_at", "2026-02-28T23:59:59+01:00", "M-TIME", "/created_at"),
    ("/wall_clock_seconds", -1, "M-TIME", "/wall_clock_seconds"),
    ("/producer", [], "M-PRODUCER", "/producer"),
    ("/producer/torch", 2, "M-PRODUCER", "/producer/torch"),
    ("/producer/Bad Name", "x", "M-PRODUCER", "/producer/Bad Name"),
    ("/commit", "link", "M-COMMIT", "/commit"),
    ("/world_size", 0, "M-WORLD", "/world_size"),
    ("/copies", 65, "M-COPIES", "/copies"),
    ("/meshes", [], "M-MESH", "/meshes"),
    ("/meshes/main/axes", [], "M-MESH", "/meshes/main/axes"),
    ("/meshes/main/axes/0/size", 0, "M-MESH", "/meshes/main/axes/0/size"),
    ("/meshes/main/axes/0/kind", "fsdp", "M-MESH", "/meshes/main/axes/0/kind"),
    ("/meshes/listed/ranks/0", -1, "M-MESH", "/meshes/listed/ranks/0"),
    ("/meshes/strided/ranks", "all", "M-MESH", "/meshes/strided/ranks"),
    ("/meshes/strided/ranks/strides/0", "1", "M-MESH", "/meshes/strided/ranks/strides/0"),
    ("/digest/block", "md5", "D-ALG", "/digest/block"),
    ("/digest/block_size", 63, "M-DIGEST", "/digest/block_size"),
    ("/manifest_digest", "sha256:" + "0" * 63, "M-DIGEST", "/manifest_digest"),
    ("/shards", {}, "M-SHARD", "/shards"),
    ("/shards", [], "M-SHARD", "/shards"),
    ("/shards/0/rank", -1, "M-SHARD", "/shards/0/rank"),
    ("/shards/0/path", "../x.shard", "W-PATH", "/shards/0/path"),
    ("/shards/0/index/offset", 0, "M-SHARD", "/shards/0/index/offset"),
    ("/shards/0/index/digest", "md5:0", "M-DIGEST", "/shards/0/index/digest"),
    ("/shards/0/annotations", {"nodots": 1}, "M-NOTE", "/shards/0/annotations/nodots"),
    ("/layouts/rows", None, "M-LAYOUT", "/layouts/rows"),
    ("/layouts/rows/kind", "grid", "M-LAYOUT", "/layouts/rows/kind"),
    ("/layouts/rows/dims/0", "dp", "M-LAYOUT", "/layouts/rows/dims/0"),
    ("/layouts/rows/at", {"tp": "1"}, "M-LAYOUT", "/layouts/rows/at/tp"),
    ("/layouts/fused/blocks", {"00": [1]}, "M-LAYOUT", "/layouts/fused/blocks/00"),
    ("/layouts/fused/blocks/0", [], "M-LAYOUT", "/layouts/fused/blocks/0"),
    ("/layouts/flat/align", 0, "M-LAYOUT", "/layouts/flat/align"),
    ("/layouts/flat/bounds", [0, 1], "M-LAYOUT", "/layouts/flat"),
    ("/layouts/cuts/bounds", [0], "M-LAYOUT", "/layouts/cuts/bounds"),
    ("/layouts/odd/boxes/0", [0, [0]], "M-LAYOUT", "/layouts/odd/boxes/0"),
    ("/layouts/odd/boxes/0/1/0", -1, "M-LAYOUT", "/layouts/odd/boxes/0/1/0"),
    ("/tensors", [], "M-TENSOR", "/tensors"),
    ("/tensors/rng/dtype", "float31", "T-DTYPE", "/tensors/rng/dtype"),
    ("/tensors/model~1w/shape/0", "6", "M-TENSOR", "/tensors/model~1w/shape/0"),
    ("/tensors/model~1w/role", "weights", "M-TENSOR", "/tensors/model~1w/role"),
    ("/tensors/rng/annotations/a.b", 1, "", ""),
    ("/objects/lr", "all", "M-OBJECT", "/objects/lr"),
    ("/flat_groups/zero/numel", -1, "M-GROUP", "/flat_groups/zero/numel"),
    ("/flat_groups/zero/members/0/name", "", "M-GROUP", "/flat_groups/zero/members/0/name"),
    ("/flat_groups/zero/members/0/of/offsets", None, "M-GROUP", "/flat_groups/zero/members/0/of/offsets"),
    ("/flat_groups/zero/tensors", {}, "M-GROUP", "/flat_groups/zero/tensors"),
    ("/aliases/model~1head", None, "M-ALIAS", "/aliases/model~1head"),
    ("/omitted/model~1frozen", "lost", "M-OMITTED", "/omitted/model~1frozen"),
    ("/objects/" + "n" * 4097, "same", "N-NAME", "/objects/" + "n" * 4097),
    ("/annotations", [], "M-NOTE", "/annotations"),
    ("/extra", 1, "M-FIELD", "/extra"),
    ("/layouts/own/mesh", "main", "M-FIELD", "/layouts/own/mesh"),
    ("/layouts/rows/align", 1, "M-FIELD", "/layouts/rows/align"),
    ("/tensors/rng/a~1b~0", 1, "M-FIELD", "/tensors/rng/a~1b~0"),
    ("/shards/0/index/digests", 1, "M-FIELD", "/shards/0/index/digests"),
    ("/flat_groups/zero/members/1/of", {"shape": [1]}, "M-FIELD", "/flat_groups/zero/members/1/of"),
]


def placed(document: Any, pointer: str, value: Any, *, delete: bool = False) -> Any:
    """Return a copy of the document with `value` at the pointer, or with that place gone."""
    document = copy.deepcopy(document)
    tokens = [t.replace("~1", "/").replace("~0", "~") for t in pointer.split("/")[1:]]
    node = document
    for token in tokens[:-1]:
        node = node[int(token)] if isinstance(node, list) else node[token]
    last: Any = int(tokens[-1]) if isinstance(node, list) else tokens[-1]
    if delete:
        del node[last]
    else:
        node[last] = value
    return document


@pytest.mark.parametrize(
    ("place", "value", "code", "pointer"), REFUSED, ids=[f"{p[:40]}={str(v)[:12]!r}" for p, v, _, _ in REFUSED]
)
def test_a_wrong_value_is_named_by_the_rule_of_its_concept(place: str, value: Any, code: str, pointer: str) -> None:
    findings = list(schemas.check("manifest", placed(VALID["manifest"], place, value)))
    assert {f.code for f in findings} == ({code} if code else set())
    for finding in findings:
        assert finding.severity == "error"
        assert finding.where == Where("manifest.json", pointer)


def places(document: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (pointer, value) of everything inside a document."""
    items: Any = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        inner = f"{pointer}/{str(key).replace('~', '~0').replace('/', '~1')}"
        yield inner, value
        if isinstance(value, (dict, list)):
            yield from places(value, inner)


OPTIONAL = {
    "manifest": {"parent", "wall_clock_seconds", "annotations", "ranks", "blocks", "of", "torch"},
    "target": {"meshes", "layouts", "tensors", "objects", "flat_groups", "aliases", "ranks", "blocks", "of"},
    "signature": {"schema_version", "objects"},
    "report": {"bytes_read", "peak_memory", "gone", "names"},
}
FREE = ("/annotations", "/params", "/meshes/", "/layouts/", "/tensors/", "/objects/", "/aliases/", "/omitted/", "/at/")


@pytest.mark.parametrize("name", VALID)
def test_every_field_that_is_not_optional_is_missed(name: str) -> None:
    missed = 0
    for pointer, _ in places(VALID[name]):
        parent, _, field = pointer.rpartition("/")
        listed = isinstance(at(VALID[name], parent), list) or parent.endswith(("/objects", "/tensors", "/blocks"))
        table = parent in ("/meshes", "/layouts", "/aliases", "/omitted", "/flat_groups", "/tensors", "/names/renamed")
        if listed or table or field in OPTIONAL.get(name, set()) or any(x in parent + "/" for x in FREE[:2]):
            continue
        if parent.endswith(("/at", "/producer")) and field not in ("name", "version"):
            continue
        codes = {f.code for f in schemas.check(name, placed(VALID[name], pointer, None, delete=True))}
        own = {"shard-header": "S-HEADER", "shard-index": "S-CODEC"}.get(name, "M-FIELD")
        assert codes == {own}, pointer
        missed += 1
    assert missed >= 5


def at(document: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer."""
    for token in pointer.split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        document = document[int(key)] if isinstance(document, list) else document[key]
    return document


WRONG: tuple[Any, ...] = (None, True, -1, 0, 1 << 53, "", "x", [], {}, ["x"], {"x": 1}, [[0]], 1.5)


def mutants(document: Any) -> Iterator[Any]:
    """Yield the document with each of its places deleted, replaced, or given an unknown field."""
    for pointer, value in places(document):
        yield placed(document, pointer, None, delete=True)
        for wrong in WRONG:
            if type(wrong) is not type(value) or wrong != value:
                yield placed(document, pointer, wrong)
        if isinstance(value, dict):
            yield placed(document, pointer + "/zz top", 1)


def told_by_jsonschema(schema: Any, document: Any) -> set[tuple[str, str]]:
    """Return (rule id, pointer to the value) of each error of the Python library, found by walking its schema path."""
    out = set()
    for error in jsonschema.Draft202012Validator(schema).iter_errors(document):
        node, rule = schema, schema["$comment"]
        for step in error.absolute_schema_path:
            while isinstance(node, dict) and step not in node:  # the library leaves references out of the path
                node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
                rule = node.get("$comment", rule)
            node = node[step]
            if isinstance(node, dict):
                rule = node.get("$comment", rule)
        out.add((rule, "".join("/" + str(t).replace("~", "~0").replace("/", "~1") for t in error.absolute_path)))
    return out


@pytest.mark.parametrize("name", VALID)
def test_two_validators_agree_on_mutated_documents(name: str) -> None:
    schema = schemas.load(name)
    seen, refused = 0, 0
    for mutant in mutants(VALID[name]):
        seen += 1
        if seen % 5 and name in ("manifest", "target"):
            continue  # the Python library is slow; every fifth mutant of the large documents will do
        expected = told_by_jsonschema(schema, mutant)
        findings = list(schemas.check(name, mutant))
        assert {f.code for f in findings} == {code for code, _ in expected}, (expected, findings)
        for finding in findings:
            # The pointer of an unknown or badly named field is one step longer than that of its object.
            pointer = finding.where.pointer or ""
            assert (finding.code, pointer) in expected or (finding.code, pointer.rpartition("/")[0]) in expected
        refused += bool(expected)
    assert refused > seen // 20


ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 60), 1 << 60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
SPOTS = [pointer for pointer, _ in places(VALID["manifest"])]


@given(spot=st.sampled_from(SPOTS), value=ANY)
def test_whatever_stands_anywhere_is_judged_and_never_raises(spot: str, value: Any) -> None:
    document = placed(VALID["manifest"], spot, value)
    findings = list(schemas.check("manifest", document))
    assert bool(findings) != jsonschema_rs.Draft202012Validator(schemas.load("manifest")).is_valid(document)
    for finding in findings:
        assert finding.code in schemas.rules()
        assert len(finding.found or "") <= 80
        assert (finding.where.pointer or "") == "" or finding.where.pointer.startswith("/")  # type: ignore[union-attr]


def test_found_is_short_and_names_the_value() -> None:
    (finding,) = schemas.check("manifest", placed(VALID["manifest"], "/step", "x" * 500))
    assert finding.found is not None
    assert finding.found.startswith('"xxx')
    assert len(finding.found) == 80
    assert finding.expected == "integer"
    (finding,) = schemas.check("manifest", placed(VALID["manifest"], "/commit", {"a": 1}))
    assert finding.found == "an object of 1 fields"
    assert finding.expected == "rename or rename-plain or manifest-last"


def test_higher_minor_turns_unknown_fields_into_warnings_and_nothing_else() -> None:
    newer = placed(placed(VALID["manifest"], "/extra", 1), "/tensors/rng/extra", 1)
    assert {(f.code, f.severity) for f in schemas.check("manifest", newer)} == {("M-FIELD", "error")}
    assert [(f.severity, f.where.pointer) for f in schemas.check("manifest", newer, minor=1)] == [
        ("warning", "/tensors/rng/extra"),
        ("warning", "/extra"),
    ]
    wrong = placed(newer, "/step", "x")
    assert [(f.code, f.severity) for f in schemas.check("manifest", wrong, minor=1)] == [
        ("M-STEP", "error"),
        ("M-FIELD", "warning"),
        ("M-FIELD", "warning"),
    ]
    missing = placed(newer, "/step", None, delete=True)
    assert ("M-FIELD", "error") in {(f.code, f.severity) for f in schemas.check("manifest", missing, minor=1)}
    header = {**VALID["shard-header"], "extra": 1}
    assert [f.severity for f in schemas.check("shard-header", header, minor=1)] == ["error"]


def test_at_most_fifty_findings_are_told_and_the_rest_counted() -> None:
    tensors = {f"t{i}": {"dtype": "x", "shape": [], "layout": "own", "role": "other"} for i in range(123)}
    findings = list(schemas.check("manifest", placed(VALID["manifest"], "/tensors", tensors)))
    assert len(findings) == schemas.LIMIT + 1
    assert findings[-1].message.startswith("and 73 more")
    assert {(f.code, f.severity) for f in findings} == {("T-DTYPE", "error")}
    many = {**VALID["manifest"], **{f"new{i}": 1 for i in range(80)}}
    assert [f.severity for f in schemas.check("manifest", many, minor=1)] == ["warning"] * 51


def large(tensors: int) -> dict[str, Any]:
    """Return a valid manifest of that many tensors."""
    entry = {"dtype": "float32", "shape": [3, 4], "layout": "rows", "role": "other"}
    return {**VALID["manifest"], "tensors": {f"model/layer.{i}": dict(entry) for i in range(tensors)}}


def test_a_valid_document_is_asked_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas, "_errors", None)  # only who finds a fault lists it
    assert list(schemas.check("manifest", large(10_000))) == []


@pytest.mark.timeout(60)
def test_of_a_large_document_full_of_faults_one_a_field_is_listed() -> None:
    document = {**large(1), "tensors": {f"t{i}": {} for i in range(100_000)}, "step": "x", "more": 1}
    findings = list(schemas.check("manifest", document))  # listing all 400,000 faults takes minutes
    assert [(f.code, f.where.pointer) for f in findings] == [
        ("M-FIELD", "/more"),
        ("M-STEP", "/step"),
        ("M-FIELD", "/tensors/t0"),
    ]


def test_in_a_large_document_a_warning_does_not_hide_an_error() -> None:
    document = large(20_000)
    document["tensors"]["model/layer.0"]["extra"] = 1
    document["tensors"]["model/layer.7"]["dtype"] = "float31"
    codes = [(f.code, f.severity) for f in schemas.check("manifest", document, minor=1)]
    assert codes == [("T-DTYPE", "error"), ("M-FIELD", "warning")]


def test_what_json_cannot_hold_is_a_finding() -> None:
    assert [f.code for f in schemas.check("manifest", {**VALID["manifest"], "run_id": "\ud800"})] == ["L-UTF8"]
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    assert [f.code for f in schemas.check("manifest", {**VALID["manifest"], "run_id": deep})] == ["L-DEPTH"]
    assert [f.code for f in schemas.check("manifest", [])] == ["M-FIELD"]


@pytest.mark.parametrize("name", ["0", "007", "+7", "7", "-1", "a/b", "~", "1e3"])
def test_a_pointer_names_odd_fields_as_they_are(name: str) -> None:
    entry = {"dtype": "x", "shape": ["y"], "layout": "own", "role": "other"}
    token = name.replace("~", "~0").replace("/", "~1")
    for group in ({name: entry}, {"other": VALID["manifest"]["tensors"]["rng"], name: entry}):
        findings = schemas.check("manifest", {**VALID["manifest"], "tensors": group})
        assert [f.where.pointer for f in findings] == [f"/tensors/{token}/dtype", f"/tensors/{token}/shape/0"]


def test_a_field_without_a_name_is_pointed_at_as_well_as_can_be() -> None:
    findings = list(schemas.check("manifest", {**VALID["manifest"], "tensors": {"": {"dtype": "x", "more": 1}}}))
    assert {f.code for f in findings} == {"T-DTYPE", "N-NAME", "M-FIELD"}
    assert ("T-DTYPE", "/tensors//dtype") in {(f.code, f.where.pointer) for f in findings}
    assert ("N-NAME", "/tensors/") in {(f.code, f.where.pointer) for f in findings}


def test_an_unknown_schema_is_refused_by_name() -> None:
    with pytest.raises(FormatError, match="no such schema") as caught:
        schemas.load("nothing")
    assert caught.value.expected == "one of manifest, plan, report, shard-header, shard-index, signature, target"


def test_rules_are_read_without_the_validator_library() -> None:
    script = (
        "import sys\n"
        "from ckptspec.format import schemas\n"
        "assert schemas.rules()['M-STEP'].level == 'schema'\n"
        "assert schemas.names()\n"
        "assert 'jsonschema_rs' not in sys.modules\n"
        "assert not list(schemas.check('report', schemas.load('report'))) == []\n"
        "assert 'jsonschema_rs' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_loading_gives_a_document_of_ones_own() -> None:
    mine = schemas.load("plan")
    mine.clear()
    assert schemas.load("plan") == json.loads(schemas.text("plan"))
    assert schemas.load("plan")["title"]

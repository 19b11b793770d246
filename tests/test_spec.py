"""SPEC.md, rules.json, schemas and code name the same rules, and everything SPEC.md shows is true."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy
import pytest

from ckptspec.check.manifests import check_manifest
from ckptspec.engine.holding import ArrayHolding
from ckptspec.engine.pool import Pool
from ckptspec.engine.saves.writer import Stored, plan_shard, write_shard
from ckptspec.format import digest, lexical, manifest, objects, schemas, shard
from ckptspec.format.box import Box
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import layout_from_document, mesh_from_document
from ckptspec.format.objects import DeviceValue, DTypeValue, SizeValue, TensorRef
from ckptspec.format.placement import boxes_at, stored_at
from ckptspec.format.report import Report
from ckptspec.format.target import Target

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "schema"
SPEC = (SCHEMA / "v1" / "SPEC.md").read_text(encoding="utf-8")
RULES: dict[str, dict[str, Any]] = json.loads((SCHEMA / "v1" / "rules.json").read_text(encoding="utf-8"))
SOURCE = {p.relative_to(ROOT): p.read_text(encoding="utf-8") for p in (ROOT / "ckptspec").rglob("*.py")}
RULE = r"[A-Z]-[A-Z][A-Z0-9]*(?:-[A-Z0-9]+)*"
FENCES = re.compile(r"^<!-- ([a-z]+): ([\w.-]+) -->\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = [(m[1], m[2], m[4]) for m in FENCES.finditer(SPEC)]
SUBJECTS = ("document", "writer", "reader")
LEVELS = ("folder", "lexical", "schema", "manifest", "shards", "bytes", "target")


def shown(kind: str, name: str) -> list[Any]:
    """Return the JSON of every example of a kind and name."""
    found = [json.loads(text) for k, n, text in EXAMPLES if (k, n) == (kind, name)]
    assert found, (kind, name)
    return found


def ids(text: str) -> set[str]:
    """Return the rule ids in brackets."""
    return set(re.findall(rf"\[({RULE})\]", text))


def comments(schema: Any) -> Iterator[str]:
    """Yield the $comment of every part of a schema."""
    for value in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(value, (dict, list)):
            yield from comments(value)
    if isinstance(schema, dict) and "$comment" in schema:
        yield schema["$comment"]


SCHEMA_RULES = {rule for name in schemas.names() for rule in comments(schemas.load(name))}


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_the_text_and_the_list_name_the_same_rules() -> None:
    assert ids(SPEC) == RULES.keys()


def test_each_must_is_followed_by_its_rule() -> None:
    body = SPEC[SPEC.index("## 3. ") :]
    body = re.sub(r"^```.*?^```$", "", body, flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=- |\d\. |\| )", body)
    bare = [b for b in blocks if "MUST" in b and not ids(b[b.rindex("MUST") :])]
    assert bare == []
    assert sum(b.count("MUST") for b in blocks) >= len(RULES)


def test_a_rule_says_whom_it_binds_how_grave_it_is_and_what_to_do() -> None:
    for rule, fields in RULES.items():
        assert re.fullmatch(RULE, rule), rule
        needed = {"subject", "severity", "level", "title", "advice"}
        assert needed <= fields.keys() <= needed | {"test"}, rule
        assert fields["subject"] in SUBJECTS, rule
        assert fields["severity"] in ("error", "warning", "info"), rule
        assert (fields["level"] in LEVELS) == (fields["subject"] == "document"), rule
        assert ("test" in fields) == (fields["subject"] != "document"), rule
        for text in (fields["title"], fields["advice"]):
            assert text[0].isupper() or text[0].islower(), rule
            assert set(re.findall(r"\{.*?\}", text)) <= {"{path}", "{run}"}, rule
        assert fields["title"].endswith("."), rule
        assert "\n" not in fields["title"] + fields["advice"], rule
    prefixes = {r[0]: f["subject"] for r, f in RULES.items()}
    assert prefixes["P"] == "writer"
    assert prefixes["Q"] == "reader"


def test_every_document_rule_is_enforced_somewhere() -> None:
    code = "\n".join(SOURCE.values())
    unheard = [r for r, f in RULES.items() if f["subject"] == "document" and r not in SCHEMA_RULES and r not in code]
    assert unheard == []


def test_the_code_names_only_rules_there_are() -> None:
    unknown = {
        (str(path), rule)
        for path, text in SOURCE.items()
        for rule in re.findall(rf"(?:\[|\"|')({RULE})(?:\]|\"|')", text)
        if rule not in RULES
    }
    assert unknown == set()
    assert RULES.keys() >= SCHEMA_RULES


def test_a_schema_rule_is_of_a_level_that_reads_schemas() -> None:
    for rule, fields in RULES.items():
        if fields["level"] == "schema":
            assert rule in SCHEMA_RULES, rule


@pytest.mark.parametrize("rule", [r for r, f in RULES.items() if f.get("test")])
def test_a_rule_for_programs_names_its_test(rule: str) -> None:
    file, _, function = RULES[rule]["test"].partition("::")
    assert re.search(rf"^def {re.escape(function)}\(", (ROOT / file).read_text(), re.MULTILINE), RULES[rule]["test"]


def test_rules_without_a_test_are_those_of_what_is_not_built_yet() -> None:
    assert [r for r, f in RULES.items() if f["subject"] != "document" and f["test"] is None] == []


def test_the_package_reads_the_same_rules() -> None:
    assert list(schemas.rules()) == list(RULES)
    for rule, fields in RULES.items():
        assert vars(schemas.rules()[rule]) == {"id": rule, "test": None, **fields}


def test_a_writer_stamps_the_lowest_version_that_suffices() -> None:
    m = manifest.Manifest("0" * 32, 1, 1)
    assert manifest.document(m)["schema_version"] == "1.0"
    assert Target(1).document()["schema_version"] == "1.0"
    assert Report("x", "bytes").document()["schema_version"] == "1.0"
    assert msgpack.unpackb(shard.encode_header(shard.Header("0" * 32, 1, 0, 1)))["spec"] == "1.0"


def test_the_same_state_gives_the_same_shard_but_for_the_save_id(tmp_path: Path) -> None:
    array = numpy.arange(300_000, dtype="float32").reshape(300, 1000)

    def written(save_id: str, threads: int) -> bytes:
        holding = ArrayHolding(array, (0, 0), DTYPES["float32"])
        boxes = {"a": Box((0, 0), (300, 1000)), "b": Box((0, 0), (1, 7))}
        stored = [Stored(name, "float32", array.shape, (box,), holding) for name, box in boxes.items()]
        state = objects.pack({name: TensorRef(name) for name in boxes})
        plan = plan_shard(shard.Header(save_id, 1, 0, 1), stored, state)
        path = tmp_path / f"{save_id}-{threads}.shard"
        write_shard(str(path), plan, Pool(budget=1 << 20, buffer_nbytes=1 << 19, threads=threads))
        return path.read_bytes()

    one, again, other = written("0" * 32, 1), written("0" * 32, 2), written("1" * 32, 2)
    assert one == again
    start = msgpack.unpackb(one[len(one) - 64 :])[:8]
    at, header = int.from_bytes(start, "little"), one.index(b"block_size") + 15
    assert one[header:at] == other[header:at]
    assert one[:header].replace(b"0" * 32, b"1" * 32) == other[:header]
    ours, theirs = (msgpack.unpackb(data[at:-64]) for data in (one, other))
    assert {k for k in ours if ours[k] != theirs[k]} == {"header"}


RUNNERS = {"eval", "exec", "compile", "__import__"}
BY_TABLE = {Path("ckptspec/__init__.py"), Path("ckptspec/cli/main.py")}  # names of our own, from a fixed table
LOADERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy", "code"}


@pytest.mark.parametrize("path", SOURCE, ids=str)
def test_no_module_can_run_what_a_file_says(path: Path) -> None:
    for node in ast.walk(ast.parse(SOURCE[path])):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in RUNNERS | {"torch.load"}
            assert not called.endswith("import_module") or path in BY_TABLE
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert LOADERS.isdisjoint(name.split(".")[0] for name in names)


# ---- what SPEC.md shows ----------------------------------------------------------------------------------------------


def test_every_block_of_json_says_what_it_is() -> None:
    assert SPEC.count("\n```json\n") == sum(text.strip()[0] in "{[" for _, _, text in EXAMPLES)
    assert {(kind, name) for kind, name, _ in EXAMPLES} == {
        ("schema", "manifest"),
        ("schema", "target"),
        ("schema", "signature"),
        ("schema", "report"),
        ("schema", "plan"),
        ("example", "boxes"),
        ("example", "stored"),
        ("example", "geometry"),
        ("vectors", "integers"),
        ("vectors", "values"),
        ("vectors", "digests"),
        ("vectors", "crc32"),
        ("bytes", "rank-00000.shard"),
    }


@pytest.mark.parametrize("name", ["manifest", "target", "signature", "report", "plan"])
def test_a_shown_document_obeys_its_schema(name: str) -> None:
    for document in shown("schema", name):
        assert [str(f) for f in schemas.check(name, document)] == []


MANIFESTS = [text for kind, name, text in EXAMPLES if (kind, name) == ("schema", "manifest")]


@pytest.mark.parametrize("text", MANIFESTS, ids=["appendix C", "appendix D"])
def test_a_shown_manifest_is_right_to_the_last_byte(text: str) -> None:
    data = text.encode()
    covered, tail = data[:-68], data[-68:]
    assert tail == hashlib.sha256(covered).hexdigest().encode() + b'"\n}\n'
    document, findings = lexical.scan(data)
    assert findings == ()
    assert document == json.loads(text)
    decoded = manifest.decode(data)
    assert decoded.findings == ()
    assert decoded.manifest is not None
    assert list(check_manifest(decoded.manifest)) == []
    assert manifest.dump(decoded.manifest) == data


def boxes(found: Any) -> list[list[list[int]]]:
    """Return boxes as the examples write them."""
    return [[list(b.offsets), list(b.sizes)] for b in found]


def test_the_boxes_of_the_examples_follow_from_their_layouts() -> None:
    examples = shown("example", "boxes")
    assert {e["layout"]["kind"] for e in examples} == {"mesh", "flat"}
    for e in examples:
        meshes, layout = {"main": mesh_from_document(e["mesh"])}, layout_from_document(e["layout"])
        assert {r: boxes(boxes_at(layout, meshes, e["shape"], int(r))) for r in e["boxes"]} == e["boxes"]


def test_what_the_examples_store_follows_from_the_holder_rule() -> None:
    for e in shown("example", "stored"):
        meshes, layout = {"main": mesh_from_document(e["mesh"])}, layout_from_document(e["layout"])
        size, rest = DTYPES[e["dtype"]].itemsize, (e["name"], e["copies"])
        found = {r: boxes(stored_at(layout, meshes, e["shape"], size, *rest, int(r))) for r in e["stored"]}
        assert found == e["stored"]
        held = numpy.zeros(e["shape"], dtype="int8")
        for pieces in e["stored"].values():
            for offsets, sizes in pieces:
                held[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        assert (held == min(e["copies"], len(e["stored"]))).all()


def test_payloads_start_where_the_example_says() -> None:
    (e,) = shown("example", "geometry")
    end, expected = e["header"], []
    for nbytes in e["nbytes"]:
        unit = 4096 if nbytes >= 262_144 else 64
        expected.append(min(s for s in range(0, end + 5 + unit, unit) if s >= end + 5))
        end = expected[-1] + nbytes
    assert e["start"] == expected == shard.starts(e["header"], e["nbytes"])


def test_integers_are_packed_as_shown() -> None:
    (vectors,) = shown("vectors", "integers")
    for number, text in vectors.items():
        assert msgpack.packb(int(number)) == bytes.fromhex(text) == objects.pack(int(number))
    assert len(vectors) >= 20


def test_values_are_packed_as_shown() -> None:
    (vectors,) = shown("vectors", "values")
    words = {
        "dtype": DTypeValue,
        "size": lambda *dims: SizeValue(dims),
        "device": DeviceValue,
        "ref": TensorRef,
        "numpy": numpy,
    }
    tags = set()
    for source, text in vectors.items():
        data = bytes.fromhex(text)
        value = eval(source, {"__builtins__": {}}, words)
        assert objects.pack(value) == data, source
        assert objects.pack(objects.unpack(data)) == data, source
        tags |= {data[1]} if 0x90 <= data[0] <= 0x9F else set()
    assert tags == set(range(11))


def test_digests_are_as_shown() -> None:
    (vectors,) = shown("vectors", "digests")
    inputs = {"no bytes": b"", "the 8 bytes of ckptspec in ASCII": b"ckptspec", "1048576 zero bytes": bytes(1 << 20)}
    assert vectors.keys() == inputs.keys()
    for name, data in inputs.items():
        assert vectors[name] == {a: digest.algorithm(a).of(data).hex() for a in digest.ALGORITHMS}


def test_crc32_of_names_is_as_shown() -> None:
    (vectors,) = shown("vectors", "crc32")
    for name, expected in vectors.items():
        crc = 0xFFFFFFFF  # the plain way: reflected polynomial, one bit at a time
        for byte in name.encode():
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
        assert crc ^ 0xFFFFFFFF == expected


def test_the_shown_shard_is_the_one_its_manifest_lists() -> None:
    (text,) = (text for kind, _, text in EXAMPLES if kind == "bytes")
    data = bytes.fromhex(text)
    m = manifest.parse(MANIFESTS[1].encode())
    entry = m.shards[0]
    assert len(data) == entry.nbytes
    trailer = shard.decode_trailer(data[-64:], len(data))
    assert (trailer.index_offset, trailer.index_nbytes) == (entry.index_offset, entry.index_nbytes)
    index_bytes = data[trailer.index_offset : -64]
    assert digest.sha256_text(index_bytes) == entry.index_digest
    header = shard.decode_header(data[: msgpack.unpackb(index_bytes)["header"][0]])
    index = shard.decode_index(index_bytes, header)
    assert (header.save_id, header.step, header.rank, header.world_size) == (m.save_id, m.step, 0, 1)
    for at, frame in shard.frame(index):
        assert data[at : at + len(frame)] == frame
    xxh3 = digest.algorithm(header.block).of
    payloads = [data[e.start : e.stop] for e in index.extents]
    assert b"".join(map(xxh3, payloads)) == index.digests
    assert xxh3(data[: index.header_nbytes]) == index.header_digest
    assert numpy.frombuffer(payloads[0], "<f4").tolist() == [1.0, 2.0]
    assert objects.unpack(payloads[1]) == {"w": TensorRef("w"), "lr": 0.5}
    assert data.startswith(shard.MAGIC)
    assert f"`{shard.MAGIC.hex(' ')}`" in SPEC


def test_the_shown_shard_is_one_stream_of_msgpack_values() -> None:
    (text,) = (text for kind, _, text in EXAMPLES if kind == "bytes")
    walker = msgpack.Unpacker(max_buffer_size=1 << 20)
    walker.feed(bytes.fromhex(text))
    kinds = [type(value).__name__ for value in walker if value is not None]
    assert kinds == ["dict", "bytes", "bytes", "dict", "bytes"]


def test_the_table_of_dtypes_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (?:`(ml_dtypes\.)?(\w+)`|none) \|$", SPEC, re.MULTILINE)
    found = [(name, int(size), int(values), numpy or None, bool(ml)) for name, size, values, ml, numpy in rows]
    assert found == [(d.name, d.itemsize, d.values, d.numpy, d.ml) for d in DTYPES.values()]


# ---- the folder ------------------------------------------------------------------------------------------------------

PROSE = [SCHEMA / "README.md", SCHEMA / "v1" / "SPEC.md", *sorted((SCHEMA / "decisions").glob("*.md"))]


@pytest.mark.parametrize("path", PROSE, ids=[p.name for p in PROSE])
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in anchors, target
        elif ":" not in target:
            assert (path.parent / target).exists(), target


def test_decisions_are_numbered_and_say_why_and_what_follows() -> None:
    files = sorted((SCHEMA / "decisions").glob("*.md"))
    assert [int(p.name[:4]) for p in files] == list(range(1, len(files) + 1))
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {int(path.name[:4])}. ")
        headings = re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequence"]


def test_released_schemas_are_frozen() -> None:
    released = SCHEMA / "v1" / "released"
    digests: dict[str, str] = json.loads((released / "digests.json").read_text(encoding="utf-8"))
    there = {str(p.relative_to(released)) for p in released.rglob("*") if p.is_file() and p.name != "digests.json"}
    assert there == digests.keys()
    for name, expected in digests.items():
        assert digest.sha256_text((released / name).read_bytes()) == expected, name
    releases = {name.split("/")[0] for name in digests}
    assert ("Status: draft" in SPEC) == (manifest.SPEC_VERSION not in releases)
    for release in releases:
        needed = {f"{release}/{p.name}" for p in (SCHEMA / "v1").iterdir() if p.is_file()}
        assert needed <= digests.keys()

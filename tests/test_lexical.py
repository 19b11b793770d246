"""The lexical rules: what the bytes of a document must be before any schema looks at it."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.format import lexical
from ckptspec.format.lexical import INT_LIMIT, scan, seal, unseal
from ckptspec.format.report import Finding

BODY = b'{\n "format": "ckptspec",\n "step": 12,\n "t": {"a": {"shape": [2, 3]}},\n "n": "\xc3\xa9 [{\\" \\u00e9",\n '
SEALED = seal(BODY)


def codes(data: bytes, **options: Any) -> list[str]:
    """Return the codes of all findings, after checking that a document comes exactly when there is none."""
    document, findings = scan(data, **options)
    assert (document is None) == bool(findings)
    assert all(f.severity == "error" for f in findings)
    return [f.code for f in findings]


def only(data: bytes, **options: Any) -> Finding:
    """Return the one finding of `data`."""
    _, findings = scan(data, **options)
    assert len(findings) == 1, findings
    return findings[0]


def opened(json_text: str) -> bytes:
    """Return an unsealed document with `json_text` as the value of its one member."""
    return b'{"x": ' + json_text.encode() + b"}"


# ---- the seal --------------------------------------------------------------------------------------------------------


def test_a_sealed_document_is_read_as_json_reads_it() -> None:
    document, findings = scan(SEALED)
    assert findings == ()
    assert document == json.loads(SEALED)
    assert list(document) == ["format", "step", "t", "n", "manifest_digest"]


def test_the_digest_is_what_head_and_sha256sum_print() -> None:
    covered = SEALED[:-68]
    assert json.loads(SEALED)["manifest_digest"] == "sha256:" + hashlib.sha256(covered).hexdigest()
    assert SEALED.endswith(b'"\n}\n')


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(-5, 5), min_size=1))
def test_unseal_undoes_seal(members: dict[str, int]) -> None:
    body = json.dumps(members).encode()[:-1] + b",\n "
    assert unseal(seal(body)) == body
    assert codes(seal(body)) == []
    with pytest.raises(ValueError, match="sealed"):
        unseal(body)


def test_a_document_cut_anywhere_is_said_to_be_cut() -> None:
    for size in range(1, len(SEALED)):
        finding = only(SEALED[:size])
        assert finding.code == "L-TAIL"
        assert finding.where.range == (max(0, size - lexical.TAIL_SIZE), size)
    assert codes(b"") == ["L-SIZE"]


def test_every_bit_flip_is_found() -> None:
    for bit in range(len(SEALED) * 8):
        flipped = bytearray(SEALED)
        flipped[bit // 8] ^= 1 << bit % 8
        (code,) = codes(bytes(flipped))
        in_tail = bit // 8 >= len(SEALED) - lexical.TAIL_SIZE
        assert code in (("L-TAIL", "L-DIGEST") if in_tail else ("L-DIGEST",))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"\n}\n', b'"\n}'),
        (b'"\n}\n', b'"}\n'),
        (b'"\n}\n', b'"\r\n}\r\n'),
        (b'"\n}\n', b'"\n}\n\n'),
        (b'"\n}\n', b'"\n }\n'),
        (b'"manifest_digest": ', b'"manifest_digest":'),
        (b'"manifest_digest": "sha256:', b'"manifest_digest": "sha256:0'),
        (b'"manifest_digest": "sha256:', b'"manifest_digest": "sha512:'),
        (b'"manifest_digest": "sha256:', b'"Manifest_digest": "sha256:'),
    ],
)
def test_any_other_end_is_refused(old: bytes, new: bytes) -> None:
    finding = only(SEALED.replace(old, new))
    assert finding.code == "L-TAIL"
    assert "<64 hex digits>" in (finding.expected or "")


def test_a_digest_in_capitals_is_another_end() -> None:
    digits = SEALED[-68:-4]
    assert codes(SEALED.replace(digits, digits.upper())) == ["L-TAIL"]


def test_a_wrong_digest_names_both_and_the_bytes_it_covers() -> None:
    finding = only(SEALED.replace(b'"step": 12', b'"step": 13'))
    assert finding.code == "L-DIGEST"
    assert finding.where.range == (0, len(SEALED) - 68)
    assert finding.found == json.loads(SEALED)["manifest_digest"]
    assert finding.expected == json.loads(seal(BODY.replace(b"12", b"13")))["manifest_digest"]


def test_other_documents_have_no_seal() -> None:
    assert codes(b'{"world_size": 4}', sealed=False) == []
    assert codes(b'{"world_size": 4}') == ["L-TAIL"]
    assert only(b"{", sealed=False, file="target.json").where.file == "target.json"


# ---- one rule at a time, digest recomputed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        ("L-UTF8", b'{\n "format"', b'\xef\xbb\xbf{\n "format"'),
        ("L-UTF8", b"\xc3\xa9", b"\xe9"),
        ("L-UTF8", b"\xc3\xa9", b"\xc0\xaf"),
        ("L-UTF8", b"\xc3\xa9", b"\xed\xa0\x80"),
        ("L-UTF8", b"\\u00e9", b"\\ud800"),
        ("L-UTF8", b"\\u00e9", b"\\\\\\uDFFF"),
        ("L-UTF8", b"\\u00e9", b"\\udc00\\ud800"),
        ("L-JSON", b'"step": 12', b'"step": 12,'),
        ("L-JSON", b'"step": 12', b"'step': 12"),
        ("L-JSON", b'"step": 12', b'"step": 012'),
        ("L-JSON", b'"step": 12', b'"step": +12'),
        ("L-JSON", b'"step": 12', b'"step": 0x12'),
        ("L-JSON", b'"step": 12', b'"step": NaN'),
        ("L-JSON", b'"step": 12', b'"step": -Infinity'),
        ("L-JSON", b'"step": 12', b'"step": 12 // twelve'),
        ("L-JSON", b"\xc3\xa9", b"a\tb"),
        ("L-JSON", b"\xc3\xa9", b"\x00"),
        ("L-JSON", b'"step": 12', b'"step": True'),
        ("L-DEPTH", b"[2, 3]", b"[" * 30 + b"]" * 30),
        ("L-DEPTH", b"[2, 3]", b'{"a":' * 29 + b"[]" + b"}" * 29),
        ("L-NUMBER", b'"step": 12', b'"step": 12.0'),
        ("L-NUMBER", b'"step": 12', b'"step": 1e2'),
        ("L-NUMBER", b'"step": 12', b'"step": -0'),
        ("L-NUMBER", b'"step": 12', b'"step": -0.0'),
        ("L-NUMBER", b'"step": 12', b'"step": 9007199254740992'),
        ("L-NUMBER", b'"step": 12', b'"step": -9007199254740992'),
        ("L-NUMBER", b'"step": 12', b'"step": 1' + b"0" * 5000),
        ("L-DUPLICATE", b'"step": 12', b'"step": 12, "step": 12'),
        ("L-DUPLICATE", b'"step": 12', b'"step": 12, "st\\u0065p": 13'),
        ("L-DUPLICATE", b'"shape": [2, 3]', b'"shape": [], "x": {}, "shape": []'),
        ("L-DUPLICATE", b'"step": 12', b'"step": 12, "manifest_digest": ""'),
    ],
)
def test_one_change_breaks_one_rule(code: str, old: bytes, new: bytes) -> None:
    assert old in BODY
    finding = only(seal(BODY.replace(old, new, 1)))
    assert finding.code == code
    assert finding.where.file == "manifest.json"
    assert finding.expected
    assert finding.found
    json.dumps(finding.document())


@pytest.mark.parametrize(
    "new",
    [
        *[b'"step": 9007199254740991', b'"step": -9007199254740991', b'"step": 0', b'"step": -1'],
        *[b'"step": "1.5e3"', b'"step": "-0"', b'"step": "[[[["', b'"step": "\\\\\\"]]]]{{{{"', b'"step":\t\r\n 12'],
        *[
            b'"step": "\\ud83d\\ude00"',
            b'"step": "\\\\ud800"',
            b'"step": "\\u0000"',
            b'"step": {}, "Step": {"step": 1}',
        ],
        *[b'"step": ' + b"[" * 31 + b"]" * 31, b'"step": ' + b'{"":' * 30 + b"[]" + b"}" * 30],
    ],
)
def test_what_no_rule_forbids_is_read(new: bytes) -> None:
    data = seal(BODY.replace(b'"step": 12', new))
    document, findings = scan(data)
    assert findings == ()
    assert document == json.loads(data)


@pytest.mark.parametrize("text", ["[1]", "1", '"a"', "null", "true"])
def test_a_document_is_an_object(text: str) -> None:
    assert only(text.encode(), sealed=False).message == "not one JSON object"


@pytest.mark.parametrize(
    ("data", "code", "at"),
    [
        (b'{"a": 1, "b": [{"c": 1.5}]}', "L-NUMBER", b"1.5"),
        (b'{"a": "1.5", "b": 1.5e1}', "L-NUMBER", b"1.5e1"),
        (b'{"\\"a": 1, "b": {"\\"a": 2, "\\"a" : 3}}', "L-DUPLICATE", b'"\\"a" '),
        (b'{"a": "b", "b": "b", "c": ["c", "c"], "a":1}', "L-DUPLICATE", b'"a":1'),
        ('{"é": [1,}'.encode(), "L-JSON", b"}"),
        (b'{"a": "\xc3\xa9\xff"}', "L-UTF8", b"\xff"),
        (b'{"a": "\\\\ud800\\ud834"}', "L-UTF8", b"\\ud834"),
    ],
)
def test_a_finding_says_where(data: bytes, code: str, at: bytes) -> None:
    finding = only(data, sealed=False)
    assert finding.code == code
    assert finding.where.range is not None
    start, stop = finding.where.range
    assert start == data.index(at)
    assert at.startswith(data[start:stop])


def test_many_faults_are_reported_by_their_first_few() -> None:
    assert codes(opened("[" + ",".join(["1.5"] * 1000) + "]"), sealed=False) == ["L-NUMBER"] * 3
    mixed = opened('[{"a": 1, "a": 2}, 1.5]')
    assert codes(mixed, sealed=False) == ["L-NUMBER", "L-DUPLICATE"]


# ---- depth -----------------------------------------------------------------------------------------------------------


def slow_depth(data: bytes) -> int:
    """Return the nesting of valid JSON, one byte at a time."""
    depth = deepest = 0
    inside = escaped = False
    for byte in data:
        if inside:
            inside = escaped or byte != 0x22
            escaped = not escaped and byte == 0x5C
        elif byte == 0x22:
            inside = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif byte in b"]}":
            depth -= 1
    return deepest


awkward = st.text(st.sampled_from('[]{}"\\,:a\n'), max_size=6)
documents = st.recursive(
    awkward | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(awkward, inner, max_size=3),
    max_leaves=20,
)


@given(documents, st.integers(1, 5))
def test_depth_is_that_of_a_byte_by_byte_count(document: Any, limit: int) -> None:
    data = json.dumps(document).encode()
    assert lexical.too_deep(data, limit) == (slow_depth(data) > limit)


# ---- hostile bytes ---------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200) | st.text('[]{}",:\\u019.eE-n\n', max_size=80).map(str.encode))
def test_any_bytes_are_read_or_refused_never_raised(data: bytes) -> None:
    for found in (codes(data, sealed=False), codes(seal(data)), codes(data)):
        assert set(found) <= {"L-SIZE", "L-TAIL", "L-UTF8", "L-DEPTH", "L-JSON", "L-NUMBER", "L-DUPLICATE"}


@given(documents.filter(lambda d: type(d) is dict), st.data())
def test_what_is_read_is_what_json_reads(document: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(document, indent=data.draw(st.sampled_from([None, 1])), ensure_ascii=data.draw(st.booleans()))
    assert scan(text.encode(), sealed=False) == (document, ())


@pytest.mark.parametrize(
    ("unit", "code"),
    [
        (b"[", "L-DEPTH"),
        (b'{"a":', "L-DEPTH"),
        (b'["]",', "L-DEPTH"),
        (b'["\\"]",', "L-DEPTH"),
        (b"[[],", "L-DEPTH"),
        (b"]", "L-JSON"),
        (b"[]", "L-JSON"),
        (b'"', "L-JSON"),
        (b"\\", "L-JSON"),
        (b"\\u", "L-JSON"),
        (b"9", "L-JSON"),
        (b" ", "L-JSON"),
        (b"\x00", "L-JSON"),
        (b"\xff", "L-UTF8"),
    ],
)
@pytest.mark.timeout(60)
def test_twenty_megabytes_of_anything_are_refused(unit: bytes, code: str) -> None:
    assert codes(unit * (20_000_000 // len(unit)), sealed=False) == [code]


@pytest.mark.timeout(60)
def test_a_number_of_a_million_digits_is_refused() -> None:
    for text in ("9" * 1_000_000, "-" + "9" * 1_000_000, "0." + "9" * 1_000_000, "1e" + "9" * 1_000_000):
        finding = only(opened(text), sealed=False)
        assert finding.code == "L-NUMBER"
        assert len(finding.found or "") <= 80


def test_a_file_over_256_mib_is_refused_by_its_size_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lexical.SIZE_LIMIT == 256 * 1024 * 1024
    monkeypatch.setattr(lexical, "SIZE_LIMIT", len(SEALED))
    assert codes(SEALED) == []
    finding = only(b" " + SEALED)
    assert finding.code == "L-SIZE"
    assert finding.found == f"{len(SEALED) + 1} bytes"


def test_integers_keep_their_exact_value() -> None:
    for n in (0, 1, -1, INT_LIMIT, -INT_LIMIT, 10**15):
        document, _ = scan(opened(str(n)), sealed=False)
        assert document == {"x": n}
        assert type(document["x"]) is int


# ---- cost ------------------------------------------------------------------------------------------------------------


def recorded(call: Callable[..., Any], collecting: list[bool]) -> Callable[..., Any]:
    """Return `call`, which notes on every call whether the garbage collector runs."""

    def record(*args: Any, **options: Any) -> Any:
        collecting.append(gc.isenabled())
        return call(*args, **options)

    return record


def test_a_sound_document_is_parsed_once_without_the_collector_and_no_fault_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    collecting: list[bool] = []
    monkeypatch.setattr(json, "loads", recorded(json.loads, collecting))
    monkeypatch.setattr(lexical, "_places", None)  # slow Python: only for documents with a fault
    digest = "sha256:" + "0123456789abcdef" * 4
    shards = [
        {"rank": i, "path": f"rank-{i:05d}.shard", "nbytes": i, "index": {"offset": 1, "nbytes": 1, "digest": digest}}
        for i in range(16_384)
    ]
    tensors = {
        f"model/layers.{i}/weight": {"dtype": "bfloat16", "shape": [4, 4], "layout": "fsdp"} for i in range(30_000)
    }
    data = seal(json.dumps({"shards": shards, "tensors": tensors}).encode()[:-1] + b",\n ")
    assert len(data) > 5_000_000
    assert codes(data) == []
    assert collecting == [False]
    assert gc.isenabled()

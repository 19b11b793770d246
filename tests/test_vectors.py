"""The published vectors of typed msgpack and the lexical cases: this library passes what it asks of others."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptspec.errors import ShardError
from ckptspec.format import lexical
from ckptspec.format import manifest as manifests
from ckptspec.format.objects import DeviceValue, DTypeValue, NumpyValue, SizeValue, TensorRef, pack, unpack

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from fixtures import build
from fixtures import lexical as lexical_cases
from fixtures import objects as vectors

VECTORS = json.loads(vectors.files()[vectors.PATH])
BODY = lexical.unseal(build.build(build.sample())[manifests.NAME])
CASES = {case.id: case for case in lexical_cases.cases(BODY)}


def value_of(d: dict[str, Any]) -> Any:
    """Return the value a description stands for."""

    def real(text: str) -> float:
        return float(struct.unpack(">d", bytes.fromhex(text))[0])

    makers: dict[str, Any] = {
        "nil": lambda: None,
        "bool": lambda: d["value"],
        "int": lambda: int(d["value"]),
        "float": lambda: real(d["bits"]),
        "complex": lambda: complex(real(d["real"]), real(d["imag"])),
        "str": lambda: d["value"],
        "bytes": lambda: bytes.fromhex(d["hex"]),
        "nest": lambda: vectors.nested(int(d["lists"]), value_of(d["leaf"])),
        "list": lambda: [value_of(x) for x in d["items"]],
        "tuple": lambda: tuple(value_of(x) for x in d["items"]),
        "dict": lambda: {value_of(k): value_of(v) for k, v in d["items"]},
        "dtype": lambda: DTypeValue(d["name"]),
        "size": lambda: SizeValue(tuple(map(int, d["dims"]))),
        "device": lambda: DeviceValue(d["name"]),
        "tensor": lambda: TensorRef(d["name"]),
        "scalar": lambda: NumpyValue(d["dtype"], None, bytes.fromhex(d["hex"])),
        "array": lambda: NumpyValue(d["dtype"], tuple(map(int, d["shape"])), bytes.fromhex(d["hex"])),
    }
    return makers[d["type"]]()


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda v: v["id"])
def test_a_valid_vector_is_the_packing_of_the_value_it_describes(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    assert pack(value_of(vector["value"])) == data
    assert vectors.describe(unpack(data, numpy=False)) == vector["value"]


@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda v: v["id"])
def test_an_invalid_vector_is_refused_by_its_rule(vector: dict[str, Any]) -> None:
    for numpy in (False, True):
        with pytest.raises(ShardError) as e:
            unpack(bytes.fromhex(vector["hex"]), numpy=numpy)
        assert e.value.rule == vector["rule"], vector["description"]


def test_every_vector_has_an_id_and_bytes_of_its_own() -> None:
    for group in ("valid", "invalid"):
        assert len({v["id"] for v in VECTORS[group]}) == len(VECTORS[group])
    everything = [v["hex"] for group in ("valid", "invalid") for v in VECTORS[group]]
    assert len(set(everything)) == len(everything)


def test_the_vectors_obey_the_lexical_rules_of_every_document() -> None:
    document, findings = lexical.scan(vectors.files()[vectors.PATH], sealed=False)
    assert findings == ()
    assert document == VECTORS


@pytest.mark.parametrize("case", CASES.values(), ids=lambda c: c.id)
def test_a_lexical_case_breaks_its_rule_and_no_other(case: lexical_cases.Case) -> None:
    decoded = manifests.decode(case.data)
    assert [f.code for f in decoded.findings] == list(case.codes)
    assert decoded.level == ("lexical" if case.codes else "schema")


def test_every_lexical_rule_has_a_valid_and_an_invalid_case() -> None:
    rules = {"L-SIZE", "L-UTF8", "L-JSON", "L-DEPTH", "L-NUMBER", "L-DUPLICATE", "L-TAIL", "L-DIGEST"}
    assert {case.rule for case in CASES.values() if case.codes} == rules
    assert {case.rule for case in CASES.values() if not case.codes} == rules


def test_a_body_without_room_for_a_note_is_refused() -> None:
    with pytest.raises(ValueError, match="annotations"):
        lexical_cases.note(b"{", b"1")
    assert lexical_cases.note(lexical_cases.SMALL, b"1").count(b"org.example.note") == 1

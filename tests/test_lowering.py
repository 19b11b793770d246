"""Lowering: every value the format cannot give back exactly is refused at save, with its path and what to do."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from typing import Any

import pytest

from ckptspec.errors import StateError
from ckptspec.format import objects
from ckptspec.format.objects import DeviceValue, DTypeValue, NumpyValue, SizeValue, TensorRef, pack, parts, unpack


class Colour(enum.IntEnum):
    """An int that is more than an int."""

    RED = 1


class Name(str):
    """A str that is more than a str."""


@dataclasses.dataclass
class Config:
    """A dataclass."""

    lr: float = 0.1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Colour.RED, "int(value)"),
        (Name("a"), "str(value)"),
        (Point(1, 2), "named tuple"),
        (Config(), "its parts"),
        ({1}, "sorted(value)"),
        (frozenset(), "sorted(value)"),
        (print, "code"),
        (math, "code"),
        (Config, "code"),
        (lambda: 0, "code"),
        (bytearray(b"a"), "its parts"),
        (memoryview(b"a"), "its parts"),
        (range(3), "its parts"),
        (iter([]), "its parts"),
        (object(), "its parts"),
        (collections.Counter("a"), "its parts"),
        (..., "its parts"),
    ],
)
def test_a_value_of_any_other_type_is_refused_with_its_path_and_what_to_do(value: Any, advice: str) -> None:
    with pytest.raises(StateError) as e:
        pack({"optimizer": [{"a/b": (0, value)}]}, path="model")
    assert e.value.where.tensor == "model/optimizer/0/a~1b/1"
    assert e.value.rule == "P-STATE"
    assert advice in (e.value.advice or "")


@pytest.mark.parametrize("key", [1j, Colour.RED, Name("a"), frozenset(), (1, frozenset()), (1, (Colour.RED,)), print])
def test_a_key_of_any_other_type_is_refused(key: Any) -> None:
    with pytest.raises(StateError, match="key of type") as e:
        pack({"a": {key: 1}})
    assert (e.value.where.tensor or "").startswith("a/")


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, [("a\ud834",)], {("\ud800",): 1}])
def test_a_lone_surrogate_is_refused(value: Any) -> None:
    with pytest.raises(StateError, match="surrogate") as e:
        pack(value)
    str(e.value).encode()


OUTSIDE = [
    *[DTypeValue("qint8"), DTypeValue("float"), SizeValue((-1,)), SizeValue((True,)), SizeValue((1 << 63,))],
    *[DeviceValue(""), DeviceValue("cuda:01"), DeviceValue("cuda:0\n")],
    *[TensorRef(""), TensorRef("a\n"), TensorRef("~")],
    *[NumpyValue("bool", (1,), b"\x02"), NumpyValue("int16", (3,), b"12"), NumpyValue("complex32", None, b"1234")],
    *[NumpyValue("int8", (0, 1 << 62, 2), b""), NumpyValue("int8", (1,) * 65, b"a")],
    *[NumpyValue("int8", (-1, -1), b"a"), NumpyValue("float128", None, bytes(16))],
]


@pytest.mark.parametrize("value", OUTSIDE)
def test_a_special_value_outside_its_domain_is_refused(value: Any) -> None:
    with pytest.raises(StateError) as e:
        pack({"x": value})
    assert e.value.where.tensor == "x"


def nested(depth: int, leaf: Any = 1) -> Any:
    """Return `leaf` inside `depth` lists."""
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def test_64_arrays_may_nest_and_65_may_not_whatever_their_tag() -> None:
    wide = NumpyValue("int8", (1,), b"a")
    for fits in (nested(64), nested(63, {}), nested(63, 1 << 70), nested(63, SizeValue(())), nested(62, wide)):
        assert unpack(pack(fits), numpy=False) == fits
    for too_deep in (nested(65), nested(64, {}), nested(64, 1 << 70), nested(64, SizeValue(())), nested(63, wide)):
        with pytest.raises(StateError, match="64 deep"):
            pack(too_deep)
    key: Any = ()
    for _ in range(64):
        key = (key,)
    with pytest.raises(StateError, match="64 deep"):
        pack({key: 1})


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    tree: dict[str, Any] = {"w": TensorRef("w")}
    tree["self"] = tree
    for value, word in ((loop, "0/0"), (tree, "self/self")):
        for call in (pack, parts):
            with pytest.raises(StateError, match="containing itself") as e:
                call(value)
            assert word in (e.value.where.tensor or "")


def test_more_than_a_chunk_of_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "STATE_LIMIT", 100)
    assert len(pack(b"a" * 98)) == 100
    with pytest.raises(StateError, match="larger than 100 bytes"):
        pack(b"a" * 99)

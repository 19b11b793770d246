"""Lifting: bytes that packing never makes are refused, fast, whatever they are."""

from __future__ import annotations

import time
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.errors import ShardError
from ckptspec.format.objects import DeviceValue, DTypeValue, NumpyValue, SizeValue, TensorRef, pack, unpack

floats = st.floats(allow_nan=True)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | floats | texts | st.binary(max_size=8)
) | st.sampled_from([0, -(1 << 63), (1 << 64) - 1, 1 << 64, -(1 << 63) - 1, 2**31, -1, -33, 127, 128, 0.0, -0.0])


def refused(data: bytes) -> ShardError:
    """Return the error `data` is refused with."""
    with pytest.raises(ShardError) as e:
        unpack(data, numpy=False)
    assert e.value.rule == "S-STATE"
    return e.value


def tagged(*items: Any) -> bytes:
    """Return msgpack of one array."""
    return bytes(msgpack.packb(list(items)))


@pytest.mark.parametrize(
    ("what", "data"),
    [
        ("nothing", b""),
        ("two values", b"\xc0\xc0"),
        ("cut array", b"\x92\x00"),
        ("reserved byte", b"\xc1"),
        ("invalid UTF-8", b"\xa1\xff"),
        ("surrogate in UTF-8", b"\xa3\xed\xa0\x80"),
        ("map", b"\x81\xa1a\x01"),
        ("empty map", b"\x80"),
        ("extension", b"\xd4\x05\x00"),
        ("empty extension", b"\xc7\x00\x05"),
        ("timestamp", b"\xd6\xff\x00\x00\x00\x00"),
        ("float32", b"\xca\x00\x00\x00\x00"),
        ("long int", b"\xcc\x01"),
        ("signed positive", b"\xd0\x01"),
        ("long str", b"\xd9\x01a"),
        ("long bin", b"\xc5\x00\x01a"),
        ("long array", b"\xdc\x00\x01\x00"),
        ("no tag", b"\x90"),
        ("tag 11", tagged(11)),
        ("tag -1", tagged(-1)),
        ("tag false", tagged(False)),
        ("tag true", tagged(True, 1)),
        ("tag 0.0", tagged(0.0)),
        ("tag str", tagged("list")),
        ("nested tag", tagged([0])),
        ("odd dict", tagged(2, "a")),
        ("equal keys", tagged(2, "a", 1, "a", 2)),
        ("keys 1 and true", tagged(2, 1, 1, True, 2)),
        ("keys 0 and -0.0", tagged(2, 0, 1, -0.0, 2)),
        ("list as key", tagged(2, [0], 1)),
        ("dict as key", tagged(2, [2], 1)),
        ("list in tuple as key", tagged(2, [1, [0]], 1)),
        ("reference as key", tagged(2, [10, "a"], 1)),
        ("untagged key", tagged(2, [], 1)),
        ("big int that is small", tagged(3, "ff")),
        ("big int 2^64-1", tagged(3, "f" * 16)),
        ("big int upper case", tagged(3, "F" * 17)),
        ("big int with zero", tagged(3, "0" + "f" * 17)),
        ("big int with prefix", tagged(3, "0x" + "f" * 17)),
        ("big int with underscore", tagged(3, "f_" + "f" * 17)),
        ("big int with space", tagged(3, " " + "f" * 17)),
        ("big int plus", tagged(3, "+" + "f" * 17)),
        ("big int newline", tagged(3, "f" * 17 + "\n")),
        ("big int bytes", tagged(3, b"f" * 17)),
        ("complex of ints", tagged(4, 1, 2)),
        ("complex alone", tagged(4, 1.0)),
        ("complex of three", tagged(4, 1.0, 1.0, 1.0)),
        ("unknown dtype", tagged(5, "quint8")),
        ("dtype twice", tagged(5, "int8", "int8")),
        ("negative size", tagged(6, -1)),
        ("bool size", tagged(6, True)),
        ("size 2^63", tagged(6, 1 << 63)),
        ("device", tagged(7, "cuda:")),
        ("scalar of two", tagged(8, "int8", b"ab")),
        ("scalar of torch only", tagged(8, "complex32", b"abcd")),
        ("bool scalar 2", tagged(8, "bool", b"\x02")),
        ("array too short", tagged(9, "int8", [2], b"a")),
        ("array too large", tagged(9, "uint8", [65537], bytes(65537))),
        ("array shape tagged", tagged(9, "int8", [0, 1], b"a")),
        ("array shape float", tagged(9, "int8", [1.0], b"a")),
        ("array shape bool", tagged(9, "int8", [True], b"a")),
        ("array of 65 dimensions", tagged(9, "int8", [1] * 65, b"a")),
        ("array product overflow", tagged(9, "int8", [0, 1 << 62, 4], b"")),
        ("reference empty", tagged(10, "")),
        ("reference control", tagged(10, "a\x00")),
        ("reference escape", tagged(10, "a~2")),
        ("reference bytes", tagged(10, b"a")),
        ("reference twice", tagged(10, "a", "b")),
    ],
)
def test_bytes_that_pack_never_makes_are_refused(what: str, data: bytes) -> None:
    assert refused(data).message, what


def test_nesting_and_length_bombs_are_refused_fast_and_small() -> None:
    start = time.monotonic()
    for bomb in (
        b"\x91" * 5_000_000,
        b"\x92\x00" * 1_000_000,
        b"\xdd\x00\x4c\x4b\x40" * 1_000_000,  # every array claims as many items as the file has bytes
        b"\x91\x00" * 3 + b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        tagged(3, "f" * 5_000_000)[:-1],
        b"\x91\x00" * 65 + b"\xc0",
    ):
        refused(bomb)
    for depth in (65, 66, 200, 510, 512, 1000, 1024):
        refused(b"\x92\x00" * depth + b"\xc0")
        refused(b"\x93\x02\xc0" * depth + b"\xc0")
        refused(b"\x93\x02\xc0" + b"\x92\x01" * depth + b"\xc0" * 2)
    assert time.monotonic() - start < 5


def test_a_huge_integer_comes_back_and_takes_linear_time() -> None:
    number = (1 << 4_000_000) + 1
    start = time.monotonic()
    assert unpack(pack(number)) == number
    assert unpack(pack(-number)) == -number
    assert time.monotonic() - start < 2


RICH = {
    "model": {"w": TensorRef("model/w"), "b": (1, 2.5, None, True)},
    3: [1 << 70, -(1 << 70), 1j, "text", b"bytes", DTypeValue("bfloat16"), SizeValue((2, 3)), DeviceValue("cuda:0")],
    (1, "k"): {"s": NumpyValue("float32", None, b"abcd"), "a": NumpyValue("int16", (2,), b"abcd"), "e": {}},
    "long": "x" * 40 + "é" * 200,
}


def survives(data: bytes) -> None:
    """Assert that `data` is refused with a ShardError or is the one packing of what it holds."""
    try:
        value = unpack(data, numpy=False)
    except ShardError:
        return
    assert pack(value) == data


def test_every_bit_flip_of_a_packing_is_refused_or_is_another_packing() -> None:
    data = pack(RICH)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        survives(bytes(flipped))


def test_every_cut_and_every_added_byte_is_refused() -> None:
    data = pack(RICH)
    for size in range(len(data)):
        refused(data[:size])
    for extra in range(256):
        refused(data + bytes([extra]))


arrays_and_tags = st.lists(st.integers(0x90, 0x9B) | st.integers(0, 11), max_size=64).map(bytes)


@given(st.binary(max_size=64) | arrays_and_tags)
def test_random_bytes_are_refused_or_are_a_packing(data: bytes) -> None:
    survives(data)


@given(st.recursive(scalars | st.integers(0, 11), lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_random_msgpack_is_refused_or_is_a_packing(raw: Any) -> None:
    try:
        data = bytes(msgpack.packb(raw))
    except OverflowError:
        return
    survives(data)

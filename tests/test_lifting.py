"""Lifting: bytes that packing never makes are refused, whatever they are."""

from __future__ import annotations

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


def test_an_array_of_one_byte_more_than_64_kib_is_refused() -> None:
    assert unpack(tagged(9, "uint8", [65536], bytes(65536)), numpy=False).shape == (65536,)
    assert "65537" in refused(tagged(9, "uint8", [65537], bytes(65537))).message


@pytest.mark.timeout(60)
def test_nesting_and_length_bombs_are_refused() -> None:
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


@pytest.mark.timeout(60)  # a conversion of quadratic time, as that to decimal digits, takes longer
def test_a_huge_integer_comes_back() -> None:
    number = (1 << 4_000_000) + 1
    assert unpack(pack(number)) == number
    assert unpack(pack(-number)) == -number


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

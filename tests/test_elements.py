"""Elements are compared bit by bit and measured as numbers, in every dtype, against the slow way."""

from __future__ import annotations

import math
import struct
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.engine.comparing.diff import SCRATCH
from ckptspec.engine.comparing.elements import Tally
from ckptspec.format.box import Box
from ckptspec.format.dtypes import DTYPES, dtype


def tally(kind: str, a: Any, b: Any) -> Tally:
    raw = [np.frombuffer(np.asarray(x).tobytes(), np.uint8) for x in (a, b)]
    out = Tally(dtype(kind), stats=True)
    out.add(Box((0,), (raw[0].nbytes // dtype(kind).itemsize,)), *raw)
    return out


@given(st.data())
def test_integers_are_measured_exactly(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"]))
    info = np.iinfo(name)
    some = st.integers(int(info.min), int(info.max)) | st.sampled_from([int(info.min), int(info.max), 0])
    pairs = data.draw(st.lists(st.tuples(some, some), min_size=1, max_size=9))
    found = tally(name, *(np.array(column, name) for column in zip(*pairs, strict=True)))
    unlike = [(x, y) for x, y in pairs if x != y]
    assert found.count == len(unlike)
    if unlike:
        assert found.index == (next(i for i, (x, y) in enumerate(pairs) if x != y),)
        assert found.distance is not None
        assert found.distance.absolute == max(abs(x - y) for x, y in unlike)
        assert found.distance.relative == pytest.approx(max(abs(x - y) / max(abs(x), abs(y)) for x, y in unlike))


FLOATS = [name for name, kind in DTYPES.items() if name.startswith(("float", "bfloat")) and kind.numpy]


@given(st.data())
def test_floats_of_every_dtype_are_measured_and_nans_counted_apart(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FLOATS))
    kind = DTYPES[name]
    numpy_kind = np.dtype(getattr(ml_dtypes, str(kind.numpy))) if kind.ml else np.dtype(kind.numpy)
    nbytes = data.draw(st.integers(1, 9)) * kind.itemsize
    raw = [data.draw(st.binary(min_size=nbytes, max_size=nbytes)) for _ in range(2)]
    a, b = (np.frombuffer(x, numpy_kind) for x in raw)
    found = tally(name, a, b)
    x, y = ([float(v) for v in side] for side in (a, b))
    bits = [[r[i : i + kind.itemsize] for i in range(0, nbytes, kind.itemsize)] for r in raw]
    unlike = [i for i in range(len(x)) if bits[0][i] != bits[1][i]]
    assert found.count == len(unlike)
    assert (found.distance is None) == (not unlike)
    if found.distance is None:
        return
    nans = [math.isnan(x[i]) + math.isnan(y[i]) for i in unlike]
    numbers = [(x[i], y[i]) for i, n in zip(unlike, nans, strict=True) if n == 0]
    assert (found.distance.nan_against_number, found.distance.nan_of_other_bits) == (nans.count(1), nans.count(2))
    assert found.distance.numbers == len(numbers)
    gaps = [math.inf if math.isinf(p) or math.isinf(q) else abs(p - q) for p, q in numbers]
    assert found.distance.absolute == max(gaps, default=0.0)
    ratios = [g if g in (0.0, math.inf) else g / max(abs(p), abs(q)) for g, (p, q) in zip(gaps, numbers, strict=True)]
    assert found.distance.relative == pytest.approx(max(ratios, default=0.0))


def test_bits_decide_and_not_numbers() -> None:
    nan, other = struct.pack("<f", math.nan), b"\x01\x00\xc0\x7f"
    assert tally("float32", np.frombuffer(nan * 2, "f4"), np.frombuffer(nan * 2, "f4")).count == 0
    found = tally("float32", np.frombuffer(nan * 2, "f4"), np.frombuffer(nan + other, "f4"))
    assert (found.count, found.index) == (1, (1,))
    assert found.texts == ("nan (0x7fc00000)", "nan (0x7fc00001)")
    assert tally("bool", np.uint8([1, 1]), np.uint8([1, 0])).texts == ("True", "False")
    assert tally("bool", np.uint8([1]), np.uint8([2])).texts == ("True", "0x02")
    assert tally("complex32", np.float16([1, 0]), np.float16([0, 0])).texts == ("0x00003c00", "0x00000000")
    zeros = tally("float32", np.float32([0.0]), np.float32([-0.0]))
    assert zeros.count == 1
    assert zeros.distance is not None
    assert (zeros.distance.absolute, zeros.distance.relative) == (0.0, 0.0)


def test_complex_numbers_are_measured_by_modulus() -> None:
    for kind in ("complex64", "complex128"):
        found = tally(kind, np.array([1 + 1j, 3j], kind), np.array([1 + 1j, -4 + 0j], kind)).distance
        assert found is not None
        assert (found.absolute, found.relative, found.numbers) == (5.0, 1.25, 1)
    half = tally("complex32", np.float16([0, 3, math.inf, 0]), np.float16([-4, 0, math.inf, math.nan])).distance
    assert half is not None
    assert (half.absolute, half.relative, half.nan_against_number) == (5.0, 1.25, 1)


@given(st.data())
def test_the_first_element_is_the_first_in_row_major_order_whatever_the_order_of_boxes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    a = np.zeros(shape, np.uint16)
    b = np.array(data.draw(st.lists(st.integers(0, 1), min_size=a.size, max_size=a.size)), np.uint16).reshape(shape)
    cut = data.draw(st.integers(0, shape[-1]))
    first = (0,) * len(shape)
    boxes = [Box(first, (*shape[:-1], cut)), Box((*first[:-1], cut), (*shape[:-1], shape[-1] - cut))]
    found = Tally(dtype("uint16"))
    for box in data.draw(st.permutations(boxes)):
        part = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        found.add(box, *(np.ascontiguousarray(x[part]).reshape(-1).view(np.uint8) for x in (a, b)))
    where = np.argwhere(a != b)
    assert found.count == len(where)
    assert found.index == (tuple(int(i) for i in where[0]) if len(where) else None)


def test_comparing_elements_that_all_differ_needs_no_more_than_its_scratch() -> None:
    for name in ("complex128", "float64", "bfloat16", "uint8", "int64"):
        kind = dtype(name)
        a, b = (np.full(1 << 23, x, np.uint8) for x in (1, 2))
        tally = Tally(kind, stats=True)
        tally.add(Box((0,), (16,)), a[: 16 * kind.itemsize], b[: 16 * kind.itemsize])
        tracemalloc.start()
        tally.add(Box((0,), (a.nbytes // kind.itemsize,)), a, b)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < SCRATCH

"""Typed msgpack: what comes back is what went in, and everything else is refused by name."""

from __future__ import annotations

import collections
import copy
import json
import math
import struct
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.errors import ShardError, StateError
from ckptspec.format import objects
from ckptspec.format.names import name_fault
from ckptspec.format.objects import DeviceValue, DTypeValue, NumpyValue, SizeValue, TensorRef, pack, parts, refs, unpack

NAN_WITH_PAYLOAD = struct.unpack("<d", bytes.fromhex("efbeadde0000f47f"))[0]

floats = st.floats(allow_nan=True) | st.just(NAN_WITH_PAYLOAD)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | floats | texts | st.binary(max_size=8)
) | st.sampled_from([0, -(1 << 63), (1 << 64) - 1, 1 << 64, -(1 << 63) - 1, 2**31, -1, -33, 127, 128, 0.0, -0.0])
names = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="~"), min_size=1, max_size=8)
specials = (
    names.map(TensorRef)
    | st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]).map(DTypeValue)
    | st.lists(st.integers(0, (1 << 63) - 1), max_size=3).map(tuple).map(SizeValue)
    | st.sampled_from(["cpu", "cuda:0", "meta", "my_accel:17"]).map(DeviceValue)
    | st.builds(NumpyValue, st.just("int16"), st.just((2, 1)), st.binary(min_size=4, max_size=4))
    | st.builds(NumpyValue, st.just("bfloat16"), st.none(), st.binary(min_size=2, max_size=2))
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
leaves = scalars | specials | st.builds(complex, floats, floats)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return bool(a == b)


# ---- round trips -----------------------------------------------------------------------------------------------------


@given(values)
def test_every_value_comes_back_in_type_order_and_bits(value: Any) -> None:
    data = pack(value)
    assert same(unpack(data, numpy=False), value)
    assert pack(unpack(data, numpy=False)) == data


def test_values_that_python_calls_equal_have_different_bytes() -> None:
    alike = [1, 1.0, True, 1 + 0j, np.int64(1), np.float64(1), np.bool_(True), "1", b"1", [1], (1,), {1: 1}]
    assert len({pack(v) for v in alike}) == len(alike)
    assert len({pack({key: 0}) for key in (1, 1.0, True, "1", b"1", (1,))}) == 6
    assert pack(0.0) != pack(-0.0)
    assert len({pack(empty) for empty in ([], (), {}, "", b"", None, [[]], [()], SizeValue(()))}) == 9


def test_nested_empties_and_order_of_keys_come_back() -> None:
    value = {"b": [], "a": (), 3: {}, "c": [[], ((),), {"x": {}}], (1, ("x", None)): 0}
    back = unpack(pack(value))
    assert same(back, value)
    assert list(back) == ["b", "a", 3, "c", (1, ("x", None))]
    assert pack({"a": 1, "b": 2}) != pack({"b": 2, "a": 1})


def test_dicts_that_only_add_behaviour_are_stored_as_dict() -> None:
    plain = {"a": 1, 2: "b"}
    counted = collections.defaultdict(int, plain)
    for value in (collections.OrderedDict(plain), counted):
        assert pack(value) == pack(plain)
    assert type(unpack(pack(counted))) is dict


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "c0"),
        (True, "c3"),
        (7, "07"),
        (-33, "d0 df"),
        (2**64 - 1, "cf ff ff ff ff ff ff ff ff"),
        (2**64, "92 03 b1 31 30 30 30 30 30 30 30 30 30 30 30 30 30 30 30 30"),
        (-0.0, "cb 80 00 00 00 00 00 00 00"),
        ("é", "a2 c3 a9"),
        (b"\x00", "c4 01 00"),
        ([], "91 00"),
        ((1, "a"), "93 01 01 a1 61"),
        ({"a": 1, 2: None}, "95 02 a1 61 01 02 c0"),
        (1j, "93 04 cb 00 00 00 00 00 00 00 00 cb 3f f0 00 00 00 00 00 00"),
        (DTypeValue("bool"), "92 05 a4 62 6f 6f 6c"),
        (SizeValue((2, 3)), "93 06 02 03"),
        (DeviceValue("cpu"), "92 07 a3 63 70 75"),
        (NumpyValue("int16", None, b"\x01\x00"), "93 08 a5 69 6e 74 31 36 c4 02 01 00"),
        (NumpyValue("int16", (1,), b"\x01\x00"), "94 09 a5 69 6e 74 31 36 91 01 c4 02 01 00"),
        (TensorRef("a/b"), "92 0a a3 61 2f 62"),
    ],
)
def test_the_bytes_are_those_of_the_specification(value: Any, text: str) -> None:
    assert pack(value).hex(" ") == text
    assert same(unpack(bytes.fromhex(text), numpy=False), value)


# ---- numpy -----------------------------------------------------------------------------------------------------------

DTYPE_NAMES = ["bool", "uint8", "int64", "float16", "float64", "complex64", "bfloat16", "float8_e5m2"]


def test_numpy_scalars_come_back_as_the_same_type_and_bits() -> None:
    for value in [np.float32(0.1), np.int8(-3), np.bool_(True), np.complex128(1 - 2j), ml_dtypes.bfloat16(1.5)]:
        back = unpack(pack([value]))[0]
        assert type(back) is type(value)
        assert back.tobytes() == value.tobytes()
    signalling = np.frombuffer(bytes.fromhex("010080ff"), dtype=np.float32)[0]
    assert unpack(pack(signalling)).tobytes().hex() == "010080ff"


@pytest.mark.parametrize("name", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_small_arrays_come_back_writable_with_dtype_shape_and_bits(name: str, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    back = unpack(pack(array))
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert back.flags.writeable
    assert back.flags.c_contiguous


def test_strides_and_byte_order_of_an_array_do_not_reach_the_bytes() -> None:
    array = np.arange(12, dtype="<i4").reshape(3, 4)
    assert pack(np.asfortranarray(array)) == pack(array)
    assert pack(array.astype(">i4")) == pack(array)
    assert pack(np.arange(24, dtype="<i4").reshape(3, 8)[:, ::2] // 2) == pack(array)


def test_an_array_of_64_kib_is_stored_and_one_byte_more_is_refused() -> None:
    assert unpack(pack(np.zeros(65536, np.uint8))).nbytes == 65536
    with pytest.raises(StateError, match="65537") as e:
        pack({"rng": np.zeros(65537, np.uint8)})
    assert (e.value.where.tensor, e.value.advice) == ("rng", "store it as a tensor")


class Sub(np.ndarray):
    """A subclass of ndarray."""


ODD_NUMPY = [
    *[np.array(["a"]), np.array([None]), np.zeros(2, "M8[s]"), np.zeros(2, "i4,i4"), np.longdouble(1), np.str_("a")],
    *[np.bytes_(b"a"), np.dtype("f4"), np.zeros(2).view(Sub), np.datetime64(1, "s"), np.void(b"ab"), np.ma.array([1])],
]


@pytest.mark.parametrize("value", ODD_NUMPY)
def test_other_numpy_values_are_refused(value: Any) -> None:
    with pytest.raises(StateError) as e:
        pack([value])
    assert e.value.where.tensor == "0"


# ---- hooks -----------------------------------------------------------------------------------------------------------


def test_encode_and_decode_map_what_the_core_does_not_know() -> None:
    def encode(value: Any) -> Any:
        return DTypeValue("float32") if value is ... else None

    data = pack({"a": [...]}, encode=encode)
    assert data == pack({"a": [DTypeValue("float32")]})
    assert unpack(data, decode=lambda special: ("was", special.name)) == {"a": [("was", "float32")]}
    with pytest.raises(StateError, match="type object"):
        pack([object()], encode=encode)


def test_numpy_is_imported_only_for_a_numpy_value() -> None:
    code = (
        "import sys; from ckptspec.format.objects import *; v = unpack(pack({'a': [1, TensorRef('w')]}));"
        "unpack(bytes.fromhex('9308a5696e743136c4020100'), numpy=False);"
        "print([m for m in ('numpy', 'torch', 'ml_dtypes') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---- parts -----------------------------------------------------------------------------------------------------------

STATE = {
    "model": {"w": TensorRef("model/w"), "a/b": [TensorRef("model/a~1b/0"), 7, {"x": ()}]},
    "optimizer": {
        "state": {0: {"step": 3, "m": TensorRef("m")}, -1: {}},
        "groups": [{"lr": 0.1, (1,): {1: 1, "1": 2}}],
    },
    "empty": {},
}


def test_the_parts_of_a_state_are_its_tensors_and_its_largest_tensor_free_subtrees() -> None:
    assert [(name, ref.name) for name, ref in refs(STATE)] == [
        ("model/w", "model/w"),
        ("model/a~1b/0", "model/a~1b/0"),
        ("optimizer/state/0/m", "m"),
    ]
    found = objects.objects(STATE)
    assert {name: unpack(data) for name, data in found.items()} == {
        "model/a~1b/1": 7,
        "model/a~1b/2": {"x": ()},
        "optimizer/state/0/step": 3,
        "optimizer/state/-1": {},
        "optimizer/groups": [{"lr": 0.1, (1,): {1: 1, "1": 2}}],
        "empty": {},
    }


def test_a_state_without_tensors_has_its_entries_as_objects() -> None:
    assert objects.objects({"a": {"b": 1}, 2: []}) == {"a": pack({"b": 1}), "2": pack([])}
    assert objects.objects([5, (6,)]) == {"0": pack(5), "1": pack((6,))}
    assert objects.objects({}) == {}


@pytest.mark.parametrize("state", [None, 5, TensorRef("w"), "text", {1, 2}])
def test_a_state_is_a_container(state: Any) -> None:
    with pytest.raises(StateError, match="dict, list or tuple"):
        parts(state)


@pytest.mark.parametrize(
    ("state", "rule", "path"),
    [
        ({"a": {1: TensorRef("x"), "1": 0}}, "P-NAME", "a/1"),
        ({1: 0, "1": 0}, "P-NAME", "1"),
        ({"a": {None: {"w": TensorRef("x")}}}, "P-NAME", "a/None"),
        ({"a": {True: 0, "w": TensorRef("x")}}, "P-NAME", "a/True"),
        ({"a": {(1, 2): [TensorRef("x")]}}, "P-NAME", "a/(1, 2)"),
        ({1.0: 0}, "P-NAME", "1.0"),
        ({1 << 64: 0}, "P-NAME", "0x10000000000000000"),
        ({"": 0}, "N-NAME", ""),
        ({"a": {"b\n": 1, "w": TensorRef("x")}}, "N-NAME", "a/b\n"),
        ({"a" * 5000: TensorRef("x")}, "N-NAME", "a" * 5000),
    ],
)
def test_a_part_without_a_name_of_its_own_is_refused(state: Any, rule: str, path: str) -> None:
    with pytest.raises(StateError) as e:
        parts(state)
    assert (e.value.rule, e.value.where.tensor) == (rule, path)
    with pytest.raises(ShardError) as r:
        list(refs(state, reading=True))
    assert r.value.rule == "S-STATE"


def test_an_object_that_cannot_be_stored_is_named_from_the_root() -> None:
    with pytest.raises(StateError) as e:
        objects.objects({"w": TensorRef("w"), "loader": {"sampler": [1, {2}]}})
    assert e.value.where.tensor == "loader/sampler/1"


@given(values.filter(lambda v: type(v) in (dict, list, tuple)))
def test_parts_never_change_the_state_and_name_each_part_once(state: Any) -> None:
    before = pack(state)
    try:
        found = parts(state)
    except StateError:
        return
    assert pack(state) == before
    assert len({name for name, _ in found}) == len(found)


# ---- cost ------------------------------------------------------------------------------------------------------------


def test_each_of_twenty_thousand_names_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: collections.Counter[str] = collections.Counter()

    def judge(name: str) -> str | None:
        judged[name] += 1
        return name_fault(name)

    monkeypatch.setattr(objects, "name_fault", judge)
    moments = ("exp_avg", "exp_avg_sq", "master", "step")
    state = {"optimizer": {i: {k: TensorRef(f"optimizer/{i}/{k}") for k in moments} for i in range(5000)}}
    assert sum(1 for _ in refs(unpack(pack(state)))) == 20_000
    assert len(judged) == judged.total() == 20_000


def test_unpacking_leaves_no_alias_of_the_input() -> None:
    data = bytearray(pack({"a": b"bytes", "n": NumpyValue("uint8", (2,), b"ab")}))
    value = unpack(data)
    kept = copy.deepcopy(value["a"]), value["n"].tobytes()
    data[:] = bytes(len(data))
    value["n"][0] = 0
    assert (value["a"], b"ab") == kept


def test_what_is_printed_about_a_refusal_is_one_readable_line() -> None:
    with pytest.raises(StateError) as e:
        pack({"a\nb": {"\ud800": {1, 2}}})
    assert json.dumps(str(e.value))
    assert "'a\\nb/" in str(e.value)

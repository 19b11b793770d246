"""Owns the way from msgpack's plain values back to typed ones; refuses whatever lowering would not have made."""

from __future__ import annotations

import re
from typing import Any

import msgpack

from ckptspec.format.arrays import NumpyValue, fault, to_numpy
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.names import name_fault
from ckptspec.format.values import (
    ARRAY,
    BIG,
    COMPLEX,
    DEPTH_LIMIT,
    DEVICE,
    DEVICE_NAME,
    DICT,
    DTYPE,
    INT_MAX,
    INT_MIN,
    LIST,
    REF,
    SCALAR,
    SIZE,
    SIZE_LIMIT,
    STATE_LIMIT,
    TUPLE,
    Decode,
    DeviceValue,
    DTypeValue,
    SizeValue,
    Special,
    TensorRef,
    broken,
)

_HEX = re.compile(r"-?[1-9a-f][0-9a-f]*\Z")


def plain(data: bytes) -> Any:
    """Return the one msgpack value in `data`: no map, no extension, nothing more; else raises ShardError [S-STATE]."""
    if not 0 < len(data) <= STATE_LIMIT:
        raise broken(f"1 to {STATE_LIMIT} bytes are allowed, found {len(data)}")
    try:
        # Skipping builds nothing: once it succeeds every announced length is really there, so what is built next is
        # bounded by the size of `data` and not by what a forged length claims [Q-CAPS].
        walker = msgpack.Unpacker(max_buffer_size=len(data))
        walker.feed(data)
        walker.skip()
        return msgpack.unpackb(data, raw=False, strict_map_key=False, max_map_len=0, max_ext_len=0)
    except (ValueError, OverflowError, msgpack.UnpackException) as e:
        raise broken(str(e) or type(e).__name__) from None


def _types(raw: list[Any]) -> list[type]:
    return [type(item) for item in raw[1:]]


def _sizes(dims: list[Any]) -> tuple[int, ...]:
    if not all(type(n) is int and 0 <= n <= SIZE_LIMIT for n in dims):
        raise broken("a size is an integer from 0 to 2^63-1")
    return tuple(dims)


def _tag(raw: list[Any]) -> int:
    return raw[0] if raw and type(raw[0]) is int else -1  # exact: true is no tag


class Lifting:
    """Lifts plain values with one hook, `decode`; `numpy` False leaves numpy values as their parts."""

    def __init__(self, decode: Decode | None = None, *, numpy: bool = True) -> None:
        self.decode = decode
        self.numpy = numpy

    def lift(self, raw: Any, depth: int = 1) -> Any:
        """Return the value of `raw`, an array at `depth` if it is one; raises ShardError [S-STATE]."""
        if type(raw) is not list:
            if isinstance(raw, (dict, tuple)):  # an empty map, an empty extension
                raise broken("a map or an extension")
            return raw
        if depth > DEPTH_LIMIT:
            raise broken(f"nested more than {DEPTH_LIMIT} deep")
        tag = _tag(raw)
        if tag == REF and len(raw) == 2 and type(raw[1]) is str and not name_fault(raw[1]):
            return self._special(TensorRef(raw[1]))
        if tag == DICT:
            return self._dict(raw, depth + 1)
        if tag == LIST:
            return [self.lift(item, depth + 1) for item in raw[1:]]
        if tag == TUPLE:
            return tuple([self.lift(item, depth + 1) for item in raw[1:]])
        return self._leaf(tag, raw, depth)

    def _dict(self, raw: list[Any], depth: int) -> dict[Any, Any]:
        if len(raw) % 2 == 0:
            raise broken("a dict has a key without a value")
        lift = self.lift
        keys = [key if type(key) is str else self._key(key, depth) for key in raw[1::2]]
        out = dict(zip(keys, [lift(item, depth) for item in raw[2::2]], strict=True))
        if len(out) != len(keys):
            raise broken("a dict has two keys that are equal (1, 1.0 and true are)")
        return out

    def _key(self, raw: Any, depth: int) -> Any:
        if type(raw) is not list or _tag(raw) == BIG:
            return self.lift(raw, depth)
        if _tag(raw) != TUPLE or depth > DEPTH_LIMIT:
            raise broken("a dict key is neither a scalar nor a tuple of them")
        return tuple([self._key(item, depth + 1) for item in raw[1:]])

    def _leaf(self, tag: int, raw: list[Any], depth: int) -> Any:
        """Return the value of a tagged array that holds no other values."""
        types = _types(raw)
        if tag == SIZE:
            return self._special(SizeValue(_sizes(raw[1:])))
        if tag == ARRAY and depth < DEPTH_LIMIT and types == [str, list, bytes]:
            return self._numpy(NumpyValue(raw[1], _sizes(raw[2]), raw[3]))
        if tag == SCALAR and types == [str, bytes]:
            return self._numpy(NumpyValue(raw[1], None, raw[2]))
        if tag == COMPLEX and types == [float, float]:
            return complex(raw[1], raw[2])
        if tag == DTYPE and types == [str] and raw[1] in DTYPES:
            return self._special(DTypeValue(raw[1]))
        if tag == DEVICE and types == [str] and DEVICE_NAME.match(raw[1]):
            return self._special(DeviceValue(raw[1]))
        if tag == BIG and types == [str] and _HEX.match(raw[1]) and not INT_MIN <= int(raw[1], 16) <= INT_MAX:
            return int(raw[1], 16)
        raise broken(f"an array with tag {tag} is not what that tag allows" if tag >= 0 else "an array without a tag")

    def _special(self, value: Special) -> Any:
        return self.decode(value) if self.decode else value

    def _numpy(self, value: NumpyValue) -> Any:
        if reason := fault(value):
            raise broken(reason)
        if not self.numpy:
            return value
        try:
            return to_numpy(value)
        except ValueError as e:  # a numpy older than 2 has fewer dimensions
            raise broken(str(e)) from None

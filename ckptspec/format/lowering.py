"""Owns the way from values to the scalars and tagged arrays that msgpack packs; refuses what would not come back."""

from __future__ import annotations

from typing import Any

from ckptspec.format.arrays import NumpyValue, fault, from_numpy
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
    DICTS,
    DTYPE,
    INT_MAX,
    INT_MIN,
    LIST,
    REF,
    SCALAR,
    SCALARS,
    SIZE,
    SIZE_LIMIT,
    TUPLE,
    DeviceValue,
    DTypeValue,
    Encode,
    RefusedError,
    SizeValue,
    TensorRef,
    kind_of,
)

TOO_DEEP = f"nested more than {DEPTH_LIMIT} deep, or containing itself"


def _unknown(value: Any) -> RefusedError:
    """Return the refusal of a value of a type that is not stored, with what to put in the state instead."""
    advice = "store its parts as dict, list, tuple, str, int, float, bool, bytes or tensors, or leave it out"
    base = next((t for t in (str, int, float, bytes) if isinstance(value, t)), None)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        advice = "store tuple(value): a named tuple would come back without its names"
    elif isinstance(value, (set, frozenset)):
        advice = "store sorted(value): a set has no order of its own"
    elif base is not None:
        advice = f"store {base.__name__}(value): a subclass would come back as plain {base.__name__}"
    elif callable(value) or kind_of(value) == "module":
        advice = "leave it out of the state: code is never stored"
    return RefusedError(f"a value of type {kind_of(value)} cannot be stored", advice=advice)


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise RefusedError("a string with a lone surrogate cannot be stored", found=ascii(value)[:80]) from None
    return value


def _reference(value: TensorRef) -> list[Any]:
    if reason := name_fault(value.name):
        raise RefusedError(reason, found=ascii(value.name)[:80], rule="N-NAME")
    return [REF, value.name]


def _special(value: Any) -> list[Any]:
    """Return the tagged array of a value the core knows by its parts."""
    if type(value) is TensorRef:
        return _reference(value)
    if type(value) is NumpyValue:
        if reason := fault(value):
            raise RefusedError(reason)
        if value.shape is None:
            return [SCALAR, value.dtype, value.data]
        return [ARRAY, value.dtype, list(value.shape), value.data]
    if type(value) is DTypeValue and value.name in DTYPES:
        return [DTYPE, value.name]
    if type(value) is SizeValue and all(type(n) is int and 0 <= n <= SIZE_LIMIT for n in value.dims):
        return [SIZE, *value.dims]
    if type(value) is DeviceValue and DEVICE_NAME.match(value.name):
        return [DEVICE, value.name]
    raise RefusedError("not a dtype, size or device that the format has", found=repr(value)[:80])


def _check_key(key: Any, depth: int) -> None:
    """Raise unless `key` is a scalar or a tuple of keys."""
    if type(key) is tuple and depth <= DEPTH_LIMIT:
        for item in key:
            _check_key(item, depth + 1)
    elif type(key) is not tuple and type(key) not in SCALARS and type(key) is not str and type(key) is not int:
        advice = "use str, int, bool, None, float, bytes or tuples of them as keys"
        raise RefusedError(f"a key of type {kind_of(key)} cannot be stored", advice=advice)


class Lowering:
    """Lowers values with one hook: `encode` maps a value the core does not know to a Special, or gives None."""

    def __init__(self, encode: Encode | None = None) -> None:
        self.encode = encode

    def lower(self, value: Any, depth: int = 1) -> Any:
        """Return `value` as scalars and tagged arrays; `depth` is that of the array it would be.

        Raises RefusedError with the trail of keys for what cannot be stored. Types are compared exactly: a subclass
        would come back as something else.
        """
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is str:
            return _text(value)
        if kind is int and INT_MIN <= value <= INT_MAX:
            return value
        if depth > DEPTH_LIMIT:
            raise RefusedError(TOO_DEEP)
        if kind is TensorRef:
            return _reference(value)
        if kind in DICTS:
            return self._dict(value, depth + 1)
        if kind is list or kind is tuple:
            return self._sequence(value, depth + 1)
        if kind is int:
            return [BIG, format(value, "x")]
        if kind is complex:
            return [COMPLEX, value.real, value.imag]
        return self._other(value, depth)

    def _sequence(self, value: list[Any] | tuple[Any, ...], depth: int) -> list[Any]:
        out: list[Any] = [LIST if type(value) is list else TUPLE]
        lower = self.lower
        try:
            for item in value:
                out.append(lower(item, depth))
        except RefusedError as refused:
            refused.trail.append(len(out) - 1)
            raise
        return out

    def _dict(self, value: dict[Any, Any], depth: int) -> list[Any]:
        out: list[Any] = [DICT]
        lower = self.lower
        key: Any = None
        try:
            for key, item in value.items():
                if type(key) is not str:
                    _check_key(key, depth)
                out.append(lower(key, depth))
                out.append(lower(item, depth))
        except RefusedError as refused:
            refused.trail.append(key)
            raise
        return out

    def _other(self, value: Any, depth: int) -> list[Any]:
        """Lower a special or numpy value, or whatever the hook makes of it."""
        special = value
        if type(value) not in (DTypeValue, SizeValue, DeviceValue, NumpyValue):
            try:
                special = (self.encode(value) if self.encode else None) or from_numpy(value)
            except ValueError as e:
                raise RefusedError(str(e), advice="store it as a tensor") from None
        if special is None:
            raise _unknown(value)
        if type(special) is NumpyValue and special.shape is not None and depth >= DEPTH_LIMIT:
            raise RefusedError(TOO_DEEP)  # the shape is an array too
        return _special(special)

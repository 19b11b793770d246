"""Owns numpy values inside the state: their dtype, shape and little-endian bytes; refuses large ones and odd dtypes."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptspec.format.dtypes import DTYPES

if TYPE_CHECKING:
    import numpy

ARRAY_LIMIT = 65_536
NDIM_LIMIT = 64


@dataclass(frozen=True)
class NumpyValue:
    """A numpy scalar (`shape` None) or array: dtype name, and its elements row-major and little-endian."""

    dtype: str
    shape: tuple[int, ...] | None
    data: bytes


def fault(value: NumpyValue) -> str | None:
    """Return why the parts of `value` cannot be stored [S-STATE], or None when they can."""
    row = DTYPES.get(value.dtype)
    if row is None or row.numpy is None:
        return f"numpy has no dtype {value.dtype!r}"
    shape = value.shape or ()
    if len(shape) > NDIM_LIMIT:
        return f"an array has at most {NDIM_LIMIT} dimensions"
    # The bound on the nonzero sizes keeps an empty array of absurd shape from being one implementation's error only.
    if any(size < 0 for size in shape) or math.prod(size or 1 for size in shape) * row.itemsize >= 1 << 63:
        return "sizes of an array are not negative and their product stays below 2^63 bytes"
    if len(value.data) > ARRAY_LIMIT:
        return f"an array in the state has at most {ARRAY_LIMIT} bytes, this one has {len(value.data)}"
    if len(value.data) != math.prod(shape) * row.itemsize:
        return f"{len(value.data)} bytes do not fill shape {list(shape)} of {value.dtype}"
    if value.dtype == "bool" and value.data.translate(None, b"\x00\x01"):
        return "a bool is the byte 0 or 1"
    return None


def _dtype(name: str) -> numpy.dtype[Any]:
    import numpy

    row = DTYPES[name]
    if not row.ml:
        return numpy.dtype(row.numpy)
    import ml_dtypes

    found: numpy.dtype[Any] = numpy.dtype(getattr(ml_dtypes, str(row.numpy)))
    return found


def from_numpy(value: Any) -> NumpyValue | None:
    """Return the parts of a numpy scalar or array of a dtype in the table, or None for anything else.

    Exact types only: a subclass of ndarray or of a scalar type gives None. Raises ValueError for one over the limit.
    """
    numpy = sys.modules.get("numpy")  # a numpy value exists only where numpy was imported
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        return None
    scalar = isinstance(value, numpy.generic)
    if type(value) is not (value.dtype.type if scalar else numpy.ndarray):
        return None
    row = DTYPES.get(value.dtype.name)
    if row is None or row.numpy is None or value.dtype.newbyteorder("=") != _dtype(row.name):
        return None
    if value.nbytes > ARRAY_LIMIT:
        raise ValueError(f"an array in the state has at most {ARRAY_LIMIT} bytes, this one has {value.nbytes}")
    native = numpy.asarray(value).astype(_dtype(row.name), copy=False)
    data = (native.byteswap() if sys.byteorder == "big" else native).tobytes()
    return NumpyValue(row.name, None if scalar else value.shape, data)


def to_numpy(value: NumpyValue) -> Any:
    """Return the numpy scalar or writable array of a faultless `value`; raises ValueError where numpy does."""
    import numpy

    flat = numpy.frombuffer(bytearray(value.data), dtype=_dtype(value.dtype))
    native = flat.byteswap() if sys.byteorder == "big" else flat
    return native[0] if value.shape is None else native.reshape(value.shape)

"""Owns the dtype table: every dtype the format can hold; refuses sub-byte and quantized types."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from ckptspec.errors import FormatError


@dataclass(frozen=True)
class DType:
    """One element type: torch's name, bytes of storage and values per element, and numpy's name if any."""

    name: str
    itemsize: int
    values: int = 1
    numpy: str | None = None
    ml: bool = False  # numpy's name lives in ml_dtypes


def _table(*rows: DType) -> MappingProxyType[str, DType]:
    return MappingProxyType({row.name: row for row in rows})


# Source: torch 2.13 dtypes that copy on the CPU [T-DTYPE]. float4_e2m1fn_x2 packs two values in a byte.
DTYPES = _table(
    DType("bool", 1, numpy="bool"),
    DType("uint8", 1, numpy="uint8"),
    DType("uint16", 2, numpy="uint16"),
    DType("uint32", 4, numpy="uint32"),
    DType("uint64", 8, numpy="uint64"),
    DType("int8", 1, numpy="int8"),
    DType("int16", 2, numpy="int16"),
    DType("int32", 4, numpy="int32"),
    DType("int64", 8, numpy="int64"),
    DType("float16", 2, numpy="float16"),
    DType("bfloat16", 2, numpy="bfloat16", ml=True),
    DType("float32", 4, numpy="float32"),
    DType("float64", 8, numpy="float64"),
    DType("complex32", 4),
    DType("complex64", 8, numpy="complex64"),
    DType("complex128", 16, numpy="complex128"),
    DType("float8_e4m3fn", 1, numpy="float8_e4m3fn", ml=True),
    DType("float8_e4m3fnuz", 1, numpy="float8_e4m3fnuz", ml=True),
    DType("float8_e5m2", 1, numpy="float8_e5m2", ml=True),
    DType("float8_e5m2fnuz", 1, numpy="float8_e5m2fnuz", ml=True),
    DType("float8_e8m0fnu", 1, numpy="float8_e8m0fnu", ml=True),
    DType("float4_e2m1fn_x2", 1, values=2),
)


def dtype(name: str) -> DType:
    """Return the DType called `name`; raises FormatError [T-DTYPE] for a name outside the table."""
    found = DTYPES.get(name)
    if found is None:
        raise FormatError("unknown dtype", rule="T-DTYPE", expected="one of " + ", ".join(DTYPES), found=repr(name))
    return found

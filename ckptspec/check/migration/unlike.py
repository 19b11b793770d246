"""Owns the findings on tensors that are there and not as they are asked for: another dtype, another shape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from ckptspec.check.registry import fault
from ckptspec.check.worlds import at
from ckptspec.format.report import Finding
from ckptspec.format.signature import Described


@dataclass(frozen=True)
class Couple:
    """A tensor under the name that is asked for, the name it is stored by, and what each side says of it."""

    name: str
    stored: str
    have: Described
    want: Described


def dtypes(asker: str, couples: Iterable[Couple]) -> Iterator[Finding]:
    """Yield the tensors of another dtype: nothing is cast in silence [R-DTYPE]."""
    for c in couples:
        if c.have.dtype != c.want.dtype:
            where = at("tensors", c.stored, "dtype", tensor=c.name)
            yield fault("R-DTYPE", f"{asker} wants another dtype", where, c.have.dtype, c.want.dtype)


def shapes(asker: str, couples: Iterable[Couple]) -> Iterator[Finding]:
    """Yield the tensors of another shape: nothing is padded or cut [R-SHAPE]."""
    for c in couples:
        if c.have.shape != c.want.shape:
            where = at("tensors", c.stored, "shape", tensor=c.name)
            message = f"{asker} wants another shape{_likeness(c.have.shape, c.want.shape)}"
            yield fault("R-SHAPE", message, where, _text(c.have.shape), _text(c.want.shape))


def _likeness(have: tuple[int, ...] | None, want: tuple[int, ...] | None) -> str:
    """Return in words how two shapes are alike, if they are."""
    if have is None or want is None or prod(have) != prod(want):
        return ""
    if sorted(have) == sorted(want) and len(have) > 1:
        return ": it is transposed" if have == want[::-1] else ": its dimensions are in another order"
    return ": it has as many elements"


def _text(shape: tuple[int, ...] | None) -> str:
    return "a shape of each rank's own" if shape is None else str(list(shape))

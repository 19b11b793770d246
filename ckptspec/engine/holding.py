"""Owns the two ways bytes enter and leave memory: a view where they lie in a row, a copy where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ckptspec.format.box import Box
from ckptspec.format.dtypes import DType


class Holding(Protocol):
    """What a rank holds of one tensor; boxes are in global coordinates and lie inside what is held."""

    def view(self, box: Box) -> memoryview | None:
        """Return the box's bytes in place (row-major), or None where they are not in a row."""

    def fill(self, box: Box, out: memoryview) -> None:
        """Copy the box's row-major bytes into `out`."""

    def scatter(self, box: Box, data: memoryview, strides: Sequence[int]) -> None:
        """Copy into the box from `data`, whose element (i, j, ..) lies at element i*strides[0] + j*strides[1] + .."""


class ArrayHolding:
    """A whole numpy array of a tensor's storage bytes: what `read` fills and what tools write from.

    `array` is C-contiguous; `origin` is the global coordinate of its first element.
    """

    def __init__(self, array: Any, origin: Sequence[int], dtype: DType) -> None:
        import numpy

        self._np = numpy
        self._array = array
        self._origin = tuple(origin)
        self._itemsize = dtype.itemsize

    def _part(self, box: Box) -> Any:
        relative = (slice(o - b, o - b + s) for o, b, s in zip(box.offsets, self._origin, box.sizes, strict=True))
        index = (*relative, ...)
        return self._array[index]

    def view(self, box: Box) -> memoryview | None:
        """Return the box's bytes in place, or None where they are not in a row."""
        part = self._part(box)
        if not part.flags.c_contiguous:
            return None
        return memoryview(part.reshape(-1).view(self._np.uint8))

    def fill(self, box: Box, out: memoryview) -> None:
        """Copy the box's row-major bytes into `out`."""
        target = self._np.frombuffer(out, self._array.dtype).reshape(box.sizes)
        self._np.copyto(target, self._part(box))

    def scatter(self, box: Box, data: memoryview, strides: Sequence[int]) -> None:
        """Copy into the box from strided `data`."""
        flat = self._np.frombuffer(data, self._array.dtype)
        steps = [s * self._itemsize for s in strides]
        source = self._np.lib.stride_tricks.as_strided(flat, box.sizes, steps, writeable=False)
        self._np.copyto(self._part(box), source)

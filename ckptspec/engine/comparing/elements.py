"""Owns the comparison of two stretches of bytes as elements: how many differ, which is the first, how far apart.

Equal means bit for bit: a NaN equals the same NaN, 0.0 and -0.0 differ.
"""

from __future__ import annotations

from typing import Any

from ckptspec.check.comparing.differences import Distance
from ckptspec.engine.read import numpy_dtype
from ckptspec.format.arrays import NumpyValue, fault, to_numpy
from ckptspec.format.box import Box
from ckptspec.format.dtypes import DType

SLICE = 1 << 16  # elements that are looked at together: this bounds what a comparison allocates
MEASURED = 1 << 13  # of them are measured together: larger arrays come as fresh pages, and that takes 4 times as long


class Tally:
    """What is known so far of the elements of two tensors of one dtype and shape."""

    def __init__(self, kind: DType, *, stats: bool = False) -> None:
        self.kind = kind
        self.count = 0
        self.index: tuple[int, ...] | None = None
        self.texts = ("", "")
        self._range = _Range(kind) if stats and measurable(kind) else None

    @property
    def distance(self) -> Distance | None:
        """How far apart the differing elements are, where that was asked for and the dtype has numbers."""
        return self._range.distance() if self._range is not None and self.count else None

    def add(self, box: Box, a: Any, b: Any) -> None:
        """Compare `box` of the two tensors, its row-major bytes as flat uint8 arrays; boxes may come in any order."""
        import numpy

        itemsize = self.kind.itemsize
        for at in range(0, box.numel, SLICE):
            x, y = (_words(raw[at * itemsize : (at + SLICE) * itemsize], itemsize) for raw in (a, b))
            unlike = x != y if x.ndim == 1 else (x != y).any(1)
            count = int(numpy.count_nonzero(unlike))
            if not count:
                continue
            self.count += count
            first = int(unlike.argmax())
            self._see(_index(box, at + first), x[first : first + 1], y[first : first + 1])
            if self._range is not None:
                pair = x[unlike], y[unlike]
                for i in range(0, count, MEASURED):
                    self._range.add(*(words[i : i + MEASURED] for words in pair))

    def _see(self, index: tuple[int, ...], a: Any, b: Any) -> None:
        if self.index is None or index < self.index:
            self.index, self.texts = index, _texts(self.kind, a.tobytes(), b.tobytes())


def _words(raw: Any, itemsize: int) -> Any:
    """Return bytes as unsigned integers, one an element; a row of two where it has 16 bytes."""
    return raw.view(f"u{itemsize}") if itemsize <= 8 else raw.view("u8").reshape(-1, itemsize // 8)


def _index(box: Box, element: int) -> tuple[int, ...]:
    """Return the coordinates of the element that is so many in row-major order from the box's first."""
    index = []
    for size, offset in zip(reversed(box.sizes), reversed(box.offsets), strict=True):
        element, i = divmod(element, size)
        index.append(offset + i)
    return tuple(reversed(index))


def _texts(kind: DType, a: bytes, b: bytes) -> tuple[str, str]:
    """Return two differing elements as numbers, as bits too where they read alike, as bits where numpy has none."""
    bits = [f"0x{raw[::-1].hex()}" for raw in (a, b)]
    value = [NumpyValue(kind.name, None, raw) for raw in (a, b)]
    words = [text if kind.numpy is None or fault(v) else str(to_numpy(v)) for v, text in zip(value, bits, strict=True)]
    if words[0] == words[1]:
        return f"{words[0]} ({bits[0]})", f"{words[1]} ({bits[1]})"
    return words[0], words[1]


def measurable(kind: DType) -> bool:
    """Tell whether elements of the dtype can be subtracted here: all but two float4 in one byte."""
    return kind.numpy is not None or kind.name == "complex32"


class _Range:
    """The largest distances seen so far."""

    def __init__(self, kind: DType) -> None:
        self.kind = kind
        self.whole = kind.name.startswith(("int", "uint", "bool"))
        self.absolute: int | float = 0 if self.whole else 0.0
        self.relative = 0.0
        self.numbers = self.one_nan = self.two_nans = 0

    def distance(self) -> Distance:
        """Return what was seen."""
        return Distance(self.absolute, self.relative, self.numbers, self.one_nan, self.two_nans)

    def add(self, a: Any, b: Any) -> None:
        """Take in differing elements, as `_words` gives them."""
        import numpy

        with numpy.errstate(all="ignore"):  # what is no number, or has no end, is told below
            if self.whole and self.kind.itemsize == 8:
                self._long_integers(a, b)
            else:
                self._numbers(_numbers(self.kind, a), _numbers(self.kind, b))

    def _long_integers(self, a: Any, b: Any) -> None:
        """The difference modulo 2^64 is the true one, for that is less."""
        import numpy

        signed = self.kind.name.startswith("int")
        first, second = (words.view(numpy.int64) if signed else words for words in (a, b))
        gap = numpy.where(first > second, a - b, b - a)
        self.numbers += len(gap)
        self._take(gap, *(words.astype(numpy.float64) for words in (first, second)))

    def _numbers(self, a: Any, b: Any) -> None:
        import numpy

        gap = abs(a - b)
        if not numpy.isfinite(gap.max()):
            gap, a, b = self._bounded(gap, a, b)
        self.numbers += len(gap)
        if len(gap):
            self._take(gap, a, b)

    def _bounded(self, gap: Any, a: Any, b: Any) -> tuple[Any, Any, Any]:
        """Return the elements without NaNs, which are counted, and with every gap that has no end as infinity to 1."""
        import numpy

        nans = numpy.isnan(a), numpy.isnan(b)
        either, both = nans[0] | nans[1], int((nans[0] & nans[1]).sum())
        self.two_nans += both
        self.one_nan += int(either.sum()) - both
        gap, a, b = gap[~either], a[~either], b[~either]
        endless = ~numpy.isfinite(gap)
        gap[endless] = numpy.where(a[endless] == b[endless], 0.0, numpy.inf)
        a[endless] = b[endless] = 1.0
        return gap, a, b

    def _take(self, gap: Any, a: Any, b: Any) -> None:
        import numpy

        largest = gap.max()
        self.absolute = max(self.absolute, int(largest) if self.whole else float(largest))
        ratio = gap / numpy.maximum(abs(a), abs(b))  # 0.0 and -0.0 have none
        self.relative = max(self.relative, float(numpy.fmax.reduce(ratio, initial=0.0)))


def _numbers(kind: DType, words: Any) -> Any:
    """Return elements as float64, which holds integers of 32 bits exactly, or complex128 where they are complex."""
    import numpy

    if kind.name == "complex32":
        return words.view(numpy.float16).astype(numpy.float64).view(numpy.complex128)
    if kind.name == "bool":
        return words.astype(numpy.float64)  # a byte that is neither 0 nor 1 is the number it is
    numbers = words.reshape(-1).view(numpy_dtype(kind, ""))
    return numbers.astype(numpy.complex128 if kind.name.startswith("complex") else numpy.float64)

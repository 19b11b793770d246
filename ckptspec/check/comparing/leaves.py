"""Owns where two unpacked objects differ: the path of every leaf, and what stands there in few words."""

from __future__ import annotations

from collections.abc import Iterator
from reprlib import Repr
from typing import Any

from ckptspec.format.arrays import NumpyValue, to_numpy
from ckptspec.format.names import escape
from ckptspec.format.objects import pack

SHOWN = 80  # characters of one value
ABSENT = "nothing"

Leaf = tuple[str, str, str]


class _Brief(Repr):
    """Writes any value in few characters, without ever writing all of a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = SHOWN // 2

    def repr_int(self, x: int, level: int) -> str:
        """Return an int; the digits of a very large one would take long, so it is shown in hex."""
        return repr(x) if x.bit_length() < 256 else f"{hex(x >> (x.bit_length() - 64))}... of {x.bit_length()} bits"

    def repr_NumpyValue(self, x: NumpyValue, level: int) -> str:  # noqa: N802 (reprlib finds it by the type's name)
        """Return a numpy scalar or array as numpy shows it."""
        return " ".join(repr(to_numpy(x)).split())


_brief = _Brief()


def shown(value: Any) -> str:
    """Return a value of the state in at most 80 characters."""
    text = _brief.repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2 - 2]}...{text[1 - SHOWN // 2 :]}"


def leaves(a: Any, b: Any, path: str) -> Iterator[Leaf]:
    """Yield (path, A's value, B's value) of every place where two objects differ; they differ where their packing does.

    So 1, 1.0 and True differ, a NaN equals the same NaN, and the order of a dict's keys counts.
    """
    if type(a) is type(b) is dict:
        yield from _dicts(a, b, path)
    elif type(a) is type(b) and type(a) in (list, tuple):
        yield from _rows(a, b, path)
    elif pack(a) != pack(b):
        yield path, shown(a), shown(b)


def _rows(a: Any, b: Any, path: str) -> Iterator[Leaf]:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        yield from leaves(x, y, f"{path}/{i}")
    if len(a) != len(b):
        yield path, f"{len(a)} entries", f"{len(b)} entries"


def _dicts(a: dict[Any, Any], b: dict[Any, Any], path: str) -> Iterator[Leaf]:
    first, second = ({pack(key): key for key in d} for d in (a, b))  # 1 and True are one key to Python, not to us
    for packed, key in first.items():
        if packed in second:
            yield from leaves(a[key], b[second[packed]], _below(path, key))
        else:
            yield _below(path, key), shown(a[key]), ABSENT
    for packed, key in second.items():
        if packed not in first:
            yield _below(path, key), ABSENT, shown(b[key])
    if list(first) != list(second) and first.keys() == second.keys():
        yield path, f"keys in the order {shown(list(a))}", f"{shown(list(b))}"


def _below(path: str, key: Any) -> str:
    return f"{path}/{escape(key) if type(key) is str else shown(key)}"

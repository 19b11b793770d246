"""Owns the words of typed msgpack: its tags, its limits, the values only it has, and why a value is refused."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Union

from ckptspec.errors import ShardError, StateError, Where
from ckptspec.format.arrays import NumpyValue
from ckptspec.format.names import escape

DEPTH_LIMIT = 64  # arrays around a value, its own included, whatever their tag
STATE_LIMIT = 1 << 30
INT_MIN, INT_MAX = -(1 << 63), (1 << 64) - 1
SIZE_LIMIT = (1 << 63) - 1
LIST, TUPLE, DICT, BIG, COMPLEX, DTYPE, SIZE, DEVICE, SCALAR, ARRAY, REF = range(11)

DEVICE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*(:(0|[1-9][0-9]{0,8}))?\Z")
SCALARS = frozenset((type(None), bool, float, bytes))  # packed as they are; str and int need a look first
DICTS = frozenset((dict, OrderedDict, defaultdict))
TREES = frozenset((list, tuple, *DICTS))


@dataclass(frozen=True)
class TensorRef:
    """A leaf that stands for a tensor by its canonical name (tag 10)."""

    name: str


@dataclass(frozen=True)
class DTypeValue:
    """An element type as a value, by its name in the dtype table (tag 5)."""

    name: str


@dataclass(frozen=True)
class SizeValue:
    """A shape as a value (tag 6)."""

    dims: tuple[int, ...]


@dataclass(frozen=True)
class DeviceValue:
    """A device as a value, such as `cpu` or `cuda:0` (tag 7)."""

    name: str


Special = Union[TensorRef, DTypeValue, SizeValue, DeviceValue, NumpyValue]
Encode = Callable[[Any], Union[Special, None]]
Decode = Callable[[Special], Any]


def kind_of(value: Any) -> str:
    """Return the type of `value` in words: its module and name."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _shown(key: Any) -> str:
    """Return a dict key or list index as a token to show, whatever it is."""
    if type(key) is str:
        return escape(key.encode("utf-8", "backslashreplace").decode())
    if type(key) is int:
        return str(key) if INT_MIN <= key <= INT_MAX else hex(key)[:40]
    if type(key) in SCALARS or type(key) is tuple:
        return escape(repr(key)[:80])
    return f"<{kind_of(key)}>"


class RefusedError(Exception):
    """Why a value is refused, before it is known who is to blame; `trail` collects the keys from it up to the root."""

    def __init__(
        self, reason: str, *, found: str | None = None, advice: str | None = None, rule: str = "P-STATE"
    ) -> None:
        super().__init__(reason)
        self.reason, self.found, self.advice, self.rule = reason, found, advice, rule
        self.trail: list[Any] = []

    def path(self, prefix: str = "") -> str:
        """Return the path of the refused value below `prefix`."""
        shown = [_shown(key) for key in reversed(self.trail)]
        return "/".join([prefix, *shown] if prefix else shown)

    def state_error(self, prefix: str = "") -> StateError:
        """Return the error for someone who saves."""
        where = Where(tensor=self.path(prefix))
        return StateError(self.reason, rule=self.rule, where=where, found=self.found, advice=self.advice)

    def shard_error(self) -> ShardError:
        """Return the error for someone who reads."""
        return broken(f"{self.reason} (at {self.path()!r})" if self.trail else self.reason)


def broken(reason: str) -> ShardError:
    """Return the error for bytes that are not typed msgpack [S-STATE]."""
    return ShardError(f"the state is not canonical typed msgpack: {reason}", rule="S-STATE")

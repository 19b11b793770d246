"""Owns typed msgpack, the form of all state that is not tensor bytes, and the names of a state's parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack

from ckptspec.format.arrays import NumpyValue
from ckptspec.format.lifting import Lifting, plain
from ckptspec.format.lowering import TOO_DEEP, Lowering
from ckptspec.format.names import escape, name_fault
from ckptspec.format.pause import collector_paused
from ckptspec.format.values import (
    DEPTH_LIMIT,
    DICTS,
    INT_MAX,
    INT_MIN,
    STATE_LIMIT,
    TREES,
    Decode,
    DeviceValue,
    DTypeValue,
    Encode,
    RefusedError,
    SizeValue,
    Special,
    TensorRef,
    broken,
    kind_of,
)

__all__ = [
    "DTypeValue",
    "Decode",
    "DeviceValue",
    "Encode",
    "NumpyValue",
    "SizeValue",
    "Special",
    "TensorRef",
    "objects",
    "pack",
    "parts",
    "refs",
    "unpack",
]


def _packed(packer: msgpack.Packer, lowered: Any) -> bytes:
    try:
        data = bytes(packer.pack(lowered))
    except (ValueError, OverflowError, MemoryError):  # a str or bytes beyond the lengths that msgpack can write
        data = None
    if data is None or len(data) > STATE_LIMIT:
        raise RefusedError(f"larger than {STATE_LIMIT} bytes when packed", advice="store large data as tensors")
    return data


def pack(value: Any, *, path: str = "", encode: Encode | None = None) -> bytes:
    """Return `value` as typed msgpack; equal values of equal types give equal bytes, and 1, 1.0 and True differ.

    `encode` maps a value of a type the core does not know to a Special, or gives None. Raises StateError [P-STATE]
    naming the key, below `path`, of the first value that cannot be stored.
    """
    try:
        return _packed(msgpack.Packer(), Lowering(encode).lower(value))
    except RefusedError as refused:
        raise refused.state_error(path) from None


def unpack(data: bytes | bytearray | memoryview, *, decode: Decode | None = None, numpy: bool = True) -> Any:
    """Return the value in `data`, typed as it was packed; raises ShardError [S-STATE] unless `data` is its one packing.

    `decode` replaces TensorRef, DTypeValue, SizeValue and DeviceValue. With numpy=False numpy stays unimported and its
    values come as NumpyValue.
    """
    data = data if type(data) is bytes else bytes(data)
    with collector_paused():
        raw = plain(data)
        value = Lifting(decode, numpy=numpy).lift(raw)
    if msgpack.packb(raw) != data:  # lifting bounded the depth, so packing cannot fail
        raise broken("an integer, float or length is not in its one form")
    return value


def _mark(tree: Any, marked: set[int], depth: int) -> bool:
    """Add the identity of every container that holds a tensor to `marked`; return whether `tree` is one of them."""
    if depth > DEPTH_LIMIT:
        raise RefusedError(TOO_DEEP)
    held = False
    key: Any = None
    try:
        for key, item in tree.items() if type(tree) in DICTS else enumerate(tree):  # noqa: B007 - the trail names it
            kind = type(item)
            if kind is TensorRef or (kind in TREES and _mark(item, marked, depth + 1)):
                held = True
    except RefusedError as refused:
        refused.trail.append(key)
        raise
    if held:
        marked.add(id(tree))
    return held


def _token(key: Any, seen: set[str]) -> str:
    """Return the text of a key and add it to `seen`; raises RefusedError [P-NAME] for a key without text of its own."""
    if type(key) is not str and (type(key) is not int or not INT_MIN <= key <= INT_MAX):
        reason = f"a key of type {kind_of(key)} has no name, and a tensor lies beside or below it"
        raise RefusedError(reason, advice="use str or int keys in every container that holds tensors", rule="P-NAME")
    token = str(key)
    if token in seen:
        raise RefusedError("two keys have one name", advice="1 and '1' are one name: use other keys", rule="P-NAME")
    seen.add(token)
    return token


def _split(tree: Any, prefix: str, marked: set[int], out: list[tuple[str, Any]]) -> None:
    """Append every named part below `tree`."""
    seen: set[str] = set()
    key: Any = None
    try:
        for key, item in tree.items() if type(tree) in DICTS else enumerate(tree):
            name = prefix + escape(_token(key, seen))
            if id(item) in marked:
                _split(item, name + "/", marked, out)
            elif reason := name_fault(name):
                raise RefusedError(reason, rule="N-NAME")
            else:
                out.append((name, item))
    except RefusedError as refused:
        refused.trail.append(key)
        raise


def parts(state: Any, *, reading: bool = False) -> list[tuple[str, Any]]:
    """Return the named parts of a state in order: its TensorRefs, and the largest subtrees that hold none.

    The state is a dict, list or tuple, never itself a part: where no tensor is, its entries are the parts. A name is
    the path of keys and list indexes. Raises StateError for a key or path without a name of its own [P-NAME] [N-NAME];
    with reading=True the fault is the file's: ShardError [S-STATE].
    """
    out: list[tuple[str, Any]] = []
    marked: set[int] = set()
    try:
        if type(state) not in TREES:
            raise RefusedError(f"a state is a dict, list or tuple, not {kind_of(state)}")
        _mark(state, marked, 1)
        _split(state, "", marked, out)
    except RefusedError as refused:
        raise (refused.shard_error() if reading else refused.state_error()) from None
    return out


def refs(state: Any, *, reading: bool = False) -> Iterator[tuple[str, TensorRef]]:
    """Return an iterator of (path name, TensorRef) in order; raises as `parts` does."""
    return ((name, part) for name, part in parts(state, reading=reading) if type(part) is TensorRef)


def objects(state: Any, *, encode: Encode | None = None, reading: bool = False) -> dict[str, bytes]:
    """Return the packed bytes of every part that holds no tensor, by name; raises as `parts` and `pack` do."""
    packer, lowering = msgpack.Packer(), Lowering(encode)
    out: dict[str, bytes] = {}
    for name, part in parts(state, reading=reading):
        if type(part) is not TensorRef:
            try:
                out[name] = _packed(packer, lowering.lower(part))
            except RefusedError as refused:
                raise (refused.shard_error() if reading else refused.state_error(name)) from None
    return out

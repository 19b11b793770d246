"""Owns the manifest as a rank returns it that did not write it: its head at once, its tables read when asked for.

What all ranks are told over the store must not grow with the tensors: the tables are in the folder for whoever wants
them, and most jobs never look.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast, overload

from ckptspec.engine.saves import commit
from ckptspec.errors import ManifestError, Where
from ckptspec.format import manifest
from ckptspec.format.declaration import TABLES
from ckptspec.format.manifest import Manifest, ShardEntry


def receipt(m: Manifest, folder: str) -> bytes:
    """Return the head of a committed manifest, its digest, and the name of its folder."""
    empty: dict[str, Any] = {table: {} for table in TABLES}
    head = replace(m, shards=(), **empty)
    return json.dumps([os.path.basename(folder), m.digest, manifest.document(head)]).encode()


def received(data: bytes, run: str) -> Manifest:
    """Return the manifest a receipt speaks of; its tables raise OSError or ManifestError if the folder has gone."""
    name, digest, document = json.loads(data)
    folder = os.path.join(run, name)

    @cache
    def whole() -> Manifest:
        found = manifest.parse(commit.read_manifest(folder))
        if found.digest != digest:
            message = "the checkpoint was replaced by another save of its step"
            raise ManifestError(message, rule="D-EXPECT", where=Where(folder), expected=digest, found=found.digest)
        return found

    tables: dict[str, Any] = {table: _Later(whole, table) for table in TABLES}
    shards = cast("tuple[ShardEntry, ...]", _LaterShards(whole))
    return replace(manifest.from_document(document), shards=shards, digest=digest, **tables)


class _Later(Mapping[str, Any]):
    """One table of a manifest that is read when first asked for."""

    def __init__(self, whole: Callable[[], Manifest], table: str) -> None:
        self._whole, self._table = whole, table

    @property
    def _found(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = getattr(self._whole(), self._table)
        return found

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return repr(self._found)


class _LaterShards(Sequence[ShardEntry]):
    """The shards of a manifest that is read when first asked for."""

    def __init__(self, whole: Callable[[], Manifest]) -> None:
        self._whole = whole

    @overload
    def __getitem__(self, at: int) -> ShardEntry: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[ShardEntry, ...]: ...
    def __getitem__(self, at: int | slice) -> ShardEntry | tuple[ShardEntry, ...]:
        return self._whole().shards[at]

    def __len__(self) -> int:
        return len(self._whole().shards)

    def __eq__(self, other: object) -> bool:
        return self._whole().shards == (tuple(other) if isinstance(other, _LaterShards) else other)

    def __hash__(self) -> int:
        return hash(self._whole().shards)

    def __repr__(self) -> str:
        return repr(self._whole().shards)

"""Owns the catalog: a manifest with the shard indexes that were read; what `planner` and `check` look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptspec.format.manifest import Manifest
from ckptspec.format.shard import Header, Index


@dataclass(frozen=True)
class ShardDocument:
    """What one shard says of itself: header, index, and its decoded state tree (tensors are references)."""

    header: Header
    index: Index
    state: Any = None
    state_bytes: bytes = b""


@dataclass(frozen=True)
class Catalog:
    """A manifest and the documents of the shards that could be read, by rank."""

    manifest: Manifest
    shards: Mapping[int, ShardDocument] = field(default_factory=dict)

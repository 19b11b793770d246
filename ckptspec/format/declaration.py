"""Owns the declaration, a rank-independent table of what ranks hold, and merges what all ranks declare into one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ckptspec.errors import SaveError, Where
from ckptspec.format.layout import BoxesLayout, Layout, Mesh
from ckptspec.format.manifest import FlatGroup, Manifest, TensorEntry, body_document, body_from_document
from ckptspec.format.placement import resolve


@dataclass(frozen=True)
class Declaration:
    """The body of a manifest: what one or more ranks hold, and how all ranks hold it together."""

    meshes: Mapping[str, Mesh] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    flat_groups: Mapping[str, FlatGroup] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    omitted: Mapping[str, str] = field(default_factory=dict)


TABLES = tuple(f.name for f in fields(Declaration))


def of_manifest(m: Manifest) -> Declaration:
    """Return the declaration that a manifest's body is."""
    return Declaration(**{table: getattr(m, table) for table in TABLES})


def encode(d: Declaration) -> bytes:
    """Return the canonical JSON bytes of a declaration; equal declarations give equal bytes."""
    body = body_document(Manifest(save_id="", step=0, world_size=1, **tables(d)))
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def decode(data: bytes) -> Declaration:
    """Return the declaration that `encode` wrote (it comes from a rank of the same job, not from a file)."""
    return Declaration(**body_from_document(json.loads(data)))


def tables(d: Declaration) -> dict[str, Any]:
    """Return the declaration as the keyword arguments it shares with Manifest."""
    return {table: getattr(d, table) for table in TABLES}


def digest(data: bytes) -> str:
    """Return the hex sha256 that names an encoded declaration."""
    return hashlib.sha256(data).hexdigest()


def merge(parts: Sequence[tuple[Declaration, Sequence[int]]]) -> Declaration:
    """Return the union of what groups of ranks declare.

    Raises SaveError [P-DECLARE] naming the entry and two ranks where the same name is declared in two ways.
    """
    if len(parts) == 1:
        return parts[0][0]
    merged: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    owner: dict[tuple[str, str], int] = {}
    for declaration, ranks in parts:
        for table, entries in tables(declaration).items():
            for name, entry in entries.items():
                known = merged[table].setdefault(name, entry)
                if known != entry and isinstance(known, BoxesLayout) and isinstance(entry, BoxesLayout):
                    merged[table][name] = _union(known, entry)
                    continue
                rank = owner.setdefault((table, name), ranks[0])
                if known is not entry and known != entry:
                    raise _conflict(table, name, (rank, known), (ranks[0], entry))
    return Declaration(**merged)


def _union(one: BoxesLayout, two: BoxesLayout) -> BoxesLayout:
    """Return all listed boxes, by rank, each rank's in its own order."""
    known = set(one.boxes)
    boxes = (*one.boxes, *(b for b in two.boxes if b not in known))
    return BoxesLayout(tuple(sorted(boxes, key=lambda listed: listed[0])))


def check_holders(merged: Declaration, parts: Sequence[tuple[Declaration, Sequence[int]]]) -> None:
    """Raise SaveError [P-DECLARE] where a rank that a tensor's layout takes in does not hold it, or another does."""
    if len(parts) == 1:
        return
    everyone = sorted(rank for _, ranks in parts for rank in ranks)
    members: dict[str, set[int]] = {}
    for name, entry in merged.tensors.items():
        holding = {rank for d, ranks in parts if name in d.tensors or name in d.aliases for rank in ranks}
        if entry.shape is None or len(holding) == len(everyone):
            continue
        if entry.layout not in members:
            members[entry.layout] = set(resolve(merged.layouts[entry.layout], merged.meshes).ranks())
        if holding != members[entry.layout]:
            odd = sorted(holding ^ members[entry.layout])
            raise SaveError(
                f"tensor {name!r} is not held by the ranks its layout {entry.layout!r} names",
                rank=odd[0],
                rule="P-DECLARE",
                where=Where(tensor=name, rank=odd[0]),
                expected=f"held by {len(members[entry.layout])} ranks",
                found=f"{'not held' if odd[0] not in holding else 'held'} by rank {odd[0]}",
                advice="every rank of the layout must have the tensor in its state; wrap per-rank tensors in Local",
            )


def _conflict(table: str, name: str, one: tuple[int, Any], two: tuple[int, Any]) -> SaveError:
    where = Where(tensor=name, rank=two[0])
    message = f"ranks {one[0]} and {two[0]} declare {table.removesuffix('s')} {name!r} in two ways"
    return SaveError(
        message,
        rank=two[0],
        rule="P-DECLARE",
        where=where,
        expected=f"{one[1]} as rank {one[0]} has it",
        found=f"{two[1]}",
        advice="every rank must hold the same dtype, global shape and layout; wrap per-rank values in ckptspec.Local",
    )

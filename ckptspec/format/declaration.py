"""Owns the declaration: the table of what ranks hold, in pieces that ranks share and the boxes that are a rank's own.

A piece has all entries whose names differ in their digits alone: the same parameter of every layer. Where some ranks
hold other experts or stages than others, all pieces but those are still equal, and each is sent once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from ckptspec.format.box import Box
from ckptspec.format.layout import BoxesLayout, Layout, Mesh
from ckptspec.format.manifest import FlatGroup, Manifest, TensorEntry, body_document, body_from_document

_DIGITS = re.compile(r"[0-9]+")
Boxes = tuple[Box, ...]


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
HEAD = ("meshes", "layouts")


@dataclass(frozen=True)
class Body:
    """A declaration as it is sent: its pieces, meshes and layouts first, and the rank's own boxes.

    `boxes` has an entry for every boxes layout of the pieces, `boxes.0`, `boxes.1` and so on, which list nothing.
    """

    pieces: tuple[Declaration, ...]
    boxes: tuple[Boxes, ...]

    @cached_property
    def encoded(self) -> tuple[bytes, ...]:
        """The bytes of each piece."""
        return tuple(map(encode, self.pieces))

    @cached_property
    def digests(self) -> tuple[bytes, ...]:
        """The digest of each piece."""
        return tuple(map(digest, self.encoded))

    @cached_property
    def digest(self) -> str:
        """The hex sha256 that names all pieces together: equal on ranks that hold alike."""
        return hashlib.sha256(b"".join(self.digests)).hexdigest()


def of_manifest(m: Manifest) -> Declaration:
    """Return the declaration that a manifest's body is."""
    return Declaration(**{table: getattr(m, table) for table in TABLES})


def tables(d: Declaration) -> dict[str, Any]:
    """Return the declaration as the keyword arguments it shares with Manifest."""
    return {table: getattr(d, table) for table in TABLES}


def encode(d: Declaration) -> bytes:
    """Return the JSON bytes of a declaration; equal declarations in equal order give equal bytes."""
    body = body_document(Manifest(save_id="", step=0, world_size=1, **tables(d)))
    return json.dumps({k: v for k, v in body.items() if v}, ensure_ascii=False, separators=(",", ":")).encode()


def decode(data: bytes) -> Declaration:
    """Return the declaration that `encode` wrote (it comes from a rank of the same job, not from a file)."""
    return Declaration(**body_from_document(json.loads(data)))


def digest(data: bytes) -> bytes:
    """Return the sha256 that names an encoded piece."""
    return hashlib.sha256(data).digest()


def body(d: Declaration, rank: int) -> Body:
    """Return what `rank` sends of its declaration."""
    common, boxes = _without_boxes(d, rank)
    return Body(tuple(_split(common)), boxes)


def _without_boxes(d: Declaration, rank: int) -> tuple[Declaration, tuple[Boxes, ...]]:
    """Return the declaration with boxes layouts that list nothing, one for each shape and boxes, and those boxes."""
    listed = {name for name, layout in d.layouts.items() if isinstance(layout, BoxesLayout)}
    if not listed:
        return d, ()
    classes: dict[tuple[Any, Boxes], str] = {}
    tensors = dict(d.tensors)
    for name, entry in d.tensors.items():
        if entry.layout in listed:
            key = entry.shape, _own(d.layouts[entry.layout], rank)
            tensors[name] = replace(entry, layout=classes.setdefault(key, f"boxes.{len(classes)}"))
    kept = {name: layout for name, layout in d.layouts.items() if name not in listed}
    layouts = {**kept, **{name: BoxesLayout(()) for name in classes.values()}}
    return replace(d, layouts=layouts, tensors=tensors), tuple(boxes for _, boxes in classes)


def _own(layout: Layout, rank: int) -> Boxes:
    listed: Iterable[tuple[int, Box]] = layout.boxes if isinstance(layout, BoxesLayout) else ()
    return tuple(box for holder, box in listed if holder == rank and not box.empty)


def _split(d: Declaration) -> Iterable[Declaration]:
    """Yield meshes and layouts, then the entries by the pattern of their names, in the order patterns are met."""
    yield Declaration(d.meshes, d.layouts)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for table, entries in tables(d).items():
        if table not in HEAD:
            for name, entry in entries.items():
                piece = found.setdefault(_DIGITS.sub("#", name), {})
                piece.setdefault(table, {})[name] = entry
    for piece in found.values():
        yield Declaration(**piece)


def pack_boxes(boxes: Sequence[Boxes]) -> list[Any]:
    """Return a rank's own boxes as plain lists."""
    return [[[list(b.offsets), list(b.sizes)] for b in one] for one in boxes]


def unpack_boxes(plain: Sequence[Any]) -> tuple[Boxes, ...]:
    """Return the boxes that `pack_boxes` wrote."""
    return tuple(tuple(Box(tuple(o), tuple(s)) for o, s in one) for one in plain)

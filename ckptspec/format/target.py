"""Owns the target: what someone wants to resume on, and its JSON form; refuses a document that its schema refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptspec.errors import PlanError
from ckptspec.format import asked, schemas
from ckptspec.format.layout import (
    Layout,
    Mesh,
    layout_document,
    layout_from_document,
    mesh_document,
    mesh_from_document,
)
from ckptspec.format.manifest import SPEC_VERSION, FlatGroup, Manifest, TensorEntry, group_document, group_from_document

FORMAT = "ckptspec-target"
SIZE_LIMIT = 256 << 20  # bytes of a target document, as for a manifest
TABLES = ("meshes", "layouts", "tensors", "objects", "flat_groups", "aliases")


@dataclass(frozen=True)
class Target:
    """A world size, and as much of meshes, layouts, tensors, objects, groups and aliases as is known; None: any."""

    world_size: int
    meshes: Mapping[str, Mesh] | None = None
    layouts: Mapping[str, Layout] | None = None
    tensors: Mapping[str, TensorEntry] | None = None
    objects: Mapping[str, str] | None = None
    flat_groups: Mapping[str, FlatGroup] | None = None
    aliases: Mapping[str, str] | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON form, which obeys target.schema.json; what is None is left out."""
        made: dict[str, Any] = {"format": FORMAT, "schema_version": SPEC_VERSION, "world_size": self.world_size}
        for table in TABLES:
            entries = getattr(self, table)
            if entries is not None:
                made[table] = {name: _TO[table](entry) for name, entry in entries.items()}
        return made


def _tensor_document(t: TensorEntry) -> dict[str, Any]:
    return {"dtype": t.dtype, "shape": None if t.shape is None else list(t.shape), "layout": t.layout}


def _tensor_entry(d: Mapping[str, Any]) -> TensorEntry:
    return TensorEntry(d["dtype"], None if d["shape"] is None else tuple(d["shape"]), d["layout"])


_TO: Mapping[str, Any] = {
    "meshes": mesh_document,
    "layouts": layout_document,
    "tensors": _tensor_document,
    "objects": str,
    "flat_groups": group_document,
    "aliases": str,
}
_FROM: Mapping[str, Any] = {
    "meshes": mesh_from_document,
    "layouts": layout_from_document,
    "tensors": _tensor_entry,
    "objects": str,
    "flat_groups": group_from_document,
    "aliases": str,
}


def from_document(document: Any) -> Target:
    """Return the Target of a JSON document; raises PlanError with the first thing its schema refuses [X-TARGET]."""
    for finding in schemas.check("target", document):
        if finding.severity == "error":
            message = f"not a target: {finding.message}"
            raise PlanError(
                message, rule=finding.code, where=finding.where, expected=finding.expected, found=finding.found
            )
    tables = {t: {n: _FROM[t](x) for n, x in document[t].items()} for t in TABLES if t in document}
    return Target(document["world_size"], **tables)


def parse(data: bytes, *, file: str | None = None) -> Target:
    """Return the Target in a JSON file's bytes; raises PlanError [X-TARGET]."""
    return from_document(asked.document(data, "target", rule="X-TARGET", limit=SIZE_LIMIT, file=file))


def of_manifest(manifest: Manifest) -> Target:
    """Return the target that a checkpoint fits as it is."""
    return Target(manifest.world_size, **{table: getattr(manifest, table) for table in TABLES})

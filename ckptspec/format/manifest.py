"""Owns the manifest's values and its JSON form; refuses bytes that break the lexical rules or the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptspec.errors import ManifestError, UnsupportedVersionError, Where
from ckptspec.format import lexical, schemas
from ckptspec.format.layout import (
    Layout,
    Mesh,
    layout_document,
    layout_from_document,
    mesh_document,
    mesh_from_document,
)
from ckptspec.format.report import Finding

FORMAT = "ckptspec"
SPEC_VERSION = "1.0"
NAME = "manifest.json"
FEATURES: frozenset[str] = frozenset()
FEATURES_SHOWN = 20
_VERSION = re.compile(r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,5})\Z")


@dataclass(frozen=True)
class ShardEntry:
    """One shard as the manifest lists it: who wrote it, its size in bytes, and its index's place and sha256."""

    rank: int
    path: str
    nbytes: int
    index_offset: int
    index_nbytes: int
    index_digest: str
    annotations: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: dtype (torch's name), global shape (None for a local tensor), layout name and role."""

    dtype: str
    shape: tuple[int, ...] | None
    layout: str
    role: str = "other"
    annotations: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Member:
    """A tensor, or a piece `of` a larger one, in a flat group; name None is padding inside the group."""

    name: str | None
    offset: int
    shape: tuple[int, ...]
    of_shape: tuple[int, ...] | None = None
    of_offsets: tuple[int, ...] | None = None


@dataclass(frozen=True)
class FlatGroup:
    """ZeRO's concatenated 1-D buffer: its elements, what lies in it, and the tensors by kind that share it."""

    numel: int
    members: tuple[Member, ...]
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """The document that lists everything in a checkpoint: the commit record (SPEC section Manifest)."""

    save_id: str
    step: int
    world_size: int
    run_id: str = ""
    parent: Mapping[str, Any] | None = None
    created_at: str = "1970-01-01T00:00:00Z"
    wall_clock_seconds: int | None = None
    producer: Mapping[str, str] = field(default_factory=dict)
    commit: str = "rename"
    copies: int = 1
    block: str = "xxh3-128"
    block_size: int = 1 << 20
    meshes: Mapping[str, Mesh] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    shards: tuple[ShardEntry, ...] = ()
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    flat_groups: Mapping[str, FlatGroup] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    omitted: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, Any] = field(default_factory=dict)
    required_features: tuple[str, ...] = ()
    schema_version: str = SPEC_VERSION
    digest: str = ""

    def shard(self, rank: int) -> ShardEntry:
        """Return the entry of the shard that `rank` wrote; raises KeyError when there is none."""
        if 0 <= rank < len(self.shards) and self.shards[rank].rank == rank:  # writers list shards by rank
            return self.shards[rank]
        for entry in self.shards:
            if entry.rank == rank:
                return entry
        raise KeyError(rank)

    @property
    def nbytes(self) -> int:
        """The bytes of all shards together."""
        return sum(s.nbytes for s in self.shards)


def _note(document: dict[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    return {**document, "annotations": dict(annotations)} if annotations else document


def _shard_document(s: ShardEntry) -> dict[str, Any]:
    index = {"offset": s.index_offset, "nbytes": s.index_nbytes, "digest": s.index_digest}
    return _note({"rank": s.rank, "path": s.path, "nbytes": s.nbytes, "index": index}, s.annotations)


def _tensor_document(t: TensorEntry) -> dict[str, Any]:
    shape = None if t.shape is None else list(t.shape)
    return _note({"dtype": t.dtype, "shape": shape, "layout": t.layout, "role": t.role}, t.annotations)


def member_document(m: Member) -> dict[str, Any]:
    """Return the JSON form of a flat group's member."""
    document: dict[str, Any] = {"name": m.name, "offset": m.offset, "shape": list(m.shape)}
    if m.of_shape is not None and m.of_offsets is not None:
        document["of"] = {"shape": list(m.of_shape), "offsets": list(m.of_offsets)}
    return document


def group_document(g: FlatGroup) -> dict[str, Any]:
    """Return the JSON form of a flat group."""
    return {"numel": g.numel, "members": [member_document(m) for m in g.members], "tensors": dict(g.tensors)}


def body_document(m: Manifest) -> dict[str, Any]:
    """Return the part that says what is held and how: meshes, layouts, tensors, objects, groups, aliases, omitted."""
    return {
        "meshes": {n: mesh_document(x) for n, x in m.meshes.items()},
        "layouts": {n: layout_document(x) for n, x in m.layouts.items()},
        "tensors": {n: _tensor_document(t) for n, t in m.tensors.items()},
        "objects": dict(m.objects),
        "flat_groups": {n: group_document(g) for n, g in m.flat_groups.items()},
        "aliases": dict(m.aliases),
        "omitted": dict(m.omitted),
    }


def document(m: Manifest) -> dict[str, Any]:
    """Return the JSON form, without the manifest_digest that only the bytes can have."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "schema_version": m.schema_version,
        "required_features": list(m.required_features),
        "run_id": m.run_id,
        "save_id": m.save_id,
        "parent": dict(m.parent) if m.parent is not None else None,
        "step": m.step,
        "created_at": m.created_at,
        "wall_clock_seconds": m.wall_clock_seconds,
        "producer": dict(m.producer),
        "commit": m.commit,
        "world_size": m.world_size,
        "copies": m.copies,
        "digest": {"block": m.block, "block_size": m.block_size},
    }
    body = body_document(m)
    meshes = body.pop("meshes")
    shards = [_shard_document(s) for s in m.shards]
    return {**head, "meshes": meshes, "shards": shards, **body, "annotations": dict(m.annotations)}


_compact = json.JSONEncoder(ensure_ascii=False, separators=(", ", ": ")).encode
_quoted = json.encoder.encode_basestring


def _group_lines(name: str, group: Mapping[str, Any]) -> str:
    members = ",\n   ".join(_compact(m) for m in group["members"])
    rest = _compact({k: v for k, v in group.items() if k not in ("numel", "members")})  # fields we do not know as well
    return f'{_compact(name)}: {{"numel": {_compact(group["numel"])}, "members": [\n   {members}],\n   {rest[1:]}'


def _field_lines(key: str, value: Any) -> str:
    if key == "flat_groups" and value:
        entries: Iterable[str] = (_group_lines(n, g) for n, g in value.items())
        return f'"{key}": {{\n  ' + ",\n  ".join(entries) + "}"
    if key == "shards" and value:
        return f'"{key}": [\n  ' + ",\n  ".join(map(_compact, value)) + "]"
    if key in ("meshes", "layouts", "tensors", "objects", "aliases", "omitted") and value:
        return f'"{key}": {{\n  ' + ",\n  ".join(f"{_quoted(n)}: {_compact(x)}" for n, x in value.items()) + "}"
    return f'"{key}": {_compact(value)}'


def dump_document(fields: Mapping[str, Any]) -> bytes:
    """Return the sealed bytes of a manifest document, one entry a line [L-TAIL] [L-DIGEST]."""
    lines = (_field_lines(k, v) for k, v in fields.items() if k != "manifest_digest")
    return lexical.seal(("{\n " + ",\n ".join(lines) + ",\n").encode())


def dump(m: Manifest) -> bytes:
    """Return the bytes of manifest.json."""
    return dump_document(document(m))


def digest_of(data: bytes) -> str:
    """Return the digest text that sealed bytes end with."""
    return data[-len('sha256:"\n}\n') - 64 : -4].decode()


def _shard_entry(d: Mapping[str, Any]) -> ShardEntry:
    i = d["index"]
    return ShardEntry(
        d["rank"], d["path"], d["nbytes"], i["offset"], i["nbytes"], i["digest"], d.get("annotations") or {}
    )


def _tensor_entry(d: Mapping[str, Any]) -> TensorEntry:
    shape = d["shape"]
    return TensorEntry(
        d["dtype"],
        None if shape is None else tuple(shape),
        d["layout"],
        d.get("role", "other"),
        d.get("annotations") or {},
    )


def _member(d: Mapping[str, Any]) -> Member:
    of = d.get("of")
    return Member(
        d["name"],
        d["offset"],
        tuple(d["shape"]),
        tuple(of["shape"]) if of else None,
        tuple(of["offsets"]) if of else None,
    )


def group_from_document(d: Mapping[str, Any]) -> FlatGroup:
    """Return the flat group of a schema-valid document."""
    return FlatGroup(d["numel"], tuple(map(_member, d["members"])), dict(d["tensors"]))


def body_from_document(d: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of Manifest for the part that body_document writes."""
    return {
        "meshes": {n: mesh_from_document(x) for n, x in d.get("meshes", {}).items()},
        "layouts": {n: layout_from_document(x) for n, x in d.get("layouts", {}).items()},
        "tensors": {n: _tensor_entry(x) for n, x in d.get("tensors", {}).items()},
        "objects": dict(d.get("objects", {})),
        "flat_groups": {n: group_from_document(x) for n, x in d.get("flat_groups", {}).items()},
        "aliases": dict(d.get("aliases", {})),
        "omitted": dict(d.get("omitted", {})),
    }


_HEAD = ("run_id", "save_id", "step", "created_at", "producer", "commit", "world_size", "copies", "schema_version")


def from_document(d: Mapping[str, Any]) -> Manifest:
    """Return the Manifest of a schema-valid document; the document is not changed."""
    return Manifest(
        **{k: d[k] for k in _HEAD if k in d},
        parent=d.get("parent"),
        wall_clock_seconds=d.get("wall_clock_seconds"),
        block=d["digest"]["block"],
        block_size=d["digest"]["block_size"],
        shards=tuple(map(_shard_entry, d["shards"])),
        annotations=d.get("annotations") or {},
        required_features=tuple(d.get("required_features", ())),
        digest=d.get("manifest_digest", ""),
        **body_from_document(d),
    )


def minor(d: Mapping[str, Any], ours: str = SPEC_VERSION) -> int:
    """Return how many minor versions the document is ahead of `ours`; 0 when it is not, or its version is not one."""
    text = d.get("schema_version")
    match = _VERSION.match(text) if isinstance(text, str) else None
    return max(0, int(match[2]) - int(ours.split(".")[1])) if match else 0


def version_findings(d: Any) -> Iterator[Finding]:
    """Yield why this library cannot read the document at all: format, major version, unknown features."""

    def fault(code: str, pointer: str, message: str, expected: str, found: object) -> Finding:
        return Finding(code, "error", message, Where(NAME, pointer), expected, repr(found)[:80])

    if not isinstance(d, dict) or d.get("format") != FORMAT:
        found = d.get("format") if isinstance(d, dict) else type(d).__name__
        yield fault("M-FORMAT", "/format", "not a ckptspec manifest", repr(FORMAT), found)
        return
    text = d.get("schema_version")
    match = _VERSION.match(text) if isinstance(text, str) else None
    if match and match[1] != SPEC_VERSION.split(".")[0]:
        yield fault("M-VERSION", "/schema_version", "unknown major version", f"{SPEC_VERSION.split('.')[0]}.x", text)
        return
    features = d.get("required_features")
    for i, name in enumerate(features if isinstance(features, list) else ()):
        if i == FEATURES_SHOWN:
            yield fault("M-FEATURE", "/required_features", "and more features", "few", len(features or ()))
            return
        if isinstance(name, str) and name not in FEATURES:
            known = ", ".join(sorted(FEATURES)) or "none"
            yield fault("M-FEATURE", f"/required_features/{i}", "feature this library does not know", known, name)


@dataclass(frozen=True)
class Decoded:
    """What decoding gave: the manifest when no finding is an error, the deepest level reached, and the findings."""

    manifest: Manifest | None
    level: str
    findings: tuple[Finding, ...]


def decode(data: bytes) -> Decoded:
    """Return the manifest in `data` with all lexical and schema findings; never raises for bad bytes."""
    doc, findings = lexical.scan(data)
    if any(f.severity == "error" for f in findings):
        return Decoded(None, "lexical", findings)
    found = list(findings)
    fields = doc or {}
    found += version_findings(fields)
    if not any(f.severity == "error" for f in found):
        found += schemas.check("manifest", fields, minor=minor(fields))
    bad = any(f.severity == "error" for f in found)
    return Decoded(None if bad else from_document(fields), "schema", tuple(found))


def raise_finding(finding: Finding) -> None:
    """Raise an error finding as the exception its rule belongs to."""
    kind = UnsupportedVersionError if finding.code in ("M-VERSION", "M-FEATURE") else ManifestError
    raise kind(
        finding.message,
        rule=finding.code,
        where=finding.where,
        expected=finding.expected,
        found=finding.found,
    )


def parse(data: bytes) -> Manifest:
    """Return the manifest in `data`; raises ManifestError or UnsupportedVersionError for the first error finding."""
    decoded = decode(data)
    for finding in decoded.findings:
        if finding.severity == "error":
            raise_finding(finding)
    assert decoded.manifest is not None
    return decoded.manifest

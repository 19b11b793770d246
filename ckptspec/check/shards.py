"""Owns the rules one shard is held to by itself: is it of this save, and does it fit what the manifest says of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckptspec.check.registry import Rules, fault
from ckptspec.errors import ShardError, Where
from ckptspec.format.box import Box, iter_pieces
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import FlatLayout, Layout, LocalLayout, MeshLayout, coordinate
from ckptspec.format.manifest import Manifest, ShardEntry
from ckptspec.format.objects import TensorRef, pack, parts
from ckptspec.format.report import Finding


@dataclass(frozen=True)
class Subject:
    """One shard: the manifest, the manifest's entry for it, and what the shard says of itself."""

    manifest: Manifest
    entry: ShardEntry
    document: ShardDocument

    def where(self, tensor: str | None = None) -> Where:
        """Return the shard as a place, or a tensor in it."""
        return Where(self.entry.path, None, tensor, self.entry.rank)

    @cached_property
    def split(self) -> tuple[tuple[tuple[str, Any], ...], ShardError | None]:
        """The parts of the state by name, or none of them and why they have no names [S-STATE]."""
        try:
            return tuple(parts(self.document.state, reading=True)), None
        except ShardError as e:
            return (), e

    @property
    def parts(self) -> tuple[tuple[str, Any], ...]:
        """The parts of the state by name: a tensor reference, or a subtree without any, which is one object."""
        return self.split[0]

    @cached_property
    def taking_part(self) -> frozenset[str]:
        """The layouts in which the shard's rank has a place; boxes and local layouts say that tensor by tensor."""
        m = self.manifest
        return frozenset(name for name, layout in m.layouts.items() if _has_place(layout, m, self.entry.rank))

    @cached_property
    def local(self) -> frozenset[str]:
        """The tensors that are private to each rank."""
        layouts = {name for name, x in self.manifest.layouts.items() if isinstance(x, LocalLayout)}
        return frozenset(name for name, t in self.manifest.tensors.items() if t.layout in layouts)

    @cached_property
    def references(self) -> dict[str, str]:
        """The places in the state that refer to a tensor, and the tensor's name."""
        return {name: part.name for name, part in self.parts if isinstance(part, TensorRef)}

    def objects(self) -> Iterator[tuple[str, bytes]]:
        """Yield each object's name and packed bytes, which differ where 1, 1.0 and True do."""
        return ((name, pack(part)) for name, part in self.parts if not isinstance(part, TensorRef))


def _has_place(layout: Layout, m: Manifest, rank: int) -> bool:
    if not isinstance(layout, (MeshLayout, FlatLayout)):
        return True
    mesh = m.meshes[layout.mesh]
    coord = coordinate(mesh, rank)
    return coord is not None and all(coord[mesh.index(axis)] == i for axis, i in layout.at.items())


rule: Rules[Subject] = Rules("shard")


@rule("S-SAVE")
def same_save(s: Subject) -> Iterator[Finding]:
    """The shard is of the manifest's save and of the rank that lists it."""
    h, m = s.document.header, s.manifest
    expected = identity(m.save_id, m.step, m.world_size, s.entry.rank)
    found = identity(h.save_id, h.step, h.world_size, h.rank)
    if expected != found:
        yield fault("S-SAVE", "the shard belongs to another save or rank", s.where(), expected, found)


def identity(save_id: str, step: int, world_size: int, rank: int) -> str:
    """Return in words which shard of which save it is."""
    return f"save {save_id[:32]!r}, step {step}, rank {rank} of {world_size}"


@rule("D-ALG")
def same_digests(s: Subject) -> Iterator[Finding]:
    """The shard uses the block digest that the manifest names."""
    h, m = s.document.header, s.manifest
    if (h.block, h.block_size) != (m.block, m.block_size):
        message = "the shard uses another block digest than the manifest"
        yield fault("D-ALG", message, s.where(), f"{m.block}, {m.block_size} bytes", f"{h.block}, {h.block_size} bytes")


@rule("T-MATCH")
def same_tensors(s: Subject) -> Iterator[Finding]:
    """Dtype and shape in the index are the manifest's, and no tensor is listed without a chunk; local ones may be."""
    index = s.document.index
    stored = {chunk.tensor for chunk in index.chunks}
    for row, (name, dtype, shape) in enumerate(zip(index.names, index.dtypes, index.shapes, strict=True)):
        entry = s.manifest.tensors.get(name)
        if entry is None:
            yield fault("T-MATCH", "the index names a tensor that the manifest has not", s.where(name))
        elif dtype != entry.dtype:
            yield fault("T-MATCH", "dtype differs from the manifest", s.where(name), entry.dtype, dtype)
        elif entry.shape is not None and shape != entry.shape:
            yield fault("T-MATCH", "shape differs from the manifest", s.where(name), list(entry.shape), list(shape))
        elif entry.shape is not None and row not in stored:
            yield fault("T-MATCH", "the index lists a tensor of which it has no chunk", s.where(name))


@rule("S-STATE")
def names_of_state(s: Subject) -> Iterator[Finding]:
    """Every part of the state has a name of its own."""
    error = s.split[1]
    if error is not None:
        yield fault("S-STATE", error.message, s.where(), error.expected, error.found)


@rule("S-REF")
def references(s: Subject) -> Iterator[Finding]:
    """The state refers to the manifest's tensors, each at its own name or at an alias, and to all that it stores."""
    if s.split[1] is not None:
        return  # no place in the state has a name, as S-STATE says
    m = s.manifest
    for name, tensor in s.references.items():
        if tensor not in m.tensors:
            yield fault("S-REF", "the state refers to a tensor that the manifest has not", s.where(tensor), None, name)
        elif name != tensor and m.aliases.get(name) != tensor:
            found = f"a reference at {name!r}"
            yield fault("S-REF", "the state refers to a tensor at another name", s.where(tensor), "an alias", found)
        elif (layout := m.tensors[tensor].layout) not in s.taking_part:
            yield fault("S-REF", f"layout {layout!r} gives this rank no part of the tensor", s.where(tensor))
    referred = set(s.references.values())
    for name in s.document.index.names:
        if name in m.tensors and name not in referred:
            yield fault("S-REF", "the shard stores a tensor that its state does not refer to", s.where(name))


@rule("O-KIND")
def objects(s: Subject) -> Iterator[Finding]:
    """Whatever in the state is not a tensor is one of the manifest's objects."""
    for name, part in s.parts:
        if not isinstance(part, TensorRef) and name not in s.manifest.objects:
            message = f"the state holds an object at {name!r} that the manifest has not"
            yield fault("O-KIND", message, s.where(), None, type(part).__name__)


@rule("T-LOCAL")
def local_tensors(s: Subject) -> Iterator[Finding]:
    """The chunks of a local tensor are its own shape, cut by the chunk limit; each one referred to is in the index."""
    index = s.document.index
    rows = {name: i for i, name in enumerate(index.names) if name in s.local}
    found: dict[int, list[Box]] = {i: [] for i in rows.values()}
    for chunk in index.chunks:
        if chunk.tensor in found:
            found[chunk.tensor].append(chunk.box)
    for name, i in rows.items():
        expected = iter_pieces(Box.whole(index.shapes[i]), DTYPES[index.dtypes[i]].itemsize)
        boxes = iter(found[i])
        if any(piece != next(boxes, None) for piece in expected) or next(boxes, None) is not None:
            message = "the chunks of a local tensor are not its own shape, cut by the chunk limit"
            yield fault("T-LOCAL", message, s.where(name), list(index.shapes[i]), f"{len(found[i])} chunks")
    for name in dict.fromkeys(s.references.values()):
        if name in s.local and name not in rows:
            yield fault("T-LOCAL", "the state refers to a local tensor that the index has not", s.where(name))


def check_shard(manifest: Manifest, rank: int, document: ShardDocument) -> Iterator[Finding]:
    """Yield every breach of a rule by the shard that `rank` should have written, looked at by itself.

    A shard of another save is reported as that and nothing else: all that follows would be noise.
    """
    yield from check_subject(Subject(manifest, manifest.shard(rank), document))


def check_subject(subject: Subject) -> Iterator[Finding]:
    """Yield what check_shard yields, for a caller that keeps the subject."""
    stale = tuple(same_save(subject))
    yield from stale or rule.run(subject)

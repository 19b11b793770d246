"""Owns the manifest-level rules about ranks, shards, meshes and layouts; sees the manifest only, never a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod

from ckptspec.check.registry import Rules, fault
from ckptspec.errors import Where
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.faults import Fault, fit_faults, layout_faults, mesh_faults
from ckptspec.format.layout import LocalLayout
from ckptspec.format.manifest import NAME, Manifest, TensorEntry
from ckptspec.format.names import escape, shard_path_fault
from ckptspec.format.report import Finding
from ckptspec.format.shard import TRAILER


@dataclass(frozen=True)
class Misfit:
    """One way a layout fails its mesh or a tensor of its own, and where in the manifest."""

    fault: Fault
    where: Where
    found: str | None = None


@dataclass(frozen=True)
class Fitted:
    """A manifest with every misfit of its layouts, looked for once for all the rules that tell of them."""

    manifest: Manifest
    misfits: tuple[Misfit, ...]


rule: Rules[Manifest] = Rules("manifest: worlds")
fit_rule: Rules[Fitted] = Rules("manifest: layouts")
FEW = 8  # faults of one layout, or of one layout and shape, that are looked for


def at(*tokens: object, tensor: str | None = None) -> Where:
    """Return the place in manifest.json that the path of `tokens` leads to."""
    return Where(NAME, "".join("/" + escape(str(token)) for token in tokens), tensor)


@rule("W-COUNT")
def count(m: Manifest) -> Iterator[Finding]:
    """One shard for each rank."""
    if len(m.shards) != m.world_size:
        message = "the number of shards is not the world size"
        there = {entry.rank for entry in m.shards}
        gone = islice((rank for rank in range(m.world_size) if rank not in there), FEW + 1)
        ranks = ", ".join(str(rank) for rank in gone)
        found = f"{len(m.shards)}, and none of rank {ranks}" if ranks else len(m.shards)
        yield fault("W-COUNT", message, at("shards"), f"{m.world_size} shards", found)


@rule("W-RANKS")
def ranks(m: Manifest) -> Iterator[Finding]:
    """Ranks are 0 to world_size - 1, none twice; that none lacks follows with W-COUNT."""
    seen: dict[int, int] = {}
    for i, entry in enumerate(m.shards):
        if not 0 <= entry.rank < max(m.world_size, len(m.shards)):
            message = "rank outside the world"
            yield fault("W-RANKS", message, at("shards", i, "rank"), f"0..{m.world_size - 1}", entry.rank)
        elif (first := seen.setdefault(entry.rank, i)) != i:
            message = f"two shards of one rank, the other is entry {first}"
            yield fault("W-RANKS", message, at("shards", i, "rank"), "each rank once", entry.rank)


@rule("W-PATH")
def paths(m: Manifest) -> Iterator[Finding]:
    """Shard paths are plain file names, distinct even where case is ignored."""
    seen: dict[str, int] = {}
    for i, entry in enumerate(m.shards):
        if problem := shard_path_fault(entry.path):
            yield fault("W-PATH", problem, at("shards", i, "path"), None, repr(entry.path))
        elif (first := seen.setdefault(entry.path.lower(), i)) != i:
            message = f"two shards in one file, the other is entry {first}"
            yield fault("W-PATH", message, at("shards", i, "path"), "a file of its own", repr(entry.path))


@rule("W-INDEX")
def index_extents(m: Manifest) -> Iterator[Finding]:
    """The index and the trailer end the shard."""
    for i, s in enumerate(m.shards):
        end = s.index_offset + s.index_nbytes + TRAILER.size
        if end != s.nbytes:
            message = f"index and trailer do not end shard {s.path}"
            yield fault("W-INDEX", message, at("shards", i, "nbytes"), f"{end} bytes", s.nbytes)


@rule("T-MESH")
def meshes(m: Manifest) -> Iterator[Finding]:
    """Meshes give every coordinate a rank of its own in the world."""
    for name, mesh in m.meshes.items():
        for problem in mesh_faults(mesh, m.world_size):
            yield fault("T-MESH", problem.message, at("meshes", name))


def one_of(names: Iterable[str]) -> str:
    """Return `one of 'a', 'b'` for the names there are."""
    return "one of " + ", ".join(map(repr, names)) if names else "none: there are none"


def misfits(m: Manifest) -> Iterator[Misfit]:
    """Yield how layouts fail by themselves, then how sound ones fail the shapes of their tensors, each shape once."""
    broken = {name for name, mesh in m.meshes.items() if any(mesh_faults(mesh, m.world_size))}
    sound = set()
    for name, layout in m.layouts.items():
        problems = list(islice(layout_faults(layout, m.meshes, None, m.world_size), FEW))
        yield from (Misfit(problem, at("layouts", name)) for problem in problems)
        if not problems and getattr(layout, "mesh", None) not in broken:
            sound.add(name)
    known: dict[tuple[str, tuple[int, ...]], list[Fault]] = {}
    for name, tensor in m.tensors.items():
        if tensor.layout not in sound or tensor.shape is None or not countable(tensor):
            continue
        key = (tensor.layout, tensor.shape)
        if key not in known:
            known[key] = list(islice(fit_faults(m.layouts[tensor.layout], tensor.shape), FEW))
        for problem in known[key]:
            yield Misfit(problem, at("tensors", name, tensor=name), str(list(tensor.shape)))


def _misfits(f: Fitted, code: str) -> Iterator[Finding]:
    for misfit in f.misfits:
        if misfit.fault.rule == code:
            yield fault(code, misfit.fault.message, misfit.where, None, misfit.found)


@fit_rule("T-LAYOUT")
def layouts(f: Fitted) -> Iterator[Finding]:
    """Every layout, mesh and axis that is named is there."""
    yield from _misfits(f, "T-LAYOUT")
    known = f.manifest.layouts
    for name, tensor in f.manifest.tensors.items():
        if tensor.layout not in known:
            where = at("tensors", name, "layout", tensor=name)
            yield fault("T-LAYOUT", "the layout does not exist", where, one_of(known), repr(tensor.layout))


@rule("T-DTYPE")
def dtypes(m: Manifest) -> Iterator[Finding]:
    """Dtypes are those of the table."""
    for name, tensor in m.tensors.items():
        if tensor.dtype not in DTYPES:
            where = at("tensors", name, "dtype", tensor=name)
            yield fault("T-DTYPE", "unknown dtype", where, one_of(DTYPES), repr(tensor.dtype))


@rule("T-SHAPE")
def shapes(m: Manifest) -> Iterator[Finding]:
    """The shape is null for a local tensor and no other, and the bytes can be counted in 63 bits."""
    for name, tensor in m.tensors.items():
        layout = m.layouts.get(tensor.layout)
        if layout is not None and (tensor.shape is None) != isinstance(layout, LocalLayout):
            where = at("tensors", name, "shape", tensor=name)
            expected = "null" if isinstance(layout, LocalLayout) else "a shape"
            message = f"layout {tensor.layout!r} asks for {expected}"
            yield fault("T-SHAPE", message, where, expected, "null" if tensor.shape is None else list(tensor.shape))
        elif not countable(tensor):
            where = at("tensors", name, "shape", tensor=name)
            yield fault("T-SHAPE", "the tensor is too large", where, "below 2^63 bytes", list(tensor.shape or ()))


def countable(tensor: TensorEntry) -> bool:
    """Tell whether the tensor's bytes, even with empty dimensions left out, stay below 2^63 [T-SHAPE]."""
    if tensor.shape is None or tensor.dtype not in DTYPES:
        return True
    return prod(n for n in tensor.shape if n) * DTYPES[tensor.dtype].itemsize < 1 << 63


@fit_rule("T-DIMS")
def mesh_layouts(f: Fitted) -> Iterator[Finding]:
    """Mesh layouts fit the shapes of their tensors."""
    return _misfits(f, "T-DIMS")


@fit_rule("T-BOXES")
def boxes_layouts(f: Fitted) -> Iterator[Finding]:
    """Boxes layouts cover their tensors, inside them and without partial overlap."""
    return _misfits(f, "T-BOXES")


@fit_rule("T-FLAT")
def flat_layouts(f: Fitted) -> Iterator[Finding]:
    """Flat layouts hold tensors of one dimension and their bounds add up."""
    return _misfits(f, "T-FLAT")

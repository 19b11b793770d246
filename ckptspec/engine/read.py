"""Owns reading whole tensors and objects by name, without a template, a process group or torch."""

from __future__ import annotations

import mmap as mapping_module
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ckptspec.engine.documents import load_manifest
from ckptspec.engine.fetch import Opened, fetch
from ckptspec.engine.holding import ArrayHolding, Holding
from ckptspec.engine.pool import DEFAULT_BUDGET, shared_pool
from ckptspec.errors import PlanError, Where
from ckptspec.format import objects, shard
from ckptspec.format.box import Box
from ckptspec.format.dtypes import DType, dtype
from ckptspec.format.manifest import TensorEntry
from ckptspec.planner.transfers import Need
from ckptspec.storage.base import is_url

Slices = Mapping[str, Sequence[slice]]


def read(
    path: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    *,
    slices: Slices | None = None,
    mmap: bool = False,
    memory: int = DEFAULT_BUDGET,
) -> dict[str, Any]:
    """Return full tensors (and objects, when named) as numpy arrays, verified; all tensors when `names` is None.

    `slices` gives a tensor's name one slice a dimension (step 1). A local tensor or `rank` object comes as {rank:
    value}. With `mmap` a tensor that is one chunk is a read-only view of the file, hashed once here. bfloat16 and
    float8 come as ml_dtypes arrays. Raises PlanError for a name or dtype that cannot be given, IntegrityError for
    damaged bytes.
    """
    folder, manifest = load_manifest(path)
    if mmap and is_url(folder):
        message, advice = "what lies in a store cannot be mapped into memory", "read it without mmap"
        raise PlanError(message, where=Where(folder), advice=advice)
    opened = Opened(folder, manifest)
    out: dict[str, Any] = {}
    wants: list[tuple[Need, Holding]] = []
    arrays: dict[str, Any] = {}
    chosen = [*manifest.tensors, *manifest.aliases] if names is None else list(names)
    for name in chosen:
        target = manifest.aliases.get(name, name)
        if target in manifest.objects:
            out[name] = _object(opened, target)
        elif target not in manifest.tensors:
            raise _unknown(name, [*manifest.tensors, *manifest.aliases, *manifest.objects])
        elif manifest.tensors[target].shape is None:
            out[name] = _local(opened, target, wants)
        else:
            entry = manifest.tensors[target]
            box = _box(entry, (slices or {}).get(name), name)
            if name not in (slices or {}) and target in arrays:
                out[name] = arrays[target]  # an alias is the tensor it points at
                continue
            _plausible(manifest.nbytes, entry.dtype, box, target)
            mapped = _mapped(opened, target, box) if mmap else None
            out[name] = mapped if mapped is not None else _allocate(entry.dtype, box, target, None, wants)
            if box == Box.whole(entry.shape or ()):
                arrays[target] = out[name]
    fetch(opened, wants, shared_pool(memory, manifest.block_size))
    return out


def numpy_dtype(kind: DType, name: str) -> Any:
    """Return numpy's (or ml_dtypes') dtype; raises PlanError for one that numpy lacks, never a silent uint8."""
    import numpy

    if kind.numpy is None:
        message = f"numpy has no dtype for {kind.name}"
        raise PlanError(message, where=Where(tensor=name), advice="load it with torch: ckptspec.load(path, into=state)")
    if not kind.ml:
        return numpy.dtype(kind.numpy)
    import ml_dtypes

    return numpy.dtype(getattr(ml_dtypes, kind.numpy))


def _unknown(name: str, known: Sequence[str]) -> PlanError:
    import difflib

    near = ", ".join(difflib.get_close_matches(name, known, 3)) or "none is near"
    return PlanError(
        "no tensor or object has this name", rule="R-NAME", where=Where(tensor=name), expected=f"a name such as {near}"
    )


def _box(entry: TensorEntry, slices: Sequence[slice] | None, name: str) -> Box:
    assert entry.shape is not None
    if slices is None:
        return Box.whole(entry.shape)
    if len(slices) > len(entry.shape) or any(s.step not in (None, 1) for s in slices):
        raise PlanError(
            "slices must have step 1, at most one a dimension",
            where=Where(tensor=name),
            expected=f"up to {len(entry.shape)}",
            found=str(list(slices)),
        )
    spans = [s.indices(n)[:2] for s, n in zip(slices, entry.shape, strict=False)]
    spans += [(0, n) for n in entry.shape[len(slices) :]]
    return Box(tuple(a for a, _ in spans), tuple(max(0, b - a) for a, b in spans))


def _plausible(stored: int, dtype_name: str, box: Box, name: str) -> None:
    """Refuse to allocate more than all shards hold: whatever the manifest says, so much cannot be there [Q-CAPS]."""
    nbytes = box.numel * dtype(dtype_name).itemsize
    if nbytes > stored:
        message, where = "the tensor is larger than all shards that could hold it", Where(tensor=name)
        raise PlanError(message, rule="T-COVER", where=where, expected=f"<= {stored} bytes", found=f"{nbytes} bytes")


def _allocate(dtype_name: str, box: Box, name: str, rank: int | None, wants: list[tuple[Need, Holding]]) -> Any:
    import numpy

    kind = dtype(dtype_name)
    array = numpy.empty(box.sizes, numpy_dtype(kind, name))
    raw = array.view(numpy.dtype((numpy.void, kind.itemsize)))  # bytes move as they are, whatever the dtype
    wants.append((Need(name, box, rank), ArrayHolding(raw, box.offsets, kind)))
    return array


def _local(opened: Opened, name: str, wants: list[tuple[Need, Holding]]) -> dict[int, Any]:
    out = {}
    for entry in opened.manifest.shards:
        index = opened.document(entry.rank).index
        if name in index.names:
            box = Box.whole(index.shapes[index.names.index(name)])
            _plausible(entry.nbytes, opened.manifest.tensors[name].dtype, box, name)
            out[entry.rank] = _allocate(opened.manifest.tensors[name].dtype, box, name, entry.rank, wants)
    return out


def _object(opened: Opened, name: str) -> Any:
    """Return an object's value from the first shard that has it, or every rank's where they differ by design."""
    found = {}
    for entry in opened.manifest.shards:
        parts = dict(objects.parts(opened.document(entry.rank).state, reading=True))
        if name in parts:
            found[entry.rank] = parts[name]
            if opened.manifest.objects[name] == "same":
                return parts[name]
    return found


def _mapped(opened: Opened, name: str, box: Box) -> Any:
    """Return a read-only array over the file for a tensor that is one whole chunk, its bytes verified; else None."""
    import numpy

    entry = opened.manifest.tensors[name]
    for listed in opened.manifest.shards:
        source = opened.source(listed.rank)
        for row, chunk in enumerate(source.index.chunks):
            if source.index.names[chunk.tensor] == name and chunk.box == box == Box.whole(entry.shape or ()):
                with open(source.path, "rb") as f:
                    mapping = mapping_module.mmap(f.fileno(), 0, access=mapping_module.ACCESS_READ)
                data = memoryview(mapping)[chunk.start : chunk.start + chunk.nbytes]
                shard.check_blocks(source.index, source.header, row, data, listed.path)
                return numpy.frombuffer(data, numpy_dtype(dtype(entry.dtype), name)).reshape(box.sizes)
    return None

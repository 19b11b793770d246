"""Owns loading into a live state: comparing first, then filling, then agreeing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch
from torch import Tensor

from ckptspec.engine.channel import Attempt
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.fetch import Opened, fetch
from ckptspec.engine.holding import Holding
from ckptspec.engine.pool import DEFAULT_BUDGET, Pool, shared_pool
from ckptspec.errors import CkptspecError, PlanError, Where
from ckptspec.format import objects
from ckptspec.format.box import Box
from ckptspec.format.dtypes import dtype
from ckptspec.format.manifest import Manifest
from ckptspec.format.objects import TensorRef
from ckptspec.format.placement import resolve
from ckptspec.plan.transfers import Need
from ckptspec.pytorch import group
from ckptspec.pytorch.capture import Capture, Leaf, capture, decode_value, encode_value
from ckptspec.pytorch.holding import TorchHolding
from ckptspec.pytorch.restore import replace_values
from ckptspec.pytorch.select import Patterns, Selection, matches, select

Cast = bool | Sequence[str]


@dataclass(frozen=True)
class LoadResult:
    """What a load did: step, folder, save id, payload bytes delivered here, and every deviation from an exact load."""

    step: int
    path: str
    save_id: str
    nbytes: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] | None = None


@dataclass(frozen=True)
class Options:
    """How a load may deviate; nothing here is lenient by default."""

    exact: bool = False
    only: Patterns = None
    skip: Patterns = None
    missing: str = "error"
    unexpected: str = "error"
    cast: Cast | None = None
    memory: int = DEFAULT_BUDGET


def load(path: str | os.PathLike[str], into: Any, options: Options, silence: float) -> tuple[LoadResult, Manifest]:
    """Fill `into` in place from a checkpoint, all ranks together; one rank's failure raises on all."""
    channel = group.channel(silence)
    attempt = channel.attempt(kind="load")
    try:
        folder, manifest = _agree_on(path, attempt, channel.rank)
        result = _Load(folder, manifest, into, options, channel.rank, channel.world_size).run(attempt)
        attempt.post("loaded", b"")
        if channel.rank == 0:
            attempt.collect("loaded")
            attempt.done(b"")
        else:
            attempt.outcome()
    except (CkptspecError, OSError, MemoryError) as e:
        agreed = attempt.fail(e)
        if channel.world_size == 1 or agreed.rank in (None, channel.rank):
            raise e  # this rank's own fault keeps its own type
        raise agreed from e
    except BaseException as e:
        attempt.fail(e)
        raise
    return result, manifest


def _agree_on(path: str | os.PathLike[str], attempt: Attempt, rank: int) -> tuple[str, Manifest]:
    """Return the checkpoint all ranks load: rank 0 resolves the path once, the others must find the same manifest."""
    if rank == 0:
        folder, manifest = load_manifest(path)
        attempt.announce("open", msgpack.packb([os.path.basename(folder), manifest.digest]))
        return folder, manifest
    name, digest = msgpack.unpackb(attempt.await_("open"))
    base = os.fspath(path)
    beside = os.path.join(base, name)
    folder, manifest = load_manifest(beside if os.path.isdir(beside) else base)
    if manifest.digest != digest:
        raise PlanError(
            "this rank finds another checkpoint than rank 0",
            rule="Q-FOLDER",
            where=Where(folder, rank=rank),
            expected=digest,
            found=manifest.digest,
            advice="give every rank the same folder on a shared file system",
        )
    return folder, manifest


class _Load:
    """One rank's part in one load."""

    def __init__(self, folder: str, manifest: Manifest, into: Any, options: Options, rank: int, world: int) -> None:
        self.opened = Opened(folder, manifest)
        self.manifest = manifest
        self.into = into
        self.options = options
        self.rank, self.world = rank, world
        self.pool: Pool = shared_pool(options.memory, manifest.block_size)
        self.casts: dict[str, tuple[str, str]] = {}
        self.local_rows: dict[str, int] | None = None

    def run(self, attempt: Attempt) -> LoadResult:
        self._same_world()
        captured = capture(self.into, rank=self.rank, world=self.world, tie=False)
        stored = dict(objects.parts(self.opened.document(self.rank).state, reading=True))
        here = dict(objects.parts(captured.tree))
        self._same_kinds(stored, here)
        chosen = select(
            tuple(here),
            tuple(stored),
            only=self.options.only,
            skip=self.options.skip,
            missing=self.options.missing,
            unexpected=self.options.unexpected,
            manifest=self.manifest,
        )
        wants = self._wants(captured, chosen, stored)
        nbytes = fetch(self.opened, wants, self.pool, prefer=self.rank, progress=attempt.progress)
        for name in chosen.names:
            leaf = captured.leaves.get(name)
            if leaf is not None and leaf.padding is not None:
                leaf.padding.zero_()  # padding is not state
        self._replace(chosen, stored)
        m = self.manifest
        return LoadResult(
            m.step, self.opened.folder, m.save_id, nbytes, chosen.missing, chosen.unexpected, chosen.skipped, self.casts
        )

    def _same_world(self) -> None:
        if self.manifest.world_size != self.world:
            raise PlanError(
                "the checkpoint was written by another number of ranks, which this release cannot load",
                rule="R-WORLD",
                where=Where(self.opened.folder),
                expected=f"{self.manifest.world_size} ranks",
                found=f"{self.world} ranks",
                advice=f"start the job with {self.manifest.world_size} ranks",
            )

    def _same_kinds(self, stored: Mapping[str, Any], here: Mapping[str, Any]) -> None:
        for name in stored.keys() & here.keys():
            tensor = isinstance(stored[name], TensorRef), isinstance(here[name], TensorRef)
            if tensor[0] != tensor[1] and not self._left_out(name):
                kinds = ["a tensor" if t else "a Python value" for t in tensor]
                raise PlanError(
                    "the checkpoint and the state hold different kinds of value here",
                    rule="R-NAME",
                    where=Where(tensor=name),
                    expected=f"{kinds[0]} as in the checkpoint",
                    found=kinds[1],
                )

    def _left_out(self, name: str) -> bool:
        only = self.options.only
        return (only is not None and not matches(name, tuple(only))) or matches(name, tuple(self.options.skip or ()))

    def _wants(self, captured: Capture, chosen: Selection, stored: Mapping[str, Any]) -> list[tuple[Need, Holding]]:
        faults: list[PlanError] = []
        wants: list[tuple[Need, Holding]] = []
        filled: dict[tuple[Any, ...], str] = {}
        for name in chosen.names:
            if not isinstance(stored[name], TensorRef):
                continue
            leaf = captured.leaves[name]
            target = stored[name].name
            fault = self._compare(name, target, leaf) or _clash(filled, name, target, leaf.tensor)
            if fault is not None:
                faults.append(fault)
            else:
                wants += self._needs(target, leaf)
        if faults:
            text = "; ".join(str(f) for f in faults[:20]) + (
                f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
            )
            raise faults[0] if len(faults) == 1 else PlanError(text, **{**faults[0].details(), "where": None})
        return wants

    def _compare(self, name: str, target: str, leaf: Leaf) -> PlanError | None:
        """Return why a tensor of the state cannot take the one stored: dtype, shape or layout."""
        entry = self.manifest.tensors[target]
        where = Where(tensor=name, rank=self.rank)
        if entry.dtype != leaf.entry.dtype:
            if not self._may_cast(name):
                advice = 'convert the state first, or pass cast=["name or glob"]'
                return PlanError("dtypes differ", rule="R-DTYPE", where=where, expected=entry.dtype,
                                 found=leaf.entry.dtype, advice=advice)  # fmt: skip
            self.casts[name] = (entry.dtype, leaf.entry.dtype)
        shape = self._local_shape(target) if entry.shape is None else entry.shape
        found = tuple(leaf.tensor.shape) if leaf.entry.shape is None else leaf.entry.shape
        if shape != found:
            return PlanError("shapes differ", rule="R-SHAPE", where=where, expected=str(list(shape)),
                             found=str(list(found)))  # fmt: skip
        if (entry.shape is None) != (leaf.entry.shape is None):
            kinds = {True: "local: every rank its own", False: "shared by all ranks"}
            return PlanError("layouts differ", rule="R-LAYOUT", where=where, expected=kinds[entry.shape is None],
                             found=kinds[leaf.entry.shape is None],
                             advice="wrap it in ckptspec.Local, or unwrap it, as it was saved")  # fmt: skip
        strides = leaf.tensor.stride()
        if 0 in strides and any(s == 0 and n > 1 for s, n in zip(strides, leaf.tensor.shape, strict=True)):
            return PlanError("an expanded tensor cannot be filled", rule="R-LAYOUT", where=where,
                             advice="give it memory of its own: tensor.clone()")  # fmt: skip
        return self._compare_layout(target, leaf, where)

    def _compare_layout(self, target: str, leaf: Leaf, where: Where) -> PlanError | None:
        entry = self.manifest.tensors[target]
        if entry.shape is None:
            return None
        place = resolve(self.manifest.layouts[entry.layout], self.manifest.meshes)
        held = place.boxes(entry.shape, self.rank)
        if held == leaf.boxes:
            return None
        here = tuple(b for b in leaf.boxes if not b.empty)
        if held == here:
            return None
        return PlanError(
            "layouts differ, and this release loads only the layout that was saved",
            rule="R-LAYOUT",
            where=where,
            expected=f"layout {entry.layout!r}: boxes {[(b.offsets, b.sizes) for b in held]}",
            found=f"boxes {[(b.offsets, b.sizes) for b in here]}",
            advice="build the state with the meshes and placements the checkpoint was saved with",
        )

    def _local_shape(self, name: str) -> tuple[int, ...]:
        index = self.opened.document(self.rank).index
        if self.local_rows is None:
            self.local_rows = {name: row for row, name in enumerate(index.names)}
        return index.shapes[self.local_rows[name]]

    def _may_cast(self, name: str) -> bool:
        cast = self.options.cast
        return cast is True or (bool(cast) and matches(name, tuple(cast)))  # type: ignore[arg-type]

    def _needs(self, target: str, leaf: Leaf) -> list[tuple[Need, Holding]]:
        entry = self.manifest.tensors[target]
        stored = getattr(torch, dtype(entry.dtype).name)
        holding = TorchHolding(leaf.tensor, leaf.boxes, stored)
        if entry.shape is None:
            return [(Need(target, Box.whole(leaf.tensor.shape), self.rank), holding)]
        return [(Need(target, box), holding) for box in leaf.boxes if not box.empty]

    def _replace(self, chosen: Selection, stored: Mapping[str, Any]) -> None:
        """Put the Python values of this rank's own state into the containers, once every tensor has arrived."""
        values = {
            name: objects.unpack(objects.pack(stored[name], encode=encode_value), decode=decode_value)
            for name in chosen.names
            if not isinstance(stored[name], TensorRef)
        }
        replace_values(self.into, "", values)


def _clash(filled: dict[tuple[Any, ...], str], name: str, target: str, t: Tensor) -> PlanError | None:
    """Return the error where two tensors of the state are one memory but two tensors of the checkpoint."""
    if not t.numel():
        return None
    key = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride())
    other = filled.setdefault(key, target)
    if other == target:
        return None
    return PlanError(
        "two tensors share memory in the state but not in the checkpoint",
        rule="Q-ALIAS",
        where=Where(tensor=name),
        expected=f"memory of its own: {other!r} is stored separately",
        found="tied",
        advice="untie them before the load",
    )

"""Owns loading into a live state: comparing first, then filling, then agreeing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import torch

from ckptspec.engine.channel import Attempt
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.fetch import Opened, fetch
from ckptspec.engine.holding import Holding
from ckptspec.engine.pool import DEFAULT_BUDGET, Pool, shared_pool
from ckptspec.errors import CkptspecError, LoadError, PlanError, Where
from ckptspec.format import objects
from ckptspec.format.box import Box
from ckptspec.format.dtypes import dtype
from ckptspec.format.manifest import Manifest
from ckptspec.format.objects import TensorRef
from ckptspec.plan.transfers import Need
from ckptspec.pytorch import group
from ckptspec.pytorch.adapters.base import Adapter, Chosen, Saved
from ckptspec.pytorch.capture import capture
from ckptspec.pytorch.compare import Cast, Comparison, together
from ckptspec.pytorch.holding import TorchHolding
from ckptspec.pytorch.materialize import Materialize, materialize
from ckptspec.pytorch.record import Capture, Leaf
from ckptspec.pytorch.restore import below, settle
from ckptspec.pytorch.select import Patterns, Selection, as_fine, asked_for, select
from ckptspec.pytorch.values import decode_value, encode_value

UNDEFINED = "what was being loaded into is now undefined"


@dataclass(frozen=True)
class LoadResult:
    """What a load did: step, folder, save id, payload bytes delivered here, and every deviation from an exact load.

    `materialized` are the meta tensors that were given memory.
    """

    step: int
    path: str
    save_id: str
    nbytes: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    cast: Mapping[str, tuple[str, str]] | None = None
    materialized: tuple[str, ...] = ()


@dataclass(frozen=True)
class Options:
    """How a load may deviate; nothing here is lenient by default."""

    exact: bool = False
    only: Patterns = None
    skip: Patterns = None
    missing: str = "error"
    unexpected: str = "error"
    cast: Cast | None = None
    materialize: Materialize | None = None
    memory: int = DEFAULT_BUDGET


def load(path: str | os.PathLike[str], into: Any, options: Options, silence: float) -> tuple[LoadResult, Manifest]:
    """Fill `into` in place from a checkpoint, all ranks together; one rank's failure raises on all.

    Another rank's failure is a LoadError here; this rank's own keeps its type. Both say that `into` is undefined, once
    the first byte was on its way.
    """
    channel = group.channel(silence)
    attempt = channel.attempt(kind="load")
    job = None
    try:
        folder, manifest = _agree_on(path, attempt, channel.rank)
        job = _Load(folder, manifest, into, options, channel.rank, channel.world_size)
        result = job.run(attempt)
        attempt.post("loaded", b"")
        if channel.rank == 0:
            attempt.collect("loaded")
            attempt.done(b"")
        else:
            attempt.outcome()
    except (CkptspecError, OSError, MemoryError) as e:
        begun = job is not None and job.begun
        agreed = attempt.fail(e)
        if channel.world_size == 1 or agreed.rank in (None, channel.rank):
            _tell(e, begun)
            raise  # this rank's own fault keeps its own type
        theirs = LoadError(agreed.message, rank=agreed.rank, **agreed.details())
        _tell(theirs, begun)
        raise theirs from e
    except BaseException as e:
        _tell(e, job is not None and job.begun)
        attempt.fail(e)
        raise
    return result, manifest


def _tell(error: BaseException, begun: bool) -> None:
    """Let an error say what became of the state, if its filling had begun."""
    if begun and isinstance(error, CkptspecError):
        error.message += f"; {UNDEFINED}"
    elif begun and hasattr(error, "add_note"):
        error.add_note(UNDEFINED)


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
        self.comparison = Comparison(self.opened, rank, options.cast)
        self.begun = False  # whether something of `into` may have changed

    def run(self, attempt: Attempt) -> LoadResult:
        """Compare, then fill, then replace values and tell objects; returns what was done."""
        self._same_world()
        saved = self._saved()
        stored = dict(objects.parts(saved.tree, reading=True))
        o = self.options
        real = materialize(self.into, o.materialize, saved.wanted, stored)
        self.begun = bool(real)
        captured = capture(self.into, rank=self.rank, world=self.world, tie=False, saved=saved)
        here = dict(objects.parts(captured.tree))
        stored, here = as_fine(stored, here), as_fine(here, stored)
        self._same_kinds(stored, here, saved)
        chosen = select(
            tuple(here),
            tuple(stored),
            only=o.only,
            skip=o.skip,
            missing=o.missing,
            unexpected=o.unexpected,
            manifest=self.manifest,
        )
        self._replaceable(chosen, stored)
        chosen = self._review(captured, chosen)
        wants = self._wants(captured, chosen, stored)
        self.begun = True
        nbytes = fetch(self.opened, wants, self.pool, prefer=self.rank, progress=attempt.progress)
        self._finish(captured, chosen, stored)
        return LoadResult(
            self.manifest.step,
            self.opened.folder,
            self.manifest.save_id,
            nbytes,
            chosen.missing,
            chosen.unexpected,
            chosen.skipped,
            self.comparison.casts,
            real,
        )

    def _replaceable(self, chosen: Selection, stored: Mapping[str, Any]) -> None:
        """Refuse values of a tuple at the root: it has no container in which they could be replaced."""
        values = [n for n in chosen.names if "/" not in n and not isinstance(stored[n], TensorRef)]
        if type(self.into) is tuple and values:
            raise PlanError(
                "a tuple at the root of the state cannot take new values",
                rule="R-NAME",
                where=Where(tensor=values[0]),
                advice="make the state a dict or a list, or leave the values out with skip=",
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

    def _saved(self) -> Saved:
        """Return what objects need to know of the checkpoint."""
        document = self.opened.document(self.rank)
        wanted = asked_for(self.options.only, self.options.skip)
        local = {
            name: shape
            for name, shape in zip(document.index.names, document.index.shapes, strict=True)
            if name in self.manifest.tensors and self.manifest.tensors[name].shape is None
        }
        return Saved(self.manifest, document.state, local, wanted)

    def _same_kinds(self, stored: Mapping[str, Any], here: Mapping[str, Any], saved: Saved) -> None:
        for name in stored.keys() & here.keys():
            tensor = isinstance(stored[name], TensorRef), isinstance(here[name], TensorRef)
            if tensor[0] != tensor[1] and saved.wanted(name):
                kinds = ["a tensor" if t else "a Python value" for t in tensor]
                raise PlanError(
                    "the checkpoint and the state hold different kinds of value here",
                    rule="R-NAME",
                    where=Where(tensor=name),
                    expected=f"{kinds[0]} as in the checkpoint",
                    found=kinds[1],
                )

    def _review(self, captured: Capture, chosen: Selection) -> Selection:
        """Let every object see what it is about to get; returns the selection with the deviations they noted."""
        faults: list[PlanError] = []
        missing, unexpected = list(chosen.missing), list(chosen.unexpected)
        for place, adapter in captured.opened.items():
            if type(adapter).review is Adapter.review:
                continue
            names = frozenset(n for n in chosen.names if below(place, n))
            seen = Chosen(names, self.options.missing == "keep", self.options.unexpected == "ignore")
            faults += adapter.review(seen)
            missing += seen.missing
            unexpected += seen.unexpected
        if faults:
            raise together(faults)
        return replace(chosen, missing=tuple(missing), unexpected=tuple(unexpected))

    def _wants(self, captured: Capture, chosen: Selection, stored: Mapping[str, Any]) -> list[tuple[Need, Holding]]:
        faults: list[PlanError] = []
        wants: list[tuple[Need, Holding]] = []
        for name in chosen.names:
            if not isinstance(stored[name], TensorRef):
                continue
            leaf = captured.leaves[name]
            target = stored[name].name
            fault = self.comparison.fault(name, target, leaf)
            if fault is not None:
                faults.append(fault)
            else:
                wants += self._needs(target, leaf)
        if faults:
            raise together(faults)
        return wants

    def _needs(self, target: str, leaf: Leaf) -> list[tuple[Need, Holding]]:
        entry = self.manifest.tensors[target]
        boxes = leaf.boxes if leaf.reads is None else leaf.reads
        holding = TorchHolding(leaf.tensor, boxes, getattr(torch, dtype(entry.dtype).name))
        if entry.shape is None:
            return [(Need(target, Box.whole(leaf.tensor.shape), self.rank), holding)]
        return [(Need(target, box), holding) for box in boxes if not box.empty]

    def _finish(self, captured: Capture, chosen: Selection, stored: Mapping[str, Any]) -> None:
        """Zero what is padding, put this rank's Python values in their containers, and tell the objects."""
        for name in chosen.names:
            leaf = captured.leaves.get(name)
            if leaf is not None and leaf.padding is not None:
                leaf.padding.zero_()  # padding is not state
        values = {
            name: objects.unpack(objects.pack(stored[name], encode=encode_value), decode=decode_value)
            for name in chosen.names
            if not isinstance(stored[name], TensorRef)
        }
        settle(self.into, captured.opened, values, frozenset(chosen.names))

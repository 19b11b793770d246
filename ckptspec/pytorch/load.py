"""Owns loading into a live state: comparing first, then filling, then agreeing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import torch.distributed as dist

from ckptspec.engine.agree.channel import Attempt, Channel
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.fetch import Opened, fetch
from ckptspec.engine.files import is_folder
from ckptspec.engine.parcels import requests
from ckptspec.engine.pool import DEFAULT_BUDGET, Pool, shared_pool
from ckptspec.errors import CkptspecError, IntegrityError, LoadError, PlanError, ShardError, Where
from ckptspec.format import objects
from ckptspec.format.dtypes import dtype
from ckptspec.format.manifest import Manifest
from ckptspec.format.objects import TensorRef
from ckptspec.planner.renames import Renames
from ckptspec.planner.routes import Routes
from ckptspec.planner.transfers import Locator
from ckptspec.pytorch import group
from ckptspec.pytorch.adapters.base import Adapter, Chosen
from ckptspec.pytorch.census import everyone, unused_by_all
from ckptspec.pytorch.compare import Cast, Comparison, together
from ckptspec.pytorch.exchange import ExchangeEnded, Peers, exchange
from ckptspec.pytorch.lazy import before_mutation
from ckptspec.pytorch.match import MAPPED, Match, Terms, match
from ckptspec.pytorch.materialize import Materialize, materialize
from ckptspec.pytorch.progress import Count, Tell
from ckptspec.pytorch.record import Capture
from ckptspec.pytorch.restore import below, settle
from ckptspec.pytorch.select import Patterns, Selection, asked_for, select
from ckptspec.pytorch.values import decode_value, encode_value
from ckptspec.pytorch.wants import Want, clear_padding, wants
from ckptspec.storage.base import plain

UNDEFINED = "what was being loaded into is now undefined"


@dataclass(frozen=True)
class LoadResult:
    """What a load did: step, folder, save id, payload bytes delivered here, and every deviation from an exact load.

    `materialized` are the meta tensors that were given memory, `renamed` the names that an explicit map led to.
    `private` is what each rank has of its own, on another number of ranks: "mapped" from the rank of the same number,
    or "kept" as it was. `recovered` says which shards could not be read, where another copy was. `elsewhere` are names
    that other ranks loaded and this one has not. `world_size` is how many ranks wrote the checkpoint, `digest` that of
    its manifest.
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
    renamed: Mapping[str, str] = field(default_factory=dict)
    private: Mapping[str, str] = field(default_factory=dict)
    recovered: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    world_size: int = 0
    digest: str = ""


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
    names: Renames = field(default_factory=Renames)
    private: str = MAPPED
    process_group: Any = None
    memory: int = DEFAULT_BUDGET
    progress: Tell | None = None


def load(path: str | os.PathLike[str], into: Any, options: Options, silence: float) -> tuple[LoadResult, Manifest]:
    """Fill `into` in place from a checkpoint, all ranks together; one rank's failure raises on all.

    Another rank's failure is a LoadError here; this rank's own keeps its type. Both say that `into` is undefined, once
    the first byte was on its way.
    """
    channel = group.channel(silence)
    with channel.turn():
        return _load(path, into, options, channel)


def _load(path: str | os.PathLike[str], into: Any, options: Options, channel: Channel) -> tuple[LoadResult, Manifest]:
    attempt = channel.attempt("load")
    job = None
    try:
        before_mutation()  # what a lazy save has still to copy is overwritten here, and it would not notice
        _refuse_group(options.process_group, channel.rank, channel.world_size)
        folder, manifest = _agree_on(path, attempt, channel.rank, options.process_group is not None)
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
        theirs.cause = agreed.cause
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


def _refuse_group(given: object, rank: int, world: int) -> None:
    """Raise PlanError [P-AGREE] unless a process group is of all ranks, in their order."""
    if given is None:
        return
    whole = isinstance(given, dist.ProcessGroup) and (given.rank(), given.size()) == (rank, world)
    if not whole:
        raise PlanError(
            "process_group is not a group of all ranks",
            rule="P-AGREE",
            expected=f"a torch.distributed.ProcessGroup of {world} ranks",
            found=f"{given.size()} ranks" if isinstance(given, dist.ProcessGroup) else repr(given)[:80],
            advice="give dist.group.WORLD, or dist.new_group(backend='gloo') where that moves no CPU tensors",
        )


def _agree_on(path: str | os.PathLike[str], attempt: Attempt, rank: int, grouped: bool) -> tuple[str, Manifest]:
    """Return the checkpoint all ranks load: rank 0 resolves the path once, the others must find the same manifest.

    Raises PlanError [P-AGREE] where only some give a process group: they would wait in it for the others.
    """
    if rank == 0:
        folder, manifest = load_manifest(path)
        attempt.announce("open", msgpack.packb([os.path.basename(folder), manifest.digest, grouped]))
        return folder, manifest
    name, digest, all_grouped = msgpack.unpackb(attempt.await_("open"))
    if grouped != all_grouped:
        has = "has" if all_grouped else "has not"
        raise PlanError(f"process_group must be given on every rank or on none: rank 0 {has} given it", rule="P-AGREE")
    base = plain(path)
    beside = os.path.join(base, name)
    folder, manifest = load_manifest(beside if is_folder(beside) else base)
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
        self.terms = Terms(rank, world, asked_for(options.only, options.skip), options.names, options.private)
        self.pool: Pool = shared_pool(options.memory, manifest.block_size)
        self.comparison = Comparison(self.opened, rank, options.cast, exact=options.exact)
        self.begun = False  # whether something of `into` may have changed
        self.elsewhere: tuple[str, ...] = ()

    def run(self, attempt: Attempt) -> LoadResult:
        """Compare, then fill, then replace values and tell objects; returns what was done."""
        same_world = self.manifest.world_size == self.world
        if self.options.exact and not same_world:
            raise self._another_world()
        real = materialize(self.into, self.options.materialize, self.terms.wanted, self._known())
        self.begun = bool(real)
        found, left = self._match(attempt, same_world)
        chosen = self._select(found, left)
        self._replaceable(chosen, found.matched)
        chosen = self._review(found.captured, chosen)
        filling = self._wants(found, chosen)
        self.begun = True
        recovered = [] if found.book.damage is None else [str(found.book.damage)]
        nbytes = self._move(filling, found.book.own, attempt, recovered)
        self._finish(found, chosen)
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
            {n: s for n in chosen.names if (s := self.terms.names.of(n)) != n},
            {**dict.fromkeys(found.mapped, "mapped"), **dict.fromkeys(found.kept, "kept")},
            tuple(recovered),
            self.elsewhere,
            self.manifest.world_size,
            self.manifest.digest,
        )

    def _another_world(self) -> PlanError:
        return PlanError(
            "the checkpoint was written by another number of ranks, and exact=True asks for the same",
            rule="R-WORLD",
            where=Where(self.opened.folder),
            expected=f"{self.manifest.world_size} ranks",
            found=f"{self.world} ranks",
            advice=f"start the job with {self.manifest.world_size} ranks, or load without exact=True",
        )

    def _known(self) -> Callable[[str], bool]:
        """Return what tells whether the checkpoint has a tensor of this name, in whatever form."""
        routes = Routes(self.manifest, {}, self.options.names)
        return lambda name: routes.find(name) is not None

    # ---- what belongs together ---------------------------------------------------------------------------------------

    def _match(self, attempt: Attempt, same_world: bool) -> tuple[Match, tuple[str, ...]]:
        """Return the state beside the checkpoint, and what of that nobody asked for.

        Where every rank finds just its own names in its own shard, that is all that is read; a rank that does not lets
        all look at the whole checkpoint.
        """
        narrow = None
        if same_world and not self.options.names:
            narrow = self._narrow()
        fits = narrow is not None and (self.options.exact or narrow.fits(self.terms.wanted))
        if everyone(attempt, self.rank, self.world, "fits", fits):
            assert narrow is not None
            return narrow, tuple(n for n in narrow.stored if n not in narrow.here)
        wide = match(self.opened, self.into, self.terms, wide=True)
        mine = [*wide.unused()]
        nobody = unused_by_all(attempt, self.rank, self.world, mine)
        self.elsewhere = wide.left([here and not all_ for here, all_ in zip(mine, nobody, strict=True)])
        return wide, wide.left(nobody)

    def _narrow(self) -> Match | None:
        """Return the state beside this rank's own shard; None where that cannot be read and others have copies."""
        try:
            return match(self.opened, self.into, self.terms, wide=False)
        except (IntegrityError, ShardError):
            if self.manifest.copies < 2 or self.options.exact:
                raise
            return None

    def _select(self, found: Match, left: tuple[str, ...]) -> Selection:
        o, kept = self.options, frozenset(found.kept)
        return select(
            tuple(n for n in found.here if n not in kept),
            tuple(n for n in found.matched if n in found.here),
            only=o.only,
            skip=o.skip,
            missing=o.missing,
            unexpected=o.unexpected,
            manifest=self.manifest,
            left=left,
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

    # ---- filling -----------------------------------------------------------------------------------------------------

    def _wants(self, found: Match, chosen: Selection) -> list[Want]:
        faults: list[PlanError] = []
        filling: list[Want] = []
        for name in chosen.names:
            if not isinstance(found.matched[name], TensorRef):
                continue
            leaf, route = found.captured.leaves[name], found.route(name)
            fault = self.comparison.fault(name, route, leaf)
            if fault is not None:
                faults.append(fault)
            else:
                filling += wants(route, leaf, self.rank, local=leaf.entry.shape is None)
        if faults:
            raise together(faults)
        return filling

    def _move(self, filling: list[Want], own: bool, attempt: Attempt, recovered: list[str]) -> int:
        """Fill everything: by exchange where a process group is given and any rank needs another's shard."""
        if self.options.process_group is not None and self.world > 1:
            at_home = all(r.source == self.rank for r in requests(filling, Locator(self.manifest, self.rank)))
            if not everyone(attempt, self.rank, self.world, "home", at_home):
                peers = Peers(self.options.process_group, attempt)
                try:
                    return exchange(self.opened, filling, peers, self.pool, self.rank)
                except ExchangeEnded as e:
                    if self.manifest.copies < 2:
                        if isinstance(e.error, LoadError):
                            everyone(attempt, self.rank, self.world, "exchanged", False)  # the rank at fault says why
                        raise e.error from None
                    recovered.append(str(e.error))  # now each rank reads for itself, from other copies where it must
        return fetch(
            self.opened,
            filling,
            self.pool,
            prefer=self.rank if own else None,
            progress=self._progress(filling, attempt),
            recovered=recovered,
        )

    def _progress(self, filling: list[Want], attempt: Attempt) -> Callable[[int], None]:
        """Return what is told of bytes read: this rank's sign of life, and whoever asked to be shown."""
        if self.options.progress is None:
            return attempt.progress
        tensors = self.manifest.tensors
        total = sum(need.box.numel * dtype(tensors[need.name].dtype).itemsize for need, _ in filling)
        return Count(total, self.options.progress, attempt.progress)

    def _finish(self, found: Match, chosen: Selection) -> None:
        """Zero what is padding, put this rank's Python values in their containers, and tell the objects."""
        for name in chosen.names:
            leaf = found.captured.leaves.get(name)
            if leaf is not None and leaf.padding is not None:
                leaf.padding.zero_()  # padding is not state
            if leaf is not None and isinstance(found.matched[name], TensorRef):
                clear_padding(found.route(name), leaf)
        values = {
            name: objects.unpack(objects.pack(found.matched[name], encode=encode_value), decode=decode_value)
            for name in chosen.names
            if not isinstance(found.matched[name], TensorRef)
        }
        settle(self.into, found.captured.opened, values, frozenset(chosen.names))

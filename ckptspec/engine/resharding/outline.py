"""Owns what the result of a reshard will be, before its first byte: tables, states, and each shard's plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from ckptspec.check.manifests import check_manifest
from ckptspec.engine.resharding.fitting import Fitting
from ckptspec.engine.resharding.growing import Growing
from ckptspec.engine.resharding.origin import Origin
from ckptspec.engine.resharding.runs import Run
from ckptspec.engine.resharding.tables import Chunk, Table
from ckptspec.engine.saves.writer import ShardPlan, Stored, plan_shard
from ckptspec.errors import CkptspecError, PlanError, Where
from ckptspec.format import shard
from ckptspec.format.box import Box, intersect
from ckptspec.format.digest import ALGORITHMS
from ckptspec.format.dtypes import dtype
from ckptspec.format.holding import Placement
from ckptspec.format.layout import BoxesLayout
from ckptspec.format.manifest import Manifest, ShardEntry, TensorEntry
from ckptspec.format.names import shard_path
from ckptspec.format.objects import TensorRef, pack, parts
from ckptspec.format.placement import resolve
from ckptspec.planner.routes import Strand
from ckptspec.planner.strips import Land, Part, Strip, strips
from ckptspec.planner.views import View


@dataclass(frozen=True)
class Form:
    """How the result is stored: copies, and the digest of its blocks."""

    copies: int
    block: str
    block_size: int

    def __post_init__(self) -> None:
        if not (1 <= self.copies <= 64 and 64 <= self.block_size <= 1 << 30 and self.block in ALGORITHMS):
            raise ValueError(f"no checkpoint has {self.copies} copies, {self.block} of {self.block_size} bytes")


class _Nowhere:
    """A holding for plans: where the bytes come from is not the plan's concern, so nobody may ask for them."""

    def view(self, box: Box) -> memoryview | None:
        raise CkptspecError("a plan of a shard holds no bytes")

    def fill(self, box: Box, out: memoryview) -> None:
        raise CkptspecError("a plan of a shard holds no bytes")

    def scatter(self, box: Box, data: memoryview, strides: Any) -> None:
        raise CkptspecError("a plan of a shard takes no bytes")


@dataclass
class Outline:
    """The result: what every rank's shard holds and where, worked out of the fitting and the source's states."""

    fitting: Fitting
    origin: Origin
    form: Form
    tables: list[Table] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        d = self.fitting.destination
        self.world_size = d.world_size
        self._numbers = {name: i for i, name in enumerate(d.tensors)}
        self._placements: dict[str, tuple[Placement, frozenset[int]]] = {}
        self._check({})

    # ---- tables ------------------------------------------------------------------------------------------------------

    @cached_property
    def tensors(self) -> dict[str, TensorEntry]:
        """The tensors of the result: local ones that no rank has any more are not among them."""
        d, local = self.fitting.destination, self.fitting.local
        return {n: self._entry(n, e) for n, e in d.tensors.items() if n not in local or self._owners(local[n])}

    def _entry(self, name: str, entry: TensorEntry) -> TensorEntry:
        """Return an entry with a role: of a name that is new, the role of what it is made of."""
        held = self.fitting.destination.manifest.tensors
        if name in held or entry.role != "other":
            return entry
        sources = self.fitting.routes[name].sources if name in self.fitting.routes else (self.fitting.local[name],)
        return replace(entry, role=held[sources[0]].role) if sources else entry  # an empty one may come from nowhere

    def _owners(self, stored: str) -> list[int]:
        """Return the ranks of the result that have their own local tensor of this stored name."""
        shapes = self.origin.local_shapes
        return [rank for rank in range(self.world_size) if stored in shapes.get(rank, ())]

    @cached_property
    def aliases(self) -> dict[str, str]:
        """The aliases of the result."""
        return {name: to for name, to in self.fitting.destination.aliases.items() if to in self.tensors}

    @cached_property
    def growing(self) -> Growing:
        """What makes the states."""
        d, m = self.fitting.destination, self.origin.manifest
        places = {**dict(zip(self.tensors, self.tensors, strict=True)), **self.aliases}
        stored = {name: name if name in self.origin.forest.places else d.names.of(name) for name in places}
        return Growing(self.origin.forest, m.objects, places, self.fitting.objects, stored)

    @cached_property
    def objects(self) -> dict[str, str]:
        """The objects of the result by name, known once every state was made."""
        return dict(sorted(self.growing.made.items()))

    def manifest(self, objects: dict[str, str], shards: tuple[ShardEntry, ...], **head: Any) -> Manifest:
        """Return the manifest of the result with these objects, shards and fields of its head."""
        d, m = self.fitting.destination, self.origin.manifest
        used = {entry.layout for entry in self.tensors.values()}
        layouts = {name: x for name, x in d.layouts.items() if name in used}
        taken = {*self.tensors, *self.aliases, *objects}
        held = (self.tensors, self.aliases)
        omitted = {n: why for n, why in m.omitted.items() if n not in taken and not _below(n, *held)}
        return Manifest(
            step=m.step,
            world_size=self.world_size,
            run_id=m.run_id,
            wall_clock_seconds=m.wall_clock_seconds,
            copies=self.form.copies,
            block=self.form.block,
            block_size=self.form.block_size,
            meshes=d.meshes,
            layouts=layouts,
            shards=shards,
            tensors=self.tensors,
            objects=objects,
            flat_groups=d.flat_groups,
            aliases=self.aliases,
            omitted=omitted,
            **head,
        )

    def _check(self, objects: dict[str, str]) -> None:
        """Raise PlanError with the first rule that the result would break, before its first byte."""
        unit = "sha256:" + "0" * 64
        entries = tuple(ShardEntry(r, shard_path(r), 66, 1, 1, unit) for r in range(self.world_size))
        for finding in check_manifest(self.manifest(objects, entries, save_id="0" * 32)):
            if finding.severity == "error":
                where = replace(finding.where, file="target")
                raise PlanError(
                    f"no checkpoint can be as the target wants it: {finding.message}",
                    rule=finding.code,
                    where=where,
                    expected=finding.expected,
                    found=finding.found,
                )

    # ---- shards ------------------------------------------------------------------------------------------------------

    def lay_out(self, tick: Callable[[], None]) -> None:
        """Work out every shard's chunks and size, calling `tick` after each."""
        for rank in range(self.world_size):
            plan = self.plan(rank, "0" * 32)
            self.tables.append(Table(rank, plan.index, self._numbers, self.form.block_size))
            self.sizes.append(plan.nbytes)
            tick()
        for name, stored in self.fitting.objects.items():
            if self.origin.manifest.objects[stored] == "same" and stored not in self.origin.forest.same:
                message = "every shard that holds this object is lost"
                raise PlanError(message, rule="Q-REPLICA", where=Where(tensor=name))
        self._check(self.objects)

    def plan(self, rank: int, save_id: str) -> ShardPlan:
        """Return the plan of a rank's shard; raises StateError [P-STATE] for a state that is too large."""
        state = self.growing.state(rank, lambda tensor: self._holds(rank, tensor))
        header = shard.Header(
            save_id,
            self.origin.manifest.step,
            rank,
            self.world_size,
            self.form.block,
            self.form.block_size,
        )
        return plan_shard(header, list(self._stored(rank, state)), pack(state))

    def _stored(self, rank: int, state: Any) -> Iterator[Stored]:
        """Yield what the shard of `rank` stores, in the order of its state [T-HOLD]."""
        names = (part.name for _, part in parts(state) if type(part) is TensorRef)
        for name in dict.fromkeys(names):
            entry = self.tensors[name]
            if entry.shape is None:
                shape = self.origin.local_shapes[rank][self.fitting.local[name]]
                whole = Box.whole(shape)
                yield Stored(name, entry.dtype, shape, () if whole.empty else (whole,), _Nowhere())
                continue
            place, _ = self._placement(entry.layout)
            boxes = place.stored(entry.shape, dtype(entry.dtype).itemsize, name, self.form.copies, rank)
            if boxes:
                yield Stored(name, entry.dtype, entry.shape, boxes, _Nowhere())

    def _placement(self, layout: str) -> tuple[Placement, frozenset[int]]:
        if layout not in self._placements:
            d = self.fitting.destination
            place = resolve(d.layouts[layout], d.meshes)
            self._placements[layout] = place, frozenset(place.ranks())
        return self._placements[layout]

    def _holds(self, rank: int, name: str) -> bool:
        """Tell whether the state of a rank of the result refers to a tensor [S-REF]."""
        entry = self.tensors[name]
        if entry.shape is None:
            return self.fitting.local[name] in self.origin.local_shapes.get(rank, ())
        _, ranks = self._placement(entry.layout)
        if rank in ranks or not ranks:
            return True
        # A state may read what other ranks are listed for.
        listed = isinstance(self.fitting.destination.layouts[entry.layout], BoxesLayout)
        return listed and name in self.origin.forest.ranks.get(rank, ())

    # ---- strips ------------------------------------------------------------------------------------------------------

    def strips(self) -> list[Strip]:
        """Return all that is to be moved: what ranks share, then what is private to each."""
        wanted = [(name, self.fitting.routes[name]) for name in self.tensors if name in self.fitting.routes]
        found = [*strips(wanted, tuple(self.origin.manifest.tensors)), *self._private()]
        given = Counter[str]()
        for strip in found:
            for land in strip.lands:
                given[land.name] += prod(strip.shape if land.view is None else land.view.box.sizes)
        for name, _ in wanted:
            if given[name] != prod(self.tensors[name].shape or ()):
                message = "what the checkpoint has does not make up a wanted tensor"
                raise PlanError(message, rule="T-COVER", where=Where(tensor=name))
        return found

    def _private(self) -> Iterator[Strip]:
        for name, stored in self.fitting.local.items():
            for rank in self._owners(stored):
                shape = self.origin.local_shapes[rank][stored]
                strands = (Strand(stored, Box.whole(shape)),)
                yield Strip(self.tensors[name].dtype, shape, strands, (Land(name),), rank)

    def runs(self, part: Part) -> Iterator[Run]:
        """Yield where a part of a strip is to be written: the runs of every chunk that holds some of it."""
        for land in part.strip.lands:
            wanted = part.box if land.view is None else intersect(land.view.box, part.box)
            if wanted is None:
                continue
            runs = [run for chunk in self._chunks(part, land) for run in _runs(chunk, land, part.box)]
            if sum(run.box.numel for run in runs) < wanted.numel:  # each element has at least one place
                message = "the result's shards do not hold all of a wanted tensor"
                raise PlanError(message, rule="T-COVER", where=Where(tensor=land.name))
            yield from runs

    def _chunks(self, part: Part, land: Land) -> Iterator[Chunk]:
        number, entry = self._numbers[land.name], self.tensors[land.name]
        if entry.shape is None:
            assert part.strip.rank is not None
            yield from self.tables[part.strip.rank].of(number)
            return
        within = part.box
        if land.view is not None:
            box = intersect(land.view.box, part.box)
            if box is None:
                return
            start, stop = land.view.hull(box)
            within = Box((start,), (stop - start,))
        place, _ = self._placement(entry.layout)
        itemsize = dtype(entry.dtype).itemsize
        storers = place.storers(entry.shape, itemsize, land.name, self.form.copies, within)
        for rank in dict.fromkeys(rank for rank, _ in storers):
            for chunk in self.tables[rank].of(number):
                if intersect(chunk.box, within) is not None:
                    yield chunk


def _runs(chunk: Chunk, land: Land, within: Box) -> Iterator[Run]:
    """Yield the runs of a wanted chunk that a part of a strip goes to."""
    if land.view is None:
        box = intersect(chunk.box, within)
        if box is not None:
            yield Run(chunk, land.name, View(0, chunk.box), box)
        return
    start = chunk.box.offsets[0]
    for view in land.view.within(start, chunk.box.stops[0]):
        box = intersect(view.box, within)
        if box is not None:
            yield Run(chunk, land.name, View(view.start - start, view.box), box)


def _below(name: str, *tables: Any) -> bool:
    """Tell whether a name lies below one of the tables' names."""
    at = name.rfind("/")
    while at > 0:
        if any(name[:at] in table for table in tables):
            return True
        at = name.rfind("/", 0, at)
    return False

"""Owns what a checkpoint that is read as a whole says of itself: every shard's chunks, digests and state, opened once.

A shard that cannot be opened is lost: where other shards store copies the rest is still good, otherwise it is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ckptspec.engine.documents import TRAILER_NBYTES, open_shard
from ckptspec.engine.files import MEDIA
from ckptspec.engine.resharding.runs import Run
from ckptspec.engine.resharding.tables import Table
from ckptspec.engine.resharding.trees import Forest
from ckptspec.errors import CkptspecError, FormatError, IntegrityError, PlanError, Where
from ckptspec.format.box import intersect
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.manifest import Manifest
from ckptspec.planner.routes import Strand
from ckptspec.planner.strips import Part
from ckptspec.planner.transfers import Locator, Need
from ckptspec.planner.transfers import Part as Stored
from ckptspec.planner.views import View


class Damaged(Exception):  # noqa: N818 - it is caught and never shown
    """Bytes of a rank's shard are not what they were: of a tensor, or (None) of all of it; `reason` is the error."""

    def __init__(self, rank: int, tensor: str | None, reason: CkptspecError) -> None:
        super().__init__(str(reason))
        self.rank = rank
        self.tensor = tensor
        self.reason = reason


@dataclass
class Origin:
    """A checkpoint whose shards have all been opened: tables and digests by rank, states by name."""

    folder: str
    manifest: Manifest
    forest: Forest = field(default_factory=Forest)
    tables: dict[int, Table] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)
    local_shapes: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    lost: dict[int, CkptspecError] = field(default_factory=dict)
    nbytes_read: int = 0

    def __post_init__(self) -> None:
        self._numbers = {name: i for i, name in enumerate(self.manifest.tensors)}
        self._local = {name for name, entry in self.manifest.tensors.items() if entry.shape is None}

    def open(self, tick: Callable[[], None]) -> None:
        """Open every shard, calling `tick` after each; raises ShardError, IntegrityError or OSError.

        With copies a shard that cannot be read is noted in `lost`, and so is what of it had no copy.
        """
        for rank in range(self.manifest.world_size):
            try:
                document = self._document(rank)
            except (FormatError, IntegrityError) as e:
                if self.manifest.copies == 1:
                    raise
                self.lost[rank] = e
            else:
                self._take(rank, document)
            tick()
        if not self.tables:
            raise next(iter(self.lost.values()))

    def _document(self, rank: int) -> ShardDocument:
        entry = self.manifest.shard(rank)
        try:
            return open_shard(self.folder, entry, self.manifest, numpy=False)
        except OSError as e:
            if e.errno not in MEDIA:
                raise
            raise unreadable(entry.path, rank, e) from e

    def _take(self, rank: int, document: ShardDocument) -> None:
        """Keep what is needed of a shard: the Index itself is ten times as large."""
        index, entry = document.index, self.manifest.shard(rank)
        self.forest.add(rank, document.state, self.manifest.objects)
        self.tables[rank] = Table(rank, index, self._numbers, self.manifest.block_size)
        self.digests[rank] = index.digests
        self.local_shapes[rank] = {n: s for n, s in zip(index.names, index.shapes, strict=True) if n in self._local}
        self.nbytes_read += index.header_nbytes + entry.index_nbytes + index.state.nbytes + TRAILER_NBYTES

    def path(self, rank: int) -> str:
        """Return the path of a rank's shard."""
        return os.path.join(self.folder, self.manifest.shard(rank).path)

    def runs(self, part: Part, without: frozenset[tuple[int, str | None]]) -> Iterator[Run]:
        """Yield what is stored of a part of a strip, each element once, read from no (rank, tensor) of `without`.

        Raises PlanError [Q-REPLICA] where no copy is left, Damaged where a shard does not hold what its layout says.
        """
        gone = frozenset((rank, None) for rank in self.lost)
        locator = Locator(self.manifest, without=without | gone)
        for strand in part.strip.strands:
            box = intersect(strand.box, part.box)
            if box is None:
                continue
            need = Need(strand.source, box, part.strip.rank, strand.view)
            for stored in self._stored(need, locator):
                yield from self._of(locator.choose(stored), strand, stored)

    def _stored(self, need: Need, locator: Locator) -> Iterable[Stored]:
        return locator.parts(need) if need.rank is None else (Stored(need, need.box, (need.rank,)),)

    def _of(self, rank: int, strand: Strand, stored: Stored) -> Iterator[Run]:
        """Yield what the shard of `rank` stores of one part of a strand."""
        found = 0
        for chunk in self.tables[rank].of(self._numbers[strand.source]):
            shared = intersect(chunk.box, stored.box)
            if shared is None:
                continue
            found += shared.numel
            if strand.view is None:
                yield Run(chunk, strand.source, View(0, chunk.box), shared)
                continue
            for view in strand.view.within(shared.offsets[0], shared.stops[0]):
                box = intersect(view.box, stored.need.box)
                if box is not None:
                    yield Run(chunk, strand.source, View(view.start - chunk.box.offsets[0], view.box), box)
        if found != stored.box.numel:
            where = Where(self.manifest.shard(rank).path, tensor=strand.source, rank=rank)
            message = "the shard does not hold the part that its layout gives it"
            expected = f"{stored.box.numel} elements"
            fault = PlanError(message, rule="T-COVER", where=where, expected=expected, found=str(found))
            raise Damaged(rank, strand.source, fault)


def unreadable(file: str, rank: int, error: OSError) -> IntegrityError:
    """Return the error [B-READ] for bytes that the storage does not give back."""
    where = Where(file, rank=rank)
    return IntegrityError("the storage cannot read the file", rule="B-READ", where=where, found=error.strerror)

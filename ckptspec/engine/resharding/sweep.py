"""Owns the walk of a reshard through its units within a budget: one batch is read while the one before is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, zip_longest

from ckptspec.engine.pool import DEFAULT_BUFFER, LEAST_BUFFER, Pool, Task, default_threads
from ckptspec.engine.resharding.batches import LEAD, Batch, batches
from ckptspec.engine.resharding.blocks import Blocks
from ckptspec.engine.resharding.carries import Carries, Half
from ckptspec.engine.resharding.descriptors import Descriptors
from ckptspec.engine.resharding.gathering import Gathered, Gathering
from ckptspec.engine.resharding.origin import Damaged, Origin
from ckptspec.engine.resharding.outline import Outline
from ckptspec.engine.resharding.runs import Run
from ckptspec.engine.resharding.scattering import Scattering
from ckptspec.errors import CkptspecError, PlanError
from ckptspec.planner.strips import Part, Unit

ENOUGH = 64 << 20  # bytes of a half for few ranks: fresh pages cost more than a second round through warm ones
PARTS = 4  # of the budget: two halves to read into, carried blocks, and the threads' buffers
LEAST_BLOCKS = 4  # of the source that a half must hold: one element may lie in two blocks


@dataclass(frozen=True)
class Budget:
    """A number of bytes of memory divided among halves of `room`, `slots` carried blocks, and threads' buffers."""

    room: int
    slots: int
    buffer: int
    threads: int

    @classmethod
    def of(cls, memory: int, source_block: int, target_block: int) -> Budget:
        """Return the division of `memory` bytes; raises ValueError naming the least that works."""
        part = memory // PARTS
        least = max(LEAST_BLOCKS * source_block, target_block + 2 * LEAD, LEAST_BUFFER)
        if part < least:
            raise ValueError(f"memory of {memory} bytes is too small: these blocks need {least * PARTS}")
        buffer = max(min(DEFAULT_BUFFER, part // 2), target_block + 2 * LEAD, LEAST_BUFFER)
        threads = max(1, min(default_threads(), part // buffer))
        return cls(part, part // source_block, buffer, threads)


@dataclass(frozen=True)
class Recovered:
    """What was read from another copy: the rank and tensor (None: its whole shard) it should come from, and why not."""

    rank: int
    tensor: str | None
    reason: str


@dataclass
class Account:
    """What a sweep moved, in bytes, and what it got from other copies."""

    nbytes_read: int = 0
    nbytes_written: int = 0
    dropped_blocks: int = 0
    recovered: dict[tuple[int, str | None], Recovered] = field(default_factory=dict)


class Sweep:
    """Moves units from the origin into the files of the outline; `finished` is told which are written, in order."""

    def __init__(
        self,
        origin: Origin,
        outline: Outline,
        files: Descriptors,
        blocks: Blocks,
        budget: Budget,
        progress: Callable[[int, int], None],
    ) -> None:
        self._origin = origin
        self._outline = outline
        self._blocks = blocks
        self._budget = budget
        self.pool = Pool(budget.threads * budget.buffer, budget.buffer, budget.threads)
        self._carries = Carries(origin.manifest.block_size, budget.slots)
        self._gathering = Gathering(origin, self._carries, progress)
        block = outline.form.block_size
        self._scattering = Scattering(outline.tables, files, blocks, block, progress)
        m = origin.manifest
        least = LEAST_BLOCKS * m.block_size
        enough = max(ENOUGH, LEAST_BLOCKS * m.block_size * max(m.world_size, outline.world_size))
        self._room = min(budget.room, enough, m.nbytes + least)
        self._halves = [Half(self._room), Half(self._room)]
        self._planned = 0
        self._reading: set[int] = set()
        self._without: dict[int, set[tuple[int, str | None]]] = {}
        self._reasons: dict[tuple[int, str | None], CkptspecError] = {}
        self.account = Account(recovered={(r, None): Recovered(r, None, str(e)) for r, e in origin.lost.items()})

    @property
    def dirty(self) -> set[int]:
        """The ranks whose files hold bytes that are not flushed."""
        return self._scattering.dirty

    @property
    def nbytes_written(self) -> int:
        """The bytes written so far."""
        return self._scattering.nbytes

    def run(self, units: Sequence[tuple[int, Unit]], finished: Callable[[list[int]], None]) -> Account:
        """Move the (number, unit)s; raises IntegrityError, PlanError [T-COVER], OSError.

        What cannot be read is taken from another copy where there is one; the units that were under way begin again.
        """
        left = dict(units)
        try:
            while left:
                try:
                    self._walk(left, finished)
                except Damaged as e:
                    self._note(e)
        finally:
            self._gathering.close()
        self.account.nbytes_read = self._gathering.nbytes
        self.account.nbytes_written = self._scattering.nbytes
        self.account.dropped_blocks = self._carries.dropped
        return self.account

    def _note(self, damage: Damaged) -> None:
        """Take the damaged tensor from another copy from now on; raises the damage where there can be none."""
        if self._origin.manifest.copies == 1:
            raise damage.reason from damage
        key = (damage.rank, damage.tensor)
        for number in self._reading | {self._planned}:
            self._without.setdefault(number, set()).add(key)
        self._reasons.setdefault(key, damage.reason)
        self.account.recovered.setdefault(key, Recovered(damage.rank, damage.tensor, str(damage.reason)))
        self._carries.clear()
        self._blocks.forget()

    def _runs(self, number: int, part: Part) -> tuple[Sequence[Run], Sequence[Run]]:
        self._planned = number
        without = self._without.get(number, set())
        try:
            return list(self._origin.runs(part, frozenset(without))), list(self._outline.runs(part))
        except PlanError as e:
            if e.rule != "Q-REPLICA":
                raise
            raise self._first_reason(without) or e from e

    def _first_reason(self, without: set[tuple[int, str | None]]) -> CkptspecError | None:
        """Return why there is no copy left: what was wrong with the one that was read first."""
        return next((self._reasons[key] for key in without), next(iter(self._origin.lost.values()), None))

    def _walk(self, left: dict[int, Unit], finished: Callable[[list[int]], None]) -> None:
        """Move what is left, and take from `left` what was written."""
        plan = batches(list(left.items()), self._runs, self._origin.manifest.block_size, self._room)
        self._reading = set()
        batch = next(plan, None)
        before: tuple[Batch, Gathered] | None = None
        halves = cycle(self._halves)
        while batch is not None or before is not None:
            writes = self._scattering.tasks(*before, self._budget.buffer) if before is not None else iter(())
            gathered, reads, ahead = self._begin(batch, next(halves), plan)
            self.pool.run(chain([ahead], _alternating(reads, writes)))
            self._gathering.keep(gathered)
            if before is not None and before[0].done:
                for number in before[0].done:
                    del left[number]
                finished(before[0].done)
            before = None if batch is None else (batch, gathered)
            batch = ahead.found

    def _begin(self, batch: Batch | None, half: Half, plan: Iterator[Batch]) -> tuple[Gathered, Iterator[Task], _Ahead]:
        """Return where a batch's windows will be, the tasks that read them, and the one that plans the next batch."""
        self._reading = batch.units if batch is not None else set()
        if batch is None:
            return {}, iter(()), _Ahead(iter(()))
        half.clear()
        gathered, reads = self._gathering.plan(batch, half)
        return gathered, reads, _Ahead(plan)


class _Ahead:
    """The task that plans the next batch while this one is read."""

    def __init__(self, plan: Iterator[Batch]) -> None:
        self._plan = plan
        self.found: Batch | None = None

    def __call__(self, buffer: memoryview) -> None:
        self.found = next(self._plan, None)


def _alternating(one: Iterator[Task], other: Iterator[Task]) -> Iterator[Task]:
    """Yield tasks of both by turns: reading waits for the disk while writing keeps the processor busy."""
    for pair in zip_longest(one, other):
        yield from (task for task in pair if task is not None)

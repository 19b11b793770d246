"""Owns the reading of a reshard's windows: whole blocks, each verified before anything is made of it, each counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ckptspec.engine.files import MEDIA, read_range
from ckptspec.engine.pool import Task
from ckptspec.engine.resharding.batches import Batch, Window
from ckptspec.engine.resharding.carries import Carries, Filled, Half, windows
from ckptspec.engine.resharding.descriptors import Descriptors
from ckptspec.engine.resharding.origin import Damaged, Origin, unreadable
from ckptspec.errors import IntegrityError, Where
from ckptspec.format.digest import algorithm
from ckptspec.storage import local
from ckptspec.storage.base import is_url

PART = 1 << 20  # of a large window, that one thread reads and verifies at a time
SMALL = 1 << 18  # bytes of a window that is read together with its neighbours
RUN = 4 << 20  # bytes of such neighbours
GAP = 8 << 10  # bytes between them that are read along: frames, mostly

Gathered = Mapping[tuple[int, int], Sequence[Filled]]


@dataclass
class _Region:
    """Neighbouring windows in one range of a file, from byte `at` on; `data` is all of the range."""

    at: int
    data: memoryview
    filled: list[Filled]


class Gathering:
    """Reads the windows of batches into memory; `nbytes` counts what storage was asked for."""

    def __init__(self, origin: Origin, carries: Carries, progress: Callable[[int, int], None]) -> None:
        m = origin.manifest
        self._origin = origin
        self._carries = carries
        self._progress = progress
        self._block = m.block_size
        self._algorithm = algorithm(m.block)
        self._files = Descriptors(self._open)
        self._lock = threading.Lock()
        self._spare = 0
        self.nbytes = 0

    def _open(self, rank: int) -> int:
        return local.open_read(self._origin.path(rank))

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def plan(self, batch: Batch, half: Half) -> tuple[Gathered, Iterator[Task]]:
        """Return where each chunk's windows will be in `half`, and the tasks that read them there.

        A task raises Damaged where bytes are not what they were.
        """
        found: dict[tuple[int, int], list[Filled]] = {}
        regions: list[_Region] = []
        self._spare = half.left - batch.nbytes  # for gaps: what windows take was counted
        for window in windows(batch):
            filled = self._place(window, half, regions)
            found.setdefault(window.chunk.key, []).append(filled)
        return found, (task for region in regions for task in self._tasks(region))

    def keep(self, gathered: Gathered) -> None:
        """Hold what later windows begin with."""
        for several in gathered.values():
            for filled in several:
                self._carries.keep(filled)

    def _place(self, window: Window, half: Half, regions: list[_Region]) -> Filled:
        start = window.first * self._block
        nbytes = min(window.last * self._block, window.chunk.nbytes) - start
        at = window.chunk.start + start
        last = regions[-1] if regions else None
        gap = self._gap(last, window, at, nbytes)
        if last is not None and gap is not None:
            half.take(gap)
            self._spare -= gap
        filled = Filled(window, start, half.take(nbytes))
        self._carries.take(filled)
        if last is not None and gap is not None and not filled.carried:
            begin = len(half.taken) - nbytes - gap - len(last.data)
            last.data = half.taken[begin:]
            last.filled.append(filled)
        else:
            regions.append(_Region(at, filled.data, [filled]))
        return filled

    def _gap(self, last: _Region | None, window: Window, at: int, nbytes: int) -> int | None:
        """Return the bytes between a region and a window that is to be read with it, None for one that is not."""
        if last is None or last.filled[0].window.chunk.rank != window.chunk.rank or last.filled[0].carried:
            return None
        gap = at - (last.at + len(last.data))
        small = nbytes < SMALL and len(last.data) + nbytes < RUN and len(last.filled[-1].data) < SMALL
        return gap if small and 0 <= gap <= min(GAP, self._spare) else None

    def _tasks(self, region: _Region) -> Iterator[Task]:
        if len(region.filled) > 1:
            yield partial(self._read_region, region)
            return
        (filled,) = region.filled
        part = max(1, PART // self._block) * self._block
        for low in range(filled.carried, len(filled.data), part):
            yield partial(self._read_part, filled, low, min(low + part, len(filled.data)))

    def _read_region(self, region: _Region, buffer: memoryview) -> None:
        self._read(region.filled[0].window, region.data, region.at)
        for filled in region.filled:
            self._verify(filled, 0, len(filled.data))

    def _read_part(self, filled: Filled, low: int, high: int, buffer: memoryview) -> None:
        self._read(filled.window, filled.data[low:high], filled.window.chunk.start + filled.start + low)
        self._verify(filled, low, high)

    def _read(self, window: Window, data: memoryview, at: int) -> None:
        rank = window.chunk.rank
        file = self._origin.manifest.shard(rank).path
        try:
            if is_url(self._origin.folder):
                read_range(self._origin.path(rank), data, at)
            else:
                with self._files.at(rank) as fd:
                    local.read_at(fd, data, at)
        except (FileNotFoundError, local.ShortReadError) as e:
            message = "the shard has become shorter, or is gone"
            where = Where(file, tensor=window.tensor, rank=rank, range=(at, at + len(data)))
            raise Damaged(rank, None, IntegrityError(message, rule="S-NBYTES", where=where)) from e
        except OSError as e:
            if e.errno not in MEDIA:
                raise
            raise Damaged(rank, window.tensor, unreadable(file, rank, e)) from e
        with self._lock:
            self.nbytes += len(data)
        self._progress(len(data), 0)

    def _verify(self, filled: Filled, low: int, high: int) -> None:
        """Compare bytes [low, high) of a window, which begin a block, with their digests [Q-VERIFY]."""
        chunk, size = filled.window.chunk, self._algorithm.size
        digests = self._origin.digests[chunk.rank]
        for at in range(low, high, self._block):
            data = filled.data[at : min(at + self._block, high)]
            slot = (chunk.block + (filled.start + at) // self._block) * size
            if self._algorithm.of(data) != digests[slot : slot + size]:
                raise self._differs(filled.window, filled.start + at, len(data))

    def _differs(self, window: Window, at: int, nbytes: int) -> Damaged:
        chunk, file = window.chunk, self._origin.manifest.shard(window.chunk.rank).path
        start = chunk.start + at
        where = Where(file, tensor=window.tensor, rank=chunk.rank, range=(start, start + nbytes))
        advice = "load an older step, or restore this file from a copy"
        error = IntegrityError("bytes differ from their digest", rule="B-DIGEST", where=where, advice=advice)
        return Damaged(chunk.rank, window.tensor, error)

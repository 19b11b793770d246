"""Owns the moving of bytes from shards into memory: coalesced, parallel, in budget, verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice

from ckptspec.engine.files import read_range
from ckptspec.engine.holding import Holding
from ckptspec.engine.pool import Pool, Task, turn
from ckptspec.engine.slabs import Slab, Wish, slabs
from ckptspec.errors import IntegrityError, Where
from ckptspec.format import shard
from ckptspec.format.box import Box
from ckptspec.format.dtypes import dtype
from ckptspec.planner.views import View
from ckptspec.storage import local
from ckptspec.storage.base import is_url

# Threads that take small parts in turn read the file almost in order, as the kernel's readahead likes it: from a cold
# disk 2.6 GB/s with parts of 1 MiB, 1.5 with 8 (tools/bench/NOTES.md).
PART = 1 << 20
GAP = 64 << 10  # reading a gap this small costs less than a second read
FAR_PART = 8 << 20  # out of a store, whose every answer takes long to begin
FAR_GAP = 1 << 20
OPEN_AT_ONCE = 256  # shards: few enough for the usual limit on a process's descriptors
Progress = Callable[[int], None]
Read = Callable[[memoryview, int], None]  # fills a view from an offset; ShortReadError, OSError


@dataclass(frozen=True)
class Source:
    """One shard to read from: its path, its name in messages, the rank that wrote it, header and index."""

    path: str
    file: str
    rank: int
    header: shard.Header
    index: shard.Index


@dataclass(frozen=True)
class Transfer:
    """Move `box` out of chunk row `chunk` of the source into `holding`.

    The box is in the coordinates of the chunk's tensor and inside the chunk; with `view`, in those of the view, whose
    run of elements is inside the chunk.
    """

    chunk: int
    box: Box
    holding: Holding
    view: View | None = None


def execute(work: Iterable[tuple[Source, Sequence[Transfer]]], pool: Pool, progress: Progress | None = None) -> None:
    """Run every transfer; on return all delivered bytes have been verified against their block digests [Q-VERIFY].

    Raises IntegrityError [B-DIGEST] naming file, tensor and byte range, or OSError; the destination is then undefined.
    """
    several = iter(work)
    while batch := [*islice(several, OPEN_AT_ONCE)]:
        with reading(batch, pool.buffer_nbytes, progress) as tasks:
            pool.run(tasks)


@contextmanager
def reading(
    work: Iterable[tuple[Source, Sequence[Transfer]]], buffer_nbytes: int, progress: Progress | None = None
) -> Iterator[Iterator[Task]]:
    """Open every source and give the tasks that run its transfers, in the order of the files; they close at the end."""
    opened: list[int] = []
    try:
        readers = []
        for source, transfers in work:
            if is_url(source.path):
                read: Read = partial(read_range, source.path)
            else:
                opened.append(local.open_read(source.path))
                read = partial(local.read_at, opened[-1])
            readers.append(_Reader(read, source, transfers, progress or _ignore))
        yield (task for reader in readers for task in reader.tasks(buffer_nbytes))
    finally:
        for fd in opened:
            os.close(fd)


def _ignore(nbytes: int) -> None:
    """Report progress to nobody."""


def row_major(sizes: Sequence[int]) -> list[int]:
    """Return row-major strides in elements."""
    out, stride = [], 1
    for n in reversed(sizes):
        out.append(stride)
        stride *= n
    return out[::-1]


class _Reader:
    """The transfers from one open shard, cut into tasks."""

    def __init__(self, read: Read, source: Source, transfers: Sequence[Transfer], progress: Progress) -> None:
        self.read = read
        self.part, self.gap = (FAR_PART, FAR_GAP) if is_url(source.path) else (PART, GAP)
        self.source = source
        self.index = source.index
        self.transfers = sorted(transfers, key=lambda t: t.chunk)
        self.progress = progress
        self.block_size = source.header.block_size
        self.algorithm = shard.block_algorithm(source.header)
        self.first = self.index.block_offsets(self.block_size)
        self.itemsize = [dtype(name).itemsize for name in self.index.dtypes]

    def tasks(self, buffer_nbytes: int) -> Iterator[Task]:
        """Yield tasks in file order: runs of small chunks, parts of whole chunks in place, slabs of cut chunks."""
        run: list[Transfer] = []
        for row, several in groupby(self.transfers, key=lambda t: t.chunk):
            chunk = self.index.chunks[row]
            if chunk.nbytes >= shard.LARGE:
                yield from self._large(row, list(several), buffer_nbytes)
                continue
            if run and not self._joins(run, chunk, buffer_nbytes):
                yield partial(self._read_run, run)
                run = []
            run += several
        if run:
            yield partial(self._read_run, run)

    def _joins(self, run: list[Transfer], chunk: shard.ChunkRow, buffer_nbytes: int) -> bool:
        first, last = self.index.chunks[run[0].chunk], self.index.chunks[run[-1].chunk]
        near = chunk.start - (last.start + last.nbytes) <= self.gap
        return near and chunk.start + chunk.nbytes - first.start <= buffer_nbytes

    def _large(self, row: int, transfers: list[Transfer], buffer_nbytes: int) -> Iterator[Task]:
        """Yield the tasks of one large chunk: all of it in place, or whole blocks by way of a buffer."""
        chunk = self.index.chunks[row]
        if len(transfers) == 1 and transfers[0].box == chunk.box and transfers[0].view is None:
            view = transfers[0].holding.view(chunk.box)
            if view is not None:
                yield from self._in_place(row, view, 0)
                return
        wishes = [Wish(self._view(t), t.box, t.holding) for t in transfers]
        for slab in slabs(wishes, chunk.nbytes, self.itemsize[chunk.tensor], self.block_size, buffer_nbytes):
            if slab.place is None:
                yield partial(self._read_slab, row, slab)
            else:
                yield from self._in_place(row, slab.place, slab.low)

    def _view(self, t: Transfer) -> View:
        """Return the run of the chunk's own elements that the transfer's box is a part of."""
        chunk = self.index.chunks[t.chunk]
        return View(0, chunk.box) if t.view is None else View(t.view.start - chunk.box.offsets[0], t.view.box)

    def _in_place(self, row: int, view: memoryview, at: int) -> Iterator[Task]:
        """Yield reads of whole blocks, from byte `at` of a chunk on, to where they belong."""
        part = max(1, self.part // self.block_size) * self.block_size
        for i in range(0, len(view), part):
            yield partial(self._read_part, row, view[i : i + part], at + i)

    def _verify(self, row: int, data: memoryview, at: int) -> None:
        """Compare the blocks of `data`, at byte `at` (a block boundary) of chunk `row`, with their digests."""
        if at == 0 and len(data) <= self.block_size:  # one block, as most small chunks are
            slot = self.first[row] * self.algorithm.size
            if self.algorithm.of(data) == self.index.digests[slot : slot + self.algorithm.size]:
                return
        shard.check_blocks(self.index, self.source.header, row, data, self.source.file, at)

    def _read(self, view: memoryview, offset: int) -> None:
        try:
            self.read(view, offset)
        except local.ShortReadError as e:
            where = Where(self.source.file, rank=self.source.rank, range=(offset, offset + len(view)))
            raise IntegrityError(
                "the file ends before the bytes that its index lists",
                rule="S-NBYTES",
                where=where,
                expected=f"{e.expected} bytes",
                found=f"{e.found} bytes",
            ) from None

    def _read_part(self, row: int, view: memoryview, at: int, buffer: memoryview) -> None:
        start = self.index.chunks[row].start + at
        self._read(view, start)
        self._verify(row, view, at)  # while it is warm in the cache
        self.progress(len(view))

    def _read_run(self, run: list[Transfer], buffer: memoryview) -> None:
        first, last = self.index.chunks[run[0].chunk], self.index.chunks[run[-1].chunk]
        data = buffer[: last.start + last.nbytes - first.start]
        self._read(data, first.start)
        with turn:
            verified = -1
            for t in run:
                chunk = self.index.chunks[t.chunk]
                found = data[chunk.start - first.start : chunk.start - first.start + chunk.nbytes]
                if t.chunk != verified:
                    self._verify(t.chunk, found, 0)
                    verified = t.chunk
                self._deliver(t, chunk, found)
        self.progress(len(data))

    def _deliver(self, t: Transfer, chunk: shard.ChunkRow, found: memoryview) -> None:
        view = t.holding.view(t.box) if t.box == chunk.box and t.view is None else None
        if view is not None:
            view[:] = found  # under 262,144 bytes
            return
        run = self._view(t)
        start = run.hull(t.box)[0] * self.itemsize[chunk.tensor]
        t.holding.scatter(t.box, found[start:], row_major(run.box.sizes))

    def _read_slab(self, row: int, slab: Slab, buffer: memoryview) -> None:
        chunk = self.index.chunks[row]
        itemsize = self.itemsize[chunk.tensor]
        data = buffer[: slab.high - slab.low]
        self._read(data, chunk.start + slab.low)
        self._verify(row, data, slab.low)
        for view, box, holding in slab.pieces():
            start, stop = (e * itemsize - slab.low for e in view.hull(box))
            holding.scatter(box, data[start:stop], row_major(view.box.sizes))
        self.progress(len(data))

"""Owns the moving of bytes from shards into memory: coalesced, parallel, in budget, verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ckptspec.engine.holding import Holding
from ckptspec.engine.pool import Pool, Task, turn
from ckptspec.errors import IntegrityError, Where
from ckptspec.format import shard
from ckptspec.format.box import Box, long_axis
from ckptspec.format.dtypes import dtype
from ckptspec.storage import local

# Threads that take small parts in turn read the file almost in order, as the kernel's readahead likes it: from a cold
# disk 2.6 GB/s with parts of 1 MiB, 1.5 with 8 (tools/bench/NOTES.md).
PART = 1 << 20
GAP = 64 << 10  # reading a gap this small costs less than a second read
Progress = Callable[[int], None]


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
    """Move `box` (global coordinates, inside chunk row `chunk` of the source) into `holding`."""

    chunk: int
    box: Box
    holding: Holding


def execute(work: Iterable[tuple[Source, Sequence[Transfer]]], pool: Pool, progress: Progress | None = None) -> None:
    """Run every transfer; on return all delivered bytes have been verified against their block digests [Q-VERIFY].

    Raises IntegrityError [B-DIGEST] naming file, tensor and byte range, or OSError; the destination is then undefined.
    """
    opened: list[int] = []
    try:
        readers = []
        for source, transfers in work:
            fd = local.open_read(source.path)
            opened.append(fd)
            readers.append(_Reader(fd, source, transfers, progress or _ignore))
        pool.run(task for reader in readers for task in reader.tasks(pool.buffer_nbytes))
    finally:
        for fd in opened:
            os.close(fd)


def _ignore(nbytes: int) -> None:
    """Report progress to nobody."""


def _strides(sizes: Sequence[int]) -> list[int]:
    """Return row-major strides in elements."""
    out, stride = [], 1
    for n in reversed(sizes):
        out.append(stride)
        stride *= n
    return out[::-1]


def _element(chunk: Box, strides: Sequence[int], index: Sequence[int]) -> int:
    return sum((i - o) * s for i, o, s in zip(index, chunk.offsets, strides, strict=True))


def _halves(box: Box) -> tuple[Box, Box]:
    axis = long_axis(box)
    assert axis is not None  # a single element never exceeds a buffer
    half = box.sizes[axis] // 2

    def part(start: int, size: int) -> Box:
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += start
        sizes[axis] = size
        return Box(tuple(offsets), tuple(sizes))

    return part(0, half), part(half, box.sizes[axis] - half)


class _Reader:
    """The transfers from one open shard, cut into tasks."""

    def __init__(self, fd: int, source: Source, transfers: Sequence[Transfer], progress: Progress) -> None:
        self.fd = fd
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
        for t in self.transfers:
            chunk = self.index.chunks[t.chunk]
            if chunk.nbytes < shard.LARGE:
                if run and not self._joins(run, chunk, buffer_nbytes):
                    yield partial(self._read_run, run)
                    run = []
                run.append(t)
                continue
            view = t.holding.view(t.box) if t.box == chunk.box else None
            if view is None:
                yield from self._slabs(t, t.box, buffer_nbytes)
                continue
            part = max(1, PART // self.block_size) * self.block_size
            for at in range(0, chunk.nbytes, part):
                yield partial(self._read_part, t.chunk, view[at : at + part], at)
        if run:
            yield partial(self._read_run, run)

    def _joins(self, run: list[Transfer], chunk: shard.ChunkRow, buffer_nbytes: int) -> bool:
        first, last = self.index.chunks[run[0].chunk], self.index.chunks[run[-1].chunk]
        near = chunk.start - (last.start + last.nbytes) <= GAP
        return near and chunk.start + chunk.nbytes - first.start <= buffer_nbytes

    def _verify(self, row: int, data: memoryview, at: int) -> None:
        """Compare the blocks of `data`, at byte `at` (a block boundary) of chunk `row`, with their digests."""
        if at == 0 and len(data) <= self.block_size:  # one block, as most small chunks are
            slot = self.first[row] * self.algorithm.size
            if self.algorithm.of(data) == self.index.digests[slot : slot + self.algorithm.size]:
                return
        shard.check_blocks(self.index, self.source.header, row, data, self.source.file, at)

    def _read(self, view: memoryview, offset: int) -> None:
        try:
            local.read_at(self.fd, view, offset)
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
            for t in run:
                chunk = self.index.chunks[t.chunk]
                found = data[chunk.start - first.start : chunk.start - first.start + chunk.nbytes]
                self._verify(t.chunk, found, 0)
                self._deliver(t, chunk, found)
        self.progress(len(data))

    def _deliver(self, t: Transfer, chunk: shard.ChunkRow, found: memoryview) -> None:
        view = t.holding.view(t.box) if t.box == chunk.box else None
        if view is not None:
            view[:] = found  # under 262,144 bytes
            return
        strides = _strides(chunk.box.sizes)
        start = _element(chunk.box, strides, t.box.offsets) * self.itemsize[chunk.tensor]
        t.holding.scatter(t.box, found[start:], strides)

    def _slabs(self, t: Transfer, box: Box, buffer_nbytes: int) -> Iterator[Task]:
        """Yield reads of the whole blocks that cover `box`, each within a buffer."""
        chunk = self.index.chunks[t.chunk]
        strides, itemsize = _strides(chunk.box.sizes), self.itemsize[chunk.tensor]
        start = _element(chunk.box, strides, box.offsets) * itemsize
        stop = (_element(chunk.box, strides, [s - 1 for s in box.stops]) + 1) * itemsize
        low = start // self.block_size * self.block_size
        high = min(-(-stop // self.block_size) * self.block_size, chunk.nbytes)
        if high - low > buffer_nbytes:
            for half in _halves(box):
                yield from self._slabs(t, half, buffer_nbytes)
            return
        yield partial(self._read_slab, t, box, (low, high), (start, stop))

    def _read_slab(
        self, t: Transfer, box: Box, blocks: tuple[int, int], wanted: tuple[int, int], buffer: memoryview
    ) -> None:
        chunk = self.index.chunks[t.chunk]
        low, high = blocks
        data = buffer[: high - low]
        self._read(data, chunk.start + low)
        self._verify(t.chunk, data, low)
        t.holding.scatter(box, data[wanted[0] - low : wanted[1] - low], _strides(chunk.box.sizes))
        self.progress(len(data))

"""Owns the writing of one shard: plan, parallel writes, digests of the very bytes written, fsync."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from ckptspec.engine.holding import Holding
from ckptspec.engine.pool import Pool, Task, turn
from ckptspec.format import shard
from ckptspec.format.box import CHUNK_LIMIT, Box, pieces
from ckptspec.format.digest import Algorithm
from ckptspec.format.dtypes import dtype
from ckptspec.storage import local

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Stored:
    """One tensor this rank stores: name, dtype, global shape (local shape for a local tensor), boxes, and the bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    holding: Holding


@dataclass(frozen=True)
class Written:
    """What a hand-in says of a finished shard: size in bytes and its index's extent and sha256."""

    nbytes: int
    index_offset: int
    index_nbytes: int
    index_digest: str


@dataclass(frozen=True)
class ShardPlan:
    """Everything known before the first byte: index (digests still zero), and where each chunk's bytes are."""

    header: shard.Header
    header_bytes: bytes
    index: shard.Index
    index_bytes: bytes
    holdings: tuple[Holding, ...]
    state: bytes

    @property
    def nbytes(self) -> int:
        """The bytes of the whole shard."""
        return self.index.end + len(self.index_bytes) + shard.TRAILER.size


def plan_shard(header: shard.Header, stored: Sequence[Stored], state: bytes) -> ShardPlan:
    """Return the plan of a shard: chunks of at most 2^30 bytes in order of `stored`, then the state [S-CHUNK]."""
    boxes: list[tuple[int, Box, int]] = []
    holdings: list[Holding] = []
    for row, tensor in enumerate(stored):
        itemsize = dtype(tensor.dtype).itemsize
        for box in tensor.boxes:
            for piece in (box,) if 0 < box.numel * itemsize <= CHUNK_LIMIT else pieces(box, itemsize, CHUNK_LIMIT):
                boxes.append((row, piece, piece.numel * itemsize))
                holdings.append(tensor.holding)
    header_bytes = shard.encode_header(header)
    starts = shard.starts(len(header_bytes), [*(n for _, _, n in boxes), len(state)])
    chunks = tuple(shard.ChunkRow(row, box, at, n) for (row, box, n), at in zip(boxes, starts, strict=False))
    algorithm = shard.block_algorithm(header)
    index = shard.Index(
        tuple(t.name for t in stored),
        tuple(t.dtype for t in stored),
        tuple(t.shape for t in stored),
        chunks,
        shard.Extent(starts[-1], len(state)),
        len(header_bytes),
        algorithm.of(header_bytes),
        b"",
    )
    zeros = bytes(index.first_blocks(header.block_size)[-1] * algorithm.size)
    index = replace(index, digests=zeros)
    return ShardPlan(header, header_bytes, index, shard.encode_index(index), tuple(holdings), state)


def write_shard(
    path: str, plan: ShardPlan, pool: Pool, progress: Progress | None = None, also: Iterable[Task] = ()
) -> Written:
    """Write the shard durably at `path`, which must not exist, and return what a hand-in says of it.

    `also` are tasks that run beside the writing, in the same threads.

    Raises OSError as the disk gives it; the file is then left as it is, for the attempt's cleaning [P-EXCL] [P-FSYNC].
    """
    fd = local.create(path, plan.nbytes)
    with local.naming(path):
        return _written(fd, plan, pool, progress, also)


def _written(fd: int, plan: ShardPlan, pool: Pool, progress: Progress | None, also: Iterable[Task]) -> Written:
    try:
        job = _Job(fd, plan, progress or _ignore)
        pool.run(chain(job.tasks(pool.buffer_nbytes), also))
        index_bytes = plan.index_bytes[: -len(job.digests)] + job.digests if job.digests else plan.index_bytes
        sha = hashlib.sha256(index_bytes)
        trailer = shard.encode_trailer(shard.Trailer(plan.index.end, len(index_bytes), sha.digest()))
        local.write_at(fd, index_bytes + trailer, plan.index.end)
    except BaseException:
        os.close(fd)  # the attempt has failed: no fsync, no reuse of the file
        raise
    local.finish(fd)
    return Written(plan.nbytes, plan.index.end, len(index_bytes), "sha256:" + sha.hexdigest())


def _ignore(nbytes: int) -> None:
    """Report progress to nobody."""


@dataclass(frozen=True)
class _Payload:
    """One payload in file order: its extent, first block number, frame bytes before it, and its bytes' source."""

    extent: shard.Extent
    block: int
    lead_at: int
    lead: bytes
    box: Box | None
    itemsize: int
    source: Holding | bytes

    def view(self) -> memoryview | None:
        if isinstance(self.source, bytes):
            return memoryview(self.source)
        assert self.box is not None
        return self.source.view(self.box)


class _Job:
    """One shard being written: cuts it into tasks and collects block digests."""

    def __init__(self, fd: int, plan: ShardPlan, progress: Progress) -> None:
        self.fd = fd
        self.plan = plan
        self.progress = progress
        self.algorithm: Algorithm = shard.block_algorithm(plan.header)
        self.block_size = plan.header.block_size
        self.digests = bytearray(len(plan.index.digests))

    def payloads(self) -> Iterator[_Payload]:
        index = self.plan.index
        first = index.first_blocks(self.block_size)
        itemsize = [dtype(name).itemsize for name in index.dtypes]
        end = index.header_nbytes
        for i, extent in enumerate(index.extents):
            lead = shard.lead(end, extent)
            if i < len(index.chunks):
                row = index.chunks[i]
                yield _Payload(extent, first[i], end, lead, row.box, itemsize[row.tensor], self.plan.holdings[i])
            else:
                yield _Payload(extent, first[i], end, lead, None, 1, self.plan.state)
            end = extent.stop

    def tasks(self, buffer_nbytes: int) -> Iterator[Task]:
        """Yield tasks in file order: runs of header, frame and small payloads, and parts of large payloads."""
        start, items = 0, [(0, self.plan.header_bytes)]
        run: list[_Payload] = []
        for p in self.payloads():
            small = p.extent.nbytes < shard.LARGE
            if (p.extent.stop if small else p.extent.start) - start > buffer_nbytes:
                yield partial(self._write_run, start, items, run)
                start, items, run = p.lead_at, [], []
            items.append((p.lead_at, p.lead))
            if small:
                run.append(p)
                continue
            yield partial(self._write_run, start, items, run)
            yield from self._large(p, buffer_nbytes)
            start, items, run = p.extent.stop, [], []
        if items:
            yield partial(self._write_run, start, items, run)

    def _large(self, p: _Payload, buffer_nbytes: int) -> Iterator[Task]:
        view = p.view()
        if view is None:
            yield partial(self._write_copied, p)
            return
        part = max(1, buffer_nbytes // self.block_size) * self.block_size
        for at in range(0, len(view), part):
            yield partial(self._write_part, p, view, at, part)

    def _digest(self, p: _Payload, data: memoryview, at: int) -> None:
        size = self.algorithm.size
        slot = (p.block + at // self.block_size) * size
        self.digests[slot : slot + size] = self.algorithm.of(data)

    def _write_blocks(self, p: _Payload, data: memoryview, at: int) -> None:
        for i in range(0, len(data), self.block_size):
            block = data[i : i + self.block_size]
            self._digest(p, block, at + i)  # the block is then warm in the cache for the write
            local.write_at(self.fd, block, p.extent.start + at + i)

    def _write_part(self, p: _Payload, view: memoryview, at: int, nbytes: int, buffer: memoryview) -> None:
        data = view[at : at + nbytes]
        self._write_blocks(p, data, at)
        local.start_writeback(self.fd, p.extent.start + at, len(data))
        self.progress(len(data))

    def _write_copied(self, p: _Payload, buffer: memoryview) -> None:
        """Write a payload that must be copied first (strided, expanded or on a device), a buffer at a time."""
        assert p.box is not None
        assert not isinstance(p.source, bytes)
        at = used = 0
        room = max(p.itemsize, len(buffer) - self.block_size)
        for piece in pieces(p.box, p.itemsize, room):
            nbytes = piece.numel * p.itemsize
            if used + nbytes > len(buffer):
                at, used = self._flush(p, buffer, at, used)
            p.source.fill(piece, buffer[used : used + nbytes])
            used += nbytes
        self._write_blocks(p, buffer[:used], at)
        local.start_writeback(self.fd, p.extent.start, p.extent.nbytes)
        self.progress(p.extent.nbytes)

    def _flush(self, p: _Payload, buffer: memoryview, at: int, used: int) -> tuple[int, int]:
        whole = used // self.block_size * self.block_size
        self._write_blocks(p, buffer[:whole], at)
        rest = used - whole
        buffer[:rest] = bytes(buffer[whole:used])  # under one block
        return at + whole, rest

    def _write_run(self, start: int, items: list[tuple[int, bytes]], run: list[_Payload], buffer: memoryview) -> None:
        """Write one contiguous range: header, frame bytes and small payloads gathered into the buffer."""
        with turn:
            end = self._gather(start, items, run, buffer)
        if end > start:
            local.write_at(self.fd, buffer[: end - start], start)
            self.progress(end - start)

    def _gather(self, start: int, items: list[tuple[int, bytes]], run: list[_Payload], buffer: memoryview) -> int:
        """Fill the buffer with everything from byte `start` of the file on, and return the byte where it ends."""
        end = start
        for at, data in items:
            buffer[at - start : at - start + len(data)] = data
            end = at + len(data)
        for p in run:
            target = buffer[p.extent.start - start : p.extent.stop - start]
            view = p.view()
            if view is not None:
                target[:] = view
            else:
                assert p.box is not None
                assert not isinstance(p.source, bytes)
                p.source.fill(p.box, target)
            for i in range(0, p.extent.nbytes, self.block_size):
                self._digest(p, target[i : i + self.block_size], i)
            end = max(end, p.extent.stop)
        return end

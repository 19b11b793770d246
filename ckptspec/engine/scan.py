"""Owns hashing a whole shard against its index, in parallel and in bounded memory: all between header and index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Union

from ckptspec.check.registry import fault
from ckptspec.engine.files import File
from ckptspec.engine.pool import LEAST_BUFFER, Pool, Task
from ckptspec.errors import IntegrityError, Where
from ckptspec.format import shard
from ckptspec.format.manifest import ShardEntry
from ckptspec.format.report import Finding

PART = 8 << 20  # bytes read at once


@dataclass(frozen=True)
class Block:
    """One digest unit: its place in the file, the payload it belongs to, and its number among all digests."""

    start: int
    nbytes: int
    row: int
    digest: int


@dataclass(frozen=True)
class Frame:
    """The bytes between two payloads: their place, and what they must be."""

    start: int
    expected: bytes

    @property
    def nbytes(self) -> int:
        """The bytes of the frame."""
        return len(self.expected)


Item = Union[Block, Frame]


def items(index: shard.Index, block_size: int) -> Iterator[Item]:
    """Yield the frames and blocks of a shard in file order: they tile it from the end of the header to the index."""
    number = 0
    for row, ((start, expected), extent) in enumerate(zip(shard.frame(index), index.extents, strict=True)):
        yield Frame(start, expected)
        for at in range(0, extent.nbytes, block_size):
            yield Block(extent.start + at, min(block_size, extent.nbytes - at), row, number)
            number += 1


def batches(stream: Iterable[Item], limit: int) -> Iterator[list[Item]]:
    """Yield the items in runs of at most `limit` bytes (a longer item by itself), each one read."""
    batch: list[Item] = []
    nbytes = 0
    for item in stream:
        if batch and nbytes + item.nbytes > limit:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += item.nbytes
    if batch:
        yield batch


def buffer_size(indexes: Iterable[shard.Index], block_size: int) -> int:
    """Return the bytes a read buffer must have: PART, less where all shards are small, more where a block is larger."""
    largest = whole = 0
    for index in indexes:
        largest = max(largest, *(extent.nbytes for extent in index.extents))
        whole = max(whole, index.end)
    return max(LEAST_BUFFER, min(block_size, largest), min(PART, whole))


class Scan:
    """One open shard being hashed; collects what is wrong, in no order, from all threads."""

    def __init__(self, file: File, entry: ShardEntry, header: shard.Header, index: shard.Index) -> None:
        self.file = file
        self.entry = entry
        self.header = header
        self.index = index
        self.algorithm = shard.block_algorithm(header)
        self.bad: list[Item] = []
        self.unread: list[tuple[int, int, str]] = []

    def run(self, pool: Pool) -> Iterator[Finding]:
        """Hash everything with the pool's threads, then yield what is wrong, in file order."""
        pool.run(self.tasks(pool.buffer_nbytes))
        yield from self._findings()

    def tasks(self, nbytes: int) -> Iterator[Task]:
        """Yield the reads, each of at most `nbytes` bytes."""
        return (partial(self._check, batch) for batch in batches(items(self.index, self.header.block_size), nbytes))

    def _check(self, batch: list[Item], buffer: memoryview) -> None:
        base, stop = batch[0].start, batch[-1].start + batch[-1].nbytes
        data = buffer[: stop - base]
        try:
            self.file.read_into(data, base)
        except (OSError, IntegrityError) as e:
            self.unread.append((base, stop, str(e)))
            return
        of, size, known = self.algorithm.of, self.algorithm.size, self.index.digests
        for item in batch:
            found = data[item.start - base : item.start - base + item.nbytes]
            if isinstance(item, Frame):
                good = found == item.expected
            else:
                good = of(found) == known[item.digest * size : (item.digest + 1) * size]
            if not good:
                self.bad.append(item)

    def _findings(self) -> Iterator[Finding]:
        for start, stop, reason in sorted(self.unread):
            where = Where(self.entry.path, rank=self.entry.rank, range=(start, stop))
            yield fault("B-READ", "bytes cannot be read", where, None, reason)
        for first, last in _runs(sorted(self.bad, key=lambda item: item.start)):
            extent = (first.start, last.start + last.nbytes)
            if isinstance(first, Frame):
                where = Where(self.entry.path, rank=self.entry.rank, range=extent)
                yield fault("S-FRAME", "bytes between payloads are not what the index implies", where)
            else:
                tensor = self._tensor(first.row)
                where = Where(self.entry.path, None, tensor, self.entry.rank, extent)
                what = "bytes differ from their digest" if tensor else "bytes of the state differ from their digest"
                yield fault("B-DIGEST", what, where)

    def _tensor(self, row: int) -> str | None:
        chunks = self.index.chunks
        return self.index.names[chunks[row].tensor] if row < len(chunks) else None


def _runs(bad: list[Item]) -> Iterator[tuple[Item, Item]]:
    """Yield the first and last of each run of bad blocks that follow each other in one payload; frames stand alone."""
    first = last = None
    for item in bad:
        joined = (
            isinstance(item, Block)
            and isinstance(last, Block)
            and (item.row, item.digest - 1)
            == (
                last.row,
                last.digest,
            )
        )
        if not joined:
            if first is not None and last is not None:
                yield first, last
            first = item
        last = item
    if first is not None and last is not None:
        yield first, last

"""Owns the passing on of whole shards, part by part, none before all its bytes are verified; refuses damaged ones.

A shard's bytes are a function of its index and its payloads. What is not payload is compared with what it must be, each
block of a payload with its digest: the bytes that leave are the bytes that were verified [Q-VERIFY].
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from ckptspec.engine.files import File
from ckptspec.engine.pool import Task
from ckptspec.engine.scan import Block, Frame, Item, batches, items
from ckptspec.errors import IntegrityError, ShardError, Where
from ckptspec.format import shard
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.digest import Algorithm
from ckptspec.format.manifest import ShardEntry

PIECE = 1 << 20  # bytes of index and trailer that are compared at once
_HEADER = -1  # in the place of a payload's number

Allow = Callable[[int], None]


@dataclass(frozen=True)
class Part:
    """Bytes [start, stop) of a file, and the items [low, high) to read for them: blocks are verified whole."""

    start: int
    stop: int
    items: tuple[Item, ...]

    @property
    def low(self) -> int:
        """Where the first item begins."""
        return self.items[0].start

    @property
    def high(self) -> int:
        """Where the last item ends."""
        return self.items[-1].start + self.items[-1].nbytes


def cut(stream: Iterable[Item], nbytes: int, size: int) -> Iterator[Part]:
    """Yield a file of `nbytes` in parts of `size` bytes; an item that lies across their border is in both."""
    source = iter(stream)
    held: list[Item] = []
    for start in range(0, nbytes, size):
        stop = min(start + size, nbytes)
        while not held or held[-1].start + held[-1].nbytes < stop:
            held.append(next(source))
        yield Part(start, stop, tuple(held))
        held = held[-1:] if held[-1].start + held[-1].nbytes > stop else []


class Passage:
    """One shard on its way: its documents have been verified, `read` and `tasks` pass on the rest."""

    def __init__(self, entry: ShardEntry, document: ShardDocument) -> None:
        self.entry = entry
        self.index = document.index
        self.header = document.header
        self._algorithm: Algorithm = shard.block_algorithm(document.header)
        self._index_bytes = shard.encode_index(document.index)
        sha = hashlib.sha256(self._index_bytes)
        if "sha256:" + sha.hexdigest() != entry.index_digest:  # it is written in one way only, or was refused before
            where = Where(entry.path, rank=entry.rank)
            raise ShardError("the index has another digest than the manifest says", rule="S-INDEX", where=where)
        trailer = shard.Trailer(entry.index_offset, len(self._index_bytes), sha.digest())
        self._end = self._index_bytes + shard.encode_trailer(trailer)

    def items(self) -> Iterator[Item]:
        """Yield what the file consists of, in order and without gaps."""
        yield Block(0, self.index.header_nbytes, _HEADER, _HEADER)
        yield from items(self.index, self.header.block_size)
        yield from _frames(self.index.end, self._end)

    def read(self, file: File, size: int, allow: Allow) -> Iterator[memoryview]:
        """Yield the file's bytes in parts of `size`, each in memory of its own; `allow` is asked before each is read.

        Raises IntegrityError naming file, tensor and byte range, OSError, and what `allow` raises.
        """
        for part in cut(self.items(), self.entry.nbytes, size):
            allow(part.stop - part.start)
            data = memoryview(bytearray(part.high - part.low))
            self._fill(file, part.items, data)
            yield data[part.start - part.low : part.stop - part.low]

    def tasks(self, file: File, nbytes: int, put: Callable[[memoryview, int], None], allow: Allow) -> Iterator[Task]:
        """Yield the reads of the whole file, each of at most `nbytes` (or one block) and then given to `put`."""
        for batch in batches(self.items(), nbytes):
            yield partial(self._pass, file, batch, put, allow)

    def _pass(
        self, file: File, batch: list[Item], put: Callable[[memoryview, int], None], allow: Allow, buffer: memoryview
    ) -> None:
        base = batch[0].start
        data = buffer[: batch[-1].start + batch[-1].nbytes - base]
        allow(len(data))
        self._fill(file, batch, data)
        put(data, base)

    def _fill(self, file: File, several: Iterable[Item], data: memoryview) -> None:
        several = tuple(several)
        base = several[0].start
        file.read_into(data, base)
        for item in several:
            if not self._holds(item, data[item.start - base : item.start - base + item.nbytes]):
                raise self._fault(item)

    def _holds(self, item: Item, found: memoryview) -> bool:
        if isinstance(item, Frame):
            return found == item.expected
        size = self._algorithm.size
        known = self.index.digests[item.digest * size : (item.digest + 1) * size]
        return self._algorithm.of(found) == (self.index.header_digest if item.row == _HEADER else known)

    def _fault(self, item: Item) -> IntegrityError:
        tensor = None
        if isinstance(item, Block) and 0 <= item.row < len(self.index.chunks):
            tensor = self.index.names[self.index.chunks[item.row].tensor]
        extent = (item.start, item.start + item.nbytes)
        where = Where(self.entry.path, tensor=tensor, rank=self.entry.rank, range=extent)
        if isinstance(item, Frame):
            message = "bytes around the payloads are not what the index implies"
            return IntegrityError(message, rule="S-FRAME", where=where)
        if item.row == _HEADER:
            return IntegrityError("the header differs from its digest", rule="S-HEADER", where=where)
        return IntegrityError("bytes differ from their digest", rule="B-DIGEST", where=where)


def _frames(start: int, expected: bytes) -> Iterator[Frame]:
    for i in range(0, len(expected), PIECE):
        yield Frame(start + i, expected[i : i + PIECE])

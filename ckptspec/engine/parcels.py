"""Owns what ranks send each other in a load: requests for stored parts, and parcels of verified bytes; sends nothing.

One rank reads each block, verifies it, and packs for every rank what that asked for, with a digest of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from ckptspec.engine.execute import row_major
from ckptspec.engine.holding import Holding
from ckptspec.errors import IntegrityError, PlanError, Where
from ckptspec.format.box import Box
from ckptspec.format.digest import algorithm
from ckptspec.planner.transfers import Locator, Need, Part
from ckptspec.planner.views import View

DIGEST = algorithm("xxh3-128")
HEAD = 8  # bytes that say how long a message's table is


@dataclass(frozen=True)
class Request:
    """One stored part that a rank asks for: which of its wants it is for, and the source rank whose shard has it."""

    want: int
    source: int
    part: Part


def reader_of(source: int, sources: int, world: int) -> int:
    """Return the rank that reads the shard of `source`, one of `sources`: the shards are shared out in order."""
    return source * world // sources


def requests(wants: Sequence[tuple[Need, Holding]], locator: Locator) -> Iterator[Request]:
    """Yield what fills all wants, each stored part once."""
    for number, (need, _) in enumerate(wants):
        for part in locator.parts(need):
            yield Request(number, locator.choose(part), part)


def encode(several: Iterable[Request]) -> bytes:
    """Return requests as bytes."""
    return bytes(msgpack.packb([_row(r) for r in several]))


def _row(r: Request) -> list[Any]:
    need, view = r.part.need, r.part.need.view
    seen = None if view is None else [view.start, view.box.offsets, view.box.sizes]
    box, stored = need.box, r.part.box
    return [r.want, r.source, need.name, box.offsets, box.sizes, need.rank, seen, stored.offsets, stored.sizes]


def decode(data: bytes) -> Iterator[Request]:
    """Yield the requests in bytes."""
    for want, source, name, offsets, sizes, rank, seen, at, extent in msgpack.unpackb(data, use_list=False):
        view = None if seen is None else View(seen[0], Box(seen[1], seen[2]))
        need = Need(name, Box(offsets, sizes), rank, view)
        yield Request(want, source, Part(need, Box(at, extent), (source,)))


class Outbox:
    """The parcels that wait for each rank, filled by many threads; full when one rank's reach `limit` bytes."""

    def __init__(self, world: int, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._tables: list[list[Any]] = [[] for _ in range(world)]
        self._bytes: list[bytearray] = [bytearray() for _ in range(world)]
        self.full = False

    def add(self, rank: int, want: int, box: Box, data: memoryview) -> None:
        """Put in the bytes of one box, which have been verified."""
        row = [want, box.offsets, box.sizes, len(data), DIGEST.of(data)]
        with self._lock:
            self._tables[rank].append(row)
            self._bytes[rank] += data
            self.full = self.full or len(self._bytes[rank]) >= self._limit

    def take(self) -> list[bytes]:
        """Return a message for each rank, empty for none, and begin anew."""
        out = [_message(t, b) if t else b"" for t, b in zip(self._tables, self._bytes, strict=True)]
        self._tables = [[] for _ in out]
        self._bytes = [bytearray() for _ in out]
        self.full = False
        return out


def _message(table: list[Any], data: bytearray) -> bytes:
    head = bytes(msgpack.packb(table))
    return len(head).to_bytes(HEAD, "little") + head + data


@dataclass(frozen=True)
class Parcel:
    """The destination of what another rank asked for: it packs row-major bytes into an outbox."""

    outbox: Outbox
    rank: int
    want: int
    itemsize: int

    def view(self, box: Box) -> memoryview | None:
        """Return None: nothing lies here in place."""
        return None

    def fill(self, box: Box, out: memoryview) -> None:
        """Refuse: a parcel is only written to."""
        raise PlanError("a parcel has nothing to give")

    def scatter(self, box: Box, data: memoryview, strides: Sequence[int]) -> None:
        """Pack the box out of strided `data`."""
        import numpy

        kind = numpy.dtype((numpy.void, self.itemsize))
        flat = numpy.frombuffer(data[: len(data) // self.itemsize * self.itemsize], kind)
        steps = [s * self.itemsize for s in strides]
        part = numpy.lib.stride_tricks.as_strided(flat, box.sizes, steps, writeable=False)
        packed = numpy.ascontiguousarray(part).reshape(-1).view(numpy.uint8)
        self.outbox.add(self.rank, self.want, box, packed.data)


@dataclass
class Inbox:
    """What this rank waits for: its wants, and how many elements of each are still to come."""

    wants: Sequence[tuple[Need, Holding]]
    _missing: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._missing = [need.box.numel for need, _ in self.wants]

    def arrived(self, want: int, box: Box) -> None:
        """Count a box as there."""
        self._missing[want] -= box.numel

    def deliver(self, message: memoryview, sender: int) -> int:
        """Check and deliver every parcel of a message; returns the bytes delivered.

        Raises IntegrityError [B-DIGEST] where a parcel is not what was packed.
        """
        length = int.from_bytes(message[:HEAD], "little")
        at = HEAD + length
        for want, offsets, sizes, nbytes, digest in msgpack.unpackb(message[HEAD:at], use_list=False):
            data = message[at : at + nbytes]
            at += nbytes
            need, holding = self.wants[want]
            if DIGEST.of(data) != digest:
                where = Where(tensor=need.name, rank=sender)
                raise IntegrityError("bytes changed on the way between ranks", rule="B-DIGEST", where=where)
            box = Box(offsets, sizes)
            holding.scatter(box, data, row_major(box.sizes))
            self.arrived(want, box)
        return at

    def check(self) -> None:
        """Raise PlanError [T-COVER] unless everything asked for has come."""
        for want, count in enumerate(self._missing):
            if count:
                name = self.wants[want][0].name
                raise PlanError(
                    "not all of this came from the other ranks",
                    rule="T-COVER",
                    where=Where(tensor=name),
                    found=f"{count} elements missing",
                )


def by_reader(several: Iterable[Request], sources: int, world: int) -> Mapping[int, list[Request]]:
    """Return requests by the rank that will read for them."""
    out: dict[int, list[Request]] = {rank: [] for rank in range(world)}
    for r in several:
        out[reader_of(r.source, sources, world)].append(r)
    return out

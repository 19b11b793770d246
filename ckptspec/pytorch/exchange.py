"""Owns the exchange of a load: each block is read and verified by one rank, and its pieces go to all that need them.

It runs in rounds over a process group that the caller gives. A rank that cannot go on says so in the next round: nobody
is left in a collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ckptspec.engine.agree.channel import Attempt
from ckptspec.engine.execute import Source, Transfer, reading
from ckptspec.engine.fetch import Opened
from ckptspec.engine.parcels import Inbox, Outbox, Parcel, Request, by_reader, decode, encode, requests
from ckptspec.engine.pool import Pool, Task
from ckptspec.errors import LoadError, Where
from ckptspec.format.dtypes import dtype
from ckptspec.planner.transfers import Locator, Rows, moves, rows_of
from ckptspec.pytorch.wants import Want

MORE, DONE, FAILED = 0, 1, 2
LEAST = 2 << 20  # bytes for one rank in a round, however many ranks there are


class ExchangeEnded(Exception):  # noqa: N818 - no error of its own: it carries one
    """A rank could not read its part, and all ranks know: `error` is this rank's own, or names that one."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True)
class Peers:
    """The process group of an exchange; every call waits for all ranks, until one of them is known to have failed."""

    group: dist.ProcessGroup
    attempt: Attempt

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size()

    def trade(self, messages: Sequence[bytes], status: int) -> tuple[list[memoryview], list[int]]:
        """Give every rank its message and status, and return what each gave this rank."""
        lengths = torch.tensor([[len(m), status] for m in messages], dtype=torch.int64)
        theirs = torch.empty_like(lengths)
        self._swap(theirs.view(-1), lengths.view(-1), None, None)
        statuses = theirs[:, 1].tolist()
        sizes = theirs[:, 0].tolist()
        joined = bytearray().join(messages)
        out = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        self._swap(found, out, sizes, [len(m) for m in messages])
        data, at, parts = found.numpy().data, 0, []
        for n in sizes:
            parts.append(data[at : at + n])
            at += n
        return parts, statuses

    def _swap(self, into: Tensor, out: Tensor, taken: list[int] | None, given: list[int] | None) -> None:
        """Run one all-to-all; while it goes on, a failure that is heard of ends the wait."""
        try:
            work = dist.all_to_all_single(into, out, taken, given, group=self.group, async_op=True)
            assert work is not None
            pause = 0.0002
            while not work.is_completed():
                self.attempt.progress(1)  # waiting for others is no standstill of one's own
                time.sleep(pause)
                pause = min(pause * 1.5, 0.02)
            work.wait()
        except RuntimeError as e:
            reason = str(e).splitlines()[0][:300]
            raise LoadError(f"the exchange over the process group failed: {reason}", rule="P-AGREE") from e


def exchange(opened: Opened, wants: Sequence[Want], peers: Peers, pool: Pool, rank: int) -> int:
    """Deliver every want of every rank, and return the payload bytes delivered here.

    Every rank calls it. Raises ExchangeEnded on all ranks together where one of them could not read its part.
    """
    world, sources = peers.size, opened.manifest.world_size
    mine = by_reader(requests(wants, Locator(opened.manifest)), sources, world)
    asked, _ = peers.trade([encode(mine[r]) if r != rank else b"" for r in range(world)], MORE)
    inbox, outbox = Inbox(wants), Outbox(world, max(LEAST, pool.budget // 8 // world))
    theirs = [(r, [*decode(bytes(data))] if len(data) else []) for r, data in enumerate(asked)]
    job = _Reading(opened, inbox, outbox)
    error: Exception | None = None
    try:
        work = job.sources([(rank, mine[rank]), *theirs], rank)
    except Exception as e:
        error, work = e, []
    with reading(work, pool.buffer_nbytes, peers.attempt.progress) as tasks:
        _rounds(tasks, pool, peers, inbox, outbox, error)
    inbox.check()
    return sum(need.box.numel * dtype(opened.manifest.tensors[need.name].dtype).itemsize for need, _ in wants)


def _rounds(
    tasks: Iterator[Task], pool: Pool, peers: Peers, inbox: Inbox, outbox: Outbox, error: Exception | None
) -> None:
    """Read until an outbox is full or all is read, trade, deliver; until no rank has more."""
    over = False
    while not over:
        try:
            if error is None:
                pool.run(_until_full(tasks, outbox))
        except Exception as e:
            error = e
        status = FAILED if error is not None else MORE if outbox.full else DONE
        found, statuses = peers.trade(outbox.take() if error is None else [b""] * peers.size, status)
        if error is not None:
            raise ExchangeEnded(error)
        if FAILED in statuses:
            who = statuses.index(FAILED)
            message = "this rank could not read its part of the exchange"
            raise ExchangeEnded(LoadError(message, rank=who, rule="P-AGREE", where=Where(rank=who)))
        for sender, parcel in enumerate(found):
            if len(parcel):
                try:
                    inbox.deliver(parcel, sender)
                except Exception as e:
                    error = e
        over = error is None and all(s == DONE for s in statuses)


def _until_full(tasks: Iterator[Task], outbox: Outbox) -> Iterator[Task]:
    for task in tasks:
        yield task
        if outbox.full:
            return


class _Reading:
    """What this rank reads, for itself and for the others."""

    def __init__(self, opened: Opened, inbox: Inbox, outbox: Outbox) -> None:
        self._opened = opened
        self._inbox = inbox
        self._outbox = outbox

    def sources(self, asked: Sequence[tuple[int, Sequence[Request]]], own: int) -> list[tuple[Source, list[Transfer]]]:
        """Return the shards to read and the transfers from each, whoever asked for them."""
        by_source: dict[int, dict[int, list[Request]]] = {}
        for rank, several in asked:
            for r in several:
                by_source.setdefault(r.source, {}).setdefault(rank, []).append(r)
        out = []
        for source, ranks in sorted(by_source.items()):
            names = {r.part.need.name for several in ranks.values() for r in several}
            rows = rows_of(self._opened.document(source).index, names)  # once: a search per request is quadratic
            transfers: list[Transfer] = []
            for rank, several in ranks.items():
                transfers += self._transfers(source, rank, several, own, rows)
            out.append((self._opened.source(source), transfers))
        return out

    def _transfers(
        self, source: int, rank: int, several: Sequence[Request], own: int, rows: Rows
    ) -> Iterator[Transfer]:
        index = self._opened.document(source).index
        tensors = self._opened.manifest.tensors
        for r in several:
            for m in moves(source, index, [r.part], rows):
                if rank == own:
                    self._inbox.arrived(r.want, m.box)
                    yield Transfer(m.chunk, m.box, self._inbox.wants[r.want][1], m.view)
                else:
                    itemsize = dtype(tensors[m.need.name].dtype).itemsize
                    yield Transfer(m.chunk, m.box, Parcel(self._outbox, rank, r.want, itemsize), m.view)

"""Owns the writing of a reshard's slices: gathered from windows, digested as they are written, at their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ckptspec.engine.pool import Task
from ckptspec.engine.resharding.batches import Batch, Comb, Piece, slices
from ckptspec.engine.resharding.blocks import Blocks
from ckptspec.engine.resharding.carries import Filled
from ckptspec.engine.resharding.descriptors import Descriptors
from ckptspec.engine.resharding.gathering import Gathered
from ckptspec.engine.resharding.runs import Copy, Run
from ckptspec.engine.resharding.tables import Table
from ckptspec.format.box import Box, intersect, iter_pieces, runs
from ckptspec.planner.views import View
from ckptspec.storage import local

STRAIGHT = 1 << 18  # bytes in a row on both sides, from which on they are written from where they were read
_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Scattering:
    """Writes the copies of batches into shard files; `dirty` are the ranks whose files have bytes not yet flushed."""

    def __init__(
        self,
        tables: Sequence[Table],
        files: Descriptors,
        blocks: Blocks,
        block: int,
        progress: Callable[[int, int], None],
    ) -> None:
        import numpy

        self._numpy = numpy
        self._tables = tables
        self._files = files
        self._blocks = blocks
        self._block = block
        self._progress = progress
        self._lock = threading.Lock()
        self.dirty: set[int] = set()
        self.nbytes = 0

    def tasks(self, batch: Batch, gathered: Gathered, room: int) -> Iterator[Task]:
        """Yield the tasks that write a batch whose windows are filled; each uses at most `room` bytes of its buffer."""
        for pieces in slices(batch, self._block, room):
            yield partial(self._write, gathered, pieces)
        for comb in batch.combs:
            for box in iter_pieces(comb.box, comb.copies[0].itemsize, room):
                yield partial(self._write_comb, gathered, comb, box)

    def _write(self, gathered: Gathered, pieces: list[Piece], buffer: memoryview) -> None:
        first, last = pieces[0], pieces[-1]
        lead = self._lead(first)
        start, stop = first.chunk.start + first.low, last.chunk.start + last.high
        data = self._straight(gathered, first) if len(pieces) == 1 else None
        with self._files.at(first.chunk.rank) as fd:
            if data is not None:
                self._blocks.take(first.chunk, first.low, data)
                local.write_at(fd, lead, start - len(lead))
            else:
                data = buffer[: stop - start + len(lead)]
                start -= len(lead)
                self._gather(gathered, pieces, data, start)
            local.write_at(fd, data, start)
            local.start_writeback(fd, start, len(data))
        self._count(first.chunk.rank, len(data))

    def _write_comb(self, gathered: Gathered, comb: Comb, box: Box, buffer: memoryview) -> None:
        """Write a box of a chunk, run by run; the digests of its blocks are taken when all of them are there."""
        run, itemsize = comb.run, comb.copies[0].itemsize
        data = buffer[: box.numel * itemsize]
        dense = Run(run.chunk, run.name, View(0, box), box)
        for copy in comb.copies:
            shared = intersect(copy.box, box)
            if shared is not None:
                self._copy(gathered, Copy(copy.source, dense, shared, itemsize), data, 0)
        base, at = run.chunk.start + run.view.start * itemsize, 0
        with self._files.at(run.chunk.rank) as fd:
            for offset, nbytes in runs(run.view.box, box, itemsize):
                start = base + offset
                if start == run.chunk.start:
                    lead = self._tables[run.chunk.rank].lead(run.chunk.row)
                    local.write_at(fd, lead, start - len(lead))
                local.write_at(fd, data[at : at + nbytes], start)
                at += nbytes
        self._count(run.chunk.rank, len(data))

    def _count(self, rank: int, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes
            self.dirty.add(rank)
        self._progress(0, nbytes)

    def _lead(self, piece: Piece) -> bytes:
        return self._tables[piece.chunk.rank].lead(piece.chunk.row) if piece.low == 0 else b""

    def _straight(self, gathered: Gathered, piece: Piece) -> memoryview | None:
        """Return the bytes of a large piece where they were read, if they lie there as they shall lie."""
        if len(piece.copies) != 1 or piece.high - piece.low < STRAIGHT:
            return None
        (copy,) = piece.copies
        if copy.source is None:
            return None
        low, high = copy.source.view.hull(copy.box)
        start, stop = copy.target.view.hull(copy.box)
        if not high - low == copy.box.numel == stop - start:
            return None
        filled = _filled(gathered, copy.source, low * copy.itemsize)
        return filled.data[low * copy.itemsize - filled.start : high * copy.itemsize - filled.start]

    def _gather(self, gathered: Gathered, pieces: list[Piece], data: memoryview, start: int) -> None:
        """Fill `data`, which begins at byte `start` of the file, with frames and payloads, and take digests."""
        for piece in pieces:
            at = piece.chunk.start + piece.low - start
            lead = self._lead(piece)
            data[at - len(lead) : at] = lead
            payload = data[at : at + piece.high - piece.low]
            for copy in piece.copies:
                self._copy(gathered, copy, payload, piece.low)
            self._blocks.take(piece.chunk, piece.low, payload)

    def _copy(self, gathered: Gathered, copy: Copy, payload: memoryview, low: int) -> None:
        target = self._elements(copy.target.view, copy, payload, low)
        if copy.source is None:
            target[...] = 0
            return
        at = copy.source.view.hull(copy.box)[0] * copy.itemsize
        filled = _filled(gathered, copy.source, at)
        self._numpy.copyto(target, self._elements(copy.source.view, copy, filled.data, filled.start))

    def _elements(self, view: View, copy: Copy, data: memoryview, start: int) -> Any:
        """Return the copy's box as an array over `data`, which begins at byte `start` of the view's chunk."""
        at = view.hull(copy.box)[0] * copy.itemsize - start
        strides = _strides(view.box, copy.itemsize)
        return self._numpy.ndarray(copy.box.sizes, _DTYPES[copy.itemsize], data, at, strides)


def _strides(box: Box, itemsize: int) -> tuple[int, ...]:
    out, stride = [], itemsize
    for n in reversed(box.sizes):
        out.append(stride)
        stride *= n
    return tuple(reversed(out))


def _filled(gathered: Gathered, run: Run, at: int) -> Filled:
    """Return the window of a run's chunk that holds its byte `at`."""
    several = gathered[run.chunk.key]
    return next(f for f in several if f.start <= at < f.start + len(f.data))

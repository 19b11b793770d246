"""Owns the comparison of two checkpoints, whatever their layouts: by digests where they prove it, else by bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ckptspec.check.comparing.differences import Comparison, Difference
from ckptspec.check.comparing.matching import Matched, facts, match, names_of
from ckptspec.engine.comparing.elements import Tally, measurable
from ckptspec.engine.comparing.likeness import Item, likeness
from ckptspec.engine.comparing.privates import compare_objects, local_items
from ckptspec.engine.comparing.sides import Side, open_side
from ckptspec.engine.fetch import fetch
from ckptspec.engine.holding import ArrayHolding, Holding
from ckptspec.engine.pool import DEFAULT_BUDGET, DEFAULT_BUFFER, LEAST_BUFFER, Pool
from ckptspec.errors import PlanError, Where
from ckptspec.format.box import Box, iter_pieces, runs
from ckptspec.format.dtypes import dtype
from ckptspec.format.patterns import Patterns, asked_for, listed, matches
from ckptspec.planner.transfers import Locator, Need, moves, needed

SCRATCH = 16 << 20  # what comparing allocates beside the bytes compared: a few arrays of `elements.SLICE` elements
LEAST_MEMORY = 2 * SCRATCH
ALIGN = 64
MOST = 8192  # pieces read together: each costs memory of its own beside its bytes
Progress = Callable[[int, int], None]


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    only: Patterns = None,
    skip: Patterns = None,
    stats: bool = False,
    memory: int = DEFAULT_BUDGET,
    progress: Progress | None = None,
) -> Comparison:
    """Return the logical difference of two checkpoints: names, shapes, dtypes and values, whatever their layouts.

    Not compared: who saved it, when, on how many ranks, laid out and guarded how. `only` and `skip` are names, prefixes
    or globs. `stats` adds how far apart the elements of each differing tensor are. `memory` bounds, in bytes, all that
    depends on the size of tensors; `progress` is told bytes done and in all. Chunks of one box with equal digests are
    equal without being read, unless they are crc32c. Raises PlanError [R-NAME] for a name in `only` that neither side
    has, and whatever reading raises: damaged bytes are an error that names the side, never a difference.
    """
    left, right = open_side("A", os.fspath(a)), open_side("B", os.fspath(b))
    _refuse_unknown(only, left, right)
    matched = match(left.manifest, right.manifest, asked_for(only, skip))
    left.keep = right.keep = frozenset(matched.objects)
    found = [*matched.differences, *compare_objects(left, right, matched.objects)]
    work = _Values(left, right, stats, memory, progress)
    for entry in _entries(left, right, matched):
        if isinstance(entry, Difference):
            found.append(entry)
        else:
            work.items.append(entry)
    found += work.run()
    order = {name: i for i, name in enumerate(matched.names)}
    found.sort(key=lambda d: (order[d.name], -1 if d.rank is None else d.rank))
    notes = (*matched.notes, *work.notes(found))
    return Comparison(
        left.folder, right.folder, tuple(found), tuple(facts(left.manifest, right.manifest)), notes,
        len(matched.pairs), len(matched.objects), matched.left_out, work.by_digest, work.by_bytes,
    )  # fmt: skip


def _refuse_unknown(only: Patterns, a: Side, b: Side) -> None:
    names = {*names_of(a.manifest), *names_of(b.manifest)}
    for pattern in listed(only) if only is not None else ():
        if not any(matches(name, (pattern,)) for name in names):
            message = "no tensor or object of either checkpoint has this name, lies below it or matches it"
            raise PlanError(message, rule="R-NAME", where=Where(tensor=pattern))


def _entries(a: Side, b: Side, matched: Matched) -> Iterator[Item | Difference]:
    """Yield the tensors to compare in the order of A's manifest, those private to each rank last."""
    private = []
    for pair in matched.pairs:
        t = a.manifest.tensors[pair.a]
        if t.shape is None:
            private.append(pair)
        else:
            yield Item(pair.name, pair.a, pair.b, dtype(t.dtype), t.shape, None, tuple(pair.also))
    yield from local_items(a, b, private)


@dataclass(frozen=True)
class _Piece:
    """A box of an item that is read together with others, and where its bytes go in the memory of each side."""

    item: Item
    box: Box
    start: int
    stop: int

    def need(self, name: str) -> Need:
        return Need(name, self.box, self.item.rank)

    def holding(self, memory: Any) -> Holding:
        import numpy

        kind = self.item.kind  # bytes move as they are, whatever the dtype
        array = memory[self.start : self.stop].view(numpy.dtype((numpy.void, kind.itemsize)))
        return ArrayHolding(array.reshape(self.box.sizes), self.box.offsets, kind)


class _Values:
    """The values of all items being compared."""

    def __init__(self, a: Side, b: Side, stats: bool, memory: int, progress: Progress | None) -> None:
        self.a, self.b, self.stats = a, b, stats
        self.items: list[Item] = []
        self.by_digest = self.by_bytes = 0
        self._tallies: dict[Item, Tally] = {}
        self._progress = progress or _ignore
        self._pool, self._capacity = _shares(memory, max(a.manifest.block_size, b.manifest.block_size))

    def run(self) -> Iterator[Difference]:
        """Compare every item and yield those that differ."""
        total = sum(item.nbytes for item in self.items)
        memory: list[Any] = []
        for batch in _batches(self._pieces(), self._capacity):
            memory = memory or _memory(min(self._capacity, total + ALIGN * len(self.items)))
            self._compare(batch, memory)
            self._progress(self.by_digest + self.by_bytes, total)
        unlike = {item: tally for item, tally in self._tallies.items() if tally.count}
        first = {item: tally.index or () for item, tally in unlike.items()}
        places = [_places(side, first) for side in (self.a, self.b)]
        for item, tally in unlike.items():
            yield Difference(
                "values", item.name, item.rank, *tally.texts, also=item.also, count=tally.count, index=tally.index,
                total=item.whole.numel, places=(places[0][item], places[1][item]), distance=tally.distance,
            )  # fmt: skip

    def notes(self, found: Sequence[Difference]) -> Iterator[str]:
        """Yield what was asked for and cannot be said."""
        unlike = {d.name for d in found if d.kind == "values"}
        for kind in dict.fromkeys(item.kind for item in self.items if item.name in unlike) if self.stats else ():
            if not measurable(kind):
                yield f"{kind.name} has no distances: two values in a byte"

    def _pieces(self) -> Iterator[tuple[Item, Box]]:
        """Yield what has to be read, in pieces that fit."""
        known = likeness(self.a, self.b, self.items)
        for item in self.items:
            boxes = known.unsettled(item)
            itemsize = item.kind.itemsize
            self.by_digest += item.nbytes - sum(box.numel for box in boxes) * itemsize
            for box in boxes:
                for piece in iter_pieces(box, itemsize, self._capacity):
                    yield item, piece

    def _compare(self, batch: Sequence[_Piece], memory: Sequence[Any]) -> None:
        for side, own, letter in zip((self.a, self.b), memory, "ab", strict=True):
            wants = [(piece.need(getattr(piece.item, letter)), piece.holding(own)) for piece in batch]
            with side.blamed():
                fetch(side, wants, self._pool, recover=False)
        for piece in batch:
            item = piece.item
            if item not in self._tallies:
                self._tallies[item] = Tally(item.kind, stats=self.stats)
            self._tallies[item].add(piece.box, *(own[piece.start : piece.stop] for own in memory))
            self.by_bytes += piece.stop - piece.start


def _ignore(done: int, total: int) -> None:
    """Report progress to nobody."""


def _shares(memory: int, block_size: int) -> tuple[Pool, int]:
    """Return the buffers to read with, and the bytes of each side that are held at once: all within `memory`.

    Raises PlanError where that is too little: a block is verified in one piece.
    """
    buffer = max(LEAST_BUFFER, 2 * block_size)
    least = LEAST_MEMORY + buffer
    if memory < least:
        raise PlanError("too little memory to compare in", expected=f">= {least} bytes", found=f"{memory} bytes")
    room = memory - SCRATCH
    buffer = max(buffer, min(DEFAULT_BUFFER, room // 16))
    pool = Pool(max(buffer, room // 4), buffer)
    return pool, (room - pool.threads * buffer) // 2 // ALIGN * ALIGN


def _memory(nbytes: int) -> list[Any]:
    import numpy

    return [numpy.empty(nbytes, numpy.uint8) for _ in range(2)]


def _batches(pieces: Iterator[tuple[Item, Box]], capacity: int) -> Iterator[list[_Piece]]:
    """Yield runs of pieces that fit in the memory of one side together."""
    batch: list[_Piece] = []
    at = 0
    for item, box in pieces:
        nbytes = box.numel * item.kind.itemsize
        if batch and (at + nbytes > capacity or len(batch) == MOST):
            yield batch
            batch, at = [], 0
        batch.append(_Piece(item, box, at, at + nbytes))
        at = -(-(at + nbytes) // ALIGN) * ALIGN
    if batch:
        yield batch


def _places(side: Side, elements: dict[Item, tuple[int, ...]]) -> dict[Item, Where]:
    """Return where a side stores one element of each item: file, rank, and the bytes in the file."""
    items: dict[int, Item] = {}
    needs = []
    for item, element in elements.items():
        name = item.a if side.letter == "A" else item.b
        needs.append(Need(name, Box(element, (1,) * len(element)), item.rank))
        items[id(needs[-1])] = item
    found = {}
    with side.blamed():
        for rank, parts in needed(Locator(side.manifest), needs).items():
            index = side.document(rank).index
            for move in moves(rank, index, parts):
                item, chunk = items[id(move.need)], index.chunks[move.chunk]
                at, nbytes = next(runs(chunk.box, move.box, item.kind.itemsize))
                extent = (chunk.start + at, chunk.start + at + nbytes)
                found[item] = Where(side.manifest.shard(rank).path, tensor=move.need.name, rank=rank, range=extent)
    return found

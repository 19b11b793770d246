"""Owns the sums over all transfers of a plan: what each rank reads, gets and opens, and the digest of the transfers.

Ranks are taken some at a time, so that memory is bounded however many there are.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ckptspec.planner.book import Book
from ckptspec.planner.columns import Bools, Ints, ints, order
from ckptspec.planner.lanes import Leaf, Transfers
from ckptspec.planner.reads import Once, Reads

RANKS = 2048  # destination ranks taken at once
PAIRS = 1 << 26  # and for them so many pairs of ranks, at most
FEW = 16  # batches of pairs that are remembered


@dataclass
class Tally:
    """Sums by destination rank; bytes of whole blocks for what is read."""

    delivered: Ints
    read: Ints
    transfers: Ints
    shards: Ints
    read_once: int = 0
    digest: str = ""


@dataclass
class _Sums:
    """What is kept from one block of ranks to the next: the digest of each leaf, and what has been read of a source."""

    book: Book
    block: int
    tally: Tally
    uses: Counter[int]
    signatures: Counter[tuple[int, ...]]
    digests: list[hashlib._Hash]
    seen: Bools
    once: dict[tuple[int, ...], Once] = field(default_factory=dict)
    pairs: list[Ints] = field(default_factory=list)  # of destination and source ranks, as places in `seen`

    def add(self, ranks: range) -> None:
        """Add what goes to `ranks`."""
        if self.book.found.own:
            mine = ints(range(ranks.start, min(ranks.stop, self.book.manifest.world_size)))
            self._opens(ranks, mine, mine)
        shared = {leaf for signature in self.signatures if len(signature) > 1 for leaf in signature}
        kept: dict[int, list[Reads]] = {leaf: [] for leaf in shared}
        for number, leaf in enumerate(self.book.leaves):
            for transfers, reads in leaf.batches(ranks, self.block):
                self._moved(number, leaf, transfers)
                self._opens(ranks, transfers.rank, transfers.source)
                if number in shared:
                    kept[number].append(reads)
                if (number,) in self.signatures:
                    self._read((number,), reads)
        for signature in self.signatures:
            several = [reads for number in signature for reads in kept.get(number, ())]
            if len(signature) > 1 and several:
                self._read(signature, Reads.union(several))
        self._forget()

    def _opens(self, ranks: range, rank: Ints, source: Ints) -> None:
        """Count the pairs that have not been seen among these ranks."""
        world = self.book.manifest.world_size
        pairs = (rank - ranks.start) * world + source
        fresh = pairs[~self.seen[pairs]]
        if (fresh[1:] <= fresh[:-1]).any():  # most often each pair comes once, in order
            fresh = np.unique(fresh)
        if len(fresh):
            self.seen[fresh] = True
            self.pairs.append(fresh if len(self.pairs) < FEW else fresh[:0])
            np.add.at(self.tally.shards, fresh // world + ranks.start, 1)

    def _forget(self) -> None:
        """Clear the table of pairs: where they were few without going through it."""
        if len(self.pairs) > FEW:
            self.seen.fill(False)
        for pairs in self.pairs:
            self.seen[pairs] = False
        self.pairs.clear()

    def _moved(self, number: int, leaf: Leaf, transfers: Transfers) -> None:
        times = self.uses[number]
        np.add.at(self.tally.delivered, transfers.rank, transfers.elements * (leaf.stored.itemsize * times))
        np.add.at(self.tally.transfers, transfers.rank, times)
        self.digests[number].update(rows_of(transfers).tobytes())

    def _read(self, signature: tuple[int, ...], reads: Reads) -> None:
        np.add.at(self.tally.read, reads.rank, (reads.high - reads.low) * self.signatures[signature])
        self.once.setdefault(signature, Once()).add(reads)


def tally(book: Book) -> Tally:
    """Return the sums over all transfers."""
    world = book.found.destination.world_size
    columns = np.zeros((4, world), np.int64)
    made = Tally(columns[0], columns[1], columns[2], columns[3])
    uses = Counter(entry.leaf for entry in book.entries)
    digests = [hashlib.sha256() for _ in book.leaves]
    several = [*blocks(world, book.manifest.world_size)]
    seen = np.zeros(len(several[0]) * book.manifest.world_size, np.bool_)
    sums = _Sums(book, book.manifest.block_size, made, uses, Counter(book.signatures()), digests, seen)
    for ranks in several:
        sums.add(ranks)
    made.read_once = sum(once.nbytes() * sums.signatures[signature] for signature, once in sums.once.items())
    made.digest = _digest(book, sums.digests)
    return made


def blocks(world: int, source_world: int) -> Iterator[range]:
    """Yield all ranks, as many at once as memory should hold."""
    step = max(1, min(RANKS, PAIRS // source_world))
    for start in range(0, world, step):
        yield range(start, min(start + step, world))


def rows_of(transfers: Transfers) -> Ints:
    """Return transfers as rows of a matrix, in canonical order: rank, source rank, offsets, sizes, elements."""
    pairs = transfers.rank * (int(transfers.source.max(initial=0)) + 1) + transfers.source
    by = np.argsort(pairs, kind="stable")
    ordered = pairs[by]
    if (ordered[1:] == ordered[:-1]).any():
        columns = [transfers.rank, transfers.source, *transfers.offsets.T, *transfers.sizes.T, transfers.elements]
        by = order(columns)
    t = transfers[by]
    return np.column_stack([t.rank, t.source, t.offsets, t.sizes, t.elements]).astype("<i8", copy=False)


def _digest(book: Book, leaves: list[hashlib._Hash]) -> str:
    """Return the digest over all transfers: name after name, each with the digest of its rows."""
    whole = hashlib.sha256()
    empty = hashlib.sha256().digest()
    digests = [leaf.digest() for leaf in leaves]
    for entry in book.entries:
        if digests[entry.leaf] != empty:
            for name in (entry.wanted, entry.source):
                data = name.encode()
                whole.update(len(data).to_bytes(8, "little") + data)
            whole.update(digests[entry.leaf])
    return "sha256:" + whole.hexdigest()

"""Owns the block digests of shards that are written out of order, by many threads; refuses to guess a block's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

from ckptspec.engine.resharding.tables import Chunk, Table
from ckptspec.format.digest import algorithm
from ckptspec.format.running import Running, start

Runs = dict[int, list[tuple[int, bytes]]]  # of a shard, by rank: runs of blocks, (the first one, all digests)


class Blocks:
    """Which blocks of which shard are known, and their digests, the state's left out.

    A block is known when its bytes came ascending and without gap; others are to be read back once all is written.
    """

    def __init__(self, tables: Sequence[Table], block: str, block_size: int) -> None:
        self._algorithm = algorithm(block)
        self._block_size = block_size
        self._digests = [bytearray(t.blocks * self._algorithm.size) for t in tables]
        self._known = [bytearray(t.blocks) for t in tables]
        self._running: dict[tuple[int, int], tuple[int, Running]] = {}
        self._fresh: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def take(self, chunk: Chunk, at: int, data: memoryview) -> None:
        """Take in the bytes of a chunk's payload from byte `at` on; any thread."""
        done = 0
        while done < len(data):
            number, inside = divmod(at + done, self._block_size)
            end = min((number + 1) * self._block_size, chunk.nbytes)
            piece = data[done : done + end - (at + done)]
            self._piece(chunk, number, inside, piece, at + done + len(piece) == end)
            done += len(piece)

    def _piece(self, chunk: Chunk, number: int, inside: int, piece: memoryview, last: bool) -> None:
        block = chunk.block + number
        if inside == 0 and last:
            self.set(chunk.rank, block, self._algorithm.of(piece))
            return
        key = (chunk.rank, block)
        at, running = self._running.pop(key, (0, None)) if inside else (0, start(self._algorithm.name))
        if running is None or at != inside:
            return  # its beginning came in another run, or will come: it is read back
        running.update(piece)
        if last:
            self.set(chunk.rank, block, running.digest())
        else:
            self._running[key] = inside + len(piece), running

    def set(self, rank: int, block: int, digest: bytes) -> None:
        """Note the digest of a block, by its number in the shard of `rank`."""
        size = self._algorithm.size
        self._digests[rank][block * size : (block + 1) * size] = digest
        self._known[rank][block] = 1
        with self._lock:
            self._fresh.append((rank, block))

    def forget(self) -> None:
        """Forget the blocks of which only the beginning came: their bytes will come again."""
        self._running.clear()

    def unknown(self, rank: int) -> Iterator[int]:
        """Yield the blocks of a shard whose digest is not known."""
        at = self._known[rank].find(0)
        while at >= 0:
            yield at
            at = self._known[rank].find(0, at + 1)

    def digests(self, rank: int) -> bytes:
        """Return the digests of all chunks' blocks of a shard, in order."""
        return bytes(self._digests[rank])

    def fresh(self) -> Runs:
        """Return, and forget as fresh, the runs (first block, digests) of each shard that became known since."""
        with self._lock:
            found, self._fresh = self._fresh, []
        return self._runs(sorted(set(found)))

    def known(self) -> Runs:
        """Return the runs (first block, digests) of each shard that are known."""
        return self._runs([(r, i) for r, known in enumerate(self._known) for i, is_ in enumerate(known) if is_])

    def _runs(self, found: Sequence[tuple[int, int]]) -> Runs:
        out: Runs = {}
        size = self._algorithm.size
        i = 0
        while i < len(found):
            j = i + 1
            rank, first = found[i]
            while j < len(found) and found[j] == (rank, first + j - i):
                j += 1
            out.setdefault(rank, []).append((first, bytes(self._digests[rank][first * size : (first + j - i) * size])))
            i = j
        return out

    def adopt(self, runs: Mapping[int, Sequence[tuple[int, bytes]]]) -> None:
        """Take over what `fresh` returned, here or in another process."""
        size = self._algorithm.size
        for rank, several in runs.items():
            for first, digests in several:
                count = len(digests) // size
                self._digests[rank][first * size : (first + count) * size] = digests
                self._known[rank][first : first + count] = b"\x01" * count

"""Owns the memory of a reshard: two halves that windows are read into by turns, and blocks that the next half needs.

The last block of a window is mostly used in part: what follows of its chunk begins with it, and finds it here.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from ckptspec.engine.resharding.batches import Batch, Window


class Half:
    """One buffer of `nbytes`, given out from its beginning to its end."""

    def __init__(self, nbytes: int) -> None:
        self._view = memoryview(mmap.mmap(-1, nbytes))
        self._used = 0

    @property
    def left(self) -> int:
        """The bytes not given out."""
        return len(self._view) - self._used

    @property
    def taken(self) -> memoryview:
        """All that was given out."""
        return self._view[: self._used]

    def take(self, nbytes: int) -> memoryview:
        """Return the next `nbytes`; raises MemoryError beyond the end: the plan is within the budget."""
        if nbytes > self.left:
            raise MemoryError(f"{nbytes} bytes asked for, {self.left} left")
        start = self._used
        self._used += nbytes
        return self._view[start : self._used]

    def clear(self) -> None:
        """Take everything back."""
        self._used = 0


@dataclass
class Filled:
    """A window's bytes in memory; byte 0 is the chunk's byte `start`, the first `carried` bytes were here before."""

    window: Window
    start: int
    data: memoryview
    carried: int = 0


class Carries:
    """The last, partly used block of every chunk that is being walked, in at most `slots` blocks of memory.

    `dropped` counts what did not fit: those blocks are read again.
    """

    def __init__(self, block: int, slots: int) -> None:
        self._block = block
        self._slots = slots
        self._held: dict[tuple[int, int], tuple[int, bytearray, int]] = {}
        self._free: list[bytearray] = []
        self._made = 0
        self.dropped = 0

    def take(self, filled: Filled) -> None:
        """Copy a window's first block into its place, if it is held."""
        held = self._held.get(filled.window.chunk.key)
        if held is not None and held[0] == filled.window.first:
            filled.data[: held[2]] = memoryview(held[1])[: held[2]]
            filled.carried = held[2]

    def keep(self, filled: Filled) -> None:
        """Hold the last block of a window for what follows of its chunk, in place of an earlier one."""
        window = filled.window
        self._drop(window.chunk.key)
        if window.used >= min(window.last * self._block, window.chunk.nbytes):
            return
        buffer = self._buffer()
        if buffer is None:
            self.dropped += 1
            return
        at = (window.last - 1) * self._block - filled.start
        nbytes = len(filled.data) - at
        buffer[:nbytes] = filled.data[at:]
        self._held[window.chunk.key] = window.last - 1, buffer, nbytes

    def _buffer(self) -> bytearray | None:
        if self._free:
            return self._free.pop()
        if self._made == self._slots:
            return None
        self._made += 1
        return bytearray(self._block)

    def _drop(self, key: tuple[int, int]) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self._free.append(held[1])

    def clear(self) -> None:
        """Hold nothing any more."""
        for key in list(self._held):
            self._drop(key)


def windows(batch: Batch) -> list[Window]:
    """Return the windows of a batch in the order of the files."""
    found = [window for several in batch.windows.values() for window in several]
    return sorted(found, key=lambda w: (w.chunk.rank, w.chunk.start, w.first))

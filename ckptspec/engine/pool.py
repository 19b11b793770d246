"""Owns the worker threads and their buffers, all within one byte budget; refuses work that would not fit."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

DEFAULT_BUDGET = 256 << 20
DEFAULT_BUFFER = 8 << 20
LEAST_BUFFER = 1 << 19  # a small payload (under 262,144 bytes) and the frame before it fit in half of it
Task = Callable[[memoryview], None]


def default_threads() -> int:
    """Return the worker threads for this rank: its share of the cores times two, 2 to 8 (disks like a deep queue)."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = max(1, int(told)) if told.isdecimal() else 1
    return max(2, min(8, 2 * (os.cpu_count() or 1) // ranks))


@dataclass
class Pool:
    """`threads` workers, each with one page-aligned, pre-faulted buffer of `buffer_nbytes`; kept between saves.

    The budget (bytes per rank) bounds threads * buffer_nbytes; fewer threads are used where it is small.
    """

    budget: int = DEFAULT_BUDGET
    buffer_nbytes: int = DEFAULT_BUFFER
    threads: int = field(default_factory=default_threads)
    _idle: list[mmap.mmap] = field(default_factory=list, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        if self.buffer_nbytes < LEAST_BUFFER:
            raise ValueError(f"a buffer of {self.buffer_nbytes} bytes is below {LEAST_BUFFER}")
        if self.budget < self.buffer_nbytes:
            raise ValueError(f"memory budget of {self.budget} bytes is below one buffer of {self.buffer_nbytes}")
        self.threads = max(1, min(self.threads, self.budget // self.buffer_nbytes))

    def _take(self) -> mmap.mmap:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        # MAP_POPULATE: fresh pages fault at 1 GB/s, touched ones copy at 9.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(-1, self.buffer_nbytes, flags=flags)

    def _give(self, buffer: mmap.mmap) -> None:
        with self._lock:
            self._idle.append(buffer)

    def run(self, tasks: Iterable[Task]) -> None:
        """Run every task with a buffer, in order of start; the first error stops the rest and is raised here."""
        work = _Work(iter(tasks))
        workers = [threading.Thread(target=self._work, args=(work,), name=f"ckptspec-{i}") for i in range(self.threads)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except BaseException as e:  # an interrupt: no worker may outlive the caller's descriptors and memory
            work.stop(e)
            for worker in workers:
                worker.join()
            raise
        if work.error is not None:
            raise work.error

    def _work(self, work: _Work) -> None:
        buffer = self._take()
        try:
            with memoryview(buffer) as view:
                while (task := work.next()) is not None:
                    task(view)
        except BaseException as e:  # carried to the caller's thread, which raises it
            work.stop(e)
        finally:
            self._give(buffer)


class _Work:
    """The tasks still to start, shared by the workers, and the first error."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def next(self) -> Task | None:
        with self._lock:
            return None if self.error is not None else next(self._tasks, None)

    def stop(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error


# Many small steps in Python take turns: threads that fight over the interpreter are slower together than one alone.
turn = threading.Lock()

_shared: dict[tuple[int, int], Pool] = {}


def shared_pool(budget: int = DEFAULT_BUDGET, block_size: int = 1 << 20) -> Pool:
    """Return this process's pool for a budget in bytes; its buffers hold at least two blocks and are reused."""
    nbytes = max(DEFAULT_BUFFER, 2 * block_size)
    if (budget, nbytes) not in _shared:
        _shared[budget, nbytes] = Pool(budget, nbytes)
    return _shared[budget, nbytes]

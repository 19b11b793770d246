"""Owns the one thread that speaks to a store and beats the heart; refuses to wait for ever for an answer.

A client that waits inside a store blocks all its other calls, and a store whose host is stopped never answers. So no
call waits for a key, the thread has its own connection, and whoever asks it stops waiting after a while.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ckptspec.engine.agree.store import Store

T = TypeVar("T")

STOP_SECONDS = 2.0


class StoreLostError(Exception):
    """The store answered with an error, or not at all: what was asked may have been done or not."""


@dataclass
class _Job(Generic[T]):
    """One question, and its answer once `done` is set."""

    ask: Callable[[Store], T]
    done: threading.Event = field(default_factory=threading.Event)
    answer: list[T] = field(default_factory=list)
    error: Exception | None = None
    dropped: bool = False

    def run(self, store: Store) -> None:
        """Ask the store, unless nobody waits any more."""
        if not self.dropped:
            try:
                self.answer.append(self.ask(store))
            except Exception as e:  # carried to the thread that asked
                self.error = e
        self.done.set()


@dataclass(frozen=True)
class Heart:
    """What the thread does by itself, every `interval` seconds, and for whom."""

    beat: Callable[[Store], None]
    interval: float
    owner: object


class Line:
    """A connection of one's own to a store, spoken over by one thread that also beats the heart.

    Not `threaded`, everything happens in the calling thread and no heart beats: enough for one rank alone.
    """

    def __init__(self, store: Store, *, threaded: bool = True) -> None:
        self._store = store  # kept: a store's host may live as long as this reference
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._heart: Heart | None = None
        self._due = 0.0
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ckptspec-store", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def call(self, ask: Callable[[Store], T], patience: float) -> T:
        """Return the answer to `ask`; raises StoreLostError when it raised, or gave none for `patience` seconds."""
        job = _Job(ask)
        if self._thread is None:
            job.run(self._store)
        else:
            self._jobs.put(job)
            self._await(job, patience)
        if job.error is not None:
            first = str(job.error).strip().partition("\n")[0]
            raise StoreLostError(first or type(job.error).__name__) from job.error
        return job.answer[0]

    def _await(self, job: _Job[T], patience: float) -> None:
        # In slices, counted: a process that was stopped for an hour has not waited an hour for the answer.
        slices = 20
        for _ in range(slices):
            if job.done.wait(patience / slices):
                return
        job.dropped = True
        raise StoreLostError(f"no answer for {patience:g} s")

    @property
    def heart(self) -> Heart | None:
        """The heart that beats now."""
        return self._heart

    @property
    def ours(self) -> bool:
        """Whether this process opened the line: a forked child has the object, not the thread."""
        return self._pid == os.getpid()

    def live(self, heart: Heart | None) -> None:
        """Beat this heart from the next call on, first after one interval; or none."""
        self._due = time.monotonic() + heart.interval if heart is not None else 0.0
        self._heart = heart

    def stop(self) -> None:
        """End the thread; it is left behind where the store holds it."""
        if self._thread is not None and self.ours:
            self._jobs.put(None)
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        store: Store | None = None
        while True:
            job = self._next()
            if job is None:
                return
            if store is None:
                store = self._connect(job)
            if store is not None:
                job.run(store)

    def _connect(self, job: _Job[Any]) -> Store | None:
        """Return a connection of our own: made here, since that too can take for ever."""
        clone = getattr(self._store, "clone", None)
        try:
            return self._store if clone is None else clone()
        except Exception as e:
            job.error = e
            job.done.set()
            return None

    def _next(self) -> _Job[Any] | None:
        """Return the next question, None to end; the heart beats when it is due and nobody asks."""
        heart = self._heart
        if heart is None:
            return self._jobs.get()
        now = time.monotonic()
        if now >= self._due:
            self._due = now + heart.interval
            return _Job(heart.beat)  # its error is left alone: who needs the store next meets it too
        try:
            return self._jobs.get(timeout=self._due - now)
        except queue.Empty:
            return self._next()

"""Owns the pace of a copy, and its end before time; refuses to go on after it was told to stop."""

from __future__ import annotations

import threading
import time


class Stopped(Exception):  # noqa: N818 - no error: somebody asked for it
    """The work was told to stop."""


class Throttle:
    """Lets bytes pass at `rate` a second (None: as they come), for all threads that ask together.

    A bucket of tokens that may be emptied once more than it holds: what is asked at once passes as a whole.
    """

    def __init__(self, rate: float | None = None) -> None:
        if rate is not None and rate <= 0:
            raise ValueError(f"a rate is a number of bytes a second above 0, not {rate}")
        self._rate = rate
        self._free_at = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    def stop(self) -> None:
        """Let nothing pass any more; who waits is told at once."""
        self._stop.set()

    def take(self, nbytes: int) -> None:
        """Return when so many bytes may pass; raises Stopped."""
        wait = 0.0
        if self._rate is not None:
            with self._lock:
                now = time.monotonic()
                wait = max(0.0, self._free_at - now)
                self._free_at = max(self._free_at, now) + nbytes / self._rate
        self.sleep(wait)

    def sleep(self, seconds: float) -> None:
        """Wait; raises Stopped as soon as that is told."""
        if self._stop.wait(seconds) if seconds > 0 else self._stop.is_set():
            raise Stopped

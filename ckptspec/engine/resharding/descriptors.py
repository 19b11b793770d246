"""Owns a bounded number of open files, used by many threads; closes only what nobody uses, and hides no error of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LIMIT = 128  # files open at once; a job has two such sets, and 1,024 descriptors are a common limit


class Descriptors:
    """Descriptors by number (a rank), each opened by `open_` when first used and, after a while unused, again."""

    def __init__(self, open_: Callable[[int], int], limit: int = LIMIT) -> None:
        self._open = open_
        self._limit = limit
        self._fds: dict[int, int] = {}  # the last used is the last entry
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def at(self, number: int) -> Iterator[int]:
        """Lend the descriptor of `number`; raises OSError of opening, and of closing another."""
        with self._lock:
            fd = self._fds.pop(number, None)
            if fd is None:
                self._make_room()
                fd = self._open(number)
            self._fds[number] = fd
            self._users[number] = self._users.get(number, 0) + 1
        try:
            yield fd
        finally:
            with self._lock:
                self._users[number] -= 1

    def _make_room(self) -> None:
        if len(self._fds) < self._limit:
            return
        idle = next((n for n in self._fds if not self._users.get(n)), None)
        if idle is not None:
            os.close(self._fds.pop(idle))

    def close(self) -> None:
        """Close all; raises the first OSError once the others are closed too."""
        error: OSError | None = None
        for fd in self._fds.values():
            try:
                os.close(fd)
            except OSError as e:
                error = error or e
        self._fds.clear()
        self._users.clear()
        if error is not None:
            raise error

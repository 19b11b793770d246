"""Owns what a person at a terminal sees of a restore: a bar on standard error; refuses to show one to a file."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int, int], None]  # bytes done, bytes in all


class Count:
    """Adds up the bytes that threads have read of `total`, and tells of them; whole blocks may be more than asked."""

    def __init__(self, total: int, tell: Tell, also: Callable[[int], None]) -> None:
        self._all = total
        self._done = 0
        self._tell = tell
        self._also = also
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        self._also(nbytes)
        with self._lock:
            self._done = min(self._all, self._done + nbytes)
            self._tell(self._done, self._all)


@contextmanager
def bar(what: str, *, shown: bool) -> Iterator[Tell | None]:
    """Give what moves a bar; None where none is to be shown, or standard error is no terminal."""
    if not shown or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # takes longer to import than a small restore
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=max(1, total))

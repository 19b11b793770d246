"""Owns saves that go on in the background: one at a time, its end told at the same call on every rank."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptspec.errors import CommitUncertainError
from ckptspec.format.manifest import Manifest

log = logging.getLogger("ckptspec")

RAISE, WARN = "raise", "warn"


@dataclass(frozen=True)
class SaveResult:
    """What became of one save: the manifest (None where nothing was saved), and seconds and bytes of this rank.

    `skipped` says why a save was not made: another one was under way.
    """

    step: int
    manifest: Manifest | None = None
    skipped: str | None = None
    error: Exception | None = None
    staged_nbytes: int = 0
    seconds_staged: float = 0.0
    seconds_written: float = 0.0
    seconds_committed: float = 0.0

    @property
    def seconds_saved(self) -> float:
        """The seconds from the copy to the commit."""
        return self.seconds_written + self.seconds_committed

    @property
    def ok(self) -> bool:
        """Whether a checkpoint was committed."""
        return self.manifest is not None

    def line(self) -> str:
        """Return the one line that is logged."""
        if self.manifest is None:
            return f"save step={self.step} " + (f"skipped={self.skipped!r}" if self.skipped else f"error={self.error}")
        m, total = self.manifest, self.seconds_staged + self.seconds_saved
        rate = m.nbytes / self.seconds_saved / 1e9 if self.seconds_saved else 0.0
        return (
            f"save step={m.step} nbytes={m.nbytes} ranks={m.world_size} staged_nbytes={self.staged_nbytes} "
            f"staged={self.seconds_staged:.3f}s written={self.seconds_written:.3f}s "
            f"committed={self.seconds_committed:.3f}s total={total:.3f}s GB/s={rate:.2f} save_id={m.save_id} "
            f"digest={m.digest}"
        )


class Pending:
    """A save under way: `done` tells whether it has ended, `result` waits for that and raises what it failed of."""

    def __init__(self, step: int, run: Callable[[], SaveResult]) -> None:
        self.step = step
        self._run = run
        self._result: SaveResult | None = None
        # Not a daemon: the interpreter's exit waits for a commit that is under way.
        self._thread: threading.Thread | None = threading.Thread(target=self._work, name=f"ckptspec-save-{step}")
        self._thread.start()

    @classmethod
    def ended(cls, result: SaveResult) -> Pending:
        """Return a save that is over."""
        made = cls.__new__(cls)
        made.step, made._result, made._thread = result.step, result, None
        return made

    def _work(self) -> None:
        try:
            self._result = self._run()
        except BaseException as e:  # carried to the thread that asks
            error = e if isinstance(e, Exception) else RuntimeError(f"the save was ended by {type(e).__name__}")
            self._result = SaveResult(self.step, error=error)
            if not threading.main_thread().is_alive():  # the program is at its end, and nobody will ask
                log.error("the save of step %d failed: %s", self.step, error)

    def done(self) -> bool:
        """Return whether the save has ended, well or not; never waits."""
        return self._result is not None

    def outcome(self) -> SaveResult:
        """Wait for the end and return what became of it, an error included."""
        if self._thread is not None:
            self._thread.join()
        assert self._result is not None
        return self._result

    def result(self) -> SaveResult:
        """Wait for the end and return what became of it; raises the error of a save that failed."""
        found = self.outcome()
        if found.error is not None:
            raise found.error
        return found


class Tolerance:
    """What to do about failed saves: raise each, or warn of up to `limit` in a row."""

    def __init__(self, on_error: str, limit: int) -> None:
        if on_error not in (RAISE, WARN):
            raise ValueError(f'on_error is "raise" or "warn", not {on_error!r}')
        if limit < 0:
            raise ValueError(f"max_failures is 0 or more, not {limit}")
        self._limit = limit if on_error == WARN else 0
        self.failures = 0

    def judge(self, result: SaveResult) -> None:
        """Count a result; raises its error once too many saves in a row have failed.

        An outcome that nobody saw is no reason to stop either: a later commit settles it.
        """
        if result.error is None:
            self.failures = 0 if result.ok else self.failures
            return
        self.failures += 1
        if self.failures > self._limit:
            raise result.error
        what = "has an outcome nobody saw" if isinstance(result.error, CommitUncertainError) else "failed"
        log.warning("the save of step %d %s (%d in a row): %s", result.step, what, self.failures, result.error)


class Clock:
    """When a save began, when this rank's shard was written, and when all was committed, in seconds."""

    def __init__(self) -> None:
        self.begun = self.written = self.committed = time.monotonic()

    def wrote(self) -> None:
        """Note that the shard is durable."""
        self.written = time.monotonic()

    def done(self) -> None:
        """Note that the save is committed."""
        self.committed = time.monotonic()


def timed(work: Callable[[Clock], Manifest], step: int, staged: float, nbytes: int) -> SaveResult:
    """Return what became of a save that `work` carries out."""
    clock = Clock()
    manifest = work(clock)
    written, committed = max(clock.written, clock.begun), max(clock.committed, clock.written)
    found = SaveResult(
        step,
        manifest,
        staged_nbytes=nbytes,
        seconds_staged=staged,
        seconds_written=written - clock.begun,
        seconds_committed=committed - written,
    )
    log.info("%s", found.line())
    return found

"""Owns the life of a run as one object: saves in the background, their cadence, and the way back into training."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from ckptspec.engine.notes import Notes
from ckptspec.engine.snapshot import Snapshot
from ckptspec.errors import SaveError
from ckptspec.format.manifest import Manifest
from ckptspec.pytorch import group
from ckptspec.pytorch.api import load
from ckptspec.pytorch.background import RAISE, Pending, SaveResult, Tolerance, timed
from ckptspec.pytorch.declare import snapshot
from ckptspec.pytorch.restoring import RestoreResult, Restoring
from ckptspec.pytorch.saving import SaveOptions, commit
from ckptspec.pytorch.staging import Staging

log = logging.getLogger("ckptspec")

WAIT, SKIP = "wait", "skip"


class Checkpointer:
    """Saves and restores one run; every rank makes one and calls its methods in the same order.

    `save` returns once the state is copied; a thread writes and commits it, never through the training's process group.
    `on_busy` says what a save does while another is under way: "wait", or "skip", as rank 0 finds it. `on_error` is
    "raise", or "warn" for up to `max_failures` failed saves in a row. `staging_memory` (bytes) bounds the copy.
    `observe` gets every SaveResult. All else is as in `ckptspec.save`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        on_busy: str = WAIT,
        on_error: str = RAISE,
        max_failures: int = 3,
        staging_memory: int | None = None,
        observe: Callable[[SaveResult], None] | None = None,
        **options: Any,
    ) -> None:
        if on_busy not in (WAIT, SKIP):
            raise ValueError(f'on_busy is "wait" or "skip", not {on_busy!r}')
        self.run = os.fspath(run)
        self._on_busy = on_busy
        self._options = SaveOptions(**options)
        self._tolerance = Tolerance(on_error, max_failures)
        self._staging = Staging(staging_memory)
        self._observe = observe
        self._pending: Pending | None = None
        self._closed = False

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(
        self, step: int, state: Any, *, blocking: bool = False, annotations: Mapping[str, Any] | None = None
    ) -> Pending:
        """Begin to save `state` as a checkpoint of `step` and return the save; changes to the state are not in it.

        First the save before is waited for (or this one is skipped), and its failure is raised here, on every rank.
        With `blocking` it is waited for as well.
        """
        if self._closed:
            raise SaveError("this Checkpointer is closed", rule="P-AGREE")
        if self._busy():
            found = SaveResult(step, skipped="the save before is still under way")
            self._tell(found)
            return Pending.ended(found)
        self.wait()
        begun = time.monotonic()
        take = self._staged(step, state)
        staged = time.monotonic() - begun
        request = self._options.request(step, annotations)
        channel = group.channel(self._options.silence)

        def work() -> Manifest:
            return commit(self.run, take, request, channel, self._options.memory)

        self._pending = Pending(step, lambda: timed(work, step, staged, self._staging.nbytes))
        pending = self._pending
        if blocking:
            self.wait()
        return pending

    def _busy(self) -> bool:
        """Return whether this save is to be skipped: rank 0 decides once for all ranks."""
        if self._on_busy == WAIT:
            return False
        mine = self._pending is not None and not self._pending.done()
        notes = self._notes()
        return notes.share("busy", b"1" if mine else b"0") == b"1"

    def _notes(self) -> Notes:
        return group.channel(self._options.silence).notes

    def _staged(self, step: int, state: Any) -> Callable[[], Snapshot]:
        """Copy the state and return what gives its snapshot; a state that cannot be saved fails there, on all ranks."""
        try:
            self._options.check(step)
            snap = snapshot(self._staging.take(self._options.capture(state)))
        except Exception as e:
            error = e

            def refuse() -> Snapshot:
                raise error

            return refuse
        return lambda: snap

    @property
    def staging_nbytes(self) -> int:
        """The bytes of memory that are kept for copies of the state."""
        return self._staging.nbytes

    def _tell(self, result: SaveResult) -> None:
        if result.manifest is None and result.error is None:
            log.info("%s", result.line())
        if self._observe is not None:
            self._observe(result)

    def wait(self) -> SaveResult | None:
        """Wait for the save under way, if there is one, and return what became of it; raises what it failed of."""
        if self._pending is None:
            return None
        pending, result = self._pending, self._pending.outcome()
        self._pending = None if self._pending is pending else self._pending
        self._tell(result)
        self._tolerance.judge(result)
        return result

    # ---- restoring ---------------------------------------------------------------------------------------------------

    def restore(self, state: Any, *, step: int | None = None, fallback: bool = True, **options: Any) -> RestoreResult:
        """Fill `state` from the newest good step of the run, all ranks together, and say what was done.

        An empty run is a fresh start: the result's step is None and the state is untouched. Where bytes turn out to be
        damaged on any rank all go back to the next older step, unless `fallback` is False. `step` loads that one and
        sets newer ones aside. All else is as in `ckptspec.load`. Raises NotCommittedError where the run is not empty
        and holds nothing good.
        """
        self.wait()
        here = group.world()
        options.setdefault("silence", self._options.silence)
        options.setdefault("memory", self._options.memory)
        job = Restoring(self.run, here.rank, self._notes(), lambda path: load(path, state, **options))
        result = job.newest(fallback=fallback) if step is None else job.exactly(step)
        log.info("%s", result.line())
        return result

    def close(self) -> None:
        """Wait for the save under way and give the staging memory back; raises what that save failed of."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._staging.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as e:
            log.warning("the last save failed too: %s", e)

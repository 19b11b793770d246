"""Owns the life of a run as one object: saves in the background, their cadence, and the way back into training."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch

from ckptspec.check.life.cadence import cadence
from ckptspec.check.life.keeping import Keep, metrics_note
from ckptspec.check.life.room import Room
from ckptspec.engine.agree.notes import Notes
from ckptspec.engine.life.cleaning import clean
from ckptspec.engine.life.retention import Ledger, retain
from ckptspec.engine.mirroring.uploads import Uploader
from ckptspec.engine.saves.rehearsal import rehearse
from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.errors import CkptspecError, SaveError
from ckptspec.format.manifest import Manifest
from ckptspec.pytorch import group
from ckptspec.pytorch.api import load
from ckptspec.pytorch.background import RAISE, Clock, Pending, SaveResult, Tolerance, timed
from ckptspec.pytorch.boundaries import Boundaries, Signals
from ckptspec.pytorch.declare import snapshot
from ckptspec.pytorch.lazy import Gate, lazy_names
from ckptspec.pytorch.progress import bar
from ckptspec.pytorch.restoring import RestoreResult, Restoring
from ckptspec.pytorch.saving import SaveOptions, commit
from ckptspec.pytorch.staging import Staging

log = logging.getLogger("ckptspec")

WAIT, SKIP = "wait", "skip"
COPY, LAZY = "copy", "lazy"


class Checkpointer:
    """Saves and restores one run; every rank makes one and calls its methods in the same order.

    `save` returns once the state is copied; a thread writes and commits it, never through the training's process group.
    After each commit the run is tidied: of its checkpoints the `keep_last` newest stay, the multiples of `keep_every`,
    the `keep_best` (metric, "min" or "max", how many), and the steps in `protect`; keep_last=None alone keeps all.
    With a `mirror`, a folder or an address such as s3://bucket/prefix, rank 0 copies each step there in the background,
    at no more than `mirror_rate` bytes a second, and `restore` uses the nearest good copy.
    `on_busy` says what a save does while another is under way: "wait", or "skip", as rank 0 finds it. `on_error` is
    "raise", or "warn" for up to `max_failures` failed saves in a row. `staging_memory` (bytes) bounds the copy.
    `save_every` (steps, or a time such as "10min") and `save_on` (signals, such as SIGTERM) say when `due` tells all
    ranks to save. `observe` gets every SaveResult, when this rank is told of it, and every RestoreResult; what it
    raises is logged. All else is as in `ckptspec.save`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        keep_last: int | None = 5,
        keep_every: int | None = None,
        keep_best: tuple[str, str, int] | None = None,
        protect: Collection[int] = (),
        mirror: str | os.PathLike[str] | None = None,
        mirror_rate: float | None = None,
        on_busy: str = WAIT,
        on_error: str = RAISE,
        max_failures: int = 3,
        staging_memory: int | None = None,
        save_every: int | str | timedelta | None = None,
        save_on: Iterable[signal.Signals] = (),
        observe: Callable[[SaveResult | RestoreResult], None] | None = None,
        **options: Any,
    ) -> None:
        if on_busy not in (WAIT, SKIP):
            raise ValueError(f'on_busy is "wait" or "skip", not {on_busy!r}')
        self.run = os.fspath(run)
        self._on_busy = on_busy
        self._options = SaveOptions(**options)
        self._tolerance = Tolerance(on_error, max_failures)
        self._staging = Staging(staging_memory)
        self._keep = Keep(keep_last, keep_every, keep_best, protect)
        self._ledger = Ledger(self.run)
        self._mirror = None if mirror is None else os.fspath(mirror)
        self._mirror_rate = mirror_rate
        self._uploads: Uploader | None = None
        self._opened = False
        self._observe = observe
        self._pending: Pending | None = None
        self._closed = False
        self._signals = Signals(save_on)
        self._cadence = cadence(save_every) if save_every is not None else None
        self._at: Boundaries | None = None
        self._signals.catch()

    # ---- saving ------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        blocking: bool = False,
        staging: str = COPY,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        metrics: Mapping[str, float] | None = None,
        annotations: Mapping[str, Any] | None = None,
    ) -> Pending:
        """Begin to save `state` as a checkpoint of `step` and return the save; later changes of it are left out.

        First the save before is waited for (or this one is skipped), and its failure is raised here, on every rank.
        With `blocking` this one is waited for as well. With staging="lazy" what the `optimizers` alone change is copied
        while training goes on, and their steps wait for it; everything else is copied at once. `metrics` are numbers
        by which the best checkpoints are kept.
        """
        if staging not in (COPY, LAZY):
            raise ValueError(f'staging is "copy" or "lazy", not {staging!r}')
        if self._closed:
            raise SaveError("this Checkpointer is closed", rule="P-AGREE")
        self._open()
        if self._busy():
            found = SaveResult(step, skipped="the save before is still under way")
            self._tell(found)
            return Pending.ended(found)
        self.wait()
        self._boundaries().saved(step)
        # What may raise comes first: once there is a lazy copy to be made, steps of its optimizers wait for it.
        request = self._options.request(step, {**(annotations or {}), **metrics_note(metrics or {})}, self._keep)
        channel = group.channel(self._options.silence)
        place = channel.reserve()  # here and not in the thread: all ranks take the same turns
        begun = time.monotonic()
        try:
            copy = self._staged(step, state, optimizers if staging == LAZY else None)
        except BaseException:  # an interrupt: all other errors are told in the attempt
            channel.forgo(place)
            raise
        staged = time.monotonic() - begun

        def work(clock: Clock) -> Manifest:
            try:
                take = copy()  # before anything that may wait for other ranks: steps may wait for these copies
                manifest = commit(self.run, take, request, channel, self._options.memory, place, clock.wrote)
                clock.done()
            finally:
                channel.forgo(place)
            if channel.rank == 0:
                self._copy(manifest)
                self._tidy(manifest)
            return manifest

        try:
            self._pending = Pending(step, lambda: timed(work, step, staged, self._staging.nbytes))
        except RuntimeError:  # no thread could be started
            channel.forgo(place)
            copy()  # no step may wait for copies that nobody makes
            raise
        pending = self._pending
        if blocking:
            self.wait()
        return pending

    def dry_run(self, state: Any, step: int = 0) -> Room:
        """Return what saving this state will take and what there is, before training begins; nothing is kept of it.

        Raises SaveError on every rank for what would fail a save: a state that cannot be stored, ranks that disagree or
        see another folder, too little room for it and what retention keeps. `str(room.line())` says it in words.
        """
        self.wait()
        self._open()
        channel = group.channel(self._options.silence)
        request = self._options.request(step, keep=self._keep)
        with channel.turn():
            found = rehearse(self.run, lambda: snapshot(self._options.capture(state)), request, channel)
        log.info("dry run %s: %s", self.run, found.line())
        return found

    def _copy(self, manifest: Manifest) -> None:
        """Have a committed step copied to the mirror, before retention may look at it; that fails no save."""
        if self._uploads is not None:
            self._uploads.enqueue(manifest.step, manifest)

    def _open(self) -> None:
        """Open the mirror, once, on rank 0; one that cannot commit is refused on every rank."""
        if self._mirror is None or self._opened:
            return
        self._opened = True
        rank, fault = group.world().rank, ""
        if rank == 0:
            try:
                with self._notes().working():
                    self._uploads = Uploader(self.run, self._mirror, self._mirror_rate)
            except (CkptspecError, OSError, ValueError) as e:
                fault = str(e)
        told = self._notes().share("mirror", fault.encode() if rank == 0 else None).decode()
        if told:
            raise SaveError(f"the mirror cannot be used: {told}", rank=0, rule="P-PROBE")

    @property
    def uploads(self) -> Uploader | None:
        """What copies steps to the mirror, on rank 0, once there is one: its `status` tells which steps are safe."""
        return self._uploads

    def _tidy(self, manifest: Manifest) -> None:
        """Remove what retention lets go, now that a newer checkpoint is durable; that can wait, so it fails nothing."""
        if not self._keep.removes:
            return
        try:
            done = retain(self.run, self._keep, after=manifest.save_id, run_id=manifest.run_id, ledger=self._ledger)
        except OSError as e:
            log.warning("older checkpoints of %s could not be removed: %s", self.run, e)
        else:
            for fate in done.removed:
                log.info("retention removed step %d of %s: %s", fate.step.step, self.run, fate.reason)

    def due(self, step: int) -> bool:
        """Return whether all ranks save at this step, by the cadence or because a signal came; ask it at every step.

        Between two steps the ranks must meet in a collective, as training does.
        """
        return self._boundaries().due(step)

    @property
    def stopping(self) -> bool:
        """Whether a signal asked for the end of the training: true on all ranks from the step that is saved for it."""
        return self._at is not None and self._at.stopping

    def _boundaries(self) -> Boundaries:
        if self._at is None:
            here = group.world()
            self._at = Boundaries(self._notes(), here.rank, here.size, self._cadence, self._signals)
        return self._at

    def _busy(self) -> bool:
        """Return whether this save is to be skipped: rank 0 decides once for all ranks."""
        if self._on_busy == WAIT:
            return False
        mine = self._pending is not None and not self._pending.done()
        notes = self._notes()
        return notes.share("busy", b"1" if mine else b"0") == b"1"

    def _notes(self) -> Notes:
        return group.channel(self._options.silence).notes

    def _staged(
        self, step: int, state: Any, optimizers: Sequence[torch.optim.Optimizer] | None
    ) -> Callable[[], Callable[[], Snapshot]]:
        """Copy the state, and return what copies the rest of it and then gives its snapshot.

        What is wrong with the state is raised by that snapshot, inside the attempt: then it fails on all ranks.
        """
        try:
            self._options.check(step)
            captured = self._options.capture(state)
            later = frozenset[str]() if optimizers is None else lazy_names(captured, optimizers)
            copied = self._staging.take(captured, later)
            snap = snapshot(copied.captured)
            gate = Gate(captured, later, optimizers) if optimizers is not None else None
        except Exception as e:
            refused = _raising(e)
            return lambda: refused

        def finish() -> Callable[[], Snapshot]:
            try:
                if gate is not None:
                    copied.rest()
                    gate.check()
            except Exception as e:
                return _raising(e)
            finally:
                if gate is not None:
                    gate.open()
            return lambda: snap

        return finish

    @property
    def staging_nbytes(self) -> int:
        """The bytes of memory that are kept for copies of the state."""
        return self._staging.nbytes

    def _tell(self, result: SaveResult) -> None:
        if result.manifest is None:  # else it was logged when it was committed
            log.info("%s", result.line())
        self._show(result)

    def _show(self, result: SaveResult | RestoreResult) -> None:
        """Give a result to who observes; a fault there is told, and stops no training and no other rank."""
        if self._observe is None:
            return
        try:
            self._observe(result)
        except Exception:
            log.exception("observe failed for step %s", result.step)

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
        self._open()
        here = group.world()
        if here.rank == 0:
            with self._notes().working():
                self._clear()
        options.setdefault("silence", self._options.silence)
        options.setdefault("memory", self._options.memory)
        with bar("restoring", shown=here.rank == 0) as progress:
            options.setdefault("progress", progress)
            job = Restoring(self.run, here.rank, self._notes(), lambda path: load(path, state, **options), self._mirror)
            result = job.newest(fallback=fallback) if step is None else job.exactly(step)
        self._boundaries().saved(result.step or 0)
        log.info("%s", result.line())
        self._show(result)
        return result

    def _clear(self) -> None:
        """Remove what dead saves left in the run; what cannot be removed stays for another time."""
        if not os.path.isdir(self.run):
            return
        try:
            clean(self.run)
        except (CkptspecError, OSError) as e:
            log.warning("what dead saves left in %s could not be removed: %s", self.run, e)

    def close(self) -> None:
        """Wait for the save under way and give the staging memory back; raises what that save failed of."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._staging.release()
            self._signals.release()
            if self._uploads is not None:
                self._uploads.close()

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


def _raising(error: Exception) -> Callable[[], Snapshot]:
    def refuse() -> Snapshot:
        raise error

    return refuse

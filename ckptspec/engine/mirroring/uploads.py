"""Owns the copying of a run's steps to its mirror in the background; never fails the training, never forgets a step.

Steps that wait are on record in the run's folder, so the next process goes on where this one ended.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

from ckptspec.engine.life import lease
from ckptspec.engine.locate import newest, read_manifest
from ckptspec.engine.mirroring.copying import Copied, Progress, copy_folder, refuse_others
from ckptspec.engine.mirroring.mirror import Mirror, folder_of, open_mirror, set_aside, sound
from ckptspec.engine.mirroring.throttle import Stopped, Throttle
from ckptspec.engine.mirroring.uploaded import OPEN, Lock, Records, Upload
from ckptspec.errors import CkptspecError, NotCommittedError
from ckptspec.format.manifest import Manifest
from ckptspec.format.names import step_folder
from ckptspec.storage.stores import open_store

log = logging.getLogger("ckptspec")

POLL = 1.0  # seconds between two looks for a lock that another process holds
BACKOFF = (1.0, 60.0)  # seconds before the second try, and at most
EXIT = 30.0  # seconds to wait for a part on its way that nobody wants any more
CLOSE = 300.0

# What a store or a disk says that may soon answer again; anything else at the beginning is for somebody to put right.
_PASSING = frozenset(
    {errno.EIO, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH}
    | {errno.ESTALE, errno.EAGAIN}
)

Done = Callable[[Copied], None]


class Uploader:
    """Copies steps to a mirror in a thread of its own, the newest that waits first; for one process of a job.

    The mirror is tried out here: SaveError [P-PROBE] for one that cannot commit, OSError for a wrong address or key.
    One that does not answer is tried again in the background, and so is every step until it is safe; what can never be
    sent (its bytes here are damaged, the mirror has another save of it) is given up, logged, and told by `status`. A
    second uploader of the same run and mirror waits until the first has ended. `rate` is in bytes a second; `done` is
    called after each step and `progress` with the bytes of each part, in threads of the uploader.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        mirror: str | os.PathLike[str],
        rate: float | None = None,
        *,
        done: Done | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.run = os.fspath(run)
        self.mirror = open_store(mirror).url
        self.waiting: str | None = None  # what it waits for beside its work, in words
        self._place = self._open(mirror)
        self._given = mirror
        self._records = Records(self.run, self.mirror)
        self._throttle = Throttle(rate)
        self._done = done
        self._progress = progress
        self._tries = 0  # failures since something was copied
        self._known = False  # that the mirror is of this run
        self._condition = threading.Condition()
        self._queue: dict[tuple[int, str], Upload] = {}
        self._busy: tuple[int, str] | None = None
        self._closing = False
        self._look_back()
        self._thread = threading.Thread(target=self._work, name="ckptspec-upload", daemon=True)
        self._thread.start()
        _living.add(self)

    def _open(self, mirror: str | os.PathLike[str]) -> Mirror | None:
        try:
            return open_mirror(mirror, self.run)
        except OSError as e:
            if e.errno not in _PASSING:
                raise
            self.waiting = f"the mirror: {e}"
            log.warning("the mirror does not answer, copies wait: %s", e)
            return None

    def _look_back(self) -> None:
        """Take up what an earlier process left: steps on record, and the newest where nothing newer is on record."""
        for upload in self._records.all():
            if upload.state in OPEN:
                self._queue[upload.key] = upload
        last = max((u.step for u in self._records.all() if u.state in ("safe", *OPEN)), default=-1)
        found = newest(self.run) if os.path.isdir(self.run) else None
        if found is not None and found.manifest is not None and found.manifest.step > last:
            self.enqueue(found.manifest.step)

    # ---- what the training calls -----------------------------------------------------------------------------------

    def enqueue(self, step: int, manifest: Manifest | None = None) -> None:
        """Have a committed step of the run copied; returns at once. Raises NotCommittedError where it is none, OSError.

        Who has just committed it gives its manifest, and the folder is not looked at. One that is safe is looked at
        again: what is missing there is sent.
        """
        folder = os.path.join(self.run, step_folder(step)) if manifest is not None else folder_of(self.run, step)
        m = manifest if manifest is not None else sound(read_manifest(folder))
        upload = Upload(self.mirror, m.step, m.save_id, folder, m.nbytes)
        known = self._records.get(m.step, m.save_id)
        if known is not None:
            upload = replace(known, path=folder, state="queued", error=None)
        with self._condition:
            if self._closing:
                raise CkptspecError("the uploader is closed")
            self._records.put(upload)
            self._queue[upload.key] = upload
            self._condition.notify_all()

    def status(self) -> tuple[Upload, ...]:
        """Return what is on record of every step and this mirror, newest first: which are safe there."""
        return self._records.all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do, at most `timeout` seconds, and return whether that is so.

        Returns at once where the uploader has ended, by `close` or by a fault; `waiting` then says which.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._idle() or not self._thread.is_alive(), timeout)
            return self._idle()

    def _idle(self) -> bool:
        return not self._queue and self._busy is None

    def close(self, timeout: float | None = CLOSE) -> bool:
        """Finish what waits, for at most `timeout` seconds, then stop; return whether nothing was left.

        What was left is on record, and the next uploader of this run and mirror goes on with it.
        """
        with self._condition:
            self._closing = True
        finished = self.wait(timeout)
        self._end(EXIT)
        return finished

    def _end(self, timeout: float | None) -> None:
        with self._condition:
            self._closing = True
            self._throttle.stop()
            self._condition.notify_all()
        self._thread.join(timeout)
        _living.discard(self)

    def __enter__(self) -> Uploader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        lock = Lock(os.path.join(self._records.folder, "lock"))
        try:
            self._begin(lock)
            while (upload := self._next()) is not None:
                self._try(upload)
        except Stopped:
            pass
        except Exception as e:
            self.waiting = f"it ended by a fault of its own: {e}"
            log.exception("the uploader ended")
        finally:
            lock.release()
            with self._condition:
                self._busy = None
                self._condition.notify_all()

    def _begin(self, lock: Lock) -> None:
        """Wait for the lock and for the mirror."""
        while not lock.take():
            self.waiting = "another process copies to this mirror"
            self._throttle.sleep(POLL)
        self._records.tidy()
        pause = BACKOFF[0]
        while self._place is None:
            self._throttle.sleep(pause)
            pause = min(2 * pause, BACKOFF[1])
            self._place = self._open(self._given)
        self.waiting = None

    def _next(self) -> Upload | None:
        with self._condition:
            self._condition.wait_for(lambda: self._queue or self._throttle.stopped)
            if self._throttle.stopped:
                return None
            self._busy = max(self._queue)
            return self._queue.pop(self._busy)

    def _try(self, upload: Upload) -> None:
        """Copy one step, again and again until it is safe or can never be; a newer one goes before the next try."""
        again = False
        try:
            copied = self._copy(upload)
        except Stopped:
            with self._condition:
                self._queue[upload.key] = upload  # it is not done
            raise
        except Exception as e:
            again = self._judged(upload, e)
        else:
            self._say(copied)
        with self._condition:
            self._busy = None
            if again:
                self._queue.setdefault(upload.key, upload)
            self._condition.notify_all()
        self._tries = self._tries + 1 if again else 0
        if again:
            self._throttle.sleep(min(BACKOFF[0] * 2.0 ** (self._tries - 1), BACKOFF[1]))

    def _copy(self, upload: Upload) -> Copied:
        assert self._place is not None
        set_aside(self.run, self._place)
        with lease.hold(upload.path, "upload", upload.save_id):
            if not self._known:  # once
                refuse_others(upload.path, self._place)
                self._known = True
            return copy_folder(upload.path, self._place, self._records, self._throttle, self._progress)

    def _say(self, copied: Copied) -> None:
        self.waiting = None
        log.info("%s", copied.line())
        if self._done is not None:
            try:
                self._done(copied)
            except Exception:  # the step is safe all the same
                log.exception("what was to be called after an upload failed")

    def _judged(self, upload: Upload, error: Exception) -> bool:
        """Note why a copy failed, and tell whether to try again."""
        now = self._records.get(upload.step, upload.save_id) or upload
        text = str(error).partition("\n")[0][:500]
        if isinstance(error, NotCommittedError) or not os.path.isdir(upload.path):
            log.warning("step %d was removed from the run before it was in the mirror", upload.step)
            self._records.put(replace(now, state="gone", error=text))
            return False
        again = isinstance(error, OSError)  # even a lost permission may be given back
        self._records.put(replace(now, state="queued" if again else "failed", error=text))
        if again:
            self.waiting = f"the mirror: {text}"
        log.log(
            logging.WARNING if again else logging.ERROR,
            "step %d was not copied to %s, %s: %s",
            upload.step,
            self.mirror,
            "and will be tried again" if again else "and cannot be",
            text,
        )
        return again


_living: weakref.WeakSet[Uploader] = weakref.WeakSet()


def _at_exit() -> None:
    """End every uploader before the interpreter goes: its thread must not come back into one that is gone."""
    for uploader in list(_living):
        uploader._end(EXIT)


atexit.register(_at_exit)

"""Owns leases: files in a run folder that say who is at a save or a checkpoint; refuses to judge by process numbers.

A holder renews the time of its file every few seconds and keeps it locked. On the machine of the holder the lock tells
at once whether it lives: the kernel lets go of it when the process ends, however it ends, and not while it is merely
stopped. From another machine, where a lock may or may not be seen, only the time tells, by the file system's own clock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
import threading
import weakref
from functools import cache
from types import TracebackType

from ckptspec.engine.saves.staging import saved
from ckptspec.errors import NotCommittedError, Where
from ckptspec.storage import local

FORMAT = "ckptspec-lease"
BEAT = 15.0  # seconds between two renewals
LIMIT = 4096  # bytes of a lease
_NAME = re.compile(r"\.lease-[0-9a-f]{32}(\.new)?\Z")
UNBORN = ".new"
_JOIN = 1.0  # seconds to wait for the end of a heart that a network disk may hold


@cache
def boot() -> str:
    """Return what is the same for all processes on this running kernel, containers included; "" where unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def is_lease(name: str) -> bool:
    """Return whether a file of a run folder is a lease, or was to become one."""
    return _NAME.match(name) is not None


class Lease:
    """A lease that is held until `release`, or the end of this process; a context manager.

    `error` is the first that the heart met: the file system then shows no life to other machines.
    """

    def __init__(self, run: str, holder: str, save_id: str, beat: float = BEAT) -> None:
        name = os.path.join(run, f".lease-{secrets.token_hex(16)}")
        self.path = name
        self.error: OSError | None = None
        self._pid = os.getpid()
        self._fd = local.create(name + UNBORN)
        try:
            self._write(holder, save_id)
            local.rename(name + UNBORN, name)  # nobody sees it before it is whole and locked
        except BaseException:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                local.remove_file(name + UNBORN)
            raise
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._live, args=(beat,), name="ckptspec-lease", daemon=True)
        _held.add(self)
        self._heart.start()

    def _write(self, holder: str, save_id: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError:
            locked = False  # a file system without locks: the time alone tells
        said: dict[str, object] = {"format": FORMAT, "holder": holder, "save_id": save_id, "host": socket.gethostname()}
        said |= {"pid": self._pid, "boot": boot(), "locked": locked}
        local.write_at(self._fd, json.dumps(said).encode(), 0)

    def _live(self, beat: float) -> None:
        try:
            while not self._stop.wait(beat):
                try:
                    os.utime(self._fd)
                except OSError as e:
                    self.error = self.error or e
        finally:
            os.close(self._fd)

    def release(self) -> None:
        """End it: the file goes. To be called once or more, and by no forked child."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        _held.discard(self)
        with contextlib.suppress(OSError):  # it is dead by its lock and its time; cleaning takes it
            local.remove_file(self.path)
        self._stop.set()
        self._heart.join(_JOIN)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: weakref.WeakSet[Lease] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: a lock lives as long as any copy of its descriptor, and the child's is no sign of life."""
    for lease in list(_held):
        with contextlib.suppress(OSError):
            os.close(lease._fd)
    _held.clear()


os.register_at_fork(after_in_child=_forked)


def hold(folder: str, holder: str, save_id: str) -> Lease:
    """Take a lease on the checkpoint in a step's folder of a run, for as long as it is read or uploaded.

    Retention and cleaning then leave it alone. Raises NotCommittedError where another save is there, or none any more;
    OSError where the run folder cannot be written.
    """
    lease = Lease(os.path.dirname(os.path.abspath(folder)), holder, save_id)
    try:
        found = saved(folder)  # only now: who removes looks for leases after it has taken a folder out of sight
    except BaseException:
        lease.release()
        raise
    if found != save_id:
        lease.release()
        expected, seen = f"save {save_id}", "none" if found is None else f"save {found}"
        where = Where(folder)
        raise NotCommittedError("it is gone", rule="C-MANIFEST", where=where, expected=expected, found=seen)
    return lease

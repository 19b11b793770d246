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
import stat
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import TracebackType

from ckptspec.check.leftovers import EXPIRY
from ckptspec.engine.staging import saved
from ckptspec.errors import NotCommittedError, Where
from ckptspec.storage import local

FORMAT = "ckptspec-lease"
BEAT = 15.0  # seconds between two renewals
LIMIT = 4096  # bytes of a lease
_NAME = re.compile(r"\.lease-[0-9a-f]{32}(\.new)?\Z")
_UNBORN = ".new"
_SAVE_ID = re.compile(r"[0-9a-f]{32}\Z")
_JOIN = 1.0  # seconds to wait for the end of a heart that a network disk may hold


@cache
def _boot() -> str:
    """Return what is the same for all processes on this running kernel, containers included; "" where unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def is_lease(name: str) -> bool:
    """Return whether a file of a run folder is a lease, or was to become one."""
    return _NAME.match(name) is not None


# ---- holding one -----------------------------------------------------------------------------------------------------


class Lease:
    """A lease that is held until `release`, or the end of this process; a context manager.

    `error` is the first that the heart met: the file system then shows no life to other machines.
    """

    def __init__(self, run: str, holder: str, save_id: str, beat: float = BEAT) -> None:
        name = os.path.join(run, f".lease-{secrets.token_hex(16)}")
        self.path = name
        self.error: OSError | None = None
        self._pid = os.getpid()
        self._fd = local.create(name + _UNBORN)
        try:
            self._write(holder, save_id)
            local.rename(name + _UNBORN, name)  # nobody sees it before it is whole and locked
        except BaseException:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                local.remove_file(name + _UNBORN)
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
        said |= {"pid": self._pid, "boot": _boot(), "locked": locked}
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


# ---- looking at those of others --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sign:
    """What one lease says: whose it is and of which save (None where it cannot be read), and what shows its life.

    `age` is in seconds since it was renewed; `locked` None where this machine cannot tell.
    """

    name: str
    holder: str
    save_id: str | None
    age: float
    locked: bool | None

    @property
    def alive(self) -> bool:
        """Whether its holder lives, as far as can be known from here."""
        return self.locked if self.locked is not None else self.age < EXPIRY

    @property
    def dead(self) -> bool:
        """Whether its holder certainly lives no more."""
        return self.locked is False


@dataclass(frozen=True)
class Signs:
    """All leases of a run at one moment, and what time it is there (seconds since 1970, by the file system)."""

    signs: tuple[Sign, ...]
    now: float

    def at(self, *save_ids: str) -> str | None:
        """Return who is at a save or checkpoint with one of these ids, None where nobody is.

        A living lease that cannot be read may be at any.
        """
        for sign in self.signs:
            if sign.alive and (sign.save_id is None or sign.save_id in save_ids):
                return sign.holder
        return None

    def died(self, save_ids: Iterable[str]) -> bool:
        """Return whether all that held these saves are certainly dead, and somebody did hold each."""
        return all(
            any(s.save_id == save_id for s in self.signs) and all(s.dead for s in self.signs if s.save_id == save_id)
            for save_id in save_ids
        )


def signs(run: str) -> Signs:
    """Return the leases of a run; raises OSError where its folder cannot be read."""
    found = [name for name in local.names(run) if is_lease(name) and not name.endswith(_UNBORN)]
    now = clock(run)
    return Signs(tuple(s for s in (_sign(run, name, now) for name in found) if s is not None), now)


def clock(run: str) -> float:
    """Return the time by the clock that dates files in a run folder: another machine's may differ from ours.

    A file is made and removed for it; ours is taken where the folder cannot be written.
    """
    path = os.path.join(run, f".lease-{secrets.token_hex(16)}{_UNBORN}")
    try:
        fd = local.create(path)
    except OSError:
        return time.time()
    try:
        local.remove_file(path)
        return os.fstat(fd).st_mtime
    finally:
        os.close(fd)


def _sign(run: str, name: str, now: float) -> Sign | None:
    path = os.path.join(run, name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None  # released meanwhile
    try:
        status = os.fstat(fd)
        said = _said(os.pread(fd, LIMIT, 0)) if stat.S_ISREG(status.st_mode) else {}
        save_id = said.get("save_id")
        known = isinstance(save_id, str) and _SAVE_ID.match(save_id) is not None
        here = bool(said.get("locked")) and said.get("boot") == _boot() != ""
        return Sign(
            name,
            f"{said.get('holder', 'somebody')} by process {said.get('pid', '?')} on {said.get('host', '?')}",
            str(save_id) if known else None,
            max(0.0, now - status.st_mtime),
            locked(fd) if here else None,
        )
    finally:
        os.close(fd)


def _said(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and found.get("format") == FORMAT else {}


def locked(fd: int) -> bool | None:
    """Return whether another process holds a lock on a file; None where the file system does not tell."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False

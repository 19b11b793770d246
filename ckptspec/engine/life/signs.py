"""Owns what the leases in a run folder say: who is at what there; refuses to take a holder for dead on a guess."""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckptspec.check.life.leftovers import EXPIRY
from ckptspec.engine.life.lease import FORMAT, LIMIT, UNBORN, boot, is_lease
from ckptspec.storage import local

_SAVE_ID = re.compile(r"[0-9a-f]{32}\Z")


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
    found = [name for name in local.names(run) if is_lease(name) and not name.endswith(UNBORN)]
    now = clock(run)
    return Signs(tuple(s for s in (_sign(run, name, now) for name in found) if s is not None), now)


def clock(run: str) -> float:
    """Return the time by the clock that dates files in a run folder: another machine's may differ from ours.

    A file is made and removed for it; ours is taken where the folder cannot be written.
    """
    path = os.path.join(run, f".lease-{secrets.token_hex(16)}{UNBORN}")
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
        here = bool(said.get("locked")) and said.get("boot") == boot() != ""
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

"""Owns the record of what a run has in its mirrors, and the lock that lets one process at a time write there.

It lies in the run's folder, one file for each mirror and step, replaced by rename; a file that cannot be read counts as
none, and costs an upload more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ckptspec.format import names
from ckptspec.storage import local

FORMAT = "ckptspec-upload"
AREA = ".uploads"  # in the run's folder
LIMIT = 256 << 20
OPEN = ("queued", "sending")  # states in which there is something left to do
STATES = (*OPEN, "safe", "failed", "gone")
_UNBORN = ".new"
_STALE = 600.0  # seconds after which nobody writes it any more


@dataclass(frozen=True)
class Sent:
    """One shard that a mirror has: its bytes, the digest of its index, which covers them, and the store's own tag."""

    nbytes: int
    index: str
    tag: str | None = None


@dataclass(frozen=True)
class Upload:
    """What is known of one step and one mirror; `sent` are the bytes there, `path` its folder in the run.

    `state`: queued, sending, safe (all there, the manifest visible), failed (`error` says why, for good), or gone (it
    was removed from the run before it was sent).
    """

    mirror: str
    step: int
    save_id: str
    path: str
    nbytes: int
    state: str = "queued"
    sent: int = 0
    error: str | None = None
    shards: Mapping[str, Sent] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from others of its mirror."""
        return self.step, self.save_id


def place_of(mirror: str) -> str:
    """Return the name of a mirror's folder below AREA."""
    return hashlib.sha256(mirror.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Records:
    """The records of one run about one mirror."""

    def __init__(self, run: str, mirror: str) -> None:
        self.mirror = mirror
        self.folder = os.path.join(run, AREA, place_of(mirror))

    def _path(self, step: int, save_id: str) -> str:
        return os.path.join(self.folder, f"{names.step_folder(step)}-{save_id}.json")

    def get(self, step: int, save_id: str) -> Upload | None:
        """Return the record of a save, None where there is none."""
        return _read(self._path(step, save_id))

    def put(self, upload: Upload) -> None:
        """Write a record, durably and in one step."""
        local.make_folders(self.folder)
        path = self._path(upload.step, upload.save_id)
        unborn = f"{path}.{secrets.token_hex(8)}{_UNBORN}"  # one who waits for the lock notes steps too
        local.write_file(unborn, json.dumps({"format": FORMAT, **asdict(upload)}, indent=1).encode())
        local.rename(unborn, path)
        local.fsync_folder(self.folder)

    def tidy(self) -> None:
        """Remove what killed processes had begun to write."""
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self.folder):
                if entry.name.endswith(_UNBORN) and time.time() - entry.stat().st_mtime > _STALE:
                    with contextlib.suppress(FileNotFoundError):
                        local.remove_file(entry.path)

    def all(self) -> tuple[Upload, ...]:
        """Return every record, newest step first."""
        return tuple(sorted(_each(self.folder), key=lambda u: u.key, reverse=True))


def recorded(run: str | os.PathLike[str]) -> tuple[Upload, ...]:
    """Return what is known of a run's steps in all its mirrors, newest step first: which of them are safe where."""
    area = os.path.join(os.fspath(run), AREA)
    try:
        found = local.names(area)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    uploads = [u for name in found for u in _each(os.path.join(area, name))]
    return tuple(sorted(uploads, key=lambda u: (*u.key, u.mirror), reverse=True))


def _each(folder: str) -> Iterator[Upload]:
    try:
        found = local.names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in found:
        if name.endswith(".json") and (upload := _read(os.path.join(folder, name))) is not None:
            yield upload


_KINDS: Mapping[str, Any] = {
    "mirror": str,
    "step": int,
    "save_id": str,
    "path": str,
    "nbytes": int,
    "state": str,
    "sent": int,
    "error": (str, type(None)),
    "shards": dict,
}


def _read(path: str) -> Upload | None:
    try:
        said = json.loads(local.read_file(path, LIMIT))
    except (OSError, ValueError, RecursionError, local.ShortReadError):
        return None
    if not isinstance(said, dict) or said.pop("format", None) != FORMAT or said.keys() != _KINDS.keys():
        return None
    if not all(isinstance(said[k], kind) for k, kind in _KINDS.items()) or said["state"] not in STATES:
        return None
    shards = {name: _sent(value) for name, value in said["shards"].items()}
    return None if None in shards.values() else Upload(**{**said, "shards": shards})


def _sent(value: Any) -> Sent | None:
    if not isinstance(value, dict) or value.keys() != {f.name for f in fields(Sent)}:
        return None
    nbytes, index, tag = value["nbytes"], value["index"], value["tag"]
    sound = isinstance(nbytes, int) and isinstance(index, str) and isinstance(tag, (str, type(None)))
    return Sent(nbytes, index, tag) if sound else None


# ---- one at a time ---------------------------------------------------------------------------------------------------


class Lock:
    """An exclusive lock on a file; the kernel lets go of it when the process ends, however it ends.

    Where the file system has no locks nothing is held: two who write the same bytes under the same names do no harm.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None

    def take(self) -> bool:
        """Try to lock, and tell whether this process may go on."""
        if self._fd is not None:
            return True
        local.make_folders(os.path.dirname(self.path))
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError as e:
            if e.errno not in local.UNSUPPORTED | _NO_LOCKS:
                os.close(fd)
                raise
        self._fd = fd
        _held.add(self)
        return True

    def release(self) -> None:
        """Let go, if it is held."""
        if self._fd is not None:
            _held.discard(self)
            os.close(self._fd)
            self._fd = None


_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS})
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _forked() -> None:
    """In a forked child: a lock lives as long as any copy of its descriptor, and the child is not who took it."""
    for lock in list(_held):
        with contextlib.suppress(OSError):
            lock.release()


os.register_at_fork(after_in_child=_forked)

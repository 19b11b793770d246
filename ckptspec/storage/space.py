"""Owns what a folder's file system still has for this user: bytes, files, quotas, limits; guesses nothing."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass

_QUOTACTL_FD = 443  # the same number on every architecture that got it in Linux 5.14
_GET_QUOTA = 0x800007
_KINDS = (("the user's quota", 0, os.geteuid), ("the group's quota", 1, os.getegid))
_BLOCK_LIMITS, _FILE_LIMITS = 1, 4  # bits of `valid`: QIF_BLIMITS, QIF_ILIMITS


class _Quota(ctypes.Structure):
    """struct if_dqblk: limits of space in KiB, space used in bytes, files."""

    _fields_ = (
        ("space_hard", ctypes.c_uint64),
        ("space_soft", ctypes.c_uint64),
        ("space_used", ctypes.c_uint64),
        ("files_hard", ctypes.c_uint64),
        ("files_soft", ctypes.c_uint64),
        ("files_used", ctypes.c_uint64),
        ("space_grace", ctypes.c_uint64),
        ("files_grace", ctypes.c_uint64),
        ("valid", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Left:
    """Bytes and files left, None where it is not told, and by what the bytes are limited."""

    nbytes: int | None
    files: int | None
    by: str = "the disk"


def left(folder: str) -> Left:
    """Return what is left for this user in an existing folder: the least of disk and quotas; raises OSError.

    A file system that reports nothing at all (some FUSE programs) tells nothing; neither does one that has no fixed
    number of files. A server's own quota shows only where it reports it as free space, as projects of XFS and ext4 do.
    """
    v = os.statvfs(folder)
    found = Left(v.f_bavail * v.f_frsize if v.f_blocks else None, v.f_favail if v.f_files else None)
    for quota in _quotas(folder):
        found = _least(found, quota)
    return found


def _least(a: Left, b: Left) -> Left:
    files = min((n for n in (a.files, b.files) if n is not None), default=None)
    if b.nbytes is not None and (a.nbytes is None or b.nbytes < a.nbytes):
        return Left(b.nbytes, files, b.by)
    return Left(a.nbytes, files, a.by)


def _quotas(folder: str) -> Iterator[Left]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for by, kind, whose in _KINDS:
            quota = quota_of(fd, kind, whose())
            if quota is not None:
                hard, files = quota.space_hard * 1024, quota.files_hard
                yield Left(
                    max(0, hard - quota.space_used) if hard and quota.valid & _BLOCK_LIMITS else None,
                    max(0, files - quota.files_used) if files and quota.valid & _FILE_LIMITS else None,
                    by,
                )
    finally:
        os.close(fd)


def quota_of(fd: int, kind: int, who: int) -> _Quota | None:
    """Return the quota of user (kind 0) or group (1) `who` on a descriptor's file system, None where none is told."""
    record = _Quota()
    libc = ctypes.CDLL(None, use_errno=True)
    command = ctypes.c_uint(_GET_QUOTA << 8 | kind)
    done = libc.syscall(ctypes.c_long(_QUOTACTL_FD), fd, command, ctypes.c_int(who), ctypes.byref(record))
    return record if done == 0 else None


def path_limit(folder: str) -> int | None:
    """Return the bytes that a path may have, its final zero left out; None where there is no limit."""
    return _conf(folder, "PC_PATH_MAX", 1)


def name_limit(folder: str) -> int | None:
    """Return the bytes that a file name may have in a folder, None where there is no limit."""
    return _conf(folder, "PC_NAME_MAX", 0)


def _conf(folder: str, name: str, less: int) -> int | None:
    try:
        found = os.pathconf(folder, name)
    except (OSError, ValueError):  # a file system may answer that it does not know
        return None
    return found - less if found > 0 else None


def file_limit() -> int | None:
    """Return the bytes that one file of this process may have (`ulimit -f`), None where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if soft == resource.RLIM_INFINITY else soft


def writable(folder: str) -> bool:
    """Return whether this user may create names in a folder."""
    return os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def nearest(path: str) -> str:
    """Return the folder itself, or the nearest above it that is there."""
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder

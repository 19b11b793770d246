"""Owns the reading of regular files by raw descriptor; refuses links and special files, and never waits on one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptspec.errors import CkptspecError, IntegrityError, Where


class NotRegularError(CkptspecError):
    """The path is a link, a folder, or a special file; `found` says which."""


_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}


@dataclass(frozen=True)
class File:
    """An open regular file: its descriptor, and its size in bytes when it was opened."""

    fd: int
    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly `nbytes` bytes; raises IntegrityError [B-READ] where the file has become shorter."""
        buffer = bytearray(nbytes)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`; raises IntegrityError [B-READ] where the file has become shorter."""
        done = 0
        while done < len(view):
            n = os.preadv(self.fd, [view[done:]], offset + done)
            if n == 0:
                where = Where(range=(offset + done, offset + len(view)))
                raise IntegrityError("the file became shorter while it was read", rule="B-READ", where=where)
            done += n


def regular_size(path: str) -> int:
    """Return the bytes of a regular file; raises FileNotFoundError, NotRegularError, or another OSError."""
    return _size(os.lstat(path))


def _size(status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise NotRegularError("not a regular file", expected="a regular file", found=found)
    return status.st_size


@contextmanager
def opened(path: str) -> Iterator[File]:
    """Open a regular file for reading; raises as `regular_size` does, whatever lies at `path` meanwhile."""
    regular_size(path)
    # O_NONBLOCK and the second look: what was a file a moment ago may be a pipe by now.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield File(fd, _size(os.fstat(fd)))
    finally:
        os.close(fd)


def entries(folder: str) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(os.listdir(folder))

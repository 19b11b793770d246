"""Owns the bytes of local files and folders, on raw descriptors; refuses to replace a file or to flush one twice."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from typing import Union

from ckptspec.storage.kernel import UNSUPPORTED as UNSUPPORTED
from ckptspec.storage.kernel import exchange as exchange
from ckptspec.storage.kernel import filesystem as filesystem
from ckptspec.storage.kernel import preallocate
from ckptspec.storage.kernel import rename_noreplace as rename_noreplace
from ckptspec.storage.kernel import start_writeback as start_writeback

Buffer = Union[bytes, bytearray, memoryview]


class ShortReadError(EOFError):
    """A file ended before the bytes that were asked for: `expected` and `found` are counts of bytes from `offset`."""

    def __init__(self, offset: int, expected: int, found: int) -> None:
        super().__init__(f"expected {expected} bytes at offset {offset}, found {found}")
        self.offset = offset
        self.expected = expected
        self.found = found


# ---- files -----------------------------------------------------------------------------------------------------------


def create(path: str, nbytes: int = 0) -> int:
    """Create a file that must not exist and return its descriptor, `nbytes` reserved for it [P-EXCL].

    Raises FileExistsError, or OSError (ENOSPC for a disk too small: before the first byte, not after the last).
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        if nbytes:
            with naming(path):
                preallocate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Give an OSError of a descriptor's file the file's name, which the kernel did not know."""
    try:
        yield
    except OSError as e:
        if e.filename is None:
            e.filename = path
        raise


def open_read(path: str) -> int:
    """Return a descriptor to read an existing file; raises FileNotFoundError and other OSErrors."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe in the file's place must not hold us


def write_at(fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data` (contiguous, any item type) at byte `offset`; what the kernel took only in part goes on."""
    with memoryview(data) as whole, whole.cast("B") as view:
        done = 0
        while done < len(view):
            wrote = os.pwrite(fd, view[done:], offset + done)
            if wrote == 0:  # nothing taken and no reason given: going on could go on for ever
                raise OSError(errno.EIO, f"no byte taken at offset {offset + done}")
            done += wrote


def read_at(fd: int, buffer: Union[bytearray, memoryview], offset: int) -> None:
    """Fill all of `buffer` (contiguous, writable) from byte `offset`; ShortReadError where the file ends before."""
    with memoryview(buffer) as whole, whole.cast("B") as view:
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done:]], offset + done)
            if got == 0:
                raise ShortReadError(offset, len(view), done)
            done += got


def finish(fd: int) -> None:
    """Make a written file durable and close it, both checked; the descriptor is gone whatever happens [P-FSYNC].

    The flush is tried once: after a failed one the kernel may drop the pages and report success the next time.
    """
    try:
        os.fsync(fd)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            os.close(fd)
        raise
    os.close(fd)  # network file systems report a full disk here


def write_file(path: str, data: Buffer) -> None:
    """Create `path` with these bytes, durably; it must not exist [P-EXCL] [P-FSYNC]."""
    fd = create(path)
    with naming(path):
        try:
            write_at(fd, data, 0)
        except BaseException:
            os.close(fd)
            raise
        finish(fd)


def read_file(path: str, limit: int) -> bytes:
    """Return the bytes of a regular file; OSError (EINVAL if not regular, EFBIG above `limit`), ShortReadError."""
    fd = open_read(path)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if status.st_size > limit:
            raise OSError(errno.EFBIG, f"{status.st_size} bytes, more than {limit}", path)
        data = bytearray(status.st_size)
        read_at(fd, data, 0)
    finally:
        os.close(fd)
    return bytes(data)


def regular_size(path: str) -> int | None:
    """Return the size in bytes of a regular file, None for anything else, links too; FileNotFoundError if absent."""
    status = os.lstat(path)
    return status.st_size if stat.S_ISREG(status.st_mode) else None


# ---- folders ---------------------------------------------------------------------------------------------------------


def fsync_folder(path: str) -> None:
    """Make the names in a folder durable: what was created, renamed or removed in it; the flush is tried once."""
    with naming(path):
        finish(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def make_folder(path: str) -> None:
    """Create one folder that must not exist; durable once its parent is flushed."""
    os.mkdir(path)


def make_folders(path: str) -> None:
    """Create a folder and its missing ancestors, each durable in its parent; NotADirectoryError where a file is."""
    for folder in reversed([*_missing(os.path.abspath(path))]):
        with contextlib.suppress(FileExistsError):  # another process may be first; the flush below serves both
            os.mkdir(folder)
        fsync_folder(folder)
        fsync_folder(os.path.dirname(folder))


def _missing(path: str) -> Iterator[str]:
    while not os.path.isdir(path):
        yield path
        path = os.path.dirname(path)


def names(path: str) -> tuple[str, ...]:
    """Return the names in a folder, sorted."""
    return tuple(sorted(os.listdir(path)))


def rename(source: str, target: str) -> None:
    """Rename as POSIX does: a file or an empty folder at `target` is replaced."""
    os.rename(source, target)


def link(source: str, target: str) -> None:
    """Give a file a second name; FileExistsError when `target` exists."""
    os.link(source, target, follow_symlinks=False)


def remove_file(path: str) -> None:
    """Remove one name of a file; raises FileNotFoundError when it is not there."""
    os.unlink(path)


def remove_tree(path: str) -> None:
    """Delete a folder and all in it, never what its links point at; what is already gone is no error."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)

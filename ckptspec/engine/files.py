"""Owns the reading of files, by raw descriptor or out of a store; refuses links and special files, waits on none."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ckptspec.errors import CkptspecError, IntegrityError, Where
from ckptspec.storage import local
from ckptspec.storage.base import is_url, join
from ckptspec.storage.stores import at

TAIL = 64 << 10  # bytes of an object's end that come with its size: trailer, index and state of most shards
# What storage says that has lost bytes, not what it says to those who may not look.
MEDIA = frozenset({errno.EIO, errno.ESTALE, errno.ENODATA, errno.EBADMSG})
AT_ONCE = 16  # requests to a store, whose answers take long and cost nothing meanwhile

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
                raise _shorter(offset + done, offset + len(view))
            done += n


@dataclass(frozen=True)
class StoredFile(File):
    """A file in a store: there is no descriptor, and its last bytes are here already."""

    url: str = ""
    tail: bytes = b""

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`; raises IntegrityError [B-READ] where the file has become shorter, or OSError."""
        start = offset - (self.nbytes - len(self.tail))
        if start >= 0 and start + len(view) <= len(self.tail):
            view[:] = self.tail[start : start + len(view)]
            return
        try:
            read_range(self.url, view, offset)
        except local.ShortReadError:
            raise _shorter(offset, offset + len(view)) from None


def _shorter(start: int, stop: int) -> IntegrityError:
    message = "the file became shorter while it was read"
    return IntegrityError(message, rule="B-READ", where=Where(range=(start, stop)))


def read_range(url: str, view: memoryview, offset: int) -> None:
    """Fill `view` from byte `offset` of a file in a store; raises ShortReadError or OSError."""
    bucket, key = at(url)
    bucket.read_into(key, view, offset)


def regular_size(path: str) -> int:
    """Return the bytes of a regular file; raises FileNotFoundError, NotRegularError, or another OSError."""
    if is_url(path):
        bucket, key = at(path)
        return bucket.stat(key).nbytes
    return _size(os.lstat(path))


def sizes(folder: str) -> Callable[[str], int]:
    """Return what gives the size of a file in a folder by name, as `regular_size`; of a store all are asked at once."""
    if not is_url(folder):
        return lambda name: regular_size(os.path.join(folder, name))
    bucket, key = at(folder)
    files = bucket.list(key).files

    def size(name: str) -> int:
        if name not in files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), join(folder, name))
        return files[name].nbytes

    return size


def _size(status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise NotRegularError("not a regular file", expected="a regular file", found=found)
    return status.st_size


@contextmanager
def opened(path: str) -> Iterator[File]:
    """Open a regular file for reading; raises as `regular_size` does, whatever lies at `path` meanwhile."""
    if is_url(path):
        bucket, key = at(path)
        nbytes, tail = bucket.tail(key, TAIL)
        yield StoredFile(-1, nbytes, path, tail)
        return
    regular_size(path)
    # O_NONBLOCK and the second look: what was a file a moment ago may be a pipe by now.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield File(fd, _size(os.fstat(fd)))
    finally:
        os.close(fd)


def entries(folder: str) -> list[str]:
    """Return the names in a folder, sorted; raises FileNotFoundError where there is none."""
    if not is_url(folder):
        return sorted(os.listdir(folder))
    bucket, key = at(folder)
    found = bucket.list(key)
    if not found:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    return sorted({*found.files, *found.folders})


def is_folder(path: str) -> bool:
    """Tell whether there is a folder at a path; in a store, whether there is anything below."""
    if not is_url(path):
        return os.path.isdir(path)
    bucket, key = at(path)
    return bool(bucket.list(key))


def is_there(path: str) -> bool:
    """Tell whether there is anything of this name."""
    if not is_url(path):
        return os.path.lexists(path)
    try:
        regular_size(path)
    except FileNotFoundError:
        return is_folder(path)
    return True


def each(place: str, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Return what `work` gives for each item, in order; many at once where `place` is in a store."""
    if not is_url(place):
        return [work(item) for item in items]
    return together(work, items, AT_ONCE)


def together(work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int) -> list[_Result]:
    """Return what `work` gives for each item, in order, from several threads; the first error stops them and is raised.

    An item that has begun is finished before.
    """
    todo = iter(enumerate(items))
    lock = threading.Lock()
    done: dict[int, _Result] = {}
    errors: list[BaseException] = []

    def take() -> None:
        while not errors:
            with lock:
                number, item = next(todo, (-1, None))
            if number < 0:
                return
            try:
                done[number] = work(item)  # type: ignore[arg-type]
            except BaseException as e:  # carried to the caller's thread, which raises it
                errors.append(e)

    workers = [threading.Thread(target=take, name=f"ckptspec-store-{i}", daemon=True) for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers:
            worker.join()
    except BaseException as e:  # an interrupt
        errors.append(e)
        raise
    if errors:
        raise errors[0]
    return [done[number] for number in sorted(done)]

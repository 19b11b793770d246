"""Owns the bytes of local files, on raw descriptors."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)


def create(path: str, nbytes: int) -> int:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
    if nbytes:
        os.posix_fallocate(fd, 0, nbytes)
    return fd


def write_at(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    _libc.sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), 2)


def finish(fd: int) -> None:
    os.fsync(fd)
    os.close(fd)


def open_read(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def read_at(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        n = os.preadv(fd, [view], offset)
        if n == 0:
            raise EOFError(offset)
        view, offset = view[n:], offset + n

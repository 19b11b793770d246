"""Owns the Linux calls Python's os lacks; refuses to pretend: a call the system lacks is ENOSYS, or just a hint."""

from __future__ import annotations

import ctypes
import errno
import os

# What a kernel or file system answers to a call it does not have.
UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_FUSE = 0x65735546

# statfs(2): the numbers of file systems that people train on.
_FILESYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x01021994: "tmpfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x00C36400: "ceph",
    0x19830326: "beegfs",
    _FUSE: "fuse",
}

_libc = ctypes.CDLL(None, use_errno=True)


def _function(name: str, *arguments: type) -> ctypes._NamedFuncPointer | None:
    """Return the C library's function, None where it has none of that name."""
    found: ctypes._NamedFuncPointer | None = getattr(_libc, name, None)
    if found is not None:
        found.argtypes, found.restype = list(arguments), ctypes.c_int
    return found


_renameat2 = _function("renameat2", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_sync_file_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_fallocate = _function("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64) or _function(
    "fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
)
_statfs = _function("statfs", ctypes.c_char_p, ctypes.c_void_p)


def _error(code: int, *paths: str) -> OSError:
    return OSError(code, os.strerror(code), *((paths[0], None, paths[1]) if len(paths) == 2 else paths))


def _rename(source: str, target: str, flags: int) -> None:
    if _renameat2 is None:
        raise _error(errno.ENOSYS, source, target)
    if _renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) != 0:
        raise _error(ctypes.get_errno(), source, target)


def rename_noreplace(source: str, target: str) -> None:
    """Rename atomically; FileExistsError when `target` exists, an errno of UNSUPPORTED where the flag is not known."""
    _rename(source, target, _RENAME_NOREPLACE)


def exchange(a: str, b: str) -> None:
    """Swap two existing paths atomically; an errno of UNSUPPORTED where the flag is not known."""
    _rename(a, b, _RENAME_EXCHANGE)


def preallocate(fd: int, nbytes: int) -> None:
    """Reserve `nbytes` of disk and make them the file's size; only the size where the file system cannot reserve.

    Not posix_fallocate: the C library answers for a file system that cannot by touching every block of the file.
    """
    while _fallocate is not None:
        if _fallocate(fd, 0, 0, nbytes) == 0:
            return
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in UNSUPPORTED:
            break
        raise _error(code)
    os.ftruncate(fd, nbytes)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing this range to disk, without waiting; only a hint where it cannot.

    Durability comes from fsync alone. Disk errors are raised as OSError.
    """
    if _sync_file_range is None or nbytes <= 0:
        return
    if _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE) != 0:
        code = ctypes.get_errno()
        if code not in UNSUPPORTED | {errno.ESPIPE, errno.EINTR}:
            raise _error(code)


def filesystem(path: str) -> str:
    """Return the type of the file system `path` is on, such as `ext4` or `fuse.gcsfuse`; its number when not known."""
    if _statfs is None:
        return "unknown"
    record = ctypes.create_string_buffer(512)  # struct statfs; its first field is the type, a C long
    if _statfs(os.fsencode(path), record) != 0:
        raise _error(ctypes.get_errno(), path)
    magic = ctypes.c_long.from_buffer(record).value & 0xFFFFFFFF
    if magic == _FUSE:
        return _mounted_type(path) or "fuse"
    return _FILESYSTEMS.get(magic, f"{magic:#x}")


def _mounted_type(path: str) -> str | None:
    """Return the type the mount table gives the device of `path`: FUSE says there which program serves it."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
            lines = table.read().splitlines()
    except FileNotFoundError:
        return None
    for line in lines:
        mount, _, source = line.partition(" - ")
        if mount.split()[2:3] == [wanted]:
            kind, program = source.split()[:2]
            return f"fuse.{program}" if kind == "fuse" else kind  # some give their name only as the source
    return None

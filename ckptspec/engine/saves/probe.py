"""Owns the question how a file system can make a save visible at one moment; refuses where it cannot [P-PROBE]."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from dataclasses import dataclass

from ckptspec.errors import SaveError, Where
from ckptspec.format.names import trash_folder
from ckptspec.storage import local

# FUSE programs over object stores: a folder rename is a copy of every file, and nothing tells.
_OBJECT_STORES = frozenset(
    {
        "fuse.blobfuse",
        "fuse.blobfuse2",
        "fuse.cosfs",
        "fuse.gcsfuse",
        "fuse.geesefs",
        "fuse.goofys",
        "fuse.mountpoint-s3",
        "fuse.obsfs",
        "fuse.ossfs",
        "fuse.rclone",
        "fuse.s3fs",
    }
)
_REFUSES = frozenset({errno.EEXIST, errno.ENOTEMPTY})


@dataclass(frozen=True)
class Means:
    """What a file system can do: its type, the commit mode that follows, and whether it swaps folders and links files.

    Modes: `rename` (a folder rename that never replaces), `rename-plain` (one that only an empty folder gives way to),
    `manifest-last` (no folder rename to trust: the manifest appears last).
    """

    filesystem: str
    mode: str
    exchange: bool = False
    link: bool = False


_known: dict[tuple[str, int, int], Means] = {}


def means(run: str) -> Means:
    """Return what can be done in a run folder, trying it out the first time this process asks.

    Raises SaveError [P-PROBE] where nothing is atomic; OSError where the folder cannot be written.
    """
    status = os.stat(run)
    key = (os.path.realpath(run), status.st_dev, status.st_ino)
    if key not in _known:
        _known[key] = _probe(run)
    return _known[key]


def _probe(run: str) -> Means:
    filesystem = local.filesystem(run)
    area = os.path.join(run, trash_folder(secrets.token_hex(16)))  # a crash leaves only what cleaning removes
    local.make_folder(area)
    try:
        if not _creates_exclusively(area):
            raise SaveError(
                f"on {filesystem} two writers can create the same file: nothing is atomic here",
                rule="P-PROBE",
                where=Where(run),
                advice="use a run folder on a local disk or on NFS, Lustre, GPFS or the like, and copy from there",
            )
        if filesystem not in _OBJECT_STORES:
            if _renames_without_replacing(area):
                return Means(filesystem, "rename", exchange=_exchanges(area))
            # FUSE programs without the flag promise nothing about a folder's rename.
            if not filesystem.startswith("fuse") and _keeps_full_folders(area):
                return Means(filesystem, "rename-plain")
        return Means(filesystem, "manifest-last", link=_links(area))
    finally:
        with contextlib.suppress(OSError):  # by its name it is trash already
            local.remove_tree(area)


def _folder(area: str, name: str) -> str:
    """Create a folder with one file in it, named like the folder so that each is known by what it holds."""
    path = os.path.join(area, name)
    local.make_folder(path)
    os.close(local.create(os.path.join(path, name)))
    return path


def _holds(path: str, name: str) -> bool:
    """Whether the folder at `path` is the one created as `name`."""
    return os.path.isdir(path) and local.names(path) == (name,)


def _creates_exclusively(area: str) -> bool:
    path = os.path.join(area, "once")
    os.close(local.create(path))
    try:
        os.close(local.create(path))
    except FileExistsError:
        return True
    return False


def _renames_without_replacing(area: str) -> bool:
    """Whether the flag is obeyed: a taken name is refused with both sides intact, a free one is taken."""
    a, b, c = _folder(area, "a"), _folder(area, "b"), os.path.join(area, "c")
    try:
        local.rename_noreplace(a, b)
        return False
    except FileExistsError:
        if not (_holds(a, "a") and _holds(b, "b")):
            return False
    except OSError as e:
        if e.errno in local.UNSUPPORTED:
            return False
        raise
    local.rename_noreplace(a, c)
    return _holds(c, "a") and not os.path.lexists(a)


def _exchanges(area: str) -> bool:
    """Whether two folders swap: judged by reading both sides afterwards, for some answer success and do nothing."""
    x, y = _folder(area, "x"), _folder(area, "y")
    try:
        local.exchange(x, y)
    except OSError as e:
        if e.errno in local.UNSUPPORTED:
            return False
        raise
    return _holds(x, "y") and _holds(y, "x")


def _keeps_full_folders(area: str) -> bool:
    """Whether a plain rename takes a free name and refuses that of a folder with something in it."""
    p, q, r = _folder(area, "p"), _folder(area, "q"), os.path.join(area, "r")
    try:
        local.rename(p, q)
        return False
    except OSError as e:
        if e.errno not in _REFUSES or not (_holds(p, "p") and _holds(q, "q")):
            return False
    local.rename(p, r)
    return _holds(r, "p") and not os.path.lexists(p)


def _links(area: str) -> bool:
    """Whether a file gets a second name, and never one that is taken."""
    source, free, taken = (os.path.join(area, name) for name in ("source", "free", "taken"))
    for path in (source, taken):
        os.close(local.create(path))
    try:
        local.link(source, free)
        local.link(source, taken)
    except FileExistsError:
        return os.path.samefile(source, free)
    except OSError:
        return False
    return False

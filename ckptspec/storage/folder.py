"""Owns a folder of a file system as a store; refuses to show a file before it is whole and durable."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable, Iterator

from ckptspec.storage import local
from ckptspec.storage.base import Listing, Stat


class Folder:
    """A folder of a file system as a store; what it writes has its name only when it is whole and durable."""

    def __init__(self, root: str) -> None:
        self.url = root

    def _path(self, key: str) -> str:
        return os.path.join(self.url, key) if key else self.url

    def list(self, folder: str) -> Listing:
        """Return the regular files and the folders in a folder."""
        files, folders = {}, set()
        try:
            for entry in os.scandir(self._path(folder)):
                if entry.is_dir(follow_symlinks=False):
                    folders.add(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    files[entry.name] = Stat(entry.stat(follow_symlinks=False).st_size)
        except FileNotFoundError:
            return Listing()
        return Listing(files, frozenset(folders))

    def stat(self, key: str) -> Stat:
        """Return the size of a regular file."""
        nbytes = local.regular_size(self._path(key))
        if nbytes is None:
            raise OSError(errno.EINVAL, "not a regular file", self._path(key))
        return Stat(nbytes)

    def read_into(self, key: str, view: memoryview, offset: int) -> None:
        """Fill `view` from byte `offset`."""
        fd = local.open_read(self._path(key))
        try:
            local.read_at(fd, view, offset)
        finally:
            os.close(fd)

    def put(self, key: str, parts: Iterable[memoryview], nbytes: int, part_nbytes: int) -> Stat:
        """Write a file beside its place, then give it its name."""
        path = self._path(key)
        with self._unnamed(path, parts, nbytes) as unnamed:
            local.rename(unnamed, path)
            local.fsync_folder(os.path.dirname(path))
        return Stat(nbytes)

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write a file beside its place, then link it there; created exclusively where there are no links."""
        path = self._path(key)
        with self._unnamed(path, [memoryview(data)], len(data)) as unnamed:
            try:
                local.link(unnamed, path)
            except FileExistsError:
                raise
            except OSError as e:
                if e.errno not in local.UNSUPPORTED | {errno.EPERM, errno.EMLINK}:
                    raise
                local.write_file(path, data)
            local.fsync_folder(os.path.dirname(path))

    @contextlib.contextmanager
    def _unnamed(self, path: str, parts: Iterable[memoryview], nbytes: int) -> Iterator[str]:
        """Give the path of a durable file of these parts, under a name that nobody looks for; it goes at the end."""
        local.make_folders(os.path.dirname(path))
        unnamed = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.{secrets.token_hex(4)}.part")
        fd = local.create(unnamed, nbytes)
        try:
            try:
                at = 0
                for part in parts:
                    local.write_at(fd, part, at)
                    local.start_writeback(fd, at, len(part))
                    at += len(part)
            except BaseException:
                os.close(fd)
                raise
            local.finish(fd)
            yield unnamed
        finally:
            with contextlib.suppress(FileNotFoundError):  # it has its own name by now
                local.remove_file(unnamed)

    def delete(self, key: str) -> None:
        """Remove a file."""
        with contextlib.suppress(FileNotFoundError):
            local.remove_file(self._path(key))
            local.fsync_folder(os.path.dirname(self._path(key)))

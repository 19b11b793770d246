"""Owns an object store by way of obstore, and its errors as a file system's; refuses to work without that package."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from ckptspec.storage import local
from ckptspec.storage.base import Listing, Stat, join

EXTRA = "pip install 'ckptspec[store]'"
IN_FLIGHT = 2  # parts of one file that are sent at once
_RETRY = {"max_retries": 5}  # with the library's backoff: about three seconds; who must not give up tries again
_COPY = 1 << 16  # bytes above which a copy that lets other threads run is worth its call


class Bucket:
    """A prefix of a bucket, reached by obstore; credentials and endpoint come from that library's usual variables.

    `sums` says that its tags are MD5 sums, which `prove` finds out: then what was sent is compared with them.
    """

    def __init__(self, url: str, scheme: str, bucket: str, prefix: str) -> None:
        self.url = url.rstrip("/")
        self.root = f"{scheme}://{bucket}"
        self.prefix = prefix.strip("/")
        self.sums = False

    @cached_property
    def _library(self) -> Any:
        try:
            import obstore
        except ModuleNotFoundError:
            raise OSError(errno.ENOPKG, f"this needs the package obstore: {EXTRA}", self.url) from None
        return obstore

    @property
    def _store(self) -> Any:
        return _connection(self._library, self.root)

    def _key(self, key: str) -> str:
        return "/".join(filter(None, (self.prefix, key)))

    def _told(self, key: str = "") -> contextlib.AbstractContextManager[None]:
        return _translated(join(self.url, key) if key else self.url)

    def list(self, folder: str) -> Listing:
        """Return the objects and prefixes one level below."""
        with self._told(folder):
            found = self._library.list_with_delimiter(self._store, self._key(folder) or None)
        files = {o["path"].rpartition("/")[2]: Stat(o["size"], o["e_tag"]) for o in found["objects"]}
        return Listing(files, frozenset(p.rstrip("/").rpartition("/")[2] for p in found["common_prefixes"]))

    def stat(self, key: str) -> Stat:
        """Return an object's size and ETag."""
        with self._told(key):
            found = self._library.head(self._store, self._key(key))
        return Stat(found["size"], found["e_tag"])

    def tail(self, key: str, nbytes: int) -> tuple[int, bytes]:
        """Return an object's size and its last bytes, at most `nbytes`: one request where the store can, else two."""
        try:
            with self._told(key):
                found = self._library.get(self._store, self._key(key), options={"range": {"suffix": nbytes}})
                return found.meta["size"], bytes(found.bytes())
        except (FileNotFoundError, PermissionError):
            raise
        except (OSError, local.ShortReadError):  # an empty object, or a store without ranges from the end
            size = self.stat(key).nbytes
            data = bytearray(min(size, nbytes))
            self.read_into(key, memoryview(data), size - len(data))
            return size, bytes(data)

    def read_into(self, key: str, view: memoryview, offset: int) -> None:
        """Fill `view` from byte `offset` of an object."""
        wanted = view.cast("B")
        if not len(wanted):
            return
        with self._told(key):
            try:
                data = self._library.get_range(self._store, self._key(key), start=offset, length=len(wanted))
            except self._library.exceptions.GenericError as e:
                if "416 " not in _first_line(e):
                    raise
                data = b""
        found = memoryview(data)
        if len(found) != len(wanted):
            raise local.ShortReadError(offset, len(wanted), len(found))
        _copy(wanted, found)

    def put(self, key: str, parts: Iterable[memoryview], nbytes: int, part_nbytes: int) -> Stat:
        """Write an object: by one request, or in parts above `part_nbytes`, given up as a whole after an error."""
        sums = _Sums(self.sums)
        several = nbytes > part_nbytes
        data = sums.through(parts) if several else _joined(list(sums.through(parts)))
        with self._told(key):
            done = self._library.put(
                self._store,
                self._key(key),
                data,
                use_multipart=several,
                chunk_size=part_nbytes,
                max_concurrency=IN_FLIGHT,
            )
        if self.sums and not sums.agree(done["e_tag"], several):
            raise OSError(errno.EIO, "the store holds other bytes than were sent", join(self.url, key))
        return Stat(nbytes, done["e_tag"])

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write an object on the condition that there is none (If-None-Match: *)."""
        with self._told(key):
            self._library.put(self._store, self._key(key), data, mode="create", use_multipart=False)

    def delete(self, key: str) -> None:
        """Remove an object."""
        with contextlib.suppress(FileNotFoundError), self._told(key):
            self._library.delete(self._store, self._key(key))


class _Sums:
    """The MD5 sums of parts on their way: what S3 makes its ETags of, unless it encrypts."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._sums: list[bytes] = []

    def through(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yield the parts, summed up."""
        for part in parts:
            if self._wanted:
                self._sums.append(hashlib.md5(part, usedforsecurity=False).digest())
            yield part

    def agree(self, tag: str | None, several: bool) -> bool:
        """Tell whether a tag is that of the parts."""
        if several:
            whole = hashlib.md5(b"".join(self._sums), usedforsecurity=False).hexdigest()
            return tag == f'"{whole}-{len(self._sums)}"'
        return tag == f'"{self._sums[0].hex() if self._sums else hashlib.md5(b"", usedforsecurity=False).hexdigest()}"'


def _joined(parts: list[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _copy(target: memoryview, source: memoryview) -> None:
    if len(target) < _COPY:
        target[:] = source
        return
    import numpy  # whose copy lets other threads run

    numpy.copyto(numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8))


# ---- connections and errors ------------------------------------------------------------------------------------------

_connections: dict[tuple[Any, ...], Any] = {}
_forked = False


def _connection(library: Any, root: str) -> Any:
    """Return this process's connections to a bucket, as its environment now says."""
    if _forked:
        message = "a forked process cannot use the connections of its parent: start it another way (spawn)"
        raise OSError(errno.ENOTSUP, message, root)
    told = {k: v for k, v in os.environ.items() if k.startswith(("AWS_", "GOOGLE_", "AZURE_"))}
    key = (root, *sorted(told.items()))
    if key not in _connections:
        allow = told.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
        options = {"timeout": "180s", "connect_timeout": "10s", "allow_http": allow}
        own = {"disable_bulk_delete": True} if root.startswith("s3://") else {}  # not every store knows it
        with _translated(root):
            _connections[key] = library.store.from_url(root, config=own, client_options=options, retry_config=_RETRY)
    return _connections[key]


def _after_fork() -> None:
    global _forked
    _forked = bool(_connections)


os.register_at_fork(after_in_child=_after_fork)


def _first_line(error: Exception) -> str:
    """Return what an error of the library says, without what is for its own authors."""
    return " ".join(str(error).partition("Debug source:")[0].split())[:400]


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Give errors of the library the kind and number that a file system's would have."""
    try:
        yield
    except FileNotFoundError as e:
        found = "no such bucket" if "NoSuchBucket" in str(e) else "no such object"
        raise FileNotFoundError(errno.ENOENT, found, url) from e
    except Exception as e:
        if type(e).__module__ != "obstore.exceptions":
            raise
        raise OSError(_code(e), _advised(_first_line(e)), url) from e  # the number decides which kind it becomes


_CODES = {
    "AlreadyExistsError": errno.EEXIST,
    "PreconditionError": errno.EEXIST,
    "PermissionDeniedError": errno.EACCES,
    "UnauthenticatedError": errno.EACCES,
    "NotSupportedError": errno.ENOTSUP,
    "InvalidPathError": errno.EINVAL,
    "UnknownConfigurationKeyError": errno.EINVAL,
}


def _code(error: Exception) -> int:
    if "builder error" in str(error):
        return errno.EINVAL
    if "status code: 501 " in str(error):
        return errno.ENOTSUP
    return _CODES.get(type(error).__name__, errno.EIO)


def _advised(text: str) -> str:
    if "builder error" in text:
        return f"{text}; for an endpoint without TLS set AWS_ALLOW_HTTP=true"
    return text

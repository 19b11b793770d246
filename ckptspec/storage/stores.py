"""Owns which store an address means, and the proof that it can commit; refuses stores that cannot."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets

from ckptspec.errors import SaveError, Where
from ckptspec.storage import local
from ckptspec.storage.base import Store, is_url, plain
from ckptspec.storage.bucket import Bucket
from ckptspec.storage.folder import Folder

SCHEMES = ("s3", "gs", "az")
_PLACE = re.compile(r"([a-z0-9]+)://([^/?#]+)/?([^?#]*)\Z")


def split(url: str) -> tuple[str, str, str]:
    """Return scheme, bucket and key of an address; raises OSError for a kind of store there is not."""
    match = _PLACE.match(url)
    if match is None or match[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://bucket/prefix" for scheme in SCHEMES)
        raise OSError(errno.EPROTONOSUPPORT, f"no such kind of store; known are {known} and file:///folder", url)
    return match[1], match[2], match[3]


def open_store(place: str | os.PathLike[str]) -> Store:
    """Return the store at a folder's path or an address; nothing is asked of it yet."""
    text = plain(place)
    return Bucket(text, *split(text)) if is_url(text) else Folder(os.path.abspath(text))


def at(url: str) -> tuple[Bucket, str]:
    """Return the bucket of an address, and the key in it."""
    scheme, bucket, key = split(url)
    return Bucket(f"{scheme}://{bucket}", scheme, bucket, ""), key.strip("/")


def prove(store: Store) -> None:
    """Try out that a second writer of one name is refused; raises SaveError [P-PROBE] where it is not, or OSError."""
    key, data = f".ckptspec-probe-{secrets.token_hex(8)}", secrets.token_bytes(16)
    try:
        kept = _takes(store, key, data) and _refuses(store, key) and _holds(store, key, data)
        if kept and isinstance(store, Bucket):
            store.sums = store.stat(key).tag == f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
    finally:
        store.delete(key)
    if not kept:
        raise SaveError(
            "two writers can put the same object: the store does not keep the condition of a put (If-None-Match)",
            rule="P-PROBE",
            where=Where(store.url),
            advice="use a store that keeps it, such as S3, MinIO, Ceph or R2 in their current versions, or a path",
        )


def _takes(store: Store, key: str, data: bytes) -> bool:
    try:
        store.put_if_absent(key, data)
    except OSError as e:
        if e.errno != errno.ENOTSUP:
            raise
        return False
    return True


def _refuses(store: Store, key: str) -> bool:
    try:
        store.put_if_absent(key, b"another")
    except FileExistsError:
        return True
    return False


def _holds(store: Store, key: str, data: bytes) -> bool:
    found = bytearray(len(data))
    try:
        store.read_into(key, memoryview(found), 0)
    except local.ShortReadError:
        return False
    return bytes(found) == data

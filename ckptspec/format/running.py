"""Owns digests taken of bytes that come piece by piece; the digest is that of `digest.algorithm` of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

from ckptspec.errors import FormatError
from ckptspec.format.digest import Buffer


class Running(Protocol):
    """A digest that is not finished."""

    def update(self, data: Buffer, /) -> object:
        """Take in the bytes that follow."""

    def digest(self) -> bytes:
        """Return the digest of all bytes so far."""


class _Crc32c:
    def __init__(self) -> None:
        import crc32c

        self._of = crc32c.crc32c
        self._value = 0

    def update(self, data: Buffer) -> None:
        self._value = self._of(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "big")


def _xxh3() -> Running:
    import xxhash

    return xxhash.xxh3_128()


def _blake3() -> Running:
    import blake3

    return blake3.blake3()


_STARTS: dict[str, Callable[[], Running]] = {
    "xxh3-128": _xxh3,
    "crc32c": _Crc32c,
    "blake3": _blake3,
    "sha256": hashlib.sha256,
}


def start(name: str) -> Running:
    """Return a digest of nothing yet; raises FormatError [D-ALG] for a name outside the closed set."""
    if name not in _STARTS:
        raise FormatError("unknown digest algorithm", rule="D-ALG", found=repr(name))
    return _STARTS[name]()

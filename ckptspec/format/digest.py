"""Owns the closed set of digest algorithms and the text form of a digest; refuses any other name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

from ckptspec.errors import FormatError

Buffer = Union[bytes, bytearray, memoryview]

DEFAULT_BLOCK = "xxh3-128"
DEFAULT_BLOCK_SIZE = 1 << 20
TEXT = re.compile(r"sha256:[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class Algorithm:
    """One digest algorithm: its name, bytes per digest, function of a buffer, and whether it resists malice [D-ALG]."""

    name: str
    size: int
    of: Callable[[Buffer], bytes]
    cryptographic: bool


def _xxh3() -> Callable[[Buffer], bytes]:
    import xxhash

    return xxhash.xxh3_128_digest


def _crc32c() -> Callable[[Buffer], bytes]:
    import crc32c

    return lambda data: crc32c.crc32c(data).to_bytes(4, "big")


def _blake3() -> Callable[[Buffer], bytes]:
    import blake3

    return lambda data: blake3.blake3(data).digest()


def _sha256(data: Buffer) -> bytes:
    return hashlib.sha256(data).digest()


# Each library is imported when its algorithm is first used: a cold start pays for one of them only.
_SIZES = {"xxh3-128": 16, "crc32c": 4, "blake3": 32, "sha256": 32}
_LOADERS: dict[str, Callable[[], Callable[[Buffer], bytes]]] = {
    "xxh3-128": _xxh3,
    "crc32c": _crc32c,
    "blake3": _blake3,
    "sha256": lambda: _sha256,
}
ALGORITHMS = tuple(_LOADERS)
_loaded: dict[str, Algorithm] = {}


def algorithm(name: str) -> Algorithm:
    """Return the algorithm called `name`; raises FormatError [D-ALG] for any name outside the closed set."""
    if name not in _LOADERS:
        raise FormatError(
            "unknown digest algorithm", rule="D-ALG", expected="one of " + ", ".join(ALGORITHMS), found=repr(name)
        )
    if name not in _loaded:
        _loaded[name] = Algorithm(name, _SIZES[name], _LOADERS[name](), name in ("blake3", "sha256"))
    return _loaded[name]


def digest_size(name: str) -> int:
    """Return the bytes per digest of the algorithm called `name`, without loading its library."""
    if name not in _SIZES:
        raise FormatError("unknown digest algorithm", rule="D-ALG", found=repr(name))
    return _SIZES[name]


def sha256_text(data: Buffer) -> str:
    """Return `sha256:` and 64 hex digits for `data`, the form every document uses."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def blocks(nbytes: int, block_size: int) -> int:
    """Return how many blocks an extent of `nbytes` has; an empty extent has none."""
    return -(-nbytes // block_size)

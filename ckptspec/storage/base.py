"""Owns what a store of files by name must do, and which texts are addresses; refuses no address, does no I/O."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FILE = "file://"


@dataclass(frozen=True)
class Stat:
    """What a store knows of one file: its size in bytes, and its tag (None: it has none), which changes with it."""

    nbytes: int
    tag: str | None = None


@dataclass(frozen=True)
class Listing:
    """What lies directly in a folder of a store: files by name, and the names of folders."""

    files: Mapping[str, Stat] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.files or self.folders)


class Store(Protocol):
    """Files by key (names joined by `/`) under one place, `url`; a missing one is FileNotFoundError, faults OSError."""

    @property
    def url(self) -> str:
        """The place, as a reader would be given it."""

    def list(self, folder: str) -> Listing:
        """Return what lies directly in a folder; "" is the place itself, one that is not there is empty."""

    def stat(self, key: str) -> Stat:
        """Return the size and tag of a file."""

    def read_into(self, key: str, view: memoryview, offset: int) -> None:
        """Fill `view` from byte `offset`; raises ShortReadError where the file ends before."""

    def put(self, key: str, parts: Iterable[memoryview], nbytes: int, part_nbytes: int) -> Stat:
        """Write a file of `nbytes` from parts of `part_nbytes` (the last may be smaller): all of it appears, or none.

        An error of the iterator ends the upload and is raised. On return the file is durable.
        """

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Write a file that must not exist, in one step; raises FileExistsError where it does."""

    def delete(self, key: str) -> None:
        """Remove a file; one that is not there is no error."""


def is_url(path: str) -> bool:
    """Tell whether a text is the address of something that is no path of this machine."""
    return "://" in path and _URL.match(path) is not None and not path.startswith(_FILE)


def plain(path: str | os.PathLike[str]) -> str:
    """Return a path or URL as text, `file:///folder` as the path it means."""
    text = os.fspath(path)
    return text[len(_FILE) :] if text.startswith(_FILE + "/") else text


def join(place: str, *names: str) -> str:
    """Return the address of something below a place."""
    return "/".join([place.rstrip("/") or place, *names])

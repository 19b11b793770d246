"""Owns what is asked of a reshard, what is told while it runs, and what it came to; does none of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptspec.engine.resharding.sweep import Account
from ckptspec.format.manifest import Manifest
from ckptspec.format.target import Target
from ckptspec.planner.renames import Renames

DEFAULT_MEMORY = 1 << 30


@dataclass(frozen=True)
class Request:
    """What is asked of a reshard, the same on every process; None for what shall be as it is in the source."""

    path: str
    out: str
    target: Target
    names: Renames = field(default_factory=Renames)
    drop: tuple[str, ...] = ()
    copies: int | None = None
    block: str | None = None
    block_size: int | None = None
    memory: int = DEFAULT_MEMORY
    on_existing: str = "refuse"


class Watcher:
    """What is told while a reshard runs; this one listens to nothing."""

    def begin(self, nbytes: int) -> None:
        """Hear how many bytes this process will write."""

    def progress(self, nbytes: int) -> None:
        """Hear that so many more were written; any thread."""

    def say(self, line: str) -> None:
        """Hear something that people should know."""


@dataclass(frozen=True)
class Private:
    """What is private to each rank, and of whom it was not carried: ranks that are gone, or whose shard is lost.

    `without` are ranks of the result that have none.
    """

    name: str
    gone: tuple[int, ...]
    without: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What a reshard came to: the result's manifest and folder, the source's manifest, and what was moved and how."""

    manifest: Manifest
    folder: str
    source: Manifest
    account: Account
    private: tuple[Private, ...] = ()
    dropped: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    resumed: int = 0
    seconds: float = 0.0

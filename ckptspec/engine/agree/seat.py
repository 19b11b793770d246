"""Owns one rank's place among the ranks: who it is, its line to the store, its heart's count, its old keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ckptspec.engine.agree.line import Line
from ckptspec.engine.agree.store import Store


@dataclass(frozen=True)
class _Past:
    """An attempt that is over: where its keys are, and which of them the coordinator removes once all have read."""

    prefix: str
    committed: bool
    keys: tuple[str, ...]


@dataclass
class Seat:
    """What a channel and its attempts share. `silence` is in seconds; `host` is the rank that serves the store."""

    line: Line
    rank: int
    world_size: int
    silence: float
    host: int | None
    incarnation: str = ""
    beats: int = 0
    past: list[_Past] = field(default_factory=list)  # coordinator: not yet acknowledged by every rank
    posted: list[str] = field(default_factory=list)  # this rank's own keys of earlier attempts

    @property
    def coordinator(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def next_beat(self) -> int:
        """Return the number of the next heartbeat: never the same twice."""
        self.beats += 1
        return self.beats

    def leave(self, prefix: str, committed: bool, own: Sequence[str], shared: Sequence[str]) -> None:
        """Remember the keys of an attempt that is over: this rank's own, and those the coordinator set for all."""
        self.posted += own
        if self.coordinator:
            self.past.append(_Past(prefix, committed, tuple(shared)))

    def tidy(self) -> None:
        """Remove keys nobody can still read; for the coordinator, or a rank that knows it is in a later attempt.

        Raises StoreLostError.
        """
        posted, self.posted = self.posted, []
        if posted:
            self.line.call(partial(_delete, keys=posted), self.silence)
        waiting = []
        for past in self.past:
            if self.acknowledged(past):
                self.line.call(partial(_delete, keys=past.keys), self.silence)
            else:
                waiting.append(past)
        self.past = waiting

    def acknowledged(self, past: _Past) -> bool:
        """Return whether every rank has read how a past attempt ended; raises StoreLostError."""
        return self.line.call(lambda s: s.add(f"{past.prefix}/ack", 0), self.silence) >= self.world_size


def _delete(store: Store, keys: Iterable[str]) -> None:
    for key in keys:
        store.delete_key(key)

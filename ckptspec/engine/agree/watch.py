"""Owns the watch over other ranks' hearts in one attempt: who is dead to it; refuses to charge them its own sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from ckptspec.engine.agree import pulse, verdict
from ckptspec.engine.agree.agreement import Broke, Event, Failure, Silent
from ckptspec.engine.agree.opening import beat_key
from ckptspec.engine.agree.pulse import Beat, Pulse
from ckptspec.engine.agree.seat import Seat
from ckptspec.engine.agree.store import Roll, Store


class Watch:
    """The pulses of the ranks that this one waits for, looked at every `interval` seconds, a part of the deadline."""

    def __init__(self, seat: Seat, number: int, kind: str) -> None:
        self._seat = seat
        self._number = number
        self._kind = kind
        self._pulses: dict[int, Pulse] = {}
        self._looked = time.monotonic()
        self.interval = max(0.05, seat.silence / 12)

    @property
    def due(self) -> bool:
        """Whether it is time for another look."""
        return time.monotonic() - self._looked >= self.interval

    def coordinator(self, store: Store) -> Event | None:
        """Look at rank 0."""
        return self._judge(self._beats(store, [0]), lambda: [0])

    def missing(self, store: Store, roll: Roll, ranks: Sequence[int]) -> Event | None:
        """Look at those of `ranks`, one for each key of the roll, that have not set theirs; one that has may die."""
        open_ranks = [ranks[place] for batch in roll.open for place in batch]
        return self._judge(self._beats(store, open_ranks), lambda: [ranks[place] for place in roll.missing(store)])

    def seen(self, store: Store) -> list[Beat]:
        """Return the beats of those this rank would wait for: of rank 0, or for rank 0 of all others."""
        ranks = range(1, self._seat.world_size) if self._seat.coordinator else range(1)
        return list(self._beats(store, ranks).values())

    def _beats(self, store: Store, ranks: Sequence[int]) -> Mapping[int, Beat]:
        roll = Roll([beat_key(self._seat.incarnation, rank) for rank in ranks])
        return dict(zip(ranks, map(pulse.decode, roll.values(store)), strict=True))

    def _judge(self, beats: Mapping[int, Beat], missing: Callable[[], list[int]]) -> Event | None:
        """Return what the beats say of those still missing: one is elsewhere, or some are silent [P-SILENCE]."""
        now = time.monotonic()
        elapsed, self._looked = now - self._looked, now
        for rank, beat in beats.items():
            known = self._pulses.get(rank) or Pulse(self._number)
            self._pulses[rank] = known.observe(beat, elapsed, 2 * self.interval)
        suspects = [*self._suspects(beats)]
        if not suspects:
            return None
        absent = set(missing())
        for rank in suspects:
            if rank in absent and self._elsewhere(beats[rank]):
                return Broke(self._other_kind(rank, beats[rank]))
        dead = [rank for rank in suspects if rank in absent]
        what = self._pulses[dead[0]].describe(self._seat.silence) if dead else ""
        return Silent(verdict.silence(dead, what)) if dead else None

    def _suspects(self, beats: Mapping[int, Beat]) -> Iterator[int]:
        for rank, beat in beats.items():
            if self._elsewhere(beat) or self._pulses[rank].dead(self._seat.silence):
                yield rank

    def _elsewhere(self, beat: Beat) -> bool:
        return beat.attempt == self._number and beat.kind != self._kind

    def _other_kind(self, rank: int, beat: Beat) -> Failure:
        return Failure(
            f"rank {rank} is in a {beat.kind} where rank {self._seat.rank} is in a {self._kind}: "
            "every rank must call save and load in the same order",
            rank,
            "mixed",
            details={"type": "SaveError", "rule": "P-AGREE"},
        )

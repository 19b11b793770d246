"""Owns the signs of life: what a rank shows while it saves, and how long it has shown nothing new; refuses clocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

# A rank whose heart beats but which moves no byte and asks for nothing is stuck in one call. No healthy call takes
# this many deadlines; a hung network disk does, and nobody may wait for it for ever.
STUCK_DEADLINES = 15


@dataclass(frozen=True)
class Beat:
    """One heartbeat: which attempt, kind and step the rank is in, how often its heart beat, and what it got done.

    `moved` counts bytes written or read and rounds of waiting, so a rank that waits for another is not stuck itself.
    """

    attempt: int = 0
    kind: str = "idle"
    count: int = 0
    moved: int = 0
    step: int | None = None

    def encode(self) -> bytes:
        """Return the beat as it is stored."""
        step = "-" if self.step is None else self.step
        return f"{self.attempt} {self.kind} {self.count} {self.moved} {step}".encode()


def decode(data: bytes) -> Beat:
    """Return the beat in `data`; bytes that are none show no life."""
    try:
        attempt, kind, count, moved, step = data.decode("ascii").split()
        return Beat(int(attempt), kind, int(count), int(moved), None if step == "-" else int(step))
    except ValueError:
        return Beat()


@dataclass(frozen=True)
class Pulse:
    """What one rank knows of another's life: the last beat of this attempt, seconds since a new one, since progress."""

    attempt: int
    beat: Beat = Beat()
    quiet: float = 0.0
    stuck: float = 0.0

    def observe(self, beat: Beat, elapsed: float, longest: float) -> Pulse:
        """Return the pulse after a look `elapsed` seconds after the last one.

        At most `longest` seconds are charged for one look: an observer that was itself stopped for an hour has not
        seen an hour of silence. A beat of another attempt is no life in this one.
        """
        spent = min(elapsed, longest)
        if beat.attempt != self.attempt or beat.count == self.beat.count:
            return replace(self, beat=beat, quiet=self.quiet + spent, stuck=self.stuck + spent)
        stuck = 0.0 if beat.moved != self.beat.moved else self.stuck + spent
        return replace(self, beat=beat, quiet=0.0, stuck=stuck)

    def dead(self, deadline: float) -> bool:
        """Whether the rank was silent for `deadline` seconds, or stuck for many of them."""
        return self.quiet >= deadline or self.stuck >= STUCK_DEADLINES * deadline

    def describe(self, deadline: float) -> str:
        """Return why a rank counts as dead: what follows its name in a message."""
        if self.quiet < deadline:
            return f"is alive but got nothing done for {self.stuck:.0f} s: stuck in one call"
        quiet = f"gave no sign of life for {deadline:g} s"
        if self.beat.attempt == self.attempt:
            return f"{quiet} (it joined, then fell silent)"
        last = f"last seen in {self.beat.kind} {self.beat.attempt}" if self.beat.attempt else "never seen in any before"
        return f"{quiet} (it did not join number {self.attempt}, {last})"

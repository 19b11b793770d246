"""Owns which attempt a call of save or load takes part in: none that is over and not its own; refuses clocks and I/O.

Ranks count their calls, so a rank that left one out is a number behind. What it then comes to is over, and it goes on
to the next number, unless it merely came late to that very call: then the failure it finds there is its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from ckptspec.engine.agree.agreement import Failure, Verdict
from ckptspec.engine.agree.pulse import Beat

# Late, or again with the others after having left it out: seen within this part of the deadline, or taken for late.
DOUBT_PART = 8


class Fit(Enum):
    """What an attempt is to the call that comes to it."""

    OURS = "ours"  # take part; where it is over, in its failure
    PASSED = "passed"  # over, and of another call: ours is a later one
    DOUBT = "doubt"  # over for want of a rank, and of the same step


def fit(found: Verdict | None, step: int | None, number: int, seen: Iterable[Beat] = ()) -> Fit:
    """Return what attempt `number`, found with this verdict, is to a call that saves `step`, or (None) loads.

    An error may have come before this rank did, and is then its own too. For want of a rank an attempt fails only after
    the deadline, so whoever finds that is late, or left the call out. `seen` are beats of those this rank would wait
    for: where they save this very step in a later attempt they want it there. Loads are not told from each other; to
    load again is all that a late one can do.
    """
    if not isinstance(found, Failure) or found.kind not in ("error", "silent"):
        return Fit.OURS  # nothing is decided; or ranks do not agree on what they do, and that concerns this one too
    if found.step != step:
        return Fit.PASSED
    if found.kind == "error":
        return Fit.OURS
    again = any(beat.attempt > number and beat.step == step for beat in seen)
    return Fit.PASSED if step is None or again else Fit.DOUBT

"""Owns how often to save: when one is due, what a failure costs, which interval costs least; refuses to read clocks.

The model is Daly's: failures come at random with a mean time between them, a save stops the work for some seconds, and
a failure loses what was done since the last save.
  J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974, 530-531.
  J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22(3), 2006, 303-312.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Union

_UNITS = {"ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SPAN = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) *(ms|s|sec|m|min|h|d)?\Z")


# ---- when ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cadence:
    """Save every so many steps, or seconds of wall clock, or whichever comes first; raises ValueError for neither."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise ValueError("a cadence needs steps or seconds")
        if self.steps is not None and (isinstance(self.steps, bool) or self.steps < 1):
            raise ValueError(f"save every 1 step or more, not {self.steps!r}")
        if self.seconds is not None:
            _number("the seconds between saves", self.seconds)


def cadence(every: Union[int, str, timedelta]) -> Cadence:
    """Return the cadence that a caller wrote: an integer of steps, or a time such as "90s", "10min", "1h".

    Raises ValueError for anything else.
    """
    if isinstance(every, timedelta):
        return Cadence(seconds=every.total_seconds())
    if isinstance(every, str):
        if every.strip().isdecimal():
            raise ValueError(f"say {every.strip()!r} as an integer for steps, or with a unit: {every.strip()}s")
        return Cadence(seconds=seconds(every))
    if isinstance(every, bool) or not isinstance(every, int):
        raise ValueError(f'save_every is steps (500) or a time ("10min"), not {every!r}')
    return Cadence(steps=every)


@dataclass(frozen=True)
class Last:
    """When the run was last saved, or began: its step, and the seconds on the caller's clock."""

    step: int
    at: float


def due(policy: Cadence, step: int, now: float, last: Last) -> bool:
    """Return whether `step` is to be saved; one rank asks, and tells the others: clocks differ.

    Steps are due at multiples, as `keep every` counts them; one that was jumped over is made up for at the next step.
    """
    if step <= last.step:
        return False
    if policy.steps is not None and step // policy.steps > last.step // policy.steps:
        return True
    return policy.seconds is not None and now - last.at >= policy.seconds


def seconds(text: str) -> float:
    """Return a time such as "90", "90s", "10min", "1.5h" or "2d" in seconds; raises ValueError."""
    match = _SPAN.match(text.strip())
    if match is None:
        raise ValueError(f"a time is a number and ms, s, min, h or d, such as 10min, not {text!r}")
    return float(match[1]) * _UNITS[match[2] or "s"]


# ---- how often -------------------------------------------------------------------------------------------------------


def suggest_interval(mtbf: float, save_seconds: float, *, restart_seconds: float = 0.0) -> float:
    """Return the seconds of work between saves that waste the least time; all arguments are in seconds.

    `mtbf` is the mean time between failures of the whole job, `save_seconds` how long a save keeps the training from
    working (of an asynchronous one the stall alone). `restart_seconds` makes failures dearer, but not the best
    interval another one. Young's sqrt(2 save mtbf) to first order, here with Daly's two further terms; where a save
    takes 2 mtbf or more, mtbf. Raises ValueError for what is no such number.
    """
    _number("mtbf", mtbf)
    _number("save_seconds", save_seconds)
    _number("restart_seconds", restart_seconds, least=0.0)
    if save_seconds >= 2 * mtbf:
        return float(mtbf)
    ratio = save_seconds / (2 * mtbf)
    return math.sqrt(2 * save_seconds * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def overhead(interval: float, mtbf: float, save_seconds: float, *, restart_seconds: float = 0.0) -> float:
    """Return the time a long run takes beyond its work, as a fraction of the work: saves, rework and restarts.

    Daly's complete model; infinite where the run would never end.
    """
    _number("interval", interval)
    _number("mtbf", mtbf)
    _number("save_seconds", save_seconds, least=0.0)
    _number("restart_seconds", restart_seconds, least=0.0)
    try:
        return mtbf / interval * math.exp(restart_seconds / mtbf) * math.expm1((interval + save_seconds) / mtbf) - 1
    except OverflowError:
        return math.inf


def expected_loss(interval: float, lag: float = 0.0) -> float:
    """Return the seconds of work that a failure loses on average: half an interval, and what a save lags behind.

    `lag` is the seconds from the moment a state is taken until it is committed.
    """
    _number("interval", interval)
    _number("lag", lag, least=0.0)
    return interval / 2 + lag


def _number(what: str, value: float, least: float | None = None) -> None:
    """Raise ValueError unless `value` is a finite number above 0, or from `least` on."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not sound or (value <= 0 if least is None else value < least):
        bound = "above 0" if least is None else f"from {least:g} on"
        raise ValueError(f"{what} must be a number {bound}, not {value!r}")


# ---- what a run's checkpoints tell -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One checkpoint of a run: its step, seconds of work so far, when it was made (since 1970), and what it follows."""

    step: int
    work: int | None
    made: float | None
    save_id: str
    parent: str | None


@dataclass(frozen=True)
class Pace:
    """How a run saves: seconds of work between saves (median of `gaps` gaps), and what a save takes, where known.

    Work is counted from the end of one save to the start of the next, and checkpoints are dated as they end, so what
    the dates differ by beyond the work is the save; in whole seconds, so nothing below 1 is known. A restart in between
    makes one gap too long, which a median bears.
    """

    gaps: int
    interval: float
    save_seconds: float | None


def pace(points: Sequence[Point]) -> Pace | None:
    """Return the pace of checkpoints given in any order, None where no two of them tell one."""
    ordered = sorted(points, key=lambda p: p.step)
    gaps = [*_gaps(ordered)]
    if not gaps:
        return None
    saves = [spent - work for work, spent in gaps if spent is not None]
    took = _median(saves) if saves else 0.0
    return Pace(len(gaps), _median([work for work, _ in gaps]), took if took >= 1 else None)


def _gaps(ordered: Sequence[Point]) -> Iterator[tuple[int, float | None]]:
    """Yield the work between neighbours, and the time between them where the one went on from the other."""
    for a, b in pairwise(ordered):
        if a.work is not None and b.work is not None and b.work > a.work:
            dated = b.parent == a.save_id and a.made is not None and b.made is not None
            yield b.work - a.work, (b.made or 0.0) - (a.made or 0.0) if dated else None


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return float(ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2)

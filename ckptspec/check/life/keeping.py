"""Owns which checkpoints of a run stay and which may go, and why; refuses to let the newest good one go."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

METRICS = "org.ckptspec.metrics"  # a manifest's annotation: numbers by name, as text
_NUMBER = re.compile(r"-?(?:[0-9]{1,400}(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,4})?|inf)\Z|nan\Z")
_MODES = ("min", "max")


@dataclass(frozen=True)
class Keep:
    """What retention keeps: the `last` steps, multiples of `every`, the `best` (metric, "min" or "max", how many).

    A step stays where any of them asks for it; with none of them every step stays. `protect` are steps that always
    stay. Raises ValueError for numbers below 1: to keep nothing is no retention.
    """

    last: int | None = None
    every: int | None = None
    best: tuple[str, str, int] | None = None
    protect: Collection[int] = ()

    def __post_init__(self) -> None:
        for name in ("last", "every"):
            _positive(f"keep {name}", getattr(self, name))
        if self.best is not None:
            if len(self.best) != 3 or not isinstance(self.best[0], str) or not self.best[0]:
                raise ValueError(f'keep best is (metric, "min" or "max", how many), not {self.best!r}')
            if self.best[1] not in _MODES:
                raise ValueError(f'keep best says "min" or "max", not {self.best[1]!r}')
            _positive("the number of best to keep", self.best[2])
        for step in self.protect:
            if isinstance(step, bool) or not isinstance(step, int) or step < 0:
                raise ValueError(f"a step to protect is an integer of 0 or more, not {step!r}")
        object.__setattr__(self, "protect", frozenset(self.protect))

    @property
    def removes(self) -> bool:
        """Whether anything may ever go."""
        return (self.last, self.every, self.best) != (None, None, None)

    @property
    def saves(self) -> int:
        """How many checkpoints lie beside each other at least when retention has settled, the one being written too."""
        best = self.best[2] if self.best is not None else 0
        return max(1, self.last or 0, best) + 1


def _positive(what: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{what} must be an integer of 1 or more, not {value!r}")


@dataclass(frozen=True)
class Step:
    """One folder of a run that looks like a checkpoint, as far as retention must know it.

    `fault` says why it is no good checkpoint or not one to touch; `held` who is at it; `protected` that a person marked
    it.
    """

    step: int
    name: str
    save_id: str = ""
    run_id: str = ""
    fault: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    protected: bool = False
    held: str | None = None

    @property
    def good(self) -> bool:
        """Whether it is a good checkpoint under a name of its own."""
        return self.fault is None


@dataclass(frozen=True)
class Fate:
    """What becomes of one step, and why."""

    step: Step
    kept: bool
    reason: str


def decide(steps: Sequence[Step], keep: Keep, run_id: str | None = None) -> tuple[Fate, ...]:
    """Return the fate of every step, newest first; `run_id` (default: the newest good one's) is the run that is tidied.

    Never to go are: the newest good one, one that is held or protected, one of another run, and one that is damaged,
    which a person may yet repair [P-CLEAN].
    """
    ordered = sorted(steps, key=lambda s: (-s.step, s.name))
    good = [s for s in ordered if s.good]
    run = run_id if run_id is not None or not good else good[0].run_id
    mine = [s for s in good if s.run_id == run]
    wanted = dict(_wanted(mine, keep))
    return tuple(_fate(s, keep, run, good, mine, wanted) for s in ordered)


def _fate(
    s: Step, keep: Keep, run: str | None, good: Sequence[Step], mine: Sequence[Step], wanted: Mapping[str, str]
) -> Fate:
    metric = keep.best[0] if keep.best is not None else None
    for holds, reason in (
        (not s.good, s.fault or ""),
        (s in good[:1] or s in mine[:1], "the newest good checkpoint"),
        (s.run_id != run, "of another run"),
        (s.held is not None, f"in use: {s.held}"),
        (s.protected, "protected: there is a file of that name in it"),
        (s.step in keep.protect, "a step to protect"),
        (not keep.removes, "nothing was asked to go"),
        (s.name in wanted, wanted.get(s.name, "")),
        (metric is not None and not any(metric in m.metrics for m in mine), f"no checkpoint has a metric {metric!r}"),
    ):
        if holds:
            return Fate(s, True, reason)
    return Fate(s, False, _unwanted(keep))


def _wanted(mine: Sequence[Step], keep: Keep) -> Iterator[tuple[str, str]]:
    """Yield the steps of the run that a rule asks for, with the rule; of several the last one is told."""
    if keep.best is not None:
        name, mode, count = keep.best
        sign = 1 if mode == "min" else -1
        known = [s for s in mine if name in s.metrics and not math.isnan(s.metrics[name])]
        for s in sorted(known, key=lambda s: (sign * s.metrics[name], -s.step))[:count]:
            yield s.name, f"among the best {count} by {mode} {name} ({s.metrics[name]:g})"
    if keep.every is not None:
        yield from ((s.name, f"a multiple of {keep.every}") for s in mine if s.step % keep.every == 0)
    if keep.last is not None:
        last = sorted({s.step for s in mine})[-keep.last :]
        yield from ((s.name, f"among the last {keep.last}") for s in mine if s.step in last)


def _unwanted(keep: Keep) -> str:
    said = [f"not among the last {keep.last}"] if keep.last is not None else []
    said += [f"no multiple of {keep.every}"] if keep.every is not None else []
    said += [f"not among the best {keep.best[2]} by {keep.best[1]} {keep.best[0]}"] if keep.best is not None else []
    return ", ".join(said)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def metrics_note(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the annotation that holds metrics: each a float64 as the shortest text that reads back as the same.

    A manifest has no fractions, so a number with one is text. Takes whatever `float` makes a number of, NaN too, which
    is never among the best. Raises ValueError for a name or a value that is none.
    """
    found = {}
    for name, value in values.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of a metric is text, not {name!r}")
        if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
            raise ValueError(f"metric {name!r} must be a number, not {value!r}")
        found[name] = repr(float(value))
    return {METRICS: found} if found else {}


def metrics_of(annotations: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that annotations hold; what is no number there is no metric."""
    note = annotations.get(METRICS)
    if not isinstance(note, Mapping):
        return {}
    return {n: float(text) for n, text in note.items() if isinstance(text, str) and _NUMBER.match(text)}

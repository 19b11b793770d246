"""Owns the steps at which a run is saved: by cadence, or because a signal asks for it, and the same on every rank.

Clocks and signals differ between ranks, so rank 0 decides and names a step a little ahead. Between two steps all ranks
meet in a collective of the training, so nobody is past that step before it can be read; none is waited for.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

import msgpack

from ckptspec.check.life.cadence import Cadence, Last, due
from ckptspec.engine.agree.notes import Notes

LEAD = 2  # steps from rank 0's decision to the save: a rank may be one step ahead of another, never two
STOPS = frozenset((signal.SIGTERM, signal.SIGINT))


class Signals:
    """Signals that ask for a save: noted when they come, acted on at the next step; SIGTERM also ends the training."""

    def __init__(self, wanted: Iterable[signal.Signals]) -> None:
        self._wanted = tuple(wanted)
        self._before: dict[signal.Signals, Any] = {}
        self.came = 0
        self.stop = False

    @property
    def listening(self) -> bool:
        """Whether any signal asks for a save."""
        return bool(self._wanted)

    def catch(self) -> None:
        """Take the place of the handlers there are; only the main thread of a process can."""
        if threading.current_thread() is not threading.main_thread() and self._wanted:
            raise ValueError("signals can only be caught from the main thread: make the Checkpointer there")
        for number in self._wanted:
            self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came += 1
        self.stop = self.stop or signal.Signals(number) in STOPS

    def release(self) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._before.clear()


class Boundaries:
    """Says at each step boundary whether all ranks save now; every rank asks at every step."""

    def __init__(self, notes: Notes, rank: int, world: int, cadence: Cadence | None, signals: Signals) -> None:
        self._notes = notes
        self._topic = notes.fresh("boundary")  # another run in this process, or one before, has signals of its own
        self._rank = rank
        self._lead = LEAD if world > 1 else 0
        self._steps = Cadence(steps=cadence.steps) if cadence is not None and cadence.steps is not None else None
        self._time = Cadence(seconds=cadence.seconds) if cadence is not None and cadence.seconds is not None else None
        self._signals = signals
        self._told = self._heard = 0  # signals this rank has told of; those rank 0 has acted on
        self._set = -1  # the step that rank 0 named last
        self._kept = -1  # the last such step that this rank saved at
        self.last = Last(0, time.monotonic())
        self.stopping = False

    def saved(self, step: int) -> None:
        """Note that `step` is saved, or was restored."""
        self.last = Last(step, time.monotonic())

    def due(self, step: int) -> bool:
        """Return whether every rank saves at `step`."""
        now = self._steps is not None and due(self._steps, step, 0.0, self.last)  # the same everywhere, by arithmetic
        if self._time is None and not self._signals.listening:
            return now
        self._tell(step)
        found = self._notes.look(self._topic)
        at, stop = msgpack.unpackb(found) if found is not None else (-1, False)
        if self._kept < at <= step:  # later, where it is not asked at every step
            self._kept = at
            self.stopping = self.stopping or stop
            return True
        return now

    def _tell(self, step: int) -> None:
        """Tell rank 0 of signals; as rank 0, name the step at which all shall save."""
        if self._rank != 0:
            if self._signals.came > self._told:
                self._told = self._signals.came
                self._notes.raise_flag(self._topic + ("/stop" if self._signals.stop else "/save"))
            return
        stops, saves = self._notes.flagged(self._topic + "/stop"), self._notes.flagged(self._topic + "/save")
        asked = self._signals.came + stops + saves
        timely = self._time is not None and due(self._time, step, time.monotonic(), self.last)
        if self._set < step and (asked > self._heard or timely):
            self._heard = asked
            self._set = step + self._lead
            stop = self._signals.stop or stops > 0
            self._notes.post(self._topic, msgpack.packb([self._set, stop]))

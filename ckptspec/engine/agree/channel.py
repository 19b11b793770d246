"""Owns the meeting of a job's ranks and its end; what they say in between is an attempt's."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from multiprocessing.util import Finalize

from ckptspec.engine.agree.agreement import Failure
from ckptspec.engine.agree.attempt import Attempt
from ckptspec.engine.agree.line import Line, StoreLostError
from ckptspec.engine.agree.notes import Notes
from ckptspec.engine.agree.opening import Opening, pauses
from ckptspec.engine.agree.seat import Seat
from ckptspec.engine.agree.store import LocalStore, Store
from ckptspec.errors import SaveError

__all__ = ["Attempt", "Channel", "LocalStore", "Store"]

# Seconds rank 0 stays at its end, so that the others can still read the outcome from a store it may host.
LINGER_COMMITTED = 30.0
LINGER_FAILED = 3.0


class Channel:
    """What the ranks of one job agree over: opened by all of them together, then one attempt after the other.

    `silence` is how many seconds a rank may give no sign of life before all others give up on it; it may be changed
    between attempts, on all ranks alike. `opening` is how long the first meeting may take (default: `silence`). `host`
    is the rank whose process serves the store, where that is known: it is named when the store is lost. `threaded` is
    for simulations of many ranks in one process: without a thread no heart beats and no call is given up.

    Raises SaveError [P-AGREE] naming the ranks that did not come.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        silence: float = 120.0,
        *,
        opening: float | None = None,
        host: int | None = None,
        threaded: bool | None = None,
    ) -> None:
        line = Line(store, threaded=world_size > 1 if threaded is None else threaded)
        self._stop = weakref.finalize(self, line.stop)
        self._seat = Seat(line, rank, world_size, silence, host)
        self._number = 0
        self._silence = silence
        self._turns = threading.Condition()
        self._line: list[object] = []
        self._holder: int | None = None
        try:
            self._seat.incarnation = Opening(line, rank, world_size, silence if opening is None else opening).run()
        except BaseException:
            self._stop()
            raise
        atexit.register(_at_exit, weakref.ref(self))
        # Children of multiprocessing end without atexit; they run these instead.
        Finalize(None, _at_exit, (weakref.ref(self),), exitpriority=0)

    @cached_property
    def notes(self) -> Notes:
        """What rank 0 tells all ranks between attempts."""
        return Notes(self._seat)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._seat.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._seat.world_size

    @property
    def silence(self) -> float:
        """Seconds without a sign of life after which a rank counts as dead."""
        return self._silence

    @silence.setter
    def silence(self, seconds: float) -> None:
        self._silence = seconds  # from the next attempt on: another thread may be in one

    def attempt(self, kind: str = "save", step: int | None = None) -> Attempt:
        """Begin the next save (of `step`) or load, in the same order on every rank.

        A rank that left one out is told of no old failure: it goes on to the attempt that the others are in [P-AGREE].
        """
        self._seat.silence = self._silence
        passed: Failure | None = None
        try:
            while True:
                self._number += 1
                attempt = Attempt(self._seat, self._number, kind, step, passed)
                passed = attempt.passed()
                if passed is None:
                    return attempt
        except BaseException:
            self._seat.line.live(None)  # an interrupt: no heart may beat for an attempt that nobody is in
            raise

    def reserve(self) -> object:
        """Return a place in the line for a turn: threads take turns as these were asked for, alike on every rank.

        Whoever has one gives it to `turn`, or else to `forgo`. Raises SaveError [P-AGREE] for a call from inside
        another one, which would wait for itself.
        """
        if self._holder == threading.get_ident():
            raise SaveError(
                "a save or load was called from inside another one, on the same thread",
                rule="P-AGREE",
                advice="an object's state_dict and load_state_dict must not save or load checkpoints themselves",
            )
        place = object()
        with self._turns:
            self._line.append(place)
        return place

    def forgo(self, place: object) -> None:
        """Leave the line; nothing where the turn is over."""
        with self._turns:
            if place in self._line:
                self._line.remove(place)
                self._turns.notify_all()

    @contextmanager
    def turn(self, place: object | None = None) -> Iterator[None]:
        """Hold this while a save or load is under way: others wait for its end, which the deadline bounds."""
        place = self.reserve() if place is None else place
        try:
            with self._turns:
                self._turns.wait_for(lambda: self._line[0] is place)
            self._holder = threading.get_ident()
            yield
        finally:
            self._holder = None if self._holder == threading.get_ident() else self._holder
            self.forgo(place)

    def close(self) -> None:
        """End the channel; rank 0 first waits, for a while, until every rank has read how the last attempt ended."""
        if not self._stop.alive:
            return
        try:
            self._linger()
        except StoreLostError:
            self._seat.past.clear()  # there is no store left to keep alive for the others
        self._stop()

    def _linger(self) -> None:
        if not self._seat.past:
            return
        last = self._seat.past[-1]
        until = time.monotonic() + min(self.silence, LINGER_COMMITTED if last.committed else LINGER_FAILED)
        for pause in pauses(1, self.silence):
            if self._seat.acknowledged(last) or time.monotonic() > until:
                return
            time.sleep(pause)


def _at_exit(reference: weakref.ref[Channel]) -> None:
    channel = reference()
    if channel is not None and channel._seat.line.ours:
        channel.close()

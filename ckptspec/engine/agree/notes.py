"""Owns short messages from rank 0 to all between attempts: a decision of its own that every rank must take alike."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from ckptspec.engine.agree.line import StoreLostError
from ckptspec.engine.agree.opening import ROOT, pauses
from ckptspec.engine.agree.seat import Seat
from ckptspec.engine.agree.store import Store
from ckptspec.errors import SaveError

T = TypeVar("T")

WORKING = "working"
BEATS = 8  # in a deadline, while rank 0 is at work
KEPT = 256  # notes of one topic that stay readable: no rank is so many calls behind


class Notes:
    """Numbered notes of rank 0 by topic. Each rank counts its own calls, so the n-th told is the n-th heard."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat
        self._counts: dict[str, int] = {}
        self._fresh: dict[str, int] = {}

    def share(self, topic: str, payload: bytes | None = None) -> bytes:
        """Return what rank 0 shares under the topic at this call; it alone gives `payload`.

        Raises SaveError [P-AGREE] where nothing came from rank 0 within the deadline, or the store is lost.
        """
        number = self._counts[topic] = self._counts.get(topic, 0) + 1
        if self._seat.world_size == 1:
            assert payload is not None
            return payload
        try:
            if self._seat.coordinator:
                assert payload is not None
                self._seat.line.call(partial(self._tell, topic, number, payload), self._seat.silence)
                return payload
            return self._hear(self._key(topic, number))
        except StoreLostError as e:
            raise SaveError(f"the store the ranks agree over is lost: {e}", rule="P-AGREE") from e

    def _tell(self, topic: str, number: int, payload: bytes, store: Store) -> None:
        store.set(self._key(topic, number), payload)
        if number > KEPT:
            store.delete_key(self._key(topic, number - KEPT))

    def _hear(self, key: str) -> bytes:
        waited, seen = 0.0, 0
        for pause in pauses(1, self._seat.silence):
            found = self._seat.line.call(partial(_value, key), self._seat.silence)
            if found is not None:
                return found
            if waited > self._seat.silence / 2:
                beats = self._ask(lambda s: s.add(self._key(WORKING, 0), 0))
                if beats != seen:
                    waited, seen = 0.0, beats
            if waited > self._seat.silence:
                break
            time.sleep(pause)
            waited += pause
        message = f"rank 0 said nothing for {self._seat.silence:g} s of what all ranks shall do"
        raise SaveError(message, rank=0, rule="P-SILENCE", advice="every rank must make the same calls")

    @contextmanager
    def working(self) -> Iterator[None]:
        """Rank 0: show that what all ranks wait for is under way, however long it takes."""
        if self._seat.world_size == 1 or not self._seat.coordinator:
            yield
            return
        done = threading.Event()

        def beat() -> None:
            while not done.wait(self._seat.silence / BEATS):
                with contextlib.suppress(StoreLostError):  # who needs the store next meets it too
                    self._seat.line.call(lambda s: s.add(self._key(WORKING, 0), 1), self._seat.silence)

        thread = threading.Thread(target=beat, name="ckptspec-working", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def fresh(self, topic: str) -> str:
        """Return a topic that nobody has used: the n-th of this name on every rank that asks n times."""
        number = self._fresh[topic] = self._fresh.get(topic, 0) + 1
        return f"{topic}-{number}"

    # ---- a value that any rank may set, and all look at --------------------------------------------------------------

    def raise_flag(self, topic: str) -> None:
        """Tell rank 0 that something happened on this rank; never waits for anybody but the store."""
        self._ask(lambda s: s.add(self._key(topic, 0), 1))

    def flagged(self, topic: str) -> int:
        """Return how often any rank raised the flag."""
        return self._ask(lambda s: s.add(self._key(topic, 0), 0))

    def post(self, topic: str, payload: bytes) -> None:
        """Set the one value of a topic, which every rank can look at."""
        self._ask(lambda s: s.set(self._key(topic, 0), payload))

    def look(self, topic: str) -> bytes | None:
        """Return the value of a topic, None where nothing was posted; never waits."""
        return self._ask(partial(_value, self._key(topic, 0)))

    def _ask(self, ask: Callable[[Store], T]) -> T:
        try:
            return self._seat.line.call(ask, self._seat.silence)
        except StoreLostError as e:
            raise SaveError(f"the store the ranks agree over is lost: {e}", rule="P-AGREE") from e

    def _key(self, topic: str, number: int) -> str:
        return f"{ROOT}/{self._seat.incarnation}/note/{topic}/{number}"


def _value(key: str, store: Store) -> bytes | None:
    return store.get(key) if store.check([key]) else None

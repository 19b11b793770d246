"""Owns the handshake that opens a channel: all ranks of this very start of the job, or an error; believes no old key.

A launcher's store outlives the processes, so keys of an earlier start may lie in it, complete and plausible. Rank 0
draws 128 random bits, the incarnation, and publishes them as `ckptspec/open`; every rank answers below them with a
nonce of its own and is in only when its receipt holds that nonce. Who read an old incarnation gets no such receipt, and
looks again.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn, TypeVar

from ckptspec.engine.agree.line import Line, StoreLostError
from ckptspec.engine.agree.pulse import Beat
from ckptspec.engine.agree.store import Roll, Store
from ckptspec.engine.agree.verdict import SHOWN_RANKS
from ckptspec.errors import SaveError

T = TypeVar("T")

ROOT = "ckptspec"
OPEN = f"{ROOT}/open"
_INCARNATION = re.compile(rb"[0-9a-f]{32}\Z")
_REFUSED = b" refused "
# Every how many looks all is looked at, not only what is most likely to have changed.
FULL_LOOK = 4


def pauses(world_size: int, silence: float) -> Iterator[float]:
    """Yield the seconds between looks at the store: first short, then such that all ranks make some 2,000 a second."""
    longest = min(1.0, silence / 10, max(0.02, world_size / 2000))
    pause = min(longest, max(0.001, world_size / 200_000))
    while True:
        yield pause
        pause = min(pause * 1.5, longest)


@dataclass
class Budget:
    """Seconds to wait in all; time in which this process was stopped is not charged."""

    seconds: float
    spent: float = 0.0

    def sleep(self, pause: float) -> bool:
        """Sleep, and return whether there is time left."""
        before = time.monotonic()
        time.sleep(pause)
        self.spent += min(time.monotonic() - before, pause + 0.25)
        return not self.over

    @property
    def over(self) -> bool:
        """Whether there is no time left."""
        return self.spent >= self.seconds


@dataclass(frozen=True)
class Opening:
    """Who opens: this rank of so many, over that line, giving up after `patience` seconds."""

    line: Line
    rank: int
    world_size: int
    patience: float
    _nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def run(self) -> str:
        """Return the incarnation all ranks share; raises SaveError [P-AGREE] naming the ranks that never came."""
        try:
            return self._gather() if self.rank == 0 else self._join()
        except StoreLostError as e:
            raise self._error(f"the store cannot be used: {e}") from e

    def _error(self, message: str, rank: int | None = None) -> SaveError:
        advice = "every rank of the job must take part in its first save or load, with one store and world size"
        return SaveError(f"the ranks did not meet: {message}", rank=rank, rule="P-AGREE", advice=advice)

    def _ask(self, ask: Callable[[Store], T]) -> T:
        return self.line.call(ask, self.patience)

    @property
    def _hello(self) -> bytes:
        return f"{self._nonce} {self.world_size}".encode()

    def _greet(self, incarnation: str) -> None:
        def send(store: Store) -> None:
            store.set(beat_key(incarnation, self.rank), Beat().encode())
            store.set(_key(incarnation, "hello", self.rank), self._hello)

        self._ask(send)

    # ---- rank 0 ------------------------------------------------------------------------------------------------------

    def _gather(self) -> str:
        incarnation = secrets.token_hex(16)
        roll = Roll([_key(incarnation, "hello", rank) for rank in range(self.world_size)])
        self._greet(incarnation)
        self._ask(lambda s: s.set(OPEN, incarnation))
        absent = self._absent(roll)
        if absent:
            more = f" and {len(absent) - SHOWN_RANKS} more" if len(absent) > SHOWN_RANKS else ""
            who = f"rank(s) {', '.join(map(str, absent[:SHOWN_RANKS]))}{more}"
            return self._refuse(incarnation, absent, absent[0], f"{who} never came within {self.patience:g} s")
        hellos = self._ask(lambda s: list(roll.values(s)))
        sizes = [hello.split()[-1] for hello in hellos]
        odd = next((rank for rank, size in enumerate(sizes) if size != sizes[0]), None)
        if odd is not None:
            found = f"rank {odd} counts {sizes[odd].decode(errors='replace')} ranks, rank 0 {self.world_size}"
            return self._refuse(incarnation, [], odd, found)
        self._answer(incarnation, dict(enumerate(hellos[1:], 1)))
        return incarnation

    def _absent(self, roll: Roll) -> list[int]:
        """Return the ranks that have not come when the patience is used up: none once all are there."""
        budget = Budget(self.patience)
        for pause in pauses(self.world_size, self.patience):
            if self._ask(roll.complete):
                return []
            if not budget.sleep(pause):
                break
        return self._ask(roll.missing)

    def _answer(self, incarnation: str, receipts: Mapping[int, bytes]) -> None:
        def send(store: Store) -> None:
            for rank, receipt in receipts.items():
                store.set(_key(incarnation, "ok", rank), receipt)

        self._ask(send)

    def _refuse(self, incarnation: str, absent: Sequence[int], blamed: int, message: str) -> NoReturn:
        """Tell those who did come why nothing comes of it, each under its own nonce, and raise it here."""
        gone = set(absent)
        here = [rank for rank in range(self.world_size) if rank not in gone]
        roll = Roll([_key(incarnation, "hello", rank) for rank in here])
        hellos = self._ask(lambda s: list(roll.values(s)))
        reason = _REFUSED + json.dumps([message, blamed]).encode()
        self._answer(incarnation, {rank: hello + reason for rank, hello in zip(here, hellos, strict=True)})
        raise self._error(message, blamed)

    # ---- the others --------------------------------------------------------------------------------------------------

    def _join(self) -> str:
        incarnation = ""
        budget = Budget(1.25 * self.patience + 1)  # rank 0 gives up first, and says why
        for count, pause in enumerate(pauses(self.world_size, self.patience)):
            current, receipt = self._ask(partial(self._look, incarnation, count % FULL_LOOK == 0))
            if current and current != incarnation:
                incarnation = current
                budget.spent = 0.0
                self._greet(incarnation)
            elif self._received(incarnation, receipt):
                return incarnation
            if not budget.sleep(pause):
                break
        known = "gave no receipt: this rank runs twice, or rank 0 is of an older start" if incarnation else "never came"
        raise self._error(f"rank 0 {known} (waited {self.patience:g} s)", 0)

    def _look(self, incarnation: str, full: bool, store: Store) -> tuple[str, bytes]:
        """Return this rank's receipt, and where that is none yet and a full look is due, the incarnation published."""
        key = _key(incarnation, "ok", self.rank)
        receipt = store.get(key) if incarnation and store.check([key]) else b""
        if receipt.startswith(self._hello) or not (full or not incarnation) or not store.check([OPEN]):
            return "", receipt
        found = store.get(OPEN)
        return found.decode() if _INCARNATION.match(found) else "", receipt

    def _received(self, incarnation: str, receipt: bytes) -> bool:
        """Return whether this process's own nonce came back, and tidy up; raises SaveError if it came refused."""
        if receipt == self._hello:
            keys = [_key(incarnation, word, self.rank) for word in ("ok", "hello")]
            self._ask(lambda s: [s.delete_key(key) for key in keys])
            return True
        if receipt.startswith(self._hello + _REFUSED):
            raise self._error(*json.loads(receipt[len(self._hello + _REFUSED) :]))
        return False  # nothing yet, or the receipt of another start


def beat_key(incarnation: str, rank: int) -> str:
    """Return the key of a rank's heartbeat; it is there from the handshake on, so it can be read without waiting."""
    return _key(incarnation, "hb", rank)


def _key(incarnation: str, word: str, rank: int) -> str:
    return f"{ROOT}/{incarnation}/{word}/{rank}"

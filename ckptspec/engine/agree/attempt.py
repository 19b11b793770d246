"""Owns one rank's talk in one save or load, over a store and without collectives; decides nothing itself.

What may be concluded is in `agreement`; here the store is asked, the hearts are listened to, and errors are raised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ckptspec.engine.agree import agreement, pairing, verdict
from ckptspec.engine.agree.agreement import Event, Failure, Stage
from ckptspec.engine.agree.line import Heart, StoreLostError
from ckptspec.engine.agree.opening import FULL_LOOK, ROOT, Budget, beat_key, pauses
from ckptspec.engine.agree.pairing import DOUBT_PART, Fit
from ckptspec.engine.agree.pulse import Beat
from ckptspec.engine.agree.seat import Seat
from ckptspec.engine.agree.store import Roll, Store
from ckptspec.engine.agree.watch import Watch
from ckptspec.errors import CkptspecError, CommitUncertainError, SaveError

T = TypeVar("T")

# The phase after which a commit can happen without this rank, by kind of attempt.
HAND_IN: Mapping[str, str] = {"save": "hand-in", "load": "loaded", "rehearsal": "rehearsed"}


def _value(store: Store, key: str) -> bytes | None:
    """Return a key's value, None where it is absent; never waits."""
    return store.get(key) if store.check([key]) else None


class Attempt:
    """One rank's part in one save or load: every waiting call ends when any rank failed or fell silent.

    All calls raise SaveError, the same on every rank, once the attempt failed; CommitUncertainError where nobody here
    can know. Phases are names that the callers agree on. `step` is what a save is of; `passed` is the failure of an
    attempt before, which was over when this rank came to it.
    """

    def __init__(
        self, seat: Seat, number: int, kind: str, step: int | None = None, passed: Failure | None = None
    ) -> None:
        self._seat = seat
        self._number = number
        self._kind = kind
        self._step = step if type(step) is int else None  # what is no step fails later, on every rank
        self._passed = passed
        self._prefix = f"{ROOT}/{seat.incarnation}/{number}"
        self._state = agreement.State(seat.rank)
        self._watch = Watch(seat, number, kind)
        self._error: SaveError | None = None
        self._payload = b""
        self._said: dict[str, bytes] = {}
        self._own: list[str] = []
        self._shared = [self._key("decision"), self._key("done"), self._key("ack")]
        self._reachable = True
        self._met = False
        self._moved = 0
        self._heard: Failure | None = None
        self._join()

    def _join(self) -> None:
        """Show that this rank is here, and keep showing it from the line's thread until the attempt is over."""
        self._seat.line.live(Heart(self._beat, self._watch.interval, self))
        if self._seat.coordinator:
            self._or_lost(self._seat.tidy)
        self._ask(self._beat)

    def _beat(self, store: Store) -> None:
        """In the line's thread: show life, and hear early of a failure elsewhere."""
        beat = Beat(self._number, self._kind, self._seat.next_beat(), self._moved, self._step)
        store.set(beat_key(self._seat.incarnation, self._seat.rank), beat.encode())
        found = _value(store, self._key("decision"))
        heard = verdict.decode_verdict(found) if found is not None else None
        if isinstance(heard, Failure):
            self._heard = heard

    def passed(self) -> Failure | None:
        """Return the failure of an attempt that was over before this rank came and is not its own, else None.

        To be asked first. One that is over and its own fails in the next call.
        """
        found = self._heard
        if found is None:
            return None
        fits = self._fit(found)
        self._apply(agreement.Decided(found))
        return found if fits is Fit.PASSED else None

    def _fit(self, found: Failure) -> Fit:
        """Return what this attempt is to this rank, watching the others for a while where that is in doubt."""
        fits = pairing.fit(found, self._step, self._number)
        budget = Budget(self._seat.silence / DOUBT_PART)
        for pause in pauses(self._seat.world_size, self._seat.silence):
            if fits is not Fit.DOUBT or budget.over:
                break
            budget.sleep(pause)
            fits = pairing.fit(found, self._step, self._number, self._ask(self._watch.seen))
        return fits

    # ---- what is said ------------------------------------------------------------------------------------------------

    def announce(self, phase: str, payload: bytes) -> None:
        """Coordinator: publish `payload` to all ranks."""
        self._coordinator("announces")
        self._said[phase] = payload
        key = self._key(self._kind, "say", phase)
        self._shared.append(key)
        self._ask(lambda s: s.set(key, payload))

    def await_(self, phase: str) -> bytes:
        """Return what the coordinator announced under `phase`, waiting for it."""
        if self._seat.rank == 0:
            return self._said[phase]
        key = self._key(self._kind, "say", phase)
        payload = self._wait(lambda s: _value(s, key), self._watch.coordinator)
        if not self._met:  # the coordinator is in this attempt: it has read all that was posted in earlier ones
            self._met = True
            self._or_lost(self._seat.tidy)
        return payload

    def post(self, phase: str, payload: bytes) -> None:
        """Hand `payload` to the coordinator, once for each phase."""
        self._raise_if_over()
        if phase == HAND_IN.get(self._kind):
            self._apply(agreement.HandedIn())
        key = self._key(self._kind, phase, str(self._seat.rank))
        self._own.append(key)
        self._ask(lambda s: s.set(key, payload))

    def collect(self, phase: str, ranks: Sequence[int] | None = None) -> list[bytes]:
        """Coordinator: return what every rank, or each of `ranks`, posted under `phase`, in order, waiting for all."""
        self._coordinator("collects")
        ranks = range(self._seat.world_size) if ranks is None else ranks
        roll = Roll([self._key(self._kind, phase, str(rank)) for rank in ranks])
        self._wait(lambda s: roll.complete(s) or None, partial(self._watch.missing, roll=roll, ranks=ranks))
        payloads = self._ask(lambda s: list(roll.values(s)))
        if phase == HAND_IN.get(self._kind):
            self._apply(agreement.Gathered())
        return payloads

    def body(self, digest: str, payload: bytes) -> bool:
        """Give the coordinator a body by its digest; only the first rank that has it sends it, and is told so."""
        key, claim = self._key("body", digest), self._key("claim", digest)

        def send(store: Store) -> bool:
            first = store.add(claim, 1) == 1
            if first:
                store.set(key, payload)
            return first

        self._raise_if_over()
        first = self._ask(send)
        if first:
            self._own += [key, claim]
        return first

    def bodies(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Coordinator: return the bodies of these digests; whoever posted after `body` has its body there."""
        self._coordinator("reads bodies")
        wanted = list(dict.fromkeys(digests))
        roll = Roll([self._key("body", digest) for digest in wanted])
        self._wait(lambda s: roll.complete(s) or None, lambda s: None)
        return dict(zip(wanted, self._ask(lambda s: list(roll.values(s))), strict=True))

    def progress(self, nbytes: int) -> None:
        """Count bytes moved, the sign that this rank is not stuck; any thread, no lock, no message.

        Raises the agreed SaveError once another rank failed, so that a long write ends early.
        """
        self._moved += nbytes
        if self._heard is not None:
            raise verdict.error_of(self._heard, Stage.FAILED)

    # ---- how it ends -------------------------------------------------------------------------------------------------

    @property
    def committing(self) -> bool:
        """Whether "commit" was decided and what became of it is not known here."""
        return self._state.stage is Stage.COMMITTING

    def fail(self, error: BaseException) -> SaveError:
        """Report that this rank cannot go on, and return the error that all ranks raise: of the rank that was first.

        After the commit was decided the outcome is uncertain, unless `error` is a NotVisibleError of the coordinator.
        """
        if self._error is None and not self._state.stage.final:
            self._apply(agreement.Broke(verdict.failure_of(error, self._seat.rank)))
            sure = self._state.stage is Stage.FAILED or isinstance(error, CommitUncertainError)
            if self._seat.world_size == 1 and isinstance(error, SaveError) and sure:
                self._error = error  # nobody else to tell: it stays as it was raised
        if self._state.stage is Stage.COMMITTED:
            return CommitUncertainError(f"committed, then this rank failed: {error}", rank=self._seat.rank)
        return self._over()

    def decide_commit(self) -> None:
        """Coordinator: win the decision with "commit"; raises the SaveError of whoever failed before [P-DECIDE]."""
        self._coordinator("decides")
        self._raise_if_over()
        self._apply(agreement.Ready())
        self._raise_if_over()

    def done(self, payload: bytes = b"") -> None:
        """Coordinator: tell all ranks that it is committed and durable; a load, or a save of nothing, decides here."""
        if not self.committing:
            self.decide_commit()
        self._payload = payload
        self._apply(agreement.Published(payload))

    def outcome(self) -> bytes:
        """Return the payload of `done`, waiting for it; raises what the coordinator reported instead."""
        if self._state.stage is not Stage.COMMITTED:
            self._raise_if_over()
            data = self._wait(lambda s: _value(s, self._key("done")), self._watch.coordinator)
            told = verdict.decode_outcome(data)
            self._payload = told.payload
            self._apply(agreement.Told(told))
            self._raise_if_over()
        return self._payload

    # ---- driving the machine -----------------------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        self._state, actions = agreement.step(self._state, event)
        for action in actions:
            if isinstance(action, agreement.Compete):
                self._compete(action.verdict)
            else:
                self._tell(action.outcome)
        if self._state.stage.final:
            self._leave()

    def _compete(self, brought: agreement.Verdict) -> None:
        if isinstance(brought, Failure):
            brought = replace(brought, step=self._step)
        key, data = self._key("decision"), verdict.encode_verdict(brought)
        try:
            stands = self._seat.line.call(lambda s: s.compare_set(key, "", data), self._seat.silence)
        except StoreLostError as e:
            self._lose(e)
        else:
            self._apply(agreement.Decided(verdict.decode_verdict(stands)))

    def _tell(self, outcome: agreement.Outcome) -> None:
        key, data = self._key("done"), verdict.encode_outcome(outcome)

        def send(store: Store) -> None:
            store.set(key, data)
            store.check([key])  # a set is no receipt; this answer is one, on the same connection

        self._last_words(send)

    def _leave(self) -> None:
        """End this rank's part, once: its heart stops, its reading of the outcome is acknowledged."""
        if self._seat.line.heart is None or self._seat.line.heart.owner is not self:
            return
        self._seat.line.live(None)
        self._last_words(lambda s: s.add(self._key("ack"), 1))
        if self._reachable:
            committed = self._state.stage is Stage.COMMITTED
            self._seat.leave(self._prefix, committed, self._own, self._shared)

    def _last_words(self, say: Callable[[Store], object]) -> None:
        """Tell the store what nothing depends on: the outcome stands whether this arrives or not."""
        if self._reachable:
            try:
                self._seat.line.call(say, self._seat.silence)
            except StoreLostError:
                self._reachable = False

    def _lose(self, error: StoreLostError) -> None:
        self._reachable = False
        self._apply(agreement.Lost(verdict.lost(str(error), self._seat.host)))

    def _over(self) -> SaveError:
        """Return the one error of an attempt that is over and was not committed."""
        if self._error is None:
            failure = self._state.failure or Failure("the attempt is over", self._seat.rank)
            stage = self._state.stage if self._state.stage.final else Stage.UNCERTAIN
            if self._kind != "save":
                stage = Stage.FAILED  # a load makes nothing visible: not to have seen its end is a failure
            self._error = verdict.error_of(failure, stage, alone=self._seat.world_size == 1)
        return self._error

    def _raise_if_over(self) -> None:
        if self._error is not None or self._state.stage in (Stage.FAILED, Stage.UNCERTAIN):
            raise self._over()

    def _coordinator(self, does: str) -> None:
        if self._seat.rank != 0:
            raise CkptspecError(f"only rank 0 {does}", rule="P-AGREE", found=f"rank {self._seat.rank}")

    # ---- asking the store --------------------------------------------------------------------------------------------

    def _key(self, *words: str) -> str:
        return "/".join((self._prefix, *words))

    def _ask(self, ask: Callable[[Store], T]) -> T:
        """Return the store's answer; a lost store ends the attempt."""
        self._raise_if_over()
        return self._or_lost(lambda: self._seat.line.call(ask, self._seat.silence))

    def _or_lost(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except StoreLostError as e:
            self._lose(e)
            raise self._over() from e

    def _wait(self, look: Callable[[Store], T | None], watch: Callable[[Store], Event | None]) -> T:
        """Return what `look` finds, once it does; every round looks for a verdict too, at times for signs of life."""
        decision = self._key("decision")

        def both(full: bool, store: Store) -> tuple[T | None, bytes | None]:
            found = look(store)
            return found, _value(store, decision) if full and found is None and not self.committing else None

        world_size = 1 if self._seat.coordinator else self._seat.world_size
        for count, pause in enumerate(pauses(world_size, self._seat.silence)):
            found, decided = self._ask(partial(both, count % FULL_LOOK == 0))
            if found is not None:
                return found
            if decided is not None:
                self._apply(agreement.Decided(verdict.decode_verdict(decided)))
            elif self._watch.due and (event := self._ask(watch)) is not None:
                found = self._ask(look)  # it may have come between the two looks
                if found is not None:
                    return found
                self._apply(self._explained(event))
            self._raise_if_over()
            time.sleep(pause)
            self._moved += 1  # waiting for another is no standstill of one's own
        raise AssertionError("there is always another pause")

    def _explained(self, event: Event) -> Event:
        """Let this rank's verdict on a silent one tell that it came too late to an attempt before, if it did."""
        if self._passed is None or not isinstance(event, agreement.Silent):
            return event
        late = f"; rank {self._seat.rank} found number {self._number - 1} over when it came: {self._passed.message}"
        return agreement.Silent(replace(event.failure, message=event.failure.message + late))

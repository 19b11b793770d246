"""Owns what one rank may conclude in one attempt: events in, actions out; refuses I/O, clocks and mutable state.

The channel feeds it what happened and does what it asks; the model test feeds it every order of events there is.
Rank 0 is the coordinator: it alone makes a save visible, and only after it won the decision with "commit" [P-DECIDE].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, Union

from ckptspec.errors import CkptspecError


class Stage(Enum):
    """How far a rank is; the last three are final."""

    WORKING = "working"  # its hand-in was not sent: without it nothing can be committed
    HANDED = "handed"  # its hand-in was sent, or may have been: the commit can happen without it
    GATHERED = "gathered"  # coordinator only: it has every hand-in
    COMMITTING = "committing"  # "commit" won; what became of it is not yet known here
    COMMITTED = "committed"
    FAILED = "failed"
    UNCERTAIN = "uncertain"

    @property
    def final(self) -> bool:
        """Whether nothing can change this rank's mind any more."""
        return self in (Stage.COMMITTED, Stage.FAILED, Stage.UNCERTAIN)


@dataclass(frozen=True)
class Failure:
    """Why an attempt cannot go on, as every rank tells it: whose fault, which error, which place.

    `kind` is error (a rank raised), silent (no sign of life), mixed (one saves, another loads), or store (the store is
    lost). `certain` says, of the coordinator's own error after its "commit" won, that it saw nothing become visible.
    `details` are texts and numbers that build the same error on another rank. `step` is that of the save, if it was
    one, in which this was found.
    """

    message: str
    rank: int | None = None
    kind: str = "error"
    certain: bool = False
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    step: int | None = None


@dataclass(frozen=True)
class Commit:
    """The verdict that the coordinator alone may bring."""


COMMIT = Commit()
Verdict = Union[Commit, Failure]


@dataclass(frozen=True)
class Outcome:
    """What the coordinator tells when all is over: the stage everyone ends in, and the reason or the payload."""

    stage: Stage
    failure: Failure | None = None
    payload: bytes = b""


# ---- events: what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HandedIn:
    """This rank is about to send its hand-in: from here on it may have arrived, whatever the sending says."""


@dataclass(frozen=True)
class Gathered:
    """The coordinator has the hand-in of every rank."""


@dataclass(frozen=True)
class Ready:
    """The coordinator could make the save visible now."""


@dataclass(frozen=True)
class Broke:
    """This rank cannot go on."""

    failure: Failure


@dataclass(frozen=True)
class Silent:
    """A rank that this one waits for gave no sign of life for the whole deadline [P-SILENCE]."""

    failure: Failure


@dataclass(frozen=True)
class Lost:
    """The store did not answer, or answered with an error: what was sent may or may not have arrived."""

    failure: Failure


@dataclass(frozen=True)
class Decided:
    """The verdict in the store, as read there or as the answer to Compete: the first one brought, for ever."""

    verdict: Verdict


@dataclass(frozen=True)
class Published:
    """The coordinator made the save visible and durable."""

    payload: bytes = b""


@dataclass(frozen=True)
class Told:
    """The coordinator's outcome was read."""

    outcome: Outcome


Event = Union[HandedIn, Gathered, Ready, Broke, Silent, Lost, Decided, Published, Told]


# ---- actions: what to do ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compete:
    """Bring this verdict: store it unless there is one, then report the one that stands as Decided, or Lost."""

    verdict: Verdict


@dataclass(frozen=True)
class Tell:
    """Publish the outcome; nothing depends on its arrival."""

    outcome: Outcome


Action = Union[Compete, Tell]


# ---- the machine -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """One rank in one attempt. `brought` is its own verdict while the answer to Compete is out."""

    rank: int
    stage: Stage = Stage.WORKING
    brought: Verdict | None = None
    failure: Failure | None = None

    @property
    def coordinator(self) -> bool:
        """Whether this rank makes the save visible."""
        return self.rank == 0


Step = tuple[State, tuple[Action, ...]]


def step(state: State, event: Event) -> Step:
    """Return the state after `event` and what to do now; once final, nothing moves.

    Raises CkptspecError for what only a mistake of the caller can ask, such as a commit before all hand-ins are there.
    """
    if state.stage.final:
        return state, ()
    return _RULES[type(event)](state, event)


def _end(state: State, stage: Stage, failure: Failure | None = None) -> State:
    return replace(state, stage=stage, brought=None, failure=failure)


def _handed_in(state: State, event: HandedIn) -> Step:
    return (replace(state, stage=Stage.HANDED) if state.stage is Stage.WORKING else state), ()


def _gathered(state: State, event: Gathered) -> Step:
    if not state.coordinator or state.stage not in (Stage.HANDED, Stage.GATHERED):
        raise CkptspecError("only the coordinator gathers, after its own hand-in", rule="P-AGREE")
    return replace(state, stage=Stage.GATHERED), ()


def _ready(state: State, event: Ready) -> Step:
    if state.stage is not Stage.GATHERED:
        raise CkptspecError("a commit needs every hand-in first", rule="P-ORDER", found=state.stage.value)
    return _compete(state, COMMIT)


def _compete(state: State, verdict: Verdict) -> Step:
    return replace(state, brought=verdict), (Compete(verdict),)


def _broke(state: State, event: Broke) -> Step:
    failure = event.failure
    if state.stage is not Stage.COMMITTING:
        return _compete(state, failure)
    if not state.coordinator:
        return _end(state, Stage.UNCERTAIN, failure), ()
    # [P-OUTCOME] After "commit" only what the coordinator saw not happen is a failure.
    stage = Stage.FAILED if failure.certain else Stage.UNCERTAIN
    return _end(state, stage, failure), (Tell(Outcome(stage, failure)),)


def _silent(state: State, event: Silent) -> Step:
    if state.stage is not Stage.COMMITTING:
        return _compete(state, event.failure)
    if state.coordinator:
        return state, ()  # it waits for nobody: every hand-in is there
    return _end(state, Stage.UNCERTAIN, event.failure), ()


def _lost(state: State, event: Lost) -> Step:
    if state.coordinator and state.stage is Stage.COMMITTING:
        return state, ()  # it won: what is on the disk is the truth, whoever can still be told
    # The coordinator renames only when it knows that it won, and never without this rank's hand-in: both ends are sure.
    sure = state.coordinator or state.stage is Stage.WORKING
    return _end(state, Stage.FAILED if sure else Stage.UNCERTAIN, event.failure), ()


def _decided(state: State, event: Decided) -> Step:
    if state.stage is Stage.COMMITTING:
        return state, ()  # the first verdict stays: nothing new can be read
    verdict, brought = event.verdict, state.brought
    if isinstance(verdict, Failure):
        return _end(state, Stage.FAILED, verdict), ()
    foreseen = brought == COMMIT if state.coordinator else brought is None and state.stage is Stage.HANDED
    if foreseen:
        return replace(state, stage=Stage.COMMITTING, brought=None), ()
    # "commit" came first and this rank has a reason not to wait for the outcome; or nobody can have brought it.
    foreign = Failure("the store holds a commit that this rank never took part in", state.rank)
    return _end(state, Stage.UNCERTAIN, brought if isinstance(brought, Failure) else foreign), ()


def _published(state: State, event: Published) -> Step:
    if not state.coordinator or state.stage is not Stage.COMMITTING:
        raise CkptspecError("nothing is visible before the commit is decided", rule="P-DECIDE", found=state.stage.value)
    outcome = Outcome(Stage.COMMITTED, payload=event.payload)
    return _end(state, Stage.COMMITTED), (Tell(outcome),)


def _told(state: State, event: Told) -> Step:
    return _end(state, event.outcome.stage, event.outcome.failure), ()


_RULES: Mapping[type, Callable[[State, Any], Step]] = {
    HandedIn: _handed_in,
    Gathered: _gathered,
    Ready: _ready,
    Broke: _broke,
    Silent: _silent,
    Lost: _lost,
    Decided: _decided,
    Published: _published,
    Told: _told,
}

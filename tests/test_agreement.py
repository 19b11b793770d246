"""What a rank may conclude: every order of three ranks' steps, delays and deaths, then the pieces one by one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
from agreement_model import explore, start
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.engine.agree import agreement as ag
from ckptspec.engine.agree import pulse, verdict
from ckptspec.engine.agree.agreement import COMMIT, Failure, Outcome, Stage, State, step
from ckptspec.engine.agree.pulse import STUCK_DEADLINES, Beat, Pulse
from ckptspec.errors import CkptspecError, CommitUncertainError, IntegrityError, SaveError, StateError, Where

# ---- every order -----------------------------------------------------------------------------------------------------

# How many ranks, and how many deaths, breaks and losses may happen; whether ranks may be wrongly thought silent.
SLICES = [(3, 0, 0, 0, True), (3, 1, 0, 0, True), (3, 0, 1, 0, True), (3, 0, 0, 1, True), (3, 1, 1, 0, False)]
WIDE = [(3, 1, 1, 1, True), (3, 2, 1, 0, True), (3, 2, 0, 1, True), (3, 0, 2, 1, True), (3, 2, 1, 1, True)]


@pytest.mark.parametrize("size", SLICES)
def test_no_order_of_events_tells_failed_of_a_save_that_is_visible(size: tuple[int, int, int, int, bool]) -> None:
    worlds, ends, faults = explore(start(*size))
    assert faults == []
    assert worlds > 500
    assert all(stage.final for end in ends for stage in end)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", WIDE)
def test_no_order_of_more_events_does_either(size: tuple[int, int, int, int, bool]) -> None:
    worlds, _, faults = explore(start(*size))
    assert faults == []
    assert worlds > 30_000


def test_without_accidents_every_rank_commits() -> None:
    _, ends, faults = explore(start(3, 0, 0, 0, False))
    assert faults == []
    assert (Stage.COMMITTED,) * 3 in ends
    assert not any(Stage.FAILED in end for end in ends)


def hopeful(state: State, event: ag.Lost) -> ag.Step:
    return ag._end(state, Stage.FAILED, event.failure), ()


def blind(state: State, event: ag.Silent) -> ag.Step:
    committing = state.stage is Stage.COMMITTING and state.rank != 0
    return (ag._end(state, Stage.FAILED, event.failure), ()) if committing else ag._silent(state, event)


def hasty(state: State, event: ag.Ready) -> ag.Step:
    return State(state.rank, Stage.COMMITTING), ()


def stubborn(state: State, event: ag.Silent) -> ag.Step:
    return state, ()


@pytest.mark.parametrize(
    ("event", "wrong", "size", "what"),
    [
        (ag.Lost, hopeful, (3, 0, 0, 1, False), "told failed, and the save is visible"),
        (ag.Silent, blind, (3, 0, 0, 0, True), "told failed, and the save is visible"),
        (ag.Ready, hasty, (3, 0, 1, 0, False), "told failed, and the save is visible"),
        (ag.Silent, stubborn, (3, 1, 0, 0, False), "waits for ever"),
    ],
)
def test_the_search_finds_the_faults_of_a_machine_with_one_wrong_rule(
    monkeypatch: pytest.MonkeyPatch,
    event: type,
    wrong: Callable[[State, Any], ag.Step],
    size: tuple[int, int, int, int, bool],
    what: str,
) -> None:
    monkeypatch.setattr(ag, "_RULES", {**ag._RULES, event: wrong})
    _, _, faults = explore(start(*size))
    assert any(what in fault for fault in faults)


# ---- one rule at a time ----------------------------------------------------------------------------------------------

BROKE = Failure("disk full", 1)
SILENT = Failure("silent", 0, "silent")
LOST = Failure("lost", None, "store")


def at(rank: int, stage: Stage, brought: ag.Verdict | None = None) -> State:
    return State(rank, stage, brought)


@pytest.mark.parametrize(
    ("state", "event", "stage"),
    [
        (at(1, Stage.WORKING), ag.HandedIn(), Stage.HANDED),
        (at(1, Stage.WORKING), ag.Lost(LOST), Stage.FAILED),
        (at(1, Stage.HANDED), ag.Lost(LOST), Stage.UNCERTAIN),
        (at(1, Stage.HANDED), ag.Decided(BROKE), Stage.FAILED),
        (at(1, Stage.HANDED), ag.Decided(COMMIT), Stage.COMMITTING),
        (at(1, Stage.HANDED, SILENT), ag.Decided(COMMIT), Stage.UNCERTAIN),
        (at(1, Stage.WORKING), ag.Decided(COMMIT), Stage.UNCERTAIN),
        (at(1, Stage.COMMITTING), ag.Silent(SILENT), Stage.UNCERTAIN),
        (at(1, Stage.COMMITTING), ag.Broke(BROKE), Stage.UNCERTAIN),
        (at(1, Stage.COMMITTING), ag.Decided(BROKE), Stage.COMMITTING),
        (at(1, Stage.COMMITTING), ag.Told(Outcome(Stage.COMMITTED)), Stage.COMMITTED),
        (at(1, Stage.HANDED), ag.Told(Outcome(Stage.FAILED, BROKE)), Stage.FAILED),
        (at(1, Stage.COMMITTED), ag.Lost(LOST), Stage.COMMITTED),
        (at(1, Stage.FAILED), ag.Told(Outcome(Stage.COMMITTED)), Stage.FAILED),
        (at(0, Stage.GATHERED, COMMIT), ag.Decided(COMMIT), Stage.COMMITTING),
        (at(0, Stage.GATHERED, COMMIT), ag.Decided(SILENT), Stage.FAILED),
        (at(0, Stage.GATHERED, COMMIT), ag.Lost(LOST), Stage.FAILED),
        (at(0, Stage.GATHERED), ag.Decided(COMMIT), Stage.UNCERTAIN),
        (at(0, Stage.COMMITTING), ag.Lost(LOST), Stage.COMMITTING),
        (at(0, Stage.COMMITTING), ag.Silent(SILENT), Stage.COMMITTING),
        (at(0, Stage.COMMITTING), ag.Broke(BROKE), Stage.UNCERTAIN),
        (at(0, Stage.COMMITTING), ag.Broke(Failure("taken", 0, certain=True)), Stage.FAILED),
        (at(0, Stage.COMMITTING), ag.Published(), Stage.COMMITTED),
    ],
)
def test_each_event_moves_a_rank_to_what_it_may_conclude(state: State, event: ag.Event, stage: Stage) -> None:
    before = repr(state)
    assert step(state, event)[0].stage is stage
    assert repr(state) == before


@pytest.mark.parametrize("event", [ag.Broke(BROKE), ag.Silent(BROKE)])
@pytest.mark.parametrize("stage", [Stage.WORKING, Stage.HANDED, Stage.GATHERED])
def test_before_the_decision_a_failure_competes_for_it(stage: Stage, event: ag.Event) -> None:
    state, actions = step(at(0, stage), event)
    assert actions == (ag.Compete(BROKE),)
    assert state.stage is stage
    assert state.brought == BROKE


def test_only_the_coordinator_commits_and_only_with_every_hand_in() -> None:
    for state in (at(0, Stage.WORKING), at(0, Stage.HANDED), at(1, Stage.HANDED)):
        with pytest.raises(CkptspecError, match="every hand-in"):
            step(state, ag.Ready())
    for event in (ag.Gathered(), ag.Published()):
        with pytest.raises(CkptspecError):
            step(at(1, Stage.HANDED), event)
    assert step(at(0, Stage.GATHERED), ag.Ready())[1] == (ag.Compete(COMMIT),)


# ---- signs of life ---------------------------------------------------------------------------------------------------


def test_a_beating_heart_is_life_however_slow_the_work() -> None:
    known = Pulse(3)
    for count in range(1, 1000):
        known = known.observe(Beat(3, "save", count, moved=count // 20), elapsed=10, longest=20)
        assert not known.dead(120)


def test_silence_is_counted_only_while_somebody_looks() -> None:
    known = Pulse(3).observe(Beat(3, "save", 1), elapsed=1, longest=20)
    known = known.observe(Beat(3, "save", 1), elapsed=86_400, longest=20)  # the observer was stopped for a day
    assert known.quiet == 20
    for _ in range(10):
        known = known.observe(Beat(3, "save", 1), elapsed=10, longest=20)
    assert known.dead(120)
    assert "no sign of life for 120 s" in known.describe(120)


def test_a_rank_that_lives_in_another_attempt_is_silent_in_this_one() -> None:
    known = Pulse(4)
    for count in range(12):
        known = known.observe(Beat(3, "save", count), elapsed=10, longest=20)
    assert known.dead(120)
    assert "did not join number 4, last seen in save 3" in known.describe(120)


def test_a_rank_stuck_in_one_call_is_given_up_though_its_heart_beats() -> None:
    known = Pulse(1)
    looks = 0
    while not known.dead(10):
        looks += 1
        known = known.observe(Beat(1, "save", looks, moved=77), elapsed=1, longest=2)
    assert looks == STUCK_DEADLINES * 10 + 1
    assert "stuck" in known.describe(10)


@given(st.integers(0, 1 << 60), st.sampled_from(["save", "load"]), st.integers(0), st.integers(0, 1 << 62))
def test_a_beat_is_read_back(attempt: int, kind: str, count: int, moved: int) -> None:
    for saved in (None, count):
        beat = Beat(attempt, kind, count, moved, saved)
        assert pulse.decode(beat.encode()) == beat


@given(st.binary())
def test_anything_else_in_its_place_is_no_life(data: bytes) -> None:
    assert isinstance(pulse.decode(data), Beat)


# ---- an error on one rank, the same on all ---------------------------------------------------------------------------


def carried(error: BaseException, rank: int = 3, stage: Stage = Stage.FAILED) -> SaveError:
    found = verdict.decode_verdict(verdict.encode_verdict(verdict.failure_of(error, rank)))
    assert isinstance(found, Failure)
    return verdict.error_of(found, stage)


def test_an_error_of_the_disk_arrives_with_rank_number_and_path() -> None:
    error = carried(OSError(errno.ENOSPC, "No space left on device", "/run/a\udcff.shard"))
    assert type(error) is SaveError
    assert error.rank == 3
    assert str(error) == "/run/a\udcff.shard: rank 3: No space left on device"
    assert isinstance(error.__cause__, OSError)
    assert error.__cause__.errno == errno.ENOSPC


def test_an_error_of_ours_arrives_with_everything_it_says() -> None:
    where = Where("rank-00003.shard", "/a", "w", 3, (10, 20))
    sent = IntegrityError("bytes differ", rule="B-DIGEST", where=where, expected="a", found="b", advice="c")
    error = carried(sent)
    assert error.details() == sent.details()
    assert error.message == "rank 3: bytes differ"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no"), "rank 3: ValueError: no"),
        (SaveError("no", where=Where(rank=3, tensor="w")), "tensor 'w': rank 3: no"),
        (SaveError("no", where=Where("f", rank=3)), "f: rank 3: no"),
        (SaveError("rank 3 holds none", rank=3, where=Where(rank=3)), "rank 3 holds none"),
        (SaveError("ranks 3, 4 differ", rank=3), "ranks 3, 4 differ"),
        (SaveError("rank 31 holds none", rank=3), "rank 3: rank 31 holds none"),
    ],
)
def test_the_rank_that_failed_is_named_once(error: Exception, text: str) -> None:
    assert str(carried(error)) == text
    assert carried(error).where.rank == 3
    uncertain = str(carried(error, stage=Stage.UNCERTAIN))
    assert uncertain.count("rank 3") == text.count("rank 3")
    assert str(verdict.error_of(verdict.silence([3, 4], "gave no sign of life"), Stage.FAILED)).startswith(
        "ranks 3, 4 g"
    )


def test_the_rank_an_error_blames_is_kept() -> None:
    assert carried(SaveError("ranks differ", rank=7), rank=0).rank == 7
    assert carried(KeyboardInterrupt(), rank=2).message == "rank 2: KeyboardInterrupt: "


def test_a_state_that_cannot_be_saved_is_called_so_on_every_rank() -> None:
    assert type(carried(StateError("a set", where=Where(tensor="x/y")))) is StateError


def test_an_uncertain_end_says_what_to_read() -> None:
    error = carried(OSError(errno.EIO, "Input/output error", "/run"), stage=Stage.UNCERTAIN)
    assert isinstance(error, CommitUncertainError)
    assert error.rule == "P-OUTCOME"
    assert "nobody saw" in str(error)
    assert error.advice


def test_many_silent_ranks_are_told_in_one_line() -> None:
    failure = verdict.silence(range(5, 2000), "gave no sign of life")
    assert failure.rank == 5
    assert "5, 6, 7" in failure.message
    assert "1987 more" in failure.message
    assert len(failure.message) < 120


def test_only_what_certainly_stayed_invisible_is_certain() -> None:
    assert verdict.failure_of(verdict.NotVisibleError("taken"), 0).certain
    assert not verdict.failure_of(SaveError("other"), 0).certain
    assert not verdict.failure_of(CommitUncertainError("who knows"), 0).certain


@given(st.binary(max_size=200))
def test_no_bytes_in_the_store_can_pass_for_a_commit_or_crash_a_reader(data: bytes) -> None:
    found = verdict.decode_verdict(data)
    assert (found == COMMIT) == (data == b"commit")
    outcome = verdict.decode_outcome(data)
    assert (outcome.stage is Stage.COMMITTED) == data.startswith(b"committed\n")
    if isinstance(found, Failure):
        assert str(verdict.error_of(found, Stage.FAILED))


@given(st.binary())
def test_an_outcome_is_read_back(payload: bytes) -> None:
    done = Outcome(Stage.COMMITTED, payload=payload)
    assert verdict.decode_outcome(verdict.encode_outcome(done)) == done
    for stage in (Stage.FAILED, Stage.UNCERTAIN):
        other = Outcome(stage, BROKE)
        assert verdict.decode_outcome(verdict.encode_outcome(other)) == other

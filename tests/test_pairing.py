"""Calls that a rank leaves out, makes late or makes again: every order of three ranks, then the rule itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import pytest
from channel_ranks import as_threads, load, save
from pairing_model import LOAD, MEET, SLEEP, World, explore

from ckptspec.engine.agree import pairing
from ckptspec.engine.agree.agreement import COMMIT, Failure, Verdict
from ckptspec.engine.agree.channel import Channel, LocalStore
from ckptspec.engine.agree.pairing import Fit, fit
from ckptspec.engine.agree.pulse import Beat
from ckptspec.errors import SaveError

LAST = [MEET, 8, MEET, 9]  # the calls that all ranks make together in the end


def committed(w: World, last: int) -> bool:
    """Whether this one of every rank's last calls was committed, in the same attempt."""
    ends = {rank.ends[last] for rank in w.ranks}
    return len(ends) == 1 and ends.pop()[1] == "committed"


def check(programs: Sequence[Sequence[int]], breaks: int = 0) -> None:
    """Explore the programs with LAST after them: the next call of all works, or the one after it."""
    ends, faults = explore([[*program, *LAST] for program in programs], breaks)
    assert faults == []
    assert ends
    for w in ends:
        assert committed(w, -1), w
        assert committed(w, -2) or w.fast or w.breaks < breaks, w


CALLS = [[], [2], [LOAD], [SLEEP, 2], [SLEEP, LOAD], [2, 3], [2, 2]]


@pytest.mark.parametrize("first", CALLS)
def test_whatever_ranks_leave_out_the_next_call_they_all_make_is_committed(first: list[int]) -> None:
    for second, third in product(CALLS, CALLS):
        check([first, second, third])


@pytest.mark.parametrize("again", [2, LOAD])
@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_call_that_a_rank_left_out_can_be_made_again_by_all(absent: int, again: int) -> None:
    programs = [[MEET, again, *LAST] if rank == absent else [again, MEET, again, *LAST] for rank in range(3)]
    ends, faults = explore(programs, 0)
    assert faults == []
    for w in ends:
        assert committed(w, -3)
        assert {rank.number for rank in w.ranks} == {4}


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_comes_late_to_a_save_gets_its_failure_and_all_go_on(late: int) -> None:
    programs = [[*([SLEEP] if rank == late else []), 2, *LAST] for rank in range(3)]
    ends, faults = explore(programs, 0)
    assert faults == []
    for w in ends:
        assert {rank.ends[0] for rank in w.ranks} in ({(1, "silent")}, {(1, "committed")})  # it may just make it
        assert committed(w, -2)
    assert any(w.ranks[late].ends[0] == (1, "silent") for w in ends)


@pytest.mark.parametrize("calls", [[2, 3], [LOAD, LOAD], [LOAD, 2], [2, 2]])
def test_ranks_that_make_the_same_calls_are_never_led_apart_by_an_error_however_early(calls: list[int]) -> None:
    for programs in ([calls] * 3, [[*calls, MEET]] * 3):
        ends, faults = explore(programs, 2)
        assert faults == []
        for w in ends:
            assert len({rank.ends for rank in w.ranks}) == 1, w


@pytest.mark.parametrize("absent", [0, 1])
def test_an_error_in_a_call_that_a_rank_left_out_costs_one_call_at_most(absent: int) -> None:
    for calls in ([2], [LOAD], [2, 3]):
        check([[] if rank == absent else calls for rank in range(3)], breaks=1)


def test_nobody_waits_for_ever_whatever_time_passes_at_any_moment() -> None:
    for programs in ([[2, 3]] * 3, [[2, 3], [3], [2, 3]], [[3], [LOAD, 3], [LOAD, 3]], [[2, 2], [2, 2], [2]]):
        _, faults = explore(programs, 0, rumours=True)
        assert faults == []


def never(found: Verdict | None, step: int | None, number: int, seen: Iterable[Beat] = ()) -> Fit:
    return Fit.OURS


def always(found: Verdict | None, step: int | None, number: int, seen: Iterable[Beat] = ()) -> Fit:
    return Fit.PASSED if isinstance(found, Failure) else Fit.OURS


def test_the_search_finds_the_faults_of_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "fit", never)
    with pytest.raises(AssertionError):
        check([[2], [], [2]])
    monkeypatch.setattr(pairing, "fit", always)
    check([[2], [], [2]])
    with pytest.raises(AssertionError):
        test_ranks_that_make_the_same_calls_are_never_led_apart_by_an_error_however_early([2, 3])


# ---- the rule --------------------------------------------------------------------------------------------------------

ERROR, SILENT = Failure("disk full", 1, step=2), Failure("silent", 1, "silent", step=2)


@pytest.mark.parametrize(
    ("found", "step", "seen", "expected"),
    [
        (None, 2, [], Fit.OURS),
        (COMMIT, 2, [], Fit.OURS),
        (ERROR, 2, [], Fit.OURS),
        (ERROR, 3, [], Fit.PASSED),
        (ERROR, None, [], Fit.PASSED),
        (ERROR, 2, [Beat(6, "save", step=2)], Fit.OURS),
        (SILENT, 2, [], Fit.DOUBT),
        (SILENT, 2, [Beat(5, "save", step=2), Beat(6, "save", step=3)], Fit.DOUBT),
        (SILENT, 2, [Beat(5, "save", step=2), Beat(6, "save", step=2)], Fit.PASSED),
        (SILENT, 3, [], Fit.PASSED),
        (Failure("not there", 0), None, [Beat(6, "load")], Fit.OURS),
        (Failure("silent", 0, "silent"), None, [], Fit.PASSED),
        (Failure("silent", 0, "silent"), 2, [], Fit.PASSED),
        (Failure("other kinds", 1, "mixed", step=3), 2, [], Fit.OURS),
        (Failure("garbled", None, "store"), 2, [], Fit.OURS),
    ],
)
def test_an_attempt_that_is_over_is_passed_unless_it_may_be_ours(
    found: Verdict | None, step: int | None, seen: list[Beat], expected: Fit
) -> None:
    assert fit(found, step, 5, seen) is expected


# ---- ranks that are threads ------------------------------------------------------------------------------------------


def saved(channel: Channel, run: Path, step: int) -> str:
    """Save, and return what came of it."""
    try:
        return save(channel, str(run), step, lambda point: None).decode()
    except SaveError as e:
        return str(e)


@pytest.mark.parametrize("absent", [0, 1])
@pytest.mark.parametrize("again", [2, 3])
def test_all_save_together_after_a_rank_left_a_save_out(absent: int, again: int, tmp_path: Path) -> None:
    meet, store = threading.Barrier(3), LocalStore()

    def act(channel: Channel) -> list[str]:
        told = [saved(channel, tmp_path, 1)]
        told += [saved(channel, tmp_path, 2)] if channel.rank != absent else []
        meet.wait(20)
        told.append(saved(channel, tmp_path, again))
        told.append(saved(channel, tmp_path, again + 1))
        return [*told, str(sum("/hb/" not in key for key in store._values))]

    results = as_threads(3, store, act, silence=1.5)
    for rank, (first, *middle, last, after, kept) in enumerate(results):
        assert (first, last, after) == ("committed 1", f"committed {again}", f"committed {again + 1}")
        assert [f"rank {absent} gave no sign of life" in text for text in middle] == [True] * (rank != absent)
        assert int(kept) <= 2 * (5 + 4 * 3), "what the absent rank passed was acknowledged, so it was removed"


def test_a_rank_that_comes_late_is_told_soon_and_why(tmp_path: Path) -> None:
    meet = threading.Barrier(3)

    def act(channel: Channel) -> tuple[str, float, str]:
        saved(channel, tmp_path, 1)
        if channel.rank == 2:
            time.sleep(3.5)  # the others wait for 2 s
        start = time.monotonic()
        told = saved(channel, tmp_path, 2)
        taken = time.monotonic() - start
        meet.wait(20)
        return told, taken, saved(channel, tmp_path, 3)

    results = as_threads(3, LocalStore(), act, silence=2)
    assert len({told for told, _, _ in results}) == 1
    assert "rank 2 gave no sign of life" in results[0][0]
    assert results[2][1] < 1.5
    assert [last for _, _, last in results] == ["committed 3"] * 3


def test_a_load_is_paired_again_after_a_rank_left_one_out() -> None:
    meet = threading.Barrier(3)

    def loaded(channel: Channel) -> str:
        try:
            return load(channel).decode()
        except SaveError as e:
            return str(e)

    def act(channel: Channel) -> list[str]:
        told = [loaded(channel)] if channel.rank != 0 else []
        meet.wait(20)
        return [*told, loaded(channel)]

    results = as_threads(3, LocalStore(), act, silence=1)
    assert [result[-1] for result in results] == ["all"] * 3
    assert all("rank 0 gave no sign of life" in result[0] for result in results[1:])


def test_a_rank_left_alone_says_what_it_had_come_too_late_for() -> None:
    def act(channel: Channel) -> str:
        if channel.rank == 1:
            time.sleep(2.5)
        try:
            return load(channel).decode()
        except SaveError as e:
            return e.message

    late = as_threads(2, LocalStore(), act, silence=1)[1]
    assert late.startswith("rank 0 gave no sign of life for 1 s (it did not join number 2, last seen in load 1)")
    assert "rank 1 found number 1 over when it came: rank 1 gave no sign of life" in late


def test_ranks_that_save_other_steps_are_told_apart_by_their_step(tmp_path: Path) -> None:
    """An error of one step is not for a rank that comes with another one; its own step's error is, at once."""
    meet = threading.Barrier(2)

    def act(channel: Channel) -> list[str]:
        told = []
        if channel.rank == 0:
            told.append(str(channel.attempt("save", 4).fail(OSError(28, "No space left on device"))))
        meet.wait(20)
        if channel.rank == 1:
            told.append(saved(channel, tmp_path, 4))
        meet.wait(20)
        if channel.rank == 0:
            told.append(str(channel.attempt("save", 5).fail(OSError(5, "Input/output error"))))
        meet.wait(20)
        return [*told, saved(channel, tmp_path, 6)]

    first, second = as_threads(2, LocalStore(), act, silence=20)
    assert "No space left" in first[0]
    assert first[0] == second[0]
    assert [first[-1], second[-1]] == ["committed 6"] * 2

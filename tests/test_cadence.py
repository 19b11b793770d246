"""How often to save: when one is due, which interval wastes least, and what a run's own checkpoints tell of it."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import make
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckptspec
from ckptspec.check.life.cadence import (
    Cadence,
    Last,
    Point,
    cadence,
    due,
    expected_loss,
    overhead,
    pace,
    seconds,
    suggest_interval,
)
from ckptspec.cli.main import main
from ckptspec.engine.life.history import points

mtbfs = st.floats(60, 1e7)
parts = st.floats(1e-6, 0.5)  # of the time between failures that a save takes


# ---- how often -------------------------------------------------------------------------------------------------------


@given(mtbfs, parts, st.floats(0, 0.2))
def test_the_suggested_interval_wastes_no_more_than_any_other(mtbf: float, part: float, restart: float) -> None:
    save, again = part * mtbf, restart * mtbf
    best = suggest_interval(mtbf, save, restart_seconds=again)
    least = overhead(best, mtbf, save, restart_seconds=again)
    for factor in (0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 4.0):
        assert overhead(best * factor, mtbf, save, restart_seconds=again) > least - 1e-3 * (1 + least)


@given(mtbfs, st.floats(1e-6, 1e-3))
def test_to_first_order_it_is_youngs(mtbf: float, part: float) -> None:
    young = math.sqrt(2 * part * mtbf * mtbf)
    assert suggest_interval(mtbf, part * mtbf) == pytest.approx(young, rel=0.03)


def test_numbers_of_a_large_job() -> None:
    assert suggest_interval(3 * 3600, 30) == pytest.approx(785.11, abs=0.01)
    assert overhead(785, 3 * 3600, 30) == pytest.approx(0.0784, abs=0.0001)
    assert suggest_interval(100, 200) == suggest_interval(100, 1e6) == 100
    assert ckptspec.suggest_interval is suggest_interval
    assert overhead(1e9, 10, 1) == math.inf
    assert expected_loss(600) == 300
    assert expected_loss(600, lag=40) == 340


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf, True, "60", None])
def test_what_is_no_time_is_refused(wrong: Any) -> None:
    for call in (
        lambda: suggest_interval(wrong, 1),
        lambda: suggest_interval(1, wrong),
        lambda: overhead(wrong, 1, 1),
        lambda: expected_loss(wrong),
    ):
        with pytest.raises(ValueError):
            call()
    if wrong != 0:
        with pytest.raises(ValueError):
            suggest_interval(60, 1, restart_seconds=wrong)


# ---- when ------------------------------------------------------------------------------------------------------------


def test_steps_are_due_at_multiples_and_one_jumped_over_is_made_up_for() -> None:
    policy = cadence(100)
    assert [s for s in range(1, 401) if due(policy, s, 0, Last(s - 1, 0))] == [100, 200, 300, 400]
    assert due(policy, 203, 0, Last(198, 0))
    assert not due(policy, 203, 0, Last(200, 0))
    assert not due(policy, 200, 1e9, Last(200, 0))


def test_time_is_due_when_it_has_passed_and_with_both_the_first_counts() -> None:
    policy = cadence("10min")
    assert policy == Cadence(seconds=600) == cadence(timedelta(minutes=10))
    assert not due(policy, 5, 1599.9, Last(4, 1000))
    assert due(policy, 5, 1600, Last(4, 1000))
    both = Cadence(steps=10, seconds=600)
    assert due(both, 10, 1001, Last(9, 1000))
    assert due(both, 6, 1600, Last(5, 1000))
    assert not due(both, 6, 1599, Last(5, 1000))


@pytest.mark.parametrize("wrong", [0, -5, True, 1.5, None, "100", "soon", "", "-1h", "0s"])
def test_a_cadence_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        cadence(wrong)


def test_times_are_read_with_their_units() -> None:
    texts = ("90", "90s", "1.5 min", "2h", "1d", "250ms", "0")
    assert [seconds(text) for text in texts] == [90, 90, 90, 7200, 86400, 0.25, 0]
    for wrong in ("", "h", "1 week", "1h30", "-1s", "1e3s"):
        with pytest.raises(ValueError):
            seconds(wrong)
    with pytest.raises(ValueError):
        Cadence()


# ---- what a run tells ------------------------------------------------------------------------------------------------


def point(n: int, work: int | None, made: float | None, parent: int | None = None) -> Point:
    return Point(n, work, made, str(n), None if parent is None else str(parent))


def test_the_pace_is_the_median_gap_of_work_and_the_rest_between_dates_is_the_save() -> None:
    line = [point(n, 600 * n, 640.0 * n, n - 1) for n in range(6)]
    found = pace(line[::-1])
    assert found is not None
    assert (found.gaps, found.interval, found.save_seconds) == (5, 600, 40)
    late = [*line, point(6, 3700, 9e6, 5)]  # a night of waiting for a node
    assert pace(late) == type(found)(6, 600, 40)


def test_what_is_not_known_is_not_guessed() -> None:
    assert pace([]) is None
    assert pace([point(1, 5, 5.0)]) is None
    assert pace([point(1, None, 0.0), point(2, 9, 9.0)]) is None
    assert pace([point(1, 9, 0.0), point(2, 9, 9.0)]) is None
    for other in (point(2, 69, 100.0, None), point(2, 69, 60.0, 1), point(2, 69, None, 1)):
        found = pace([point(1, 9, 0.0), other])
        assert found is not None
        assert (found.interval, found.save_seconds) == (60, None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that worked for 600 s before each of 13 saves, which took 20 s each; the last one is damaged."""
    parent = None
    for n in range(1, 14):
        made = f"2026-01-01T{n * 620 // 3600:02d}:{n * 620 // 60 % 60:02d}:{n * 620 % 60:02d}Z"
        told = {"step": n, "save_id": f"{n:032x}", "wall_clock_seconds": n * 600, "created_at": made, "parent": parent}
        make.checkpoint(tmp_path / f"step-{n:08d}", 1, run_id="x", **told)
        parent = {"step": n, "save_id": f"{n:032x}"}
    (tmp_path / "step-00000013" / "rank-00000.shard").unlink()
    make.checkpoint(tmp_path / "step-00000005", 1, run_id="other", step=5, save_id="5" * 32)
    return tmp_path


def test_the_newest_good_checkpoints_of_one_run_are_looked_at(run: Path) -> None:
    assert [p.step for p in points(str(run))] == [12, 11, 10, 9, 8, 7, 6, 4, 3, 2]
    assert [p.step for p in points(str(run), 3)] == [12, 11, 10]


def inspect(capfd: Any, *arguments: object) -> str:
    assert main(["inspect", *map(str, arguments)]) == 0
    return str(capfd.readouterr().out)


def test_inspect_tells_what_a_failure_loses_and_how_often_to_save(run: Path, capfd: Any) -> None:
    assert inspect(capfd, run).splitlines()[-1] == (
        "cadence: 600 s of work between saves (the median of the last 9 gaps); a failure loses 300 s on average"
    )
    last = inspect(capfd, run, "--mtbf", "3").splitlines()[-1]
    assert "with 3 h between failures and 20 s a save, save every 644 s" in last
    told = json.loads(inspect(capfd, run, "--mtbf", "3", "--save-seconds", "30", "--format", "json"))["cadence"]
    assert told["suggested"] == suggest_interval(3 * 3600, 30)
    assert (told["interval"], told["expected_loss"], told["gaps"], told["save_seconds"]) == (600, 300, 9, 30)
    assert 0 < told["suggested_overhead"] < told["overhead"] < 0.1


def test_inspect_of_one_checkpoint_says_nothing_of_cadence(run: Path, capfd: Any) -> None:
    assert "cadence" not in inspect(capfd, run / "step-00000012")
    assert "cadence" not in json.loads(inspect(capfd, run / "step-00000012", "--format", "json"))
    last = inspect(capfd, run / "step-00000012", "--mtbf", "3").splitlines()[-1]
    assert last == (
        "cadence: too few checkpoints tell how often this run saves; "
        "how long a save takes is not known: give --save-seconds"
    )
    assert main(["inspect", str(run), "--mtbf", "0"]) == 2

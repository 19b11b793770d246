"""What retention keeps and lets go, decided from what is known of steps; and what may go of leftovers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptspec.check.life.keeping import METRICS, Fate, Keep, Step, decide, metrics_note, metrics_of
from ckptspec.check.life.leftovers import EXPIRY, Leftover, rule


def step(n: int, **known: Any) -> Step:
    return Step(n, f"step-{n:08d}", f"{n:032x}", **{"run_id": "a", **known})


STEPS = [step(n) for n in range(100, 1100, 100)]


def kept(fates: tuple[Fate, ...]) -> list[int]:
    return sorted(f.step.step for f in fates if f.kept)


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (Keep(last=1), [1000]),
        (Keep(last=3), [800, 900, 1000]),
        (Keep(last=99), list(range(100, 1100, 100))),
        (Keep(every=400), [400, 800, 1000]),
        (Keep(last=2, every=500), [500, 900, 1000]),
        (Keep(last=1, protect=[300, 77]), [300, 1000]),
        (Keep(), list(range(100, 1100, 100))),
        (Keep(protect=[100]), list(range(100, 1100, 100))),
    ],
)
def test_a_step_stays_where_any_rule_asks_for_it(keep: Keep, stay: list[int]) -> None:
    assert kept(decide(STEPS, keep)) == stay


def test_fates_are_told_newest_first_each_with_its_reason() -> None:
    fates = decide(STEPS[::-1], Keep(last=2, every=500))
    assert [f.step.step for f in fates] == list(range(1000, 0, -100))
    assert [f.reason for f in fates[:3]] == [
        "the newest good checkpoint",
        "among the last 2",
        "not among the last 2, no multiple of 500",
    ]
    assert fates[5].reason == "a multiple of 500"


def test_the_best_stay_by_their_metric_and_of_equals_the_newer() -> None:
    losses = {100: 3.0, 200: 1.0, 300: 2.0, 400: 1.0, 500: math.nan, 600: math.inf, 700: 9.0}
    steps = [step(n, metrics={"loss": x}) for n, x in losses.items()]
    assert kept(decide(steps, Keep(best=("loss", "min", 1)))) == [400, 700]
    assert kept(decide(steps, Keep(best=("loss", "min", 2)))) == [200, 400, 700]
    assert kept(decide(steps, Keep(best=("loss", "max", 1)))) == [600, 700]
    assert kept(decide(steps, Keep(last=1, best=("loss", "max", 9)))) == [100, 200, 300, 400, 600, 700]


def test_a_metric_that_no_checkpoint_has_lets_nothing_go() -> None:
    steps = [step(n, metrics={"loss": 1.0}) for n in (1, 2, 3)]
    fates = decide(steps, Keep(last=1, best=("los", "min", 1)))
    assert kept(fates) == [1, 2, 3]
    assert fates[-1].reason == "no checkpoint has a metric 'los'"


def test_what_is_used_protected_damaged_or_of_another_run_stays() -> None:
    steps = [
        step(1, held="upload"),
        step(2, protected=True),
        step(3, fault="damaged: a shard is missing"),
        step(4, run_id="b"),
        step(5),
        step(6),
        step(7, fault="damaged"),
    ]
    fates = {f.step.step: f for f in decide(steps, Keep(last=1))}
    assert [n for n, f in fates.items() if not f.kept] == [5]
    assert fates[1].reason == "in use: upload"
    assert fates[3].reason == "damaged: a shard is missing"
    assert fates[4].reason == "of another run"
    assert fates[6].reason == "the newest good checkpoint"


def test_damaged_ones_do_not_count_among_the_last() -> None:
    steps = [step(1), step(2), step(3, fault="damaged"), step(4, fault="damaged"), step(5)]
    assert kept(decide(steps, Keep(last=2))) == [2, 3, 4, 5]


def test_another_run_is_tidied_by_name_and_the_newest_of_both_stays() -> None:
    steps = [step(1, run_id="b"), step(2, run_id="b"), step(3), step(4)]
    assert kept(decide(steps, Keep(last=1), "b")) == [2, 3, 4]
    assert kept(decide(steps, Keep(last=1), "c")) == [1, 2, 3, 4]


def test_without_a_good_checkpoint_nothing_goes() -> None:
    assert kept(decide([step(1, fault="x"), step(2, fault="x")], Keep(last=1))) == [1, 2]
    assert decide([], Keep(last=1)) == ()


steps_drawn = st.lists(
    st.builds(
        step,
        st.integers(0, 30),
        run_id=st.sampled_from("ab"),
        fault=st.sampled_from([None, None, None, "damaged"]),
        metrics=st.dictionaries(st.sampled_from(["loss"]), st.floats()),
        protected=st.booleans(),
        held=st.sampled_from([None, None, "load"]),
    ),
    max_size=12,
    unique_by=lambda s: s.step,
)
some = st.none() | st.integers(1, 5)
keeps = st.builds(
    Keep,
    last=some,
    every=some,
    best=st.none() | st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    protect=st.lists(st.integers(0, 30), max_size=3),
)


@given(steps_drawn, keeps, st.sampled_from([None, "a", "b"]))
def test_whatever_is_asked_the_newest_good_one_and_all_that_is_needed_stay(
    steps: list[Step], keep: Keep, run_id: str | None
) -> None:
    fates = decide(steps, keep, run_id)
    assert sorted(f.step.step for f in fates) == sorted(s.step for s in steps)
    good = [s for s in steps if s.good]
    gone = [f.step for f in fates if not f.kept]
    if good:
        newest = max(good, key=lambda s: s.step)
        assert newest not in gone
        run = run_id or newest.run_id
        last = sorted((s.step for s in good if s.run_id == run), reverse=True)[: keep.last or 0]
        for s in gone:
            assert s.good
            assert (s.run_id, s.protected, s.held) == (run, False, None)
            assert s.step not in {*last, *keep.protect}
            assert keep.every is None or s.step % keep.every
    else:
        assert gone == []
    again = decide([f.step for f in fates if f.kept], keep, run_id)
    assert all(f.kept for f in again)  # what stayed stays


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": 0},
        {"last": -1},
        {"last": 1.0},
        {"last": True},
        {"every": 0},
        {"best": ("loss", "min", 0)},
        {"best": ("loss", "least", 1)},
        {"best": ("", "min", 1)},
        {"best": ("loss", "min")},
        {"protect": [-1]},
        {"protect": ["3"]},
    ],
)
def test_to_keep_nothing_or_nonsense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Keep(**wrong)


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.floats(allow_nan=False) | st.integers(-(10**9), 10**9)))
def test_metrics_come_back_as_the_same_float64(values: dict[str, float]) -> None:
    note = metrics_note(values)
    assert metrics_of(note) == {name: float(x) for name, x in values.items()}
    assert all(isinstance(text, str) for text in note.get(METRICS, {}).values())


def test_a_metric_is_a_number_under_a_name() -> None:
    assert math.isnan(metrics_of(metrics_note({"x": math.nan}))["x"])
    for wrong in ({"x": "1"}, {"x": True}, {"x": None}, {"": 1}, {1: 1}):
        with pytest.raises(ValueError):
            metrics_note(wrong)  # type: ignore[arg-type]
    assert metrics_of({METRICS: {"a": 1, "b": "1_0", "c": " 1", "d": "infinity", "e": "", "f": "-1.5e-7"}}) == {
        "f": -1.5e-7
    }
    assert metrics_of({METRICS: ["x"]}) == metrics_of({}) == {}


# ---- leftovers -------------------------------------------------------------------------------------------------------

HOUR = 3600.0


@pytest.mark.parametrize("kind", ["staging", "trash", "superseded", "abandoned", "lease"])
def test_an_old_leftover_that_nobody_needs_goes_and_a_young_or_live_one_stays(kind: str) -> None:
    def goes(**known: Any) -> bool:
        return rule(Leftover("x", kind, **{"age": 2 * HOUR, **known}), HOUR, abandoned=True).goes

    assert goes()
    assert not goes(age=HOUR - 1)
    assert not goes(live="a save")
    assert not goes(only="step 3 has no other good checkpoint")


def test_a_leftover_of_unknown_life_is_given_time_whatever_was_asked() -> None:
    for kind in ("staging", "lease"):
        assert not rule(Leftover("x", kind, EXPIRY - 1), 0).goes
        assert rule(Leftover("x", kind, EXPIRY), 0).goes
        assert rule(Leftover("x", kind, 0.0, dead=True), 0).goes
        assert not rule(Leftover("x", kind, 5.0, dead=True), 10).goes
    assert rule(Leftover("x", "trash", 0.0), 0).goes


def test_what_a_roll_back_set_aside_goes_only_when_asked_for() -> None:
    found = Leftover("x", "abandoned", 9 * HOUR)
    assert not rule(found, HOUR).goes
    assert rule(found, HOUR, abandoned=True).goes

"""Advice is data: ranked by work lost, each command one that exists, and nothing in it taken from a checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import make
import pytest
from make import builder

from ckptspec.check.advice import OtherStep, Situation, advise
from ckptspec.check.verdicts import losses
from ckptspec.cli.main import COMMANDS
from ckptspec.engine.verify import validate
from ckptspec.errors import Where
from ckptspec.format import schemas
from ckptspec.format.report import Advice, Finding

HERE = Situation("run/step-00000009", "run", world_size=4, step=9, wall_clock_seconds=900)
OLDER = OtherStep(7, "run/step-00000007", 5000, 700)


def error(code: str, **fields: Any) -> Finding:
    """Return an error finding."""
    return Finding(code, "error", fields.pop("message", "wrong"), Where("rank-00001.shard", rank=1), **fields)


def ids(advice: tuple[Advice, ...]) -> list[str]:
    """Return the ids in order."""
    return [a.id for a in advice]


def test_nothing_wrong_needs_no_advice() -> None:
    counsel = advise([], HERE)
    assert (counsel.findings, counsel.advice, counsel.decision) == ((), (), "load")


def test_what_loses_nothing_comes_before_what_loses_work() -> None:
    counsel = advise([error("S-MISSING")], Situation(**{**vars(HERE), "good": (OLDER,)}))
    assert ids(counsel.advice) == ["restore", "fallback"]
    assert counsel.findings[0].advice == ("restore", "fallback")
    assert counsel.decision == "fallback"
    back = counsel.advice[1]
    assert (back.cost.steps_lost, back.cost.seconds_lost, back.cost.bytes_read) == (2, 200, 5000)


def test_without_an_older_good_step_there_is_no_fallback() -> None:
    counsel = advise([error("B-DIGEST")], HERE)
    assert (ids(counsel.advice), counsel.decision) == (["restore"], "stop")
    newer = OtherStep(11, "run/step-00000011")
    assert "fallback" not in ids(advise([error("B-DIGEST")], Situation(**{**vars(HERE), "good": (newer,)})).advice)


def test_unknown_times_are_unknown_not_zero() -> None:
    known = {**vars(HERE), "good": (OtherStep(7, "run/step-00000007"),)}
    (_, back) = advise([error("S-INDEX")], Situation(**known)).advice
    assert (back.cost.steps_lost, back.cost.seconds_lost) == (2, None)


def test_another_world_size_is_answered_with_the_one_that_was_saved() -> None:
    counsel = advise([error("R-WORLD")], Situation(**{**vars(HERE), "good": (OLDER,)}))
    (same,) = counsel.advice
    assert (same.id, same.params, same.argv) == ("same-world", {"world_size": 4}, ())
    assert "--nproc-per-node 4" in same.text
    assert counsel.decision == "stop"


def test_bytes_that_were_only_appended_can_be_repaired() -> None:
    longer = error("S-NBYTES", message="bytes were appended, the shard's own come first", expected="100 bytes")
    counsel = advise([longer], HERE)
    assert (counsel.decision, counsel.advice[0].params) == ("repair", {"nbytes": 100, "rank": 1})
    assert counsel.advice[0].argv == ("truncate", "-s", "100", "run/step-00000009/rank-00001.shard")
    assert advise([longer, error("S-MISSING")], HERE).decision == "stop"
    named = replace(longer, where=Where("made-up-name.shard", rank=1))
    assert (advise([named], HERE).decision, advise([named], HERE).advice[0].argv) == ("stop", ())


def test_a_path_is_never_taken_for_an_option() -> None:
    counsel = advise([error("S-MISSING")], Situation("--help"))
    assert counsel.advice[0].argv[2] == "./--help"


def test_each_advice_is_there_once_however_many_findings_name_it() -> None:
    counsel = advise([error("S-MISSING"), error("S-NBYTES"), error("B-DIGEST")], HERE)
    assert ids(counsel.advice) == ["restore"]
    assert all(f.advice == ("restore",) for f in counsel.findings)


def test_warnings_leave_the_decision_alone_and_notes_get_no_advice() -> None:
    notes = [Finding("S-EXTRA", "warning", "an extra file"), Finding("D-PIN", "info", "a note")]
    counsel = advise(notes, HERE)
    assert counsel.decision == "load"
    assert counsel.findings[1].advice == ()
    assert ids(counsel.advice) == ["rule-s-extra"]


@pytest.mark.parametrize("code", sorted(schemas.rules()))
def test_every_rule_has_advice_and_every_command_in_it_exists(code: str) -> None:
    situation = Situation("a path/step-00000009", "a path", 4, 9, 900, (OLDER,))
    for advice in advise([error(code, expected="5 bytes")], situation).advice:
        assert advice.text
        assert "{" not in advice.text
        commands = re.findall(r"\bckptspec (?!that\b)([a-z]+)", advice.text)
        commands += [advice.argv[1]] if advice.argv and advice.argv[0] == "ckptspec" else []
        assert set(commands) <= COMMANDS.keys(), advice.text


def test_no_name_from_a_checkpoint_enters_a_command(tmp_path: Path) -> None:
    evil = "$(reboot)"
    plan = builder.sample(2, objects={evil: "same"}, run_id=evil, producer={"name": evil, "version": evil})
    files = builder.build(builder.Plan(plan.manifest, plan.local, {evil: 1}))
    files = builder.edit(files, lambda d: d["shards"][1].update(path="rank-evil--.shard"))
    files.pop("rank-00001.shard")
    make.write(tmp_path / "run" / "step-00000007", files)
    make.checkpoint(tmp_path / "run" / "step-00000003", 2, step=3)
    report = validate(tmp_path / "run" / "step-00000007")
    words = [word for advice in report.advice for word in advice.argv]
    assert words
    assert not [word for word in words if "evil" in word or "reboot" in word]


@pytest.mark.parametrize(("copies", "expected"), [(1, {"replicated", "split"}), (2, {"split"})])
def test_a_replica_counts_only_where_a_second_copy_is_stored(copies: int, expected: set[str]) -> None:
    entries = {
        "replicated": builder.TensorEntry("float32", (1 << 20,), "replicated"),
        "split": builder.TensorEntry("float32", (8, 2), "rows"),
    }
    m = builder.sample(4, copies=copies, tensors=entries, objects={}, aliases={}, flat_groups={}).manifest
    loss = losses(m, {2})
    assert set(loss.tensors) == expected
    if copies == 1:
        assert loss.tensors["replicated"] == 1 << 20  # a quarter of it, cut among four holders
    both = losses(m, {2, 3})
    assert "replicated" in both.tensors

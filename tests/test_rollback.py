"""Rolling back: newer steps are set aside, oldest first, so that a crash leaves the old end or the new one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from make import checkpoint

from ckptspec.cli.main import main
from ckptspec.engine.life.rollback import rollback
from ckptspec.engine.locate import latest
from ckptspec.errors import NotCommittedError


def put(folder: Path, step: int, save_id: str) -> Path:
    return checkpoint(folder, 1, step=step, save_id=save_id)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (3, 6, 9, 12):
        put(tmp_path / f"step-{step:08d}", step, f"{step:032x}")
    return tmp_path


def visible(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir())


def test_newer_steps_are_set_aside_and_older_ones_stay(run: Path) -> None:
    done = rollback(run, 6)
    assert done.path == str(run / "step-00000006") == latest(run)
    assert visible(run) == [
        f".abandoned-00000009-{9:032x}",
        f".abandoned-00000012-{12:032x}",
        "step-00000003",
        "step-00000006",
    ]
    assert rollback(run, 6).abandoned == ()


def test_a_dry_run_changes_nothing(run: Path) -> None:
    before = visible(run)
    assert len(rollback(run, 3, dry_run=True).abandoned) == 3
    assert visible(run) == before


def test_a_step_that_is_not_there_or_not_good_is_refused_and_nothing_changes(run: Path) -> None:
    (run / "step-00000003" / "rank-00000.shard").write_bytes(b"")
    before = visible(run)
    for step in (3, 5, 99):
        with pytest.raises(NotCommittedError, match=f"step {step} is no good checkpoint"):
            rollback(run, step)
    assert visible(run) == before


def test_damaged_misnamed_and_superseded_ones_are_set_aside_too(run: Path) -> None:
    (run / "step-00000009" / "manifest.json").write_bytes(b"damaged")
    put(run / f".superseded-{13:032x}", 12, f"{13:032x}")
    shutil.move(run / "step-00000012", run / "step-00000001")  # its manifest still says 12
    rollback(run, 6)
    assert latest(run) == str(run / "step-00000006")
    assert [n for n in visible(run) if n.startswith("step")] == ["step-00000003", "step-00000006"]
    assert sum(n.startswith(".abandoned-00000012-") for n in visible(run)) == 2
    assert not any(n.startswith(".superseded") for n in visible(run))


def test_a_kill_at_any_moment_leaves_the_old_end_or_the_new_one(run: Path, tmp_path_factory: Any) -> None:
    put(run / f".superseded-{13:032x}", 12, f"{13:032x}")
    ends = []
    for crash in range(5):
        copy = tmp_path_factory.mktemp("copy") / "run"
        shutil.copytree(run, copy)
        pid = os.fork()
        if pid == 0:
            left = [*range(crash)]
            rollback(copy, 6, trace=lambda point, left=left: left.pop() if left else os._exit(9))
            os._exit(0)
        os.waitpid(pid, 0)
        ends.append(Path(str(latest(copy))).name)
        rollback(copy, 6)  # and it can be finished
        assert latest(copy) == str(copy / "step-00000006")
    assert ends == ["step-00000012"] * 3 + ["step-00000006"] * 2


def test_the_command_prints_where_the_run_resumes(run: Path, capfd: Any) -> None:
    assert main(["rollback", str(run), "--to", "9", "--dry-run"]) == 0
    assert "would set step-00000012 aside" in capfd.readouterr().err
    assert main(["rollback", str(run), "--to", "9", "--format", "json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["path"] == str(run / "step-00000009")
    assert len(document["abandoned"]) == 1
    assert main(["rollback", str(run), "--to", "12"]) == 1
    assert "step 12 is no good checkpoint" in capfd.readouterr().err
    assert main(["rollback", str(run)]) == 2

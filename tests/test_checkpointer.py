"""Background saves: what was copied is what is committed, and every rank hears of a save's end at the same call."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from forks import run_phases

import ckptspec
from ckptspec.check.life.keeping import Keep
from ckptspec.engine.life.retention import retain
from ckptspec.format.target import parse
from ckptspec.pytorch.checkpointer import Checkpointer
from ckptspec.pytorch.staging import Staging

PHASES = [("mutated", 3), ("skipped", 3), ("full_disk", 2), ("refused", 2)]


def test_saves_in_the_background_on_real_ranks(tmp_path: Path) -> None:
    printed = run_phases("async_cases", PHASES, tmp_path)
    assert [text.split() for text in printed["mutated"]] == [["equal"]] * 3
    assert len(set(printed["skipped"])) == 1  # the same saves are skipped on every rank
    made = printed["skipped"][0].strip("[]\n ").split(", ")
    assert 1 < len(made) < 6
    for text in printed["full_disk"]:
        told, *newest = text.splitlines()[-1].rsplit(" ", 3)
        assert text.count("No space left on device") == 4  # the saves that were only warned of
        assert told == "[(3, 1), (8, 1)]", text
        assert [Path(p.strip()).name for p in newest] == ["step-00000004", "step-00000004", "step-00000005"]
    assert [text.split() for text in printed["refused"]] == [["StateError", "1"]] * 2


def test_ranks_stay_together_whatever_one_of_them_meets(tmp_path: Path) -> None:
    printed = run_phases("async_cases", [("together", 2), ("in_turn", 2), ("grouped", 2), ("signalled", 2)], tmp_path)
    last = {phase: [text.splitlines()[-1] for text in texts] for phase, texts in printed.items()}
    assert last["together"] == ["['ValueError', '1', 'LoadError', '1']", "['LoadError', '1', 'ValueError', '1']"]
    assert last["in_turn"] == ["done"] * 2
    assert last["grouped"] == [str(["P-AGREE"] * 3)] * 2
    assert last["signalled"] == ["['one', 'True', 'False']"] * 2


def test_every_rank_restores_the_same_step(tmp_path: Path) -> None:
    printed = run_phases("async_cases", [("restored", 2)], tmp_path)
    for rank, text in enumerate(printed["restored"]):
        damaged = "IntegrityError" if rank == 1 else "LoadError"
        assert text.splitlines()[-1] == str([damaged, "PlanError", "NotCommittedError"])


def test_all_ranks_save_at_the_same_steps_by_cadence_and_signal(tmp_path: Path) -> None:
    printed = run_phases("async_cases", [("cadenced", 3)], tmp_path)
    assert len({text.splitlines()[-1] for text in printed["cadenced"]}) == 1
    saved = ast.literal_eval(printed["cadenced"][0].splitlines()[-1])
    assert saved["steps"] == [3, 6, 9]
    assert len(saved["time"]) >= 1
    first, last = saved["signal"]
    assert 4 < first <= 9
    assert 12 < last <= 17
    assert ckptspec.latest(tmp_path / "signal") == str(tmp_path / "signal" / f"step-{last:08d}")


class Tidies:
    """An object that is loaded while somebody tidies the run."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.kept: list[int] = []

    def state_dict(self) -> dict[str, int]:
        return {"one": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.kept = [fate.step.step for fate in retain(self.run, Keep(last=1)).kept]


def test_nobody_removes_the_step_that_a_run_goes_back_to(tmp_path: Path) -> None:
    tidies = Tidies(tmp_path / "run")
    with ckptspec.Checkpointer(tmp_path / "run", keep_last=None) as cp:
        for step in (1, 2, 3):
            cp.save(step, {"tidies": tidies}, blocking=True)
        assert cp.restore({"tidies": tidies}, step=1).step == 1
    assert tidies.kept == [3, 1]  # while 2, which nobody reads, went
    assert not list((tmp_path / "run").glob(".lease-*"))


def steps_of(run: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in run.glob("step-*"))


def test_retention_keeps_the_last_the_multiples_the_best_and_the_protected(tmp_path: Path) -> None:
    losses = [9, 3, 8, 1, 7, 6, 5, 4, 2.5, 10]
    with Checkpointer(tmp_path, keep_last=2, keep_every=5, keep_best=("loss", "min", 2), protect=[1]) as cp:
        for step, loss in enumerate(losses, 1):
            cp.save(step, {"w": torch.full((10,), float(step))}, metrics={"loss": loss})
    assert steps_of(tmp_path) == [1, 4, 5, 9, 10]
    with pytest.raises(ValueError, match="keep last"):
        Checkpointer(tmp_path, keep_last=0)


def test_a_dry_run_says_what_a_save_takes_and_leaves_nothing(tmp_path: Path) -> None:
    printed = run_phases("async_cases", [("rehearsed", 2)], tmp_path)
    assert {text.splitlines()[-1] for text in printed["rehearsed"]} == {"[True, 'StateError', 'P-FOLDER']"}


def test_what_the_run_lost_comes_from_the_mirror(tmp_path: Path) -> None:
    printed = run_phases("async_cases", [("mirrored", 2)], tmp_path)
    for text in printed["mirrored"]:
        assert text.splitlines()[-1] == "[3, 3.0, 'mirror', 1, 3, 3.0, 2, 2.0, 'P-PROBE']"


def test_an_exit_without_close_waits_for_the_commit(tmp_path: Path) -> None:
    script = f"""
        import torch
        from ckptspec.pytorch.checkpointer import Checkpointer
        Checkpointer({str(tmp_path)!r}).save(7, {{"w": torch.ones(3_000_000)}})
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    assert ckptspec.latest(tmp_path) == str(tmp_path / "step-00000007")
    assert ckptspec.validate(tmp_path, level="bytes").ok


def test_an_exit_in_the_middle_of_a_lazy_save_waits_for_the_commit(tmp_path: Path) -> None:
    script = f"""
        import torch
        from ckptspec.pytorch.checkpointer import Checkpointer
        model = torch.nn.Linear(3000, 3000)
        held = torch.optim.SGD(model.parameters())
        cp = Checkpointer({str(tmp_path)!r})
        cp.save(7, {{"m": model, "o": held}}, staging="lazy", optimizers=[held])
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    assert ckptspec.latest(tmp_path) == str(tmp_path / "step-00000007")


def test_a_refused_argument_leaves_no_step_waiting(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(tmp_path) as cp:
        with pytest.raises(ValueError, match="metric"):
            cp.save(1, {"m": model}, staging="lazy", optimizers=[optimizer], metrics={"loss": "low"})  # type: ignore[dict-item]
        assert not optimizer._optimizer_step_pre_hooks
        cp.save(1, {"m": model}, blocking=True)


def test_twenty_saves_leave_the_memory_flat(tmp_path: Path) -> None:
    held = {"w": torch.ones(4_000_000), "b": torch.ones(500, 500).t()}
    with Checkpointer(tmp_path) as cp:
        for step in range(4):
            cp.save(step, held, blocking=True)
        staging = cp.staging_nbytes
        before = resident()
        for step in range(4, 24):
            cp.save(step, held)
        cp.wait()
        assert resident() - before < 64 << 20  # of 340 MB that twenty copies would be
        assert cp.staging_nbytes == staging
        assert 17_000_000 <= staging <= 17_020_000
    assert cp.staging_nbytes == 0


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def test_staging_copies_every_kind_of_tensor_and_keeps_its_memory() -> None:
    from ckptspec.pytorch.saving import SaveOptions

    base = torch.randn(64, 64)
    held = {
        "plain": base,
        "turned": base.t(),
        "part": base[3:9, 5:20:2],
        "expanded": torch.ones(1).expand(5, 3),
        "conj": torch.tensor([1 + 2j]).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(7).bfloat16(),
        "bool": torch.tensor([True, False]),
    }
    staging = Staging()
    first = staging.take(SaveOptions().capture(held)).captured
    for name, t in held.items():
        assert torch.equal(first.leaves[name].tensor, t), name
    where = first.leaves["plain"].tensor.data_ptr()
    assert staging.take(SaveOptions().capture(held)).captured.leaves["plain"].tensor.data_ptr() == where
    with pytest.raises(ckptspec.SaveError, match="P-STAGING"):
        Staging(1000).take(SaveOptions().capture(held))


@pytest.mark.parametrize("bad", [{"on_busy": "drop"}, {"on_error": "ignore"}, {"max_failures": -1}])
def test_arguments_that_mean_nothing_are_refused(bad: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Checkpointer(tmp_path, **bad)  # type: ignore[arg-type]


def test_a_job_says_how_it_holds_its_state_and_checkpoints_are_resharded_to_that(tmp_path: Path) -> None:
    printed = run_phases("async_cases", [("aimed", 2), ("aimed_more", 3)], tmp_path)
    for texts in printed.values():
        assert len({text.split()[-1] for text in texts}) == 1  # every rank is given the same target
    wanted = parse((tmp_path / "target-3.json").read_bytes())
    assert {f.code for f in ckptspec.validate(tmp_path / "aim-2", target=wanted).findings} == {"R-WORLD"}
    ckptspec.reshard(tmp_path / "aim-2", tmp_path / "out", wanted)
    assert ckptspec.validate(tmp_path / "out", target=wanted, exact=True, level="bytes").ok

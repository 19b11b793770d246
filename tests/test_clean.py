"""Retention and cleaning of real run folders, with saves that live, stop and die: nothing that is needed ever goes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import make
import pytest

from ckptspec.check.life.keeping import Keep, metrics_note
from ckptspec.check.life.leftovers import EXPIRY
from ckptspec.cli.main import main
from ckptspec.engine.agree.channel import Channel, LocalStore
from ckptspec.engine.life import lease, retention
from ckptspec.engine.life import signs as signs_module
from ckptspec.engine.life.cleaning import Cleaned, clean
from ckptspec.engine.life.lease import Lease, hold
from ckptspec.engine.life.retention import PROTECTED, Ledger, retain
from ckptspec.engine.life.signs import signs
from ckptspec.engine.locate import latest
from ckptspec.engine.saves import commit, probe
from ckptspec.engine.saves.save import Request, save
from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.errors import CkptspecError, NotCommittedError
from ckptspec.format import names, objects
from ckptspec.format.declaration import Declaration
from ckptspec.storage import local

DAY = 86400.0


def save_id(n: int) -> str:
    return f"{n:032x}"


def put(run: Path, step: int, name: str | None = None, **changes: Any) -> Path:
    changes = {"save_id": save_id(step), "run_id": "a", **changes}
    return make.checkpoint(run / (name or names.step_folder(step)), 1, step=step, **changes)


@pytest.fixture
def area() -> Iterator[Path]:
    """A folder in memory where possible: these tests flush a lot."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        yield Path(name)


@pytest.fixture
def run(area: Path) -> Path:
    """A run with steps 1 to 5."""
    for n in range(1, 6):
        put(area / "run", n)
    return area / "run"


def steps(run: Path) -> list[int]:
    return [n for n in map(names.parse_step_folder, sorted(os.listdir(run))) if n is not None]


def hidden(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name.startswith("."))


def gone(cleaned: Cleaned) -> list[str]:
    return sorted(item.name for item in cleaned.removed)


def why(cleaned: Cleaned) -> dict[str, str]:
    return {item.name: item.reason for item in cleaned.spared}


def later(run: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = DAY) -> None:
    """Let the file system's clock be ahead: everything in the run is that old."""
    monkeypatch.setattr(signs_module, "clock", lambda run: time.time() + seconds)


# ---- retention -------------------------------------------------------------------------------------------------------


def test_retention_removes_after_a_commit_what_no_rule_keeps(run: Path) -> None:
    done = retain(run, Keep(last=2, every=3), after=save_id(5))
    assert [f.step.step for f in done.removed] == [2, 1]
    assert steps(run) == [3, 4, 5]
    assert hidden(run) == []
    assert retain(run, Keep(last=2, every=3), after=save_id(5)).removed == ()


def test_a_dry_run_changes_nothing(run: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    assert [f.step.step for f in retain(run, Keep(last=1), dry_run=True).removed] == [4, 3, 2, 1]
    assert gone(clean(run, Keep(last=1), dry_run=True, min_age=0)) == [names.step_folder(n) for n in (1, 2, 3, 4)]
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_nothing_goes_where_the_commit_it_follows_is_not_there(run: Path) -> None:
    done = retain(run, Keep(last=1), after=save_id(6))
    assert done.removed == ()
    assert {f.reason for f in done.kept} == {f"save {save_id(6)} is not a good checkpoint here"}
    assert steps(run) == [1, 2, 3, 4, 5]


def test_a_damaged_newest_one_protects_the_good_one_before_it(run: Path) -> None:
    (run / "step-00000005" / "rank-00000.shard").unlink()
    retain(run, Keep(last=1))
    assert steps(run) == [4, 5]
    assert latest(run) == str(run / "step-00000004")


def test_the_best_by_a_metric_that_was_saved_with_them_stay(run: Path) -> None:
    for n, loss in ((2, 0.1), (3, 0.7), (4, 0.2)):
        put(run, n, annotations=metrics_note({"loss": loss}))
    retain(run, Keep(last=1, best=("loss", "min", 2)))
    assert steps(run) == [2, 4, 5]


def test_a_protected_one_stays_and_so_does_a_copy_of_it(run: Path, area: Path) -> None:
    (run / "step-00000001" / PROTECTED).touch()
    shutil.copytree(run, area / "copy")
    for folder in (run, area / "copy"):
        retain(folder, Keep(last=1))
        assert steps(folder) == [1, 5]
    (run / "step-00000001" / PROTECTED).unlink()
    retain(run, Keep(last=1))
    assert steps(run) == [5]


def test_another_runs_checkpoints_in_the_same_folder_stay(run: Path) -> None:
    put(run, 2, run_id="b")
    retain(run, Keep(last=1))
    assert steps(run) == [2, 5]


def test_a_ledger_reads_each_manifest_once_and_again_when_it_is_another(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = retention.committed

    def counted(folder: str) -> Any:
        read.append(os.path.basename(folder))
        return real(folder)

    monkeypatch.setattr(retention, "committed", counted)
    ledger = Ledger(run)
    retain(run, Keep(last=4), ledger=ledger)
    read.clear()
    put(run, 6)
    retain(run, Keep(last=4), ledger=ledger)
    assert read == ["step-00000006", "step-00000006"]  # once to know it, and the newest again before anything goes
    read.clear()
    put(run, 4, run_id="another")
    assert len(retain(run, Keep(last=4), ledger=ledger).removed) == 0
    assert read == ["step-00000004", "step-00000006"]
    assert steps(run) == [3, 4, 5, 6]


def test_each_removal_is_a_durable_rename_before_the_first_file_goes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.means(str(run))
    log: list[str] = []
    for name in ("rename", "fsync_folder", "remove_tree"):
        real = getattr(local, name)

        def logged(*args: str, name: str = name, real: Callable[..., None] = real) -> None:
            log.append(" ".join([name, *(os.path.relpath(a, run) for a in args)]))
            real(*args)

        monkeypatch.setattr(local, name, logged)
    retain(run, Keep(last=4))
    trash = names.trash_folder(save_id(1))
    assert log == [
        "fsync_folder step-00000005",
        "fsync_folder .",
        f"rename step-00000001 {trash}",
        "fsync_folder .",
        f"remove_tree {trash}",
    ]


def test_where_folders_cannot_be_renamed_the_manifest_goes_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(local, "filesystem", lambda path: "fuse.s3fs")
    seen: list[list[str]] = []
    folder = run / "step-00000001"
    retain(run, Keep(last=4), trace=lambda point: seen.append(sorted(os.listdir(folder)) if folder.exists() else []))
    assert steps(run) == [2, 3, 4, 5]
    manifest = f".manifest-{save_id(1)}.json"  # last to go: it tells cleaning what the folder is
    shown, hidden_one = ["manifest.json", "rank-00000.shard"], [manifest, "rank-00000.shard"]
    assert seen == [shown, hidden_one, hidden_one, [manifest], []]


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_held_stays_until_it_is_let_go(run: Path) -> None:
    with hold(str(run / "step-00000001"), "upload", save_id(1)):
        done = retain(run, Keep(last=1))
        assert steps(run) == [1, 5]
        assert done.kept[-1].reason.startswith(f"in use: upload by process {os.getpid()} on ")
    assert hidden(run) == []
    retain(run, Keep(last=1))
    assert steps(run) == [5]


def test_who_takes_a_lease_too_late_is_told_and_leaves_none(run: Path) -> None:
    for folder, wanted in (("step-00000009", save_id(9)), ("step-00000001", save_id(2))):
        with pytest.raises(NotCommittedError, match="it is gone"):
            hold(str(run / folder), "load", wanted)
    assert hidden(run) == []


@pytest.mark.parametrize("at", ["hide step-00000001", "hidden step-00000001"])
@pytest.mark.parametrize("mode", ["rename", "manifest-last"])
def test_a_lease_taken_while_a_step_is_removed_has_it_back_or_is_refused(
    run: Path, at: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_known", {})
    if mode == "manifest-last":
        monkeypatch.setattr(local, "filesystem", lambda path: "fuse.s3fs")
    taken: list[Lease] = []

    def trace(point: str) -> None:
        if point == at:
            try:
                taken.append(hold(str(run / "step-00000001"), "load", save_id(1)))
            except NotCommittedError:
                taken.append(Lease(str(run), "load", save_id(1)))  # took it, and has not looked yet

    done = retain(run, Keep(last=4), trace=trace)
    taken[0].release()
    assert done.removed == ()
    assert steps(run) == [1, 2, 3, 4, 5]
    assert commit.saved(str(run / "step-00000001")) == save_id(1)
    assert hidden(run) == []


def test_a_heart_renews_its_lease_and_ends_with_it(run: Path) -> None:
    held = Lease(str(run), "save", save_id(7), beat=0.01)
    os.utime(held.path, (0, 0))
    until = time.monotonic() + 10
    while os.stat(held.path).st_mtime < 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert os.stat(held.path).st_mtime > 1
    assert held.error is None
    descriptors = len(os.listdir("/proc/self/fd"))
    held.release()
    held.release()
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    assert not held._heart.is_alive()
    assert signs(str(run)).signs == ()


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """Run `work` in a forked child, which then waits to be killed; yields its number once it says it is there."""
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(say, b"x")
            time.sleep(60)
        finally:
            os._exit(1)
    try:
        os.close(say)
        assert os.read(ready, 1) == b"x"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_lease_lives_while_its_process_does_stopped_or_not_and_dies_with_it(run: Path) -> None:
    keep: list[Lease] = []
    with child(lambda: keep.append(Lease(str(run), "save", save_id(7)))) as pid:
        os.kill(pid, signal.SIGSTOP)
        (sign,) = signs(str(run)).signs
        os.utime(run / sign.name, (0, 0))
        (sign,) = signs(str(run)).signs
        assert (sign.locked, sign.alive, sign.dead, sign.save_id) == (True, True, False, save_id(7))
    (sign,) = signs(str(run)).signs
    assert (sign.locked, sign.alive, sign.dead) == (False, False, True)
    assert not signs(str(run)).at(save_id(7))


def test_a_childs_copy_of_a_lease_is_no_sign_of_life_and_does_not_end_it(run: Path) -> None:
    held = Lease(str(run), "save", save_id(7))
    with child(held.release):
        assert signs(str(run)).signs[0].alive
        os.close(os.dup(held._fd))
        held.release()
        assert signs(str(run)).signs == ()
    keep: list[Any] = []

    def parent_then_child() -> None:
        keep.append(Lease(str(run), "save", save_id(8)))
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)

    with child(parent_then_child) as pid:
        group = [int(t) for t in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    until = time.monotonic() + 10
    while signs(str(run)).signs[0].alive and time.monotonic() < until:
        time.sleep(0.01)  # the grandchild has just been born
    assert signs(str(run)).signs[0].dead
    assert len(group) == 1
    for orphan in group:
        os.kill(orphan, signal.SIGKILL)


def test_from_another_machine_only_the_time_tells(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Lease(str(run), "save", save_id(7)) as held:
        monkeypatch.setattr(signs_module, "boot", lambda: "another")
        assert signs(str(run)).signs[0].locked is None
        assert signs(str(run)).at(save_id(7))
        os.utime(held.path, (time.time() - EXPIRY - 1,) * 2)
        assert not signs(str(run)).at(save_id(7))
        assert not signs(str(run)).died([save_id(7)])


def test_a_living_lease_that_nobody_can_read_may_be_on_anything(run: Path) -> None:
    path = run / f".lease-{'e' * 32}"
    for content in (b"", b"\xff", b"[]", b'{"format": "ckptspec-lease", "save_id": 7}'):
        path.write_bytes(content)
        assert retain(run, Keep(last=1)).removed == ()
    os.utime(path, (0, 0))
    assert len(retain(run, Keep(last=1)).removed) == 4
    assert gone(clean(run)) == []
    assert "changed" in why(clean(run))[path.name]  # its inode changed just now


def test_without_locks_the_time_tells(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(lease.fcntl, "flock", refuse)
    with Lease(str(run), "save", save_id(7)):
        assert signs(str(run)).signs[0].locked is None
        assert signs(str(run)).at(save_id(7))


# ---- saves that live and die -----------------------------------------------------------------------------------------


def engine_save(run: Path, step: int, **how: Any) -> None:
    state = objects.pack({"step": step})
    snapshot = Snapshot(Declaration(), state, {}, {}, {}, {})
    producer = {"name": "test", "version": "1"}
    request = Request(step=step, run_id="a", producer=producer, **how)
    save(str(run), lambda: snapshot, request, Channel(LocalStore(), 0, 1), 1 << 25)


def stopping_at(name: str, say: Callable[[], None]) -> None:
    """Let this process call `say` and wait where a function of the storage is called first."""
    real = getattr(local, name)

    def call(*args: Any) -> Any:
        say()
        time.sleep(60)
        return real(*args)

    setattr(local, name, call)


PLACES = ("create", "finish", "write_file", "rename_noreplace")


@contextmanager
def saving(run: Path, at: str) -> Iterator[int]:
    """A process that saves step 6 and stands where it calls `at` of the storage."""
    probe.means(str(run))  # so that what it meets is its save
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        real = commit.prepare

        def prepared(*args: Any, **how: Any) -> Any:
            found = real(*args, **how)
            if at != "create":
                stopping_at(at, lambda: os.write(say, b"x"))
            else:
                create = local.create

                def create_shard(path: str, nbytes: int = 0) -> int:
                    if path.endswith(".shard"):
                        os.write(say, b"x")
                        time.sleep(60)
                    return create(path, nbytes)

                local.create = create_shard
            return found

        commit.prepare = prepared
        try:
            engine_save(run, 6)
        finally:
            os._exit(1)
    os.close(say)
    try:
        assert os.read(ready, 1) == b"x"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("at", PLACES)
def test_a_living_save_is_never_touched_and_a_killed_one_is_cleaned_away(
    run: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saving(run, at) as pid:
        for stop in (None, signal.SIGSTOP):
            if stop:
                os.kill(pid, stop)
            before = set(run.rglob("*"))
            with pytest.MonkeyPatch.context() as patch:
                later(run, patch)  # stopped for a day, it is still there
                found = clean(run, min_age=0)
            assert found.removed == ()
            assert all(reason.startswith("in use: save by process") for reason in why(found).values())
            assert len(found.spared) == 2  # the staging folder and the lease
            assert set(run.rglob("*")) == before
    assert why(clean(run))  # an hour is what is waited by default, though it is dead
    assert len(clean(run, min_age=0).removed) == 2
    assert hidden(run) == []
    assert latest(run) == str(run / "step-00000005")
    engine_save(run, 6)
    assert latest(run) == str(run / "step-00000006")
    assert hidden(run) == []


def test_a_save_that_ends_leaves_no_lease_however_it_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine_save(run, 6)
    assert hidden(run) == []
    for call in ("finish", "write_file", "rename_noreplace"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, call, _fails)
            with pytest.raises((CkptspecError, OSError)):
                engine_save(run, 7)
        assert not [name for name in hidden(run) if lease.is_lease(name)]


def _fails(*args: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_save_where_the_manifest_comes_last_is_cleaned_when_it_is_dead(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(local, "filesystem", lambda path: "fuse.s3fs")
    with saving(run, "finish"):
        assert clean(run, min_age=0).removed == ()
    folder = run / "step-00000006"
    assert folder.exists()
    assert gone(clean(run, min_age=0))[-1] == "step-00000006"
    assert not folder.exists()
    folder.mkdir()
    (folder / "rank-00000.shard").write_bytes(b"")  # in another mode this is damage, and not for cleaning
    assert clean(run, min_age=0).removed == ()


# ---- cleaning --------------------------------------------------------------------------------------------------------


def test_cleaning_without_a_rule_of_retention_touches_no_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later(run, monkeypatch)
    assert clean(run) == Cleaned((), ())
    assert steps(run) == [1, 2, 3, 4, 5]


def leave(run: Path) -> dict[str, str]:
    """Leave in a run what may be found there, and return what each is."""
    made = {
        names.staging_folder(6, save_id(6)): "a dead save",
        names.trash_folder(save_id(20)): "half removed",
        names.superseded_folder(save_id(21)): "replaced",
        names.abandoned_folder(7, save_id(7)): "set aside",
    }
    for name in made:
        put(run, 3, name, save_id=name[-32:])
    (run / names.trash_folder(save_id(20)) / "manifest.json").unlink()
    return made


def test_old_leftovers_go_and_young_ones_stay(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = leave(run)
    assert clean(run).removed == ()
    later(run, monkeypatch)
    assert gone(clean(run)) == sorted(name for name, what in made.items() if what != "set aside")
    assert steps(run) == [1, 2, 3, 4, 5]
    assert gone(clean(run, abandoned=True)) == [names.abandoned_folder(7, save_id(7))]
    assert hidden(run) == []


def test_a_superseded_checkpoint_goes_only_where_its_step_has_a_good_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(run, monkeypatch)
    for n in (3, 5, 9):
        put(run, n, names.superseded_folder(save_id(100 + n)), save_id=save_id(100 + n))
    (run / "step-00000005" / "rank-00000.shard").unlink()
    (run / names.superseded_folder(save_id(99))).mkdir()
    assert gone(clean(run)) == [names.superseded_folder(save_id(103))]
    assert latest(run) == str(run / names.superseded_folder(save_id(109)))
    assert sorted(why(clean(run)).values()) == [
        "nobody can tell which step it was",
        "step 5 has no other good checkpoint",
        "step 9 has no other good checkpoint",
    ]


def test_a_checkpoint_swapped_out_by_a_save_that_died_goes_only_where_the_new_one_is_good(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(run, monkeypatch)
    swapped = put(run, 5, names.staging_folder(5, save_id(50)), save_id=save_id(5))
    (run / "step-00000005" / "rank-00000.shard").unlink()
    assert clean(run).removed == ()
    put(run, 5, save_id=save_id(50))
    assert gone(clean(run)) == [swapped.name]


def test_trash_that_holds_something_newer_than_the_run_has_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later(run, monkeypatch)
    trash = put(run, 9, names.trash_folder(save_id(9)))
    assert why(clean(run)) == {trash.name: "it holds step 9, newer than any good checkpoint of the run"}
    put(run, 10)
    assert gone(clean(run)) == [trash.name]


def test_a_reshard_that_lives_keeps_its_staging_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later(run, monkeypatch)
    staging = run / names.staging_folder(6, save_id(6))
    staging.mkdir()
    with (staging / f".journal-{save_id(6)}-00000000").open("wb") as journal:
        lease.fcntl.flock(journal, lease.fcntl.LOCK_EX)
        assert why(clean(run, min_age=0)) == {staging.name: "in use: a reshard"}
    assert gone(clean(run)) == [staging.name]


def test_what_cannot_be_removed_is_told_and_the_rest_goes(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    later(run, monkeypatch)
    made = leave(run)
    real = local.remove_tree

    def stuck(path: str) -> None:
        if os.path.basename(path) == names.trash_folder(save_id(20)):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        real(path)

    monkeypatch.setattr(local, "remove_tree", stuck)
    found = clean(run, abandoned=True)
    assert len(found.removed) == len(made) - 1
    assert [item.error for item in found.failed] == [
        f"{run / names.trash_folder(save_id(20))}: {os.strerror(errno.EBUSY)}"
    ]
    assert main(["clean", str(run)]) == 3
    assert f"could not remove {names.trash_folder(save_id(20))}" in capfd.readouterr().err


def test_files_and_folders_of_others_are_left_alone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later(run, monkeypatch)
    for name in (".tmp-x", ".trash-", "logs", ".tmp-00000001", f".Trash-{save_id(1)}", f"tmp-00000001-{save_id(1)}"):
        (run / name).mkdir()
    (run / names.trash_folder(save_id(1))).write_bytes(b"a file")
    (run / names.trash_folder(save_id(2))).symlink_to(run / "step-00000005")
    before = sorted(os.listdir(run))
    assert clean(run, min_age=0, abandoned=True) == Cleaned((), ())
    assert sorted(os.listdir(run)) == before


# ---- killed anywhere -------------------------------------------------------------------------------------------------


def killed_after(run: Path, points: int) -> bool:
    """Clean in a child that is killed after so many points; return whether it lived to the end."""
    pid = os.fork()
    if pid == 0:
        left = iter(range(points))

        def trace(point: str) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)

        clean(run, Keep(last=2), min_age=0, abandoned=True, trace=trace)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("mode", ["rename", "manifest-last"])
def test_a_kill_at_any_moment_of_cleaning_loses_nothing_that_is_kept(
    run: Path, area: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(run, monkeypatch)
    monkeypatch.setattr(probe, "_known", {})
    if mode == "manifest-last":
        monkeypatch.setattr(local, "filesystem", lambda path: "fuse.s3fs")
    leave(run)
    lived = False
    for points in range(100):
        copy = area / f"copy-{points}"
        shutil.copytree(run, copy)
        lived = killed_after(copy, points)
        assert latest(copy) == str(copy / "step-00000005")
        assert [n for n in steps(copy) if commit.saved(str(copy / names.step_folder(n)))][-2:] == [4, 5]
        clean(copy, Keep(last=2), min_age=0, abandoned=True)
        assert steps(copy) == [4, 5]
        assert hidden(copy) == []
        if lived:
            break
    assert lived
    assert points > 20


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*arguments: object) -> int:
    return main(["clean", *map(str, arguments)])


def test_the_command_says_what_goes_and_what_stays(run: Path, capfd: Any) -> None:
    leave(run)
    assert command(run, "--keep-last", 2, "--keep-every", 2, "--dry-run") == 0
    said = capfd.readouterr()
    assert [line.split(" (")[0] for line in said.out.splitlines()] == [
        "would remove step-00000003",
        "would remove step-00000001",
    ]
    assert "kept step-00000002: a multiple of 2\n" in said.err
    assert "set aside by a roll-back: goes only with --abandoned" in said.err
    assert steps(run) == [1, 2, 3, 4, 5]
    assert command(run, "--keep-last", 1, "--protect", 4, "--min-age", "0s", "--format", "json") == 0
    document = json.loads(capfd.readouterr().out)
    assert [e["name"] for e in document["removed"] if e["kind"] == "step"] == [
        "step-00000003",
        "step-00000002",
        "step-00000001",
    ]
    assert document["nbytes"] == sum(e["nbytes"] for e in document["removed"]) > 0
    assert (document["dry_run"], steps(run)) == (False, [4, 5])


def test_the_command_keeps_the_best(run: Path) -> None:
    for n in (1, 2, 3):
        put(run, n, annotations=metrics_note({"a:b": n}))
    assert command(run, "--keep-last", 1, "--keep-best", "a:b:max:1") == 0
    assert steps(run) == [3, 5]


def test_what_is_no_run_or_no_option_is_refused(run: Path, area: Path, capfd: Any) -> None:
    assert command(run / "step-00000005") == 1
    assert "this is a checkpoint, not a run folder" in capfd.readouterr().err
    assert command(area / "nowhere") == 3
    for wrong in (
        ("--keep-last", 0),
        ("--keep-every", 0),
        ("--keep-best", "loss"),
        ("--keep-best", "loss:least:1"),
        ("--keep-best", "loss:min:0"),
        ("--min-age", "soon"),
        ("--protect", -1),
    ):
        assert command(run, *wrong) == 2
    assert steps(run) == [1, 2, 3, 4, 5]

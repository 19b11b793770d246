"""A save becomes visible at one moment: killed or failing anywhere, the run has the old checkpoint or the new one."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptspec.engine.agree.verdict import NotVisibleError
from ckptspec.engine.saves import commit, probe
from ckptspec.errors import CommitUncertainError, SaveError
from ckptspec.format import lexical, names
from ckptspec.storage import local

STEP = 7
MODES = ("rename", "rename without exchange", "rename-plain", "manifest-last by link", "manifest-last by put")
OLD, NEW, NEXT = "0" * 31 + "1", "0" * 31 + "2", "0" * 31 + "3"
# Every function through which a commit changes what is on the disk.
CHANGES = (
    "make_folder",
    "create",
    "write_at",
    "finish",
    "rename",
    "rename_noreplace",
    "exchange",
    "link",
    "remove_file",
    "remove_tree",
)


@pytest.fixture
def run() -> Iterator[str]:
    """A run folder that is not there yet, in memory where possible: these tests flush a lot."""
    area = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    yield os.path.join(area, "run")
    shutil.rmtree(area)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_known", {})


def refuse(code: int) -> Callable[..., None]:
    def call(source: str, target: str) -> None:
        raise OSError(code, os.strerror(code), source, None, target)

    return call


def behave(mode: str, put: Callable[[str, Any], None]) -> None:
    """Make the file system one on which this is the way to commit."""
    if mode in ("rename without exchange", "rename-plain"):
        put("exchange", refuse(errno.EINVAL))
    if mode == "rename-plain":
        put("rename_noreplace", refuse(errno.EINVAL))
    if mode.startswith("manifest-last"):
        put("filesystem", lambda path: "fuse.s3fs")
    if mode == "manifest-last by put":
        put("link", refuse(errno.EPERM))


def manifest(save_id: str, step: int = STEP, shards: dict[str, int] | None = None) -> bytes:
    body = json.dumps({"save_id": save_id, "step": step, "shards": shards or {}})
    return lexical.seal(body[:-1].encode() + b",\n")


def write(staging: commit.Staging) -> dict[str, int]:
    """Write two shards that say whose they are."""
    sizes = {}
    for rank in range(2):
        name = commit.shard_name(staging.mode, rank, staging.save_id)
        data = f"{staging.save_id} of rank {rank}".encode()
        with open(os.path.join(staging.path, name), "xb") as f:
            f.write(data)
        sizes[name] = len(data)
    return sizes


def save(run: str, save_id: str, on_existing: str = "refuse", **how: Any) -> str:
    staging = commit.prepare(run, STEP, save_id)
    sizes = write(staging)
    return commit.publish(staging, manifest(save_id, STEP, sizes), sizes, on_existing, **how)


def checkpoint(folder: str) -> str | None:
    """Return the save id of a folder that is a whole checkpoint: manifest and shards, all of one save."""
    save_id = commit.saved(folder)
    if save_id is None:
        return None
    shards = json.loads(commit.read_manifest(folder))["shards"]
    assert len(shards) == 2
    for name in shards:
        assert Path(folder, name).read_text().startswith(save_id), "a checkpoint mixes two saves"
    return save_id


def newest(run: str) -> str | None:
    """Return the save id a reader finds for the step: the final folder's, else that of a superseded one."""
    if not os.path.isdir(run):
        return None
    final = checkpoint(os.path.join(run, names.step_folder(STEP)))
    aside = [checkpoint(os.path.join(run, name)) for name in os.listdir(run) if name.startswith(".superseded-")]
    return final or next(iter(aside), None)


def hidden(run: str) -> list[str]:
    return [name for name in os.listdir(run) if name.startswith(".")]


# ---- the straight line -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("mode", MODES)
def test_a_save_appears_under_its_step_and_leaves_nothing_else(
    run: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    behave(mode, partial(monkeypatch.setattr, local))
    points: list[str] = []
    staging = commit.prepare(run, STEP, NEW, trace=points.append)
    assert staging.mode == mode.split()[0]
    assert newest(run) is None
    sizes = write(staging)
    path = commit.publish(staging, manifest(NEW, STEP, sizes), sizes, trace=points.append)
    assert path == os.path.join(run, "step-00000007")
    assert newest(run) == NEW
    assert os.listdir(run) == ["step-00000007"]
    assert sorted(os.listdir(path)) == sorted([*sizes, "manifest.json"])
    assert tuple(points) == tuple(p for p in commit.POINTS if p != "aside")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("mode", MODES)
def test_an_existing_step_is_refused_or_superseded_never_changed(
    run: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    behave(mode, partial(monkeypatch.setattr, local))
    save(run, OLD)
    assert commit.existing(run, STEP) == commit.Existing(os.path.join(run, "step-00000007"), OLD)
    assert commit.existing(run, STEP + 1) is None
    staging = commit.prepare(run, STEP, NEW)
    sizes = write(staging)
    decided: list[str] = []
    with pytest.raises(SaveError, match="exists already") as caught:
        commit.publish(staging, manifest(NEW, STEP, sizes), sizes, decide=lambda: decided.append("yes"))
    assert caught.value.rule == "P-EXISTING"
    assert not decided
    assert newest(run) == OLD
    commit.discard(staging)
    assert newest(run) == OLD
    save(run, NEXT, "supersede")
    assert newest(run) == NEXT
    assert os.listdir(run) == ["step-00000007"]
    assert len(os.listdir(os.path.join(run, "step-00000007"))) == 3


@pytest.mark.parametrize("name", ["step-00000007", ".trash-0123456789abcdef0123456789abcdef"])
def test_a_run_that_readers_would_take_for_a_checkpoint_is_refused(run: str, name: str) -> None:
    with pytest.raises(SaveError, match="P-EXISTING"):
        commit.prepare(os.path.join(run, name), 7, secrets.token_hex(16))
    assert not os.path.exists(os.path.join(run, name))


@pytest.mark.usefixtures("fresh")
def test_what_is_no_checkpoint_is_not_silently_replaced_either(run: str) -> None:
    os.makedirs(os.path.join(run, "step-00000007"))
    assert commit.existing(run, STEP) == commit.Existing(os.path.join(run, "step-00000007"), None)
    with pytest.raises(SaveError, match="no checkpoint"):
        save(run, NEW)
    save(run, NEXT, "supersede")
    assert newest(run) == NEXT


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("fault", ["absent", "short", "long", "link", "folder"])
def test_a_shard_that_is_not_what_was_handed_in_stops_the_commit(run: str, fault: str) -> None:
    staging = commit.prepare(run, STEP, NEW)
    sizes = write(staging)
    shard = Path(staging.path, "rank-00001.shard")
    if fault == "short":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif fault == "long":
        shard.write_bytes(shard.read_bytes() + b"x")
    else:
        shard.rename(Path(staging.path, "elsewhere"))
    if fault == "link":
        shard.symlink_to("elsewhere")
    elif fault == "folder":
        shard.mkdir()
    with pytest.raises(SaveError) as caught:
        commit.publish(staging, manifest(NEW, STEP, sizes), sizes)
    assert caught.value.rule == "P-ORDER"
    assert caught.value.where.file == str(shard)
    assert not os.path.exists(staging.manifest)
    assert newest(run) is None


@pytest.mark.usefixtures("fresh")
def test_everything_is_durable_before_it_is_visible_and_nothing_old_goes_before_that(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, OLD)
    log: list[str] = []
    staging = commit.prepare(run, STEP, NEW)
    sizes = write(staging)
    for name in (*CHANGES, "write_file", "fsync_folder"):
        real = getattr(local, name)

        def logged(*args: Any, name: str = name, real: Callable[..., Any] = real) -> Any:
            log.append(name if isinstance(args[0], int) else f"{name} {os.path.relpath(args[0], run)}")
            return real(*args)

        monkeypatch.setattr(local, name, logged)
    points = lambda point: log.append(f"- {point}")  # noqa: E731
    commit.publish(staging, manifest(NEW, STEP, sizes), sizes, "supersede", trace=points)
    trash = next(line for line in log if line.startswith("remove_tree")).split()[1]
    tmp = os.path.basename(staging.path)
    assert log == [
        "- checked",
        f"write_file {tmp}/manifest.json",
        f"create {tmp}/manifest.json",
        "write_at",
        "finish",
        "- manifest",
        f"fsync_folder {tmp}",
        "finish",
        "- ready",
        "- decided",
        f"exchange {tmp}",
        "- visible",
        "fsync_folder .",
        "finish",
        "- durable",
        f"rename {tmp}",
        f"remove_tree {trash}",
        "- cleaned",
    ]


@pytest.mark.usefixtures("fresh")
def test_a_lost_decision_makes_nothing_visible(run: str) -> None:
    def lost() -> None:
        raise SaveError("rank 3 failed", rank=3)

    staging = commit.prepare(run, STEP, NEW)
    sizes = write(staging)
    with pytest.raises(SaveError, match="rank 3 failed"):
        commit.publish(staging, manifest(NEW, STEP, sizes), sizes, decide=lost)
    assert newest(run) is None
    commit.discard(staging)
    commit.discard(staging)
    assert os.listdir(run) == []


# ---- killed anywhere -------------------------------------------------------------------------------------------------


class Countdown:
    """Replaces every changing function of the storage; at the n-th call from now does something else instead."""

    def __init__(self, at: int, act: Callable[[Callable[[], Any]], Any]) -> None:
        self.left = at
        self.act = act

    def install(self, put: Callable[[str, Any], None]) -> None:
        for name in CHANGES:
            put(name, self.wrap(getattr(local, name)))

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.left -= 1
            return self.act(lambda: real(*args)) if self.left == -1 else real(*args)

        return call


def put_for_good(name: str, call: Any) -> None:
    setattr(local, name, call)


def killed(run: str, mode: str, at: int, on_existing: str) -> bool:
    """Save in a child that dies before its `at`-th change to the disk; return whether it lived to the end."""
    pid = os.fork()
    if pid == 0:
        try:
            behave(mode, put_for_good)
            Countdown(at, lambda real: os.kill(os.getpid(), signal.SIGKILL)).install(put_for_good)
            save(run, NEW, on_existing)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("old", [None, OLD])
@pytest.mark.parametrize("mode", MODES)
def test_killed_anywhere_a_run_has_the_old_or_the_new_and_the_next_save_works(
    run: str, monkeypatch: pytest.MonkeyPatch, mode: str, old: str | None
) -> None:
    behave(mode, partial(monkeypatch.setattr, local))
    found = set()
    for at in range(100):
        if old:
            save(run, old)
        lived = killed(run, mode, at, "supersede" if old else "refuse")
        now = newest(run)
        assert now in (old, NEW), f"killed before change {at}"
        found.add(now)
        if lived:
            assert now == NEW
        if os.path.isdir(run):
            assert commit.settle(run, STEP, NEW) is (now == NEW)
            assert newest(run) == now
        save(run, NEXT, "supersede" if commit.existing(run, STEP) else "refuse")
        assert newest(run) == NEXT
        shutil.rmtree(run)
        if lived:
            break
    assert lived
    assert at > 7
    assert found == {old, NEW}


# ---- failing anywhere ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("applied", [False, True], ids=["refused", "done but reported"])
@pytest.mark.parametrize("old", [None, OLD])
@pytest.mark.parametrize("mode", MODES)
def test_an_error_anywhere_is_called_what_it_is(
    run: str, monkeypatch: pytest.MonkeyPatch, mode: str, old: str | None, applied: bool
) -> None:
    behave(mode, partial(monkeypatch.setattr, local))
    outcomes = set()

    def fail(real: Callable[[], Any]) -> None:
        if applied:
            real()
        raise OSError(errno.EIO, "Input/output error")

    for at in range(100):
        if old:
            save(run, old)
        decided: list[bool] = []
        countdown = Countdown(at, fail)
        with pytest.MonkeyPatch.context() as patch:
            countdown.install(partial(patch.setattr, local))
            outcome = attempt(run, "supersede" if old else "refuse", decided)
        outcomes.add(outcome)
        now = newest(run)
        if outcome == "committed":
            assert now == NEW
        elif outcome == "failed":
            assert now == old
            assert not decided
        else:
            assert decided
            assert now in (old, NEW)
        if os.path.isdir(run):
            assert commit.settle(run, STEP, NEW) is (newest(run) == NEW)
            assert now == newest(run)
        save(run, NEXT, "supersede" if commit.existing(run, STEP) else "refuse")
        assert newest(run) == NEXT
        shutil.rmtree(run)
        if countdown.left >= 0:
            break
    assert countdown.left >= 0
    assert outcomes == {"committed", "failed", "uncertain"}


def attempt(run: str, on_existing: str, decided: list[bool]) -> str:
    staging = None
    try:
        staging = commit.prepare(run, STEP, NEW)
        sizes = write(staging)
        data = manifest(NEW, STEP, sizes)
        commit.publish(staging, data, sizes, on_existing, decide=lambda: decided.append(True))
    except CommitUncertainError:
        return "uncertain"
    except (OSError, SaveError):
        if staging is not None:
            commit.discard(staging)
        return "failed"
    return "committed"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("old", [None, OLD])
@pytest.mark.parametrize("mode", MODES)
def test_interrupted_anywhere_cleaning_up_takes_nothing_that_is_visible(
    run: str, monkeypatch: pytest.MonkeyPatch, mode: str, old: str | None, applied: bool
) -> None:
    behave(mode, partial(monkeypatch.setattr, local))

    def interrupt(real: Callable[[], Any]) -> None:
        if applied:
            real()
        raise KeyboardInterrupt

    countdown, at = Countdown(-1, interrupt), 0
    while countdown.left < 0:
        if old:
            save(run, old)
        staging = commit.prepare(run, STEP, NEW)
        sizes = write(staging)
        countdown = Countdown(at, interrupt)
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            countdown.install(partial(patch.setattr, local))
            commit.publish(staging, manifest(NEW, STEP, sizes), sizes, "supersede" if old else "refuse")
        before = newest(run)
        commit.discard(staging)
        assert newest(run) == before
        assert before in (old, NEW)
        assert commit.settle(run, STEP, NEW) is (before == NEW)
        shutil.rmtree(run)
        at += 1
    assert at > 4


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("mode", MODES)
def test_a_name_taken_at_the_last_moment_is_a_certain_failure(
    run: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    behave(mode, partial(monkeypatch.setattr, local))
    staging = commit.prepare(run, STEP, NEW)
    sizes = write(staging)

    def take() -> None:
        other = replace(staging, save_id=OLD, path=staging.final)
        os.makedirs(other.path, exist_ok=True)
        Path(other.path, "manifest.json").write_bytes(manifest(OLD, STEP, write(other)))

    with pytest.raises(NotVisibleError, match="exists already") as caught:
        commit.publish(staging, manifest(NEW, STEP, sizes), sizes, decide=take)
    assert caught.value.found == f"save {OLD}"
    commit.discard(staging)
    assert newest(run) == OLD


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("old", [None, OLD])
@pytest.mark.parametrize("mode", MODES[:4])
def test_a_coordinator_that_wakes_after_its_save_was_settled_makes_nothing_visible(
    run: str, monkeypatch: pytest.MonkeyPatch, mode: str, old: str | None
) -> None:
    behave(mode, partial(monkeypatch.setattr, local))
    if old:
        save(run, old)
    staging = commit.prepare(run, STEP, NEW)
    sizes = write(staging)
    settled: list[bool] = []

    def sleep() -> None:
        settled.append(commit.settle(run, STEP, NEW))

    with pytest.raises(NotVisibleError, match="gave this save up"):
        commit.publish(staging, manifest(NEW, STEP, sizes), sizes, "supersede", decide=sleep)
    assert settled == [False]
    assert newest(run) == old


@pytest.mark.usefixtures("fresh")
def test_a_rename_answered_twice_by_the_network_counts_once(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = local.rename_noreplace

    def twice(source: str, target: str) -> None:
        real(source, target)
        if "step-" in target:
            real(source, target)

    staging = commit.prepare(run, STEP, NEW)
    sizes = write(staging)
    monkeypatch.setattr(local, "rename_noreplace", twice)
    commit.publish(staging, manifest(NEW, STEP, sizes), sizes)
    assert newest(run) == NEW


@pytest.mark.usefixtures("fresh")
def test_settling_decides_both_ways_and_again(run: str) -> None:
    save(run, OLD)
    assert commit.settle(run, STEP, OLD)
    assert commit.settle(run, STEP, OLD)
    assert not commit.settle(run, STEP, NEW)
    staging = commit.prepare(run, STEP + 1, NEW)
    write(staging)
    assert not commit.settle(run, STEP + 1, NEW)
    assert not os.path.exists(staging.path)
    assert not commit.settle(run, STEP + 1, NEW)
    assert os.listdir(run) == ["step-00000007"]


# ---- where nothing can be promised -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
def test_where_files_are_not_created_exclusively_the_save_is_refused(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = local.create
    monkeypatch.setattr(local, "create", lambda path, nbytes=0: os.open(path, os.O_RDWR | os.O_CREAT))
    with pytest.raises(SaveError, match="nothing is atomic") as caught:
        commit.prepare(run, STEP, NEW)
    assert caught.value.rule == "P-PROBE"
    assert caught.value.advice
    assert os.listdir(run) == []
    monkeypatch.setattr(local, "create", real)
    assert save(run, NEXT)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("lie", ["replaces", "does nothing", "plain replaces"])
def test_a_file_system_that_lies_about_renames_is_found_out(
    run: str, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    def replace(source: str, target: str) -> None:
        if os.path.isdir(target):
            shutil.rmtree(target)
        os.rename(source, target)

    if lie == "does nothing":
        monkeypatch.setattr(local, "exchange", lambda a, b: None)
    else:
        monkeypatch.setattr(local, "rename_noreplace", replace if lie == "replaces" else refuse(errno.EINVAL))
        monkeypatch.setattr(local, "rename", replace if lie == "plain replaces" else os.rename)
    staging = commit.prepare(run, STEP, NEW)
    expected = {"replaces": "rename-plain", "does nothing": "rename", "plain replaces": "manifest-last"}
    assert staging.mode == expected[lie]
    assert not staging.exchange


@pytest.mark.usefixtures("fresh")
def test_fuse_programs_without_the_flag_are_not_trusted_with_folders(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "filesystem", lambda path: "fuse.unheard-of")
    assert commit.prepare(run, STEP, NEW).mode == "rename"
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(local, "rename_noreplace", refuse(errno.EINVAL))
    assert commit.prepare(run, STEP, NEXT).mode == "manifest-last"


@pytest.mark.usefixtures("fresh")
def test_a_run_folder_is_probed_once(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    real = local.rename_noreplace

    def counted(source: str, target: str) -> None:
        calls.append(source)
        real(source, target)

    monkeypatch.setattr(local, "rename_noreplace", counted)
    for step in range(3):
        staging = commit.prepare(run, step, secrets.token_hex(16))
        sizes = write(staging)
        commit.publish(staging, manifest(staging.save_id, step, sizes), sizes)
    assert len(calls) == 2 + 3
    assert hidden(run) == []


@pytest.mark.usefixtures("fresh")
def test_a_damaged_manifest_keeps_its_folder_in_manifest_last(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    behave("manifest-last by link", partial(monkeypatch.setattr, local))
    path = save(run, OLD)
    data = bytearray(commit.read_manifest(path))
    data[3] ^= 1
    Path(path, "manifest.json").write_bytes(data)
    assert commit.existing(run, STEP) == commit.Existing(path, None)
    with pytest.raises(SaveError):
        save(run, NEW)
    assert os.path.exists(os.path.join(path, commit.shard_name("manifest-last", 0, OLD)))
    save(run, NEXT, "supersede")
    assert newest(run) == NEXT


@pytest.mark.parametrize(
    ("mode", "name"), [("rename", "rank-00003.shard"), ("manifest-last", f"rank-00003-{NEW}.shard")]
)
def test_shards_carry_the_save_id_only_where_saves_share_a_folder(mode: str, name: str) -> None:
    assert commit.shard_name(mode, 3, NEW) == name
    assert names.shard_path_fault(name) is None

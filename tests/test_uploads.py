"""The uploader works beside the training: it forgets no step, meets outages with patience, and never two at a time."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import make
import pytest
import s3_server
from s3_server import Faults

import ckptspec
from ckptspec.engine.life import signs
from ckptspec.engine.life.rollback import rollback
from ckptspec.engine.locate import latest
from ckptspec.engine.mirroring import uploads
from ckptspec.engine.mirroring.copying import Copied, copy
from ckptspec.engine.mirroring.uploaded import Lock, Upload, recorded
from ckptspec.engine.mirroring.uploads import Uploader
from ckptspec.errors import CkptspecError, NotCommittedError, SaveError

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "BACKOFF", (0.05, 0.1))
    monkeypatch.setattr(uploads, "POLL", 0.05)
    monkeypatch.setattr("ckptspec.storage.bucket._RETRY", {"max_retries": 0})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    with s3_server.serve_with_faults() as (server, faults):
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield faults


def add(run: Path, step: int, *, save_id: str | None = None, world: int = 1) -> Path:
    made = {"step": step, "save_id": save_id or f"{step:032x}", "run_id": "one-run"}
    return make.checkpoint(run / f"step-{step:08d}", world, **made)


def states(uploader: Uploader) -> dict[int, str]:
    return {u.step: u.state for u in uploader.status()}


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Gate:
    """Holds the uploader's copies until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.open = threading.Event()
        copying = uploads.copy_folder

        def held(folder: str, *rest: object) -> Copied:
            self.begun.append(int(folder[-8:]))
            assert self.open.wait(PATIENCE)
            return copying(folder, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(uploads, "copy_folder", held)


# ---- the straight way ------------------------------------------------------------------------------------------------


def test_steps_become_safe_and_the_status_says_so(run: Path, mirror: Path) -> None:
    done: list[Copied] = []
    with Uploader(run, mirror, done=done.append) as uploader:
        assert uploader.wait(PATIENCE)
        for step in (1, 2):
            add(run, step)
            uploader.enqueue(step)
        assert uploader.wait(PATIENCE)
        assert states(uploader) == {1: "safe", 2: "safe"}
    assert latest(mirror) == str(mirror / "step-00000002")
    assert ckptspec.validate(mirror, level="bytes").findings == ()
    assert sorted(d.step for d in done) == [1, 2]
    assert all(u.sent == u.nbytes and u.mirror == str(mirror) for u in recorded(run))
    with pytest.raises(CkptspecError, match="closed"):
        uploader.enqueue(1)
    with pytest.raises(NotCommittedError):
        Uploader(run, mirror).enqueue(3)


def test_the_newest_goes_first_and_nothing_it_copies_is_removed(
    run: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    add(run, 1)
    with Uploader(run, mirror) as uploader:
        until(lambda: gate.begun == [1])
        assert (signs.signs(str(run)).at(f"{1:032x}") or "").startswith("upload by process")
        for step in (2, 3, 4):
            add(run, step)
            uploader.enqueue(step)
        shutil.rmtree(run / "step-00000003")  # as retention may, of one that only waits
        assert not uploader.wait(0.05)
        gate.open.set()
        assert uploader.wait(PATIENCE)
        assert gate.begun == [1, 4, 2]
        assert states(uploader) == {1: "safe", 2: "safe", 3: "gone", 4: "safe"}
    assert signs.signs(str(run)).at(f"{1:032x}") is None


def test_a_fault_of_who_is_told_harms_nothing(run: Path, mirror: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(run, 1)
    add(run, 2)

    def broken(copied: Copied) -> None:
        raise ValueError(copied.step)

    with caplog.at_level(logging.INFO, "ckptspec"), Uploader(run, mirror, done=broken) as uploader:
        uploader.enqueue(1)
        assert uploader.wait(PATIENCE)
        assert states(uploader) == {1: "safe", 2: "safe"}
    assert any(r.message.startswith("upload step=2 nbytes=") for r in caplog.records)


# ---- across processes ------------------------------------------------------------------------------------------------

_CHILD = """
import sys
from ckptspec.engine.mirroring.uploads import Uploader
uploader = Uploader(sys.argv[1], sys.argv[2], float(sys.argv[3]), progress=lambda n: print(n, flush=True))
sys.stdin.read()
"""


def child(run: Path, mirror: Path | str, rate: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CHILD, str(run), str(mirror), str(rate)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_the_next_process_goes_on_where_a_killed_one_was(run: Path, mirror: Path) -> None:
    nbytes = sum(p.stat().st_size for p in add(run, 5, world=4).glob("*.shard"))
    with child(run, mirror, nbytes / 2) as killed:
        assert killed.stdout is not None
        for _ in range(3):
            assert killed.stdout.readline()
        time.sleep(0.3)
        killed.send_signal(signal.SIGKILL)
    assert latest(mirror) is None
    (left,) = recorded(run)
    assert left.state == "sending"
    sent: list[int] = []
    with Uploader(run, mirror, progress=sent.append) as uploader:
        assert uploader.wait(PATIENCE)
        assert states(uploader) == {5: "safe"}
    assert sum(sent) == nbytes - left.sent < nbytes


def test_an_interpreter_that_ends_leaves_the_rest_to_the_next(run: Path, mirror: Path) -> None:
    add(run, 5, world=4)
    with child(run, mirror, 10.0) as ended:
        assert ended.stdout is not None
        assert ended.stdin is not None
        assert ended.stdout.readline()
        ended.stdin.close()
        assert ended.wait(PATIENCE) == 0
    assert [u.state for u in recorded(run)] == ["sending"]
    with Uploader(run, mirror) as uploader:
        assert uploader.wait(PATIENCE)
    assert latest(mirror) is not None


def test_of_two_uploaders_the_second_waits_and_then_takes_over(
    run: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(run, 1)
    first = Uploader(run, mirror)
    assert first.wait(PATIENCE)
    gate = Gate(monkeypatch)
    add(run, 2)
    second = Uploader(run, mirror)
    until(lambda: second.waiting is not None)
    assert second.waiting == "another process copies to this mirror"
    assert not second.wait(0.2)
    assert gate.begun == []
    gate.open.set()
    assert first.close(PATIENCE)
    assert second.wait(PATIENCE)
    assert gate.begun == [2]
    assert second.waiting is None
    assert second.close(PATIENCE)
    assert {u.step: u.state for u in recorded(run)} == {1: "safe", 2: "safe"}


def test_a_lock_is_not_kept_by_a_forked_child(tmp_path: Path) -> None:
    first, second = Lock(str(tmp_path / "lock")), Lock(str(tmp_path / "lock"))
    assert first.take()
    assert first.take()
    assert not second.take()
    told, tell = os.pipe()
    heard, hear = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(hear, b"x")
        os.read(told, 1)
        os._exit(0)
    os.read(heard, 1)
    first.release()
    taken = second.take()
    os.write(tell, b"x")
    os.waitpid(child, 0)
    assert taken
    second.release()


def test_what_was_committed_while_nobody_copied_is_taken_up(run: Path, mirror: Path) -> None:
    for step in (1, 2):
        add(run, step)
    with Uploader(run, mirror) as uploader:  # of a run that had no mirror the newest goes
        assert uploader.wait(PATIENCE)
        assert states(uploader) == {2: "safe"}
    add(run, 3)
    with Uploader(run, mirror) as uploader:
        assert uploader.wait(PATIENCE)
        assert states(uploader) == {2: "safe", 3: "safe"}


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_mirror_that_is_down_is_tried_until_it_is_back(
    run: Path, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    add(run, 1)
    faults.busy = 5  # the first is met at the opening
    with caplog.at_level(logging.WARNING, "ckptspec"), Uploader(run, "s3://bucket/run") as uploader:
        assert uploader.waiting is not None
        assert uploader.wait(PATIENCE)
        assert states(uploader) == {1: "safe"}
        faults.busy = 3
        add(run, 2)
        uploader.enqueue(2)
        assert uploader.wait(PATIENCE)
        assert states(uploader) == {1: "safe", 2: "safe"}
        assert uploader.waiting is None
    assert any("does not answer" in r.message for r in caplog.records)
    assert any("step 2 was not copied" in r.message and "tried again" in r.message for r in caplog.records)
    assert latest("s3://bucket/run") == "s3://bucket/run/step-00000002"


def test_a_wrong_address_or_an_unfit_store_is_said_at_once(run: Path, faults: Faults) -> None:
    faults.deaf = True
    with pytest.raises(SaveError, match="does not keep the condition"):
        Uploader(run, "s3://bucket/run")
    with pytest.raises(OSError, match="no such kind of store"):
        Uploader(run, "ftp://bucket/run")
    with pytest.raises(SaveError, match="no second place"):
        Uploader(run, run / "mirror")


def test_what_can_never_be_sent_is_given_up_and_holds_up_nothing(
    run: Path, mirror: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    add(other, 1, save_id="f" * 32)
    copy(other, 1, mirror)
    add(run, 1)
    damaged = add(run, 2) / "rank-00000.shard"
    data = bytearray(damaged.read_bytes())
    data[705] ^= 1
    damaged.write_bytes(data)
    add(run, 3)
    with caplog.at_level(logging.ERROR, "ckptspec"), Uploader(run, mirror) as uploader:
        for step in (1, 2):
            uploader.enqueue(step)
        assert uploader.wait(PATIENCE)
        assert states(uploader) == {1: "failed", 2: "failed", 3: "safe"}
        told: dict[int, Upload] = {u.step: u for u in uploader.status()}
        assert "already, of another save" in (told[1].error or "")
        assert "differ from their digest" in (told[2].error or "")
    assert len([r for r in caplog.records if "and cannot be" in r.message]) == 2
    assert latest(mirror) == str(mirror / "step-00000003")


def test_what_a_roll_back_took_out_of_the_run_goes_out_of_the_mirror(run: Path, mirror: Path) -> None:
    with Uploader(run, mirror) as uploader:
        for step in (1, 2, 3):
            add(run, step)
            uploader.enqueue(step)
        assert uploader.wait(PATIENCE)
        rollback(run, 1)
        add(run, 2, save_id="d" * 32)
        uploader.enqueue(2)
        assert uploader.wait(PATIENCE)
        assert {u.save_id: u.state for u in uploader.status() if u.step == 2} == {f"{2:032x}": "safe", "d" * 32: "safe"}
    assert latest(mirror) == str(mirror / "step-00000002")
    assert not (mirror / "step-00000003/manifest.json").exists()


def test_closing_in_haste_leaves_the_rest_on_record(run: Path, mirror: Path) -> None:
    add(run, 1, world=4)
    uploader = Uploader(run, mirror, rate=10)
    until(lambda: states(uploader) == {1: "sending"})
    begun = time.monotonic()
    assert not uploader.close(0.1)
    assert time.monotonic() - begun < 5
    assert states(uploader) == {1: "sending"}
    assert not uploader.wait(PATIENCE)  # it has ended
    assert time.monotonic() - begun < 10


def test_what_a_killed_process_had_begun_to_note_goes(run: Path, mirror: Path) -> None:
    add(run, 1)
    copy(run, 1, mirror)
    (folder,) = (p for p in (run / ".uploads").iterdir() if p.is_dir())
    old, young = folder / "step-00000001-x.json.1.new", folder / "step-00000001-x.json.2.new"
    for path in (old, young):
        path.write_bytes(b"{")
    os.utime(old, (1e9, 1e9))
    with Uploader(run, mirror) as uploader:
        until(lambda: not old.exists())
        assert young.exists()
        assert states(uploader) == {1: "safe"}


@pytest.mark.long
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_a_kill_at_any_moment_leaves_a_step_whole_or_not_to_be_seen(
    run: Path, mirror: Path, faults: Faults, place: str
) -> None:
    where = str(mirror) if place == "folder" else "s3://bucket/run"
    dice = random.Random(5)
    safe = 0
    for step in range(1, 41):
        nbytes = sum(p.stat().st_size for p in add(run, step, world=3).glob("*.shard"))
        with child(run, where, nbytes * 4) as killed:
            assert killed.stdout is not None
            assert killed.stdout.readline()
            time.sleep(dice.uniform(0, 0.6))
            killed.send_signal(signal.SIGKILL)
        found = latest(where)
        assert found is None or ckptspec.validate(found, level="bytes").findings == ()
        told = max((u.step for u in recorded(run) if u.state == "safe"), default=0)
        assert told >= safe
        assert told == 0 or (found is not None and int(found[-8:]) >= told)
        safe = told
    with Uploader(run, where) as uploader:
        assert uploader.wait(PATIENCE)
        assert set(states(uploader).values()) == {"safe"}
    assert latest(where) == f"{where}/step-00000040"

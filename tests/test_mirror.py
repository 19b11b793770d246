"""A step in a mirror is all there or not to be seen, never another's, and is read where it lies or brought back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import make
import pytest
import s3_server
import torch
from hypothesis import given
from hypothesis import strategies as st
from s3_server import Server

import ckptspec
from ckptspec.cli.main import main
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.life.rollback import rollback
from ckptspec.engine.locate import latest, newest
from ckptspec.engine.mirroring import copying
from ckptspec.engine.mirroring.copying import copy, part_size
from ckptspec.engine.mirroring.mirror import Found, find, open_mirror, set_aside
from ckptspec.engine.mirroring.recall import fetch_back
from ckptspec.engine.mirroring.throttle import Stopped, Throttle
from ckptspec.engine.mirroring.uploaded import recorded
from ckptspec.engine.mirroring.verified import cut
from ckptspec.engine.saves import probe
from ckptspec.engine.scan import Block
from ckptspec.errors import IntegrityError, NotCommittedError, PlanError, SaveError, ShardError
from ckptspec.format.manifest import decode
from ckptspec.pytorch import group
from ckptspec.pytorch.load import LoadResult
from ckptspec.pytorch.restoring import Restoring
from ckptspec.storage.stores import open_store

RUN_ID = "one-run"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server.serve() as running:
        yield running


@pytest.fixture
def url(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that is this test's own."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{server.bucket}/{tmp_path.name}/run"


@pytest.fixture(params=["path", "s3"])
def mirror(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "path":
        return str(tmp_path / "mirror")
    address: str = request.getfixturevalue("url")
    return address


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 10 and 20 of two ranks."""
    for step in (10, 20):
        add(tmp_path / "run", step)
    return tmp_path / "run"


def add(run: Path, step: int, *, save_id: str | None = None, world: int = 2, run_id: str = RUN_ID) -> Path:
    made = {"step": step, "save_id": save_id or f"{step:032x}", "run_id": run_id}
    return make.checkpoint(run / f"step-{step:08d}", world, **made)


def shard_of(step: int, rank: int = 0) -> str:
    return f"step-{step:08d}/rank-{rank:05d}-{step:032x}.shard"


def names(place: str, step: int) -> set[str]:
    return set(open_store(place).list(f"step-{step:08d}").files)


def content(place: str, key: str) -> bytes:
    store = open_store(place)
    data = bytearray(store.stat(key).nbytes)
    store.read_into(key, memoryview(data), 0)
    return bytes(data)


def overwrite(place: str, key: str, data: bytes) -> None:
    open_store(place).put(key, [memoryview(data)], len(data), 1 << 30)


def flip(place: str, key: str, at: int = 700) -> None:
    data = bytearray(content(place, key))
    data[at] ^= 1
    overwrite(place, key, bytes(data))


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# ---- the copy --------------------------------------------------------------------------------------------------------


def test_a_copied_step_is_a_checkpoint_whose_shards_have_names_of_their_save(run: Path, mirror: str) -> None:
    done = copy(run, 20, mirror)
    assert (done.step, done.sent, done.nbytes) == (20, done.nbytes, load_manifest(run)[1].nbytes)
    where = f"{open_store(mirror).url}/step-00000020"
    assert latest(mirror) == done.path == where
    assert ckptspec.validate(mirror, level="bytes").findings == ()
    manifest = load_manifest(mirror)[1]
    assert manifest.commit == "manifest-last"
    assert [s.path for s in manifest.shards] == [shard_of(20, r).split("/")[1] for r in (0, 1)]
    assert content(mirror, f"step-00000020/source-{20:032x}.json") == (run / "step-00000020/manifest.json").read_bytes()
    assert {s.path for s in manifest.shards} | {"manifest.json", f"source-{20:032x}.json"} == names(mirror, 20)
    (upload,) = recorded(run)
    assert (upload.step, upload.state, upload.sent, upload.mirror) == (20, "safe", done.nbytes, open_store(mirror).url)
    assert "source" not in done.line()
    assert f"save_id={20:032x}" in done.line()


def test_a_second_copy_sends_nothing_and_a_lost_or_changed_shard_alone(run: Path, url: str) -> None:
    whole = copy(run, 20, url).nbytes
    assert copy(run, 20, url).sent == 0
    open_store(url).delete(shard_of(20, 1))
    assert latest(url) is None
    assert newest(url).skipped[0].finding.code == "S-MISSING"
    assert 0 < copy(run, 20, url).sent < whole
    flip(url, shard_of(20, 0))  # as long as it was: the store's own tag tells
    assert ckptspec.validate(url, level="bytes").exit_code == 1
    assert 0 < copy(run, 20, url).sent < whole
    assert ckptspec.validate(url, level="bytes").findings == ()


def test_a_damaged_step_never_becomes_visible(run: Path, mirror: str) -> None:
    flip(str(run), "step-00000020/rank-00001.shard")
    with pytest.raises(IntegrityError) as damaged:
        copy(run, 20, mirror)
    assert damaged.value.rule == "B-DIGEST"
    assert (damaged.value.where.file, damaged.value.where.rank) == ("rank-00001.shard", 1)
    assert damaged.value.where.range is not None
    assert "manifest.json" not in names(mirror, 20)
    assert shard_of(20, 1).split("/")[1] not in names(mirror, 20)
    assert latest(mirror) is None
    (run / "step-00000020/rank-00001.shard").unlink()
    with pytest.raises(NotCommittedError, match="step 20 is no good checkpoint here: the shard is missing"):
        copy(run, 20, mirror)


@pytest.mark.parametrize("at", [3, -1, -70])  # header, trailer, index
def test_no_byte_of_a_shard_goes_unverified(run: Path, tmp_path: Path, at: int) -> None:
    flip(str(run), "step-00000020/rank-00000.shard", at)
    with pytest.raises((IntegrityError, ShardError)):
        copy(run, 20, tmp_path / "mirror")
    assert latest(tmp_path / "mirror") is None


def test_the_manifest_of_another_save_is_never_replaced(run: Path, mirror: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    add(other, 20, save_id="f" * 32)
    copy(other, 20, mirror)
    with pytest.raises(SaveError, match="already, of another save") as refused:
        copy(run, 20, mirror)
    assert (refused.value.rule, refused.value.found) == ("P-EXISTING", f"save {'f' * 32}")
    assert load_manifest(mirror)[1].save_id == "f" * 32
    assert ckptspec.validate(mirror, level="bytes").findings == ()
    overwrite(mirror, "step-00000010/manifest.json", b"{")
    with pytest.raises(SaveError, match="a manifest that breaks L-"):
        copy(run, 10, mirror)


def test_who_comes_second_in_the_last_moment_is_refused_by_the_store(
    run: Path, mirror: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    add(other, 20, save_id="f" * 32)
    check = copying._Copying._check

    def and_another_commits(self: copying._Copying) -> None:
        check(self)
        monkeypatch.setattr(copying._Copying, "_check", check)
        copy(other, 20, mirror)

    monkeypatch.setattr(copying._Copying, "_check", and_another_commits)
    with pytest.raises(SaveError, match="already, of another save"):
        copy(run, 20, mirror)
    assert load_manifest(mirror)[1].save_id == "f" * 32


def test_a_put_whose_answer_was_lost_counts_as_done(run: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(open_store(mirror))
    put = kind.put_if_absent

    def twice(self: object, key: str, data: bytes) -> None:
        put(self, key, data)  # type: ignore[arg-type]
        put(self, key, data)  # type: ignore[arg-type]

    place = open_mirror(mirror, run)
    monkeypatch.setattr(copying, "open_mirror", lambda *_: place)
    monkeypatch.setattr(kind, "put_if_absent", twice)
    assert copy(run, 20, mirror).sent > 0
    assert latest(mirror) is not None


def test_a_mirror_of_another_run_or_inside_the_run_is_refused(run: Path, mirror: str, tmp_path: Path) -> None:
    add(tmp_path / "other", 30, run_id="another")
    copy(tmp_path / "other", 30, mirror)
    with pytest.raises(SaveError, match="checkpoints of another run"):
        copy(run, 20, mirror)
    with pytest.raises(SaveError, match="checkpoints of another run"):
        find(run, mirror)
    with pytest.raises(SaveError, match="no second place"):
        copy(run, 20, run / "mirror")


def test_a_shard_of_several_parts_arrives_whole(tmp_path: Path, url: str) -> None:
    state = {"w": torch.arange(5_000_000, dtype=torch.float32), "small": torch.ones(3)}
    ckptspec.save(tmp_path / "run", state, step=1)
    copy(tmp_path / "run", 1, url)
    found = {"w": torch.zeros(5_000_000), "small": torch.zeros(3)}
    result = ckptspec.load(url, into=found)
    assert (result.step, result.path) == (1, f"{url}/step-00000001")
    assert torch.equal(found["w"], state["w"])
    part = ckptspec.read(url, ["w"], slices={"w": [slice(4_000_000, 4_000_004)]})["w"]
    assert part.tolist() == [4e6, 4e6 + 1, 4e6 + 2, 4e6 + 3]
    flip(url, f"step-00000001/rank-00000-{result.save_id}.shard", 15_000_000)
    with pytest.raises(IntegrityError) as damaged:
        ckptspec.load(url, into=found)
    assert damaged.value.where.tensor == "w"


# ---- killed and gone on with -----------------------------------------------------------------------------------------

_SLOW = """
import sys
from ckptspec.engine.mirroring.copying import copy
copy(sys.argv[1], 20, sys.argv[2], rate=float(sys.argv[3]), progress=lambda n: print(n, flush=True))
"""


def test_a_copy_that_was_killed_is_gone_on_with(tmp_path: Path, mirror: str) -> None:
    run = tmp_path / "run"
    add(run, 20, world=4)
    nbytes = load_manifest(run)[1].nbytes
    command = [sys.executable, "-c", _SLOW, str(run), mirror, str(nbytes / 2)]  # two shards a second
    killed = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert killed.stdout is not None
    for _ in range(3):
        assert killed.stdout.readline()
    time.sleep(0.3)
    killed.send_signal(signal.SIGKILL)
    killed.wait(20)
    killed.stdout.close()
    assert latest(mirror) is None
    (upload,) = recorded(run)
    assert upload.state == "sending"
    assert 0 < upload.sent < nbytes
    done = copy(run, 20, mirror)
    assert done.sent == nbytes - upload.sent
    assert ckptspec.validate(mirror, level="bytes").findings == ()
    assert recorded(run)[0].state == "safe"


def test_a_record_that_cannot_be_read_costs_an_upload_and_no_more(run: Path, mirror: str) -> None:
    copy(run, 20, mirror)
    (record,) = (run / ".uploads").glob("*/step-*.json")
    open_store(mirror).delete("step-00000020/manifest.json")
    for text in ("{", json.dumps({**json.loads(record.read_text()), "sent": "all"})):
        record.write_text(text)
        assert recorded(run) == ()
        assert copy(run, 20, mirror).sent > 0
        open_store(mirror).delete("step-00000020/manifest.json")
    assert copy(run, 20, mirror).sent == 0


def test_two_do_not_copy_at_once(run: Path, tmp_path: Path) -> None:
    mirror, nbytes = str(tmp_path / "mirror"), load_manifest(run)[1].nbytes
    first = subprocess.Popen([sys.executable, "-c", _SLOW, str(run), mirror, str(nbytes / 30)], stdout=subprocess.PIPE)
    try:
        assert first.stdout is not None
        assert first.stdout.readline()
        with pytest.raises(SaveError, match="another process is copying"):
            copy(run, 20, mirror)
    finally:
        first.kill()
        first.wait(20)
        first.stdout.close()  # type: ignore[union-attr]
    assert copy(run, 20, mirror).step == 20


# ---- reading it where it lies ----------------------------------------------------------------------------------------


def test_every_reader_takes_the_address(run: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    copy(run, 10, url)
    copy(run, 20, url)
    for path in (url, f"{url}/", f"{url}/step-00000020", f"{url}/step-00000020/manifest.json"):
        for level in ("schema", "manifest", "shards", "bytes"):
            report = ckptspec.validate(path, level=level)
            assert (report.findings, report.step) == ((), 20), (path, level)
    near, far = ckptspec.read(run), ckptspec.read(url)
    assert near.keys() == far.keys()
    for name, value in near.items():
        pairs = [(value[r], far[name][r]) for r in value] if isinstance(value, dict) else [(value, far[name])]
        assert all(a.tobytes() == b.tobytes() for a, b in pairs)
    with pytest.raises(PlanError, match="cannot be mapped"):
        ckptspec.read(url, mmap=True)
    assert ckptspec.diff(run, url).equal
    for arguments in (["latest", url], ["inspect", url], ["plan", url, "--world-size", "1"], ["diff", str(run), url]):
        assert main(arguments) == 0, arguments
    shown = capsys.readouterr().out
    assert shown.startswith(f"{url}/step-00000020\n")


def test_a_reshard_reads_from_the_address_and_writes_to_no_other(run: Path, url: str, tmp_path: Path) -> None:
    copy(run, 20, url)
    ckptspec.reshard(url, tmp_path / "out", 1)
    assert load_manifest(tmp_path / "out")[1].world_size == 1
    assert ckptspec.validate(tmp_path / "out", level="bytes").findings == ()
    near = tmp_path / "near"
    ckptspec.reshard(run, near, 1)
    assert ckptspec.diff(near, tmp_path / "out").equal
    with pytest.raises(SaveError, match="a save is written to a file system"):
        ckptspec.reshard(run, f"{url}/out", 1)
    assert not (Path.cwd() / "s3:").exists()


def test_no_checkpoint_at_an_address_is_told_as_of_a_path(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert latest(url) is None
    for command in ("validate", "inspect", "latest"):
        assert main([command, url]) == 3
    assert "No such file" in capsys.readouterr().err
    overwrite(url, "notes.txt", b"x")
    assert main(["latest", url]) == 4
    assert main(["validate", url]) == 4
    overwrite(url, shard_of(7), b"x")
    assert main(["latest", url]) == 1
    assert main(["validate", f"{url}/step-00000007"]) == 1


def test_the_newest_at_an_address_is_by_the_manifests_step(run: Path, url: str) -> None:
    copy(run, 10, url)
    (run / "step-00000020").rename(run / "step-00000005")
    for path in (run / "step-00000005").iterdir():
        overwrite(url, f"step-00000005/{path.name}", path.read_bytes())
    assert latest(url) == f"{url}/step-00000005"
    assert [s.finding.code for s in newest(url).skipped] == ["C-STEP"]


# ---- the nearest good copy -------------------------------------------------------------------------------------------


def test_the_newest_good_step_over_both_is_found_here_first(run: Path, mirror: str) -> None:
    copy(run, 10, mirror)
    copy(run, 20, mirror)
    far = open_store(mirror).url
    found = find(run, mirror)
    assert (found.step, found.path, found.place) == (20, str(run / "step-00000020"), "local")
    os.truncate(run / "step-00000020/rank-00000.shard", 9)
    found = find(run, mirror)
    assert (found.step, found.path, found.place) == (20, f"{far}/step-00000020", "mirror")
    assert [s.finding.code for s in found.skipped] == ["S-NBYTES"]
    assert (find(run, mirror, below=20).step, find(run, mirror, below=20).place) == (10, "local")
    found = find(run, mirror, without={f"{far}/step-00000020"})
    assert (found.step, found.place) == (10, "local")
    assert find(run / "empty", mirror).place == "mirror"
    assert find(run / "empty", f"{mirror}/nothing") == Found(None, None, None, None)


def test_a_mirror_out_of_reach_matters_only_where_it_may_have_the_newest(
    run: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy(run, 20, url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("ckptspec.storage.bucket._RETRY", {"max_retries": 0})
    found = find(run, url)
    assert (found.step, found.place) == (20, "local")
    assert found.unreachable is not None
    job = Restoring(str(run), 0, group.channel().notes, lambda path: LoadResult(20, path, "", 0), url)
    assert job.newest(fallback=True).path == found.path
    assert [m.partition(":")[0] for m in caplog.messages] == [
        "the mirror cannot be asked, and by the record has nothing newer"
    ]
    for path in (run / "step-00000020").iterdir():
        path.unlink()
    with pytest.raises(OSError, match=r"s3://"):
        find(run, url)


def test_what_a_roll_back_took_out_is_not_found_in_the_mirror(run: Path, mirror: str) -> None:
    for step in (10, 20):
        copy(run, step, mirror)
    rollback(run, 10)
    assert latest(mirror) == f"{open_store(mirror).url}/step-00000020"  # not yet told
    assert (find(run, mirror).step, find(run, mirror).place) == (10, "local")
    assert set_aside(run, open_mirror(mirror, run)) == (20,)
    assert set_aside(run, open_mirror(mirror, run)) == ()
    assert latest(mirror) == f"{open_store(mirror).url}/step-00000010"
    add(run, 20, save_id="e" * 32)  # training comes by again
    copy(run, 20, mirror)
    assert load_manifest(mirror)[1].save_id == "e" * 32
    told = ckptspec.validate(mirror, level="bytes").findings
    assert {(f.code, f.severity) for f in told} == {("S-EXTRA", "warning")}
    kept = content(mirror, f"step-00000020/abandoned-{20:032x}.json")
    manifest = decode(kept).manifest
    assert manifest is not None
    assert {s.path for s in manifest.shards} <= names(mirror, 20)


# ---- bringing it back ------------------------------------------------------------------------------------------------


def test_a_lost_step_comes_back_bit_for_bit(run: Path, mirror: str, tmp_path: Path) -> None:
    before = files(run / "step-00000020")
    copy(run, 20, mirror)
    seen: list[int] = []
    back = fetch_back(tmp_path / "new", mirror, 20, progress=seen.append)
    assert files(tmp_path / "new/step-00000020") == before
    assert (back.path, back.fetched, back.kept) == (str(tmp_path / "new/step-00000020"), (0, 1), ())
    assert sum(seen) == back.nbytes == load_manifest(run)[1].nbytes
    assert sorted(os.listdir(tmp_path / "new")) == [".uploads", "step-00000020"]
    again = fetch_back(tmp_path / "new", mirror, 20)
    assert (again.fetched, again.kept, again.nbytes) == ((), (0, 1), 0)
    with pytest.raises(NotCommittedError, match="step 99"):
        fetch_back(tmp_path / "new", mirror, 99)


@pytest.mark.parametrize("damage", ["lost shard", "cut shard", "flipped byte", "no manifest", "cut manifest"])
def test_only_what_is_lost_here_comes_back(run: Path, tmp_path: Path, damage: str) -> None:
    mirror = tmp_path / "mirror"
    folder = run / "step-00000020"
    before = files(folder)
    copy(run, 20, mirror)
    if damage == "lost shard":
        (folder / "rank-00001.shard").unlink()
    elif damage == "cut shard":
        os.truncate(folder / "rank-00001.shard", 100)
    elif damage == "flipped byte":
        flip(str(run), "step-00000020/rank-00001.shard")
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        os.truncate(folder / "manifest.json", 100)
    back = fetch_back(run, mirror, 20)
    bad = (1,) if "manifest" not in damage else ()
    assert (back.fetched, back.kept) == (bad, tuple(r for r in (0, 1) if r not in bad))
    assert files(folder) == before
    assert sorted(os.listdir(run)) == [".uploads", "step-00000010", "step-00000020"]


def test_wrong_bytes_in_the_mirror_are_not_brought_back(run: Path, mirror: str, tmp_path: Path) -> None:
    copy(run, 20, mirror)
    flip(mirror, shard_of(20, 1))
    with pytest.raises(IntegrityError) as damaged:
        fetch_back(tmp_path / "new", mirror, 20)
    assert (damaged.value.rule, damaged.value.where.rank) == ("B-DIGEST", 1)
    assert latest(tmp_path / "new") is None
    with pytest.raises(IntegrityError):
        ckptspec.read(mirror)
    copy(run, 10, mirror)
    assert fetch_back(tmp_path / "new", mirror, 10).step == 10


def test_what_a_killed_process_brought_back_is_not_brought_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, new = tmp_path / "mirror", tmp_path / "new"
    copy(run, 20, mirror)
    monkeypatch.setattr("ckptspec.engine.saves.commit.publish", lambda *_, **__: pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        fetch_back(new, mirror, 20)
    monkeypatch.undo()
    (staging,) = (p for p in new.iterdir() if p.name.startswith(".tmp-"))
    flip(str(staging), "rank-00001.shard")  # of two shards one did not come through it
    seen: list[int] = []
    fetch_back(new, mirror, 20, progress=seen.append)
    assert sum(seen) == (run / "step-00000020/rank-00001.shard").stat().st_size
    assert files(new / "step-00000020") == files(run / "step-00000020")
    assert not staging.exists()


def test_another_save_of_the_step_stays_where_it_is(run: Path, tmp_path: Path) -> None:
    mirror, other = tmp_path / "mirror", tmp_path / "other"
    copy(run, 20, mirror)
    add(other, 20, save_id="f" * 32)
    before = files(other / "step-00000020")
    with pytest.raises(SaveError, match="already, of another save"):
        fetch_back(other, mirror, 20)
    assert files(other / "step-00000020") == before


def test_where_manifests_come_last_it_comes_back_so(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, new = tmp_path / "mirror", tmp_path / "new"
    copy(run, 20, mirror)
    monkeypatch.setattr(probe, "means", lambda _: probe.Means("fuse.s3fs", "manifest-last", link=True))
    fetch_back(new, mirror, 20)
    assert ckptspec.validate(new, level="bytes").findings == ()
    (bad,) = (new / "step-00000020").glob("rank-00001-*.shard")
    os.truncate(bad, 7)
    back = fetch_back(new, mirror, 20)
    assert (back.fetched, back.kept) == ((1,), (0,))
    assert ckptspec.validate(new, level="bytes").findings == ()
    assert load_manifest(new)[1].commit == "manifest-last"


# ---- parts and pace --------------------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30), size=st.integers(1, 60))
def test_parts_tile_the_file_and_hold_every_item_they_touch_whole(sizes: list[int], size: int) -> None:
    items, at = [], 0
    for i, nbytes in enumerate(sizes):
        items.append(Block(at, nbytes, 0, i))
        at += nbytes
    parts = list(cut(items, at, size))
    assert [(p.start, p.stop) for p in parts] == [(i, min(i + size, at)) for i in range(0, at, size)]
    for part in parts:
        touched = [i for i in items if i.start < part.stop and i.start + i.nbytes > part.start]
        assert list(part.items) == touched


def test_a_large_shard_has_parts_enough_and_not_too_many() -> None:
    for nbytes in (1, 8 << 20, 80 << 30, 5 << 40):
        size = part_size(nbytes)
        assert size >= copying.PART
        assert size % (1 << 20) == 0
        assert -(-nbytes // size) <= 10_000


def test_a_rate_holds_and_a_stop_is_heard_at_once() -> None:
    throttle = Throttle(1_000_000)
    begun = time.monotonic()
    for _ in range(5):
        throttle.take(50_000)
    assert 0.19 <= time.monotonic() - begun < 2
    throttle.take(100_000_000)
    throttle.stop()
    with pytest.raises(Stopped):
        throttle.take(1)
    with pytest.raises(ValueError, match="a rate"):
        Throttle(0)

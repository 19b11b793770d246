"""A reshard that is killed, damaged, interrupted or out of space ends with all or nothing, and goes on from there."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from written import World, columns, documents, flat, line, payloads, rows, values, whole

import ckptspec
from ckptspec.engine.agree.channel import Channel, LocalStore
from ckptspec.engine.resharding import batches, reshard
from ckptspec.engine.resharding.asking import Outcome, Request, Watcher
from ckptspec.engine.resharding.reshard import run
from ckptspec.engine.saves import staging
from ckptspec.errors import IntegrityError, SaveError
from ckptspec.format.layout import Axis, Mesh, MeshLayout
from ckptspec.format.manifest import Manifest, Member
from ckptspec.format.target import Target
from ckptspec.planner import strips
from ckptspec.planner.sizing import of_world
from ckptspec.storage import local

MEMORY = 4 << 20


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units and batches of a few KB, each noted at once: so that there is something to go on from."""
    monkeypatch.setattr(reshard, "units", lambda found: strips.units(found, 20_000, 20_000))
    monkeypatch.setattr(reshard, "SYNC_NBYTES", 0)
    monkeypatch.setattr(batches, "COPIES", 4)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushes take no time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def job(size: int = 4) -> World:
    """Parameters by rows, moments flat, something private."""
    w = World(size, {"main": line(size)}, {"rows": rows(), "zero": flat(align=4)}, block_size=4096)
    w.add("model/w", "bfloat16", (257, 64), "rows")
    w.add("model/u", "float32", (97, 33), "rows")
    members = [Member("model/w", 0, (257, 64)), Member("model/u", 257 * 64, (97, 33))]
    w.add_group("optimizer/zero", "zero", members, {"exp_avg": "optimizer/zero/exp_avg"}, "float32")
    w.add_local("rng/torch", "uint8", {rank: (16 + rank,) for rank in range(size)})
    w.objects = {"step": ("same", 12)}
    return w


def target_of(m: Manifest) -> Target:
    """Three ranks, what was cut by rows cut by columns."""
    t = of_world(m, 3)
    assert t.layouts is not None
    return replace(t, layouts={**t.layouts, "rows": columns()})


def request(folder: Path, out: Path, **options: Any) -> Request:
    return Request(str(folder), str(out), target_of(documents(folder)[0]), memory=MEMORY, **options)


def content(folder: Path) -> Any:
    """All that a checkpoint says but its save id and its time."""
    m, docs = documents(folder)
    same = [(d.index.chunks, d.index.digests, d.state_bytes) for d in docs]
    digests = tuple(replace(s, index_digest="") for s in m.shards)
    return same, payloads(folder), replace(m, save_id="", created_at="", shards=digests, digest="")


def good(outcome: Outcome) -> Path:
    report = ckptspec.validate(outcome.folder, level="bytes")
    assert report.findings == (), [str(f) for f in report.findings]
    return Path(outcome.folder)


# ---- killed ----------------------------------------------------------------------------------------------------------

EVENTS = [
    (local, "create"),
    (local, "write_at"),
    (local, "remove_file"),
    (local, "rename_noreplace"),
    (local, "fsync_folder"),
    (os, "fsync"),
]


class Death:
    """Kills the process before its n-th act on a disk; counts the acts."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int | None = None) -> None:
        self.count = 0
        self._number = number
        for owner, name in EVENTS:
            patch.setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **options: Any) -> Any:
            if self.count == self._number:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return real(*args, **options)

        return act


def forked(work: Callable[[], object]) -> int:
    """Run work in a child and return how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kills(count: int, wanted: int) -> Iterator[int]:
    """Some of `count` moments, the last ones, where it is committed, among them."""
    yield from sorted({*range(0, count, max(1, count // wanted)), *range(max(0, count - 4), count)})


def killed_and_gone_on_with(tmp_path: Path, wanted: int) -> None:
    folder = job().write(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        acts = Death(patch)
        expected = content(good(run(request(folder, tmp_path / "whole"))))
        count = acts.count
    resumed = 0
    for number in kills(count, wanted):
        out = tmp_path / f"out{number}"

        def die(number: int = number, out: Path = out) -> None:
            with pytest.MonkeyPatch.context() as patch:
                Death(patch, number)
                run(request(folder, out))

        assert forked(die) == -signal.SIGKILL, number
        done = out / "step-00000007"
        if done.exists():
            assert ckptspec.validate(done, level="bytes").ok, number
            assert content(done) == expected
            continue
        assert ckptspec.latest(out) is None
        outcome = run(request(folder, out))
        assert content(good(outcome)) == expected, number
        resumed += outcome.resumed
    assert resumed > 0


@pytest.mark.usefixtures("quick")
def test_a_kill_leaves_all_or_nothing_and_the_same_call_goes_on(tmp_path: Path) -> None:
    killed_and_gone_on_with(tmp_path, 10)


@pytest.mark.long
def test_a_kill_at_any_act_leaves_all_or_nothing(tmp_path: Path) -> None:
    killed_and_gone_on_with(tmp_path, 10_000)


class Stopping(Watcher):
    """Stops a reshard once so many bytes were written; keeps what was said."""

    def __init__(self, nbytes: int, error: BaseException) -> None:
        self.left = nbytes
        self.error = error
        self.said: list[str] = []

    def progress(self, nbytes: int) -> None:
        self.left -= nbytes
        if self.left < 0:
            raise self.error

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.mark.usefixtures("quick")
def test_an_interrupt_keeps_what_is_finished_and_is_not_written_again(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    expected = run(request(folder, tmp_path / "whole"))
    for error in (KeyboardInterrupt(), OSError(5, "Input/output error")):
        out = tmp_path / type(error).__name__
        watcher = Stopping(expected.account.nbytes_written * 2 // 3, error)
        with pytest.raises(type(error)):
            run(request(folder, out), watcher=watcher)
        assert "goes on from there" in watcher.said[-1]
        assert [p.name.startswith(".tmp-00000007-") for p in out.iterdir()] == [True]
        outcome = run(request(folder, out))
        assert outcome.resumed > 0
        assert outcome.account.nbytes_written < expected.account.nbytes_written * 2 // 3
        assert content(good(outcome)) == content(Path(expected.folder))
        assert [p.name for p in out.iterdir()] == ["step-00000007"]


@pytest.mark.usefixtures("quick")
def test_another_reshard_begins_anew_and_leaves_what_was_kept(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(request(folder, out), watcher=Stopping(60_000, KeyboardInterrupt()))
    (kept,) = out.iterdir()
    outcome = run(request(folder, out, block_size=1000))
    assert outcome.resumed == 0
    good(outcome)
    assert kept.exists()


@pytest.mark.usefixtures("quick")
def test_what_a_living_process_works_at_is_not_joined(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    out = tmp_path / "out"
    ready, go = os.pipe(), os.pipe()

    class Waiting(Watcher):
        def progress(self, nbytes: int) -> None:
            os.write(ready[1], b"x")
            os.read(go[0], 1)

    pid = os.fork()
    if pid == 0:
        run(request(folder, out), watcher=Waiting())
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(SaveError, match="another process is at this very reshard"):
        run(request(folder, out))
    os.write(go[1], b"x" * 10_000)
    assert os.waitpid(pid, 0)[1] == 0
    assert ckptspec.validate(out, level="bytes").ok


@pytest.mark.usefixtures("quick")
def test_a_journal_cut_short_or_of_files_that_are_gone_is_not_believed(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    expected = content(good(run(request(folder, tmp_path / "whole"))))
    for i, damage in enumerate((_cut_journal, _lose_shard, _shorten_shard)):
        out = tmp_path / f"out{i}"
        with pytest.raises(KeyboardInterrupt):
            run(request(folder, out), watcher=Stopping(90_000, KeyboardInterrupt()))
        (kept,) = out.iterdir()
        damage(kept)
        outcome = run(request(folder, out))
        assert content(good(outcome)) == expected
        assert (outcome.resumed == 0) == (damage is not _cut_journal)


def _cut_journal(kept: Path) -> None:
    (journal,) = kept.glob(".journal-*")
    journal.write_bytes(journal.read_bytes()[:-30])


def _lose_shard(kept: Path) -> None:
    (kept / "rank-00001.shard").unlink()


def _shorten_shard(kept: Path) -> None:
    os.truncate(kept / "rank-00001.shard", 1000)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    command = [sys.executable, "-m", "ckptspec", "reshard", str(folder), str(tmp_path / "out"), "--world-size", "2"]

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, preexec_fn=small_disk, check=False)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.splitlines() == [done.stderr.strip()]
    assert "File too large" in done.stderr
    assert "rank-00000.shard" in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_where_folders_cannot_be_renamed_the_manifest_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job().write(tmp_path / "run")
    expected = content(good(run(request(folder, tmp_path / "whole"))))
    last = staging.probe.Means("fuse.s3fs", "manifest-last", link=True)
    monkeypatch.setattr(staging.probe, "means", lambda run: last)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(request(folder, out), watcher=Stopping(90_000, KeyboardInterrupt()))
    assert ckptspec.latest(out) is None
    outcome = run(request(folder, out))
    assert outcome.resumed > 0
    found = content(good(outcome))
    assert (found[0], found[1]) == (expected[0], expected[1])
    assert sorted(p.name.split("-")[0] for p in Path(outcome.folder).iterdir()) == ["manifest.json", *["rank"] * 3]


# ---- damaged ---------------------------------------------------------------------------------------------------------


def twice(copies: int = 2) -> World:
    """Two replicas of two tensor-parallel ranks, every element stored twice."""
    mesh = Mesh((Axis("dp", 2, "data"), Axis("tp", 2, "tensor")))
    layouts = {"rows": MeshLayout("main", (("tp",),)), "columns": MeshLayout("main", ((), ("tp",)))}
    w = World(4, {"main": mesh}, dict(layouts), copies=copies, block_size=4096)
    for i in range(4):
        w.add(f"model/{i}", "float32", (97, 66), "rows" if i % 2 else "columns")
    w.add_local("rng/torch", "uint8", dict.fromkeys(range(4), (16,)))
    w.objects = {"step": ("same", 3), "own": ("rank", {rank: rank for rank in range(4)})}
    return w


def flip(folder: Path, rank: int, name: str, at: int = 5) -> None:
    """Change one byte of a tensor's first chunk in the shard of a rank."""
    m, docs = documents(folder)
    index = docs[rank].index
    chunk = next(c for c in index.chunks if index.names[c.tensor] == name)
    path = folder / m.shards[rank].path
    data = bytearray(path.read_bytes())
    data[chunk.start + at] ^= 1
    path.write_bytes(data)


def repaired(folder: Path, out: Path) -> Outcome:
    target = Target(4)
    outcome = run(Request(str(folder), str(out), target, memory=MEMORY))
    good(outcome)
    found = whole(Path(outcome.folder))
    for i in range(4):
        assert found[f"model/{i}"].tobytes() == values(f"model/{i}", "float32", (97, 66)).tobytes()
    return outcome


@pytest.mark.usefixtures("quick")
def test_a_damaged_block_is_read_from_the_other_copy(tmp_path: Path) -> None:
    recovered = []
    for rank in (0, 2):  # the two that hold what the first tensor rank holds; one of them is read
        folder = twice().write(tmp_path / f"run{rank}")
        before = payloads(folder)
        flip(folder, rank, "model/1")
        outcome = repaired(folder, tmp_path / f"out{rank}")
        recovered += [(r.rank, r.tensor, "B-DIGEST" in r.reason) for r in outcome.account.recovered.values()]
        assert payloads(Path(outcome.folder)) == before
        assert outcome.private == ()
    assert recovered in ([(0, "model/1", True)], [(2, "model/1", True)])


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("how", ["unlink", "cut", "state"])
def test_a_lost_shard_is_made_anew_but_for_what_it_alone_had(tmp_path: Path, how: str) -> None:
    folder = twice().write(tmp_path / "run")
    before = payloads(folder)
    path = folder / "rank-00001.shard"
    _, docs = documents(folder)
    if how == "unlink":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 100)
    else:
        data = bytearray(path.read_bytes())
        data[docs[1].index.state.start + 3] ^= 4
        path.write_bytes(data)
    outcome = repaired(folder, tmp_path / "out")
    assert [(r.rank, r.tensor) for r in outcome.account.recovered.values()] == [(1, None)]
    assert [(p.name, p.gone, p.without) for p in outcome.private] == [("rng/torch", (1,), (1,)), ("own", (1,), (1,))]
    after = payloads(Path(outcome.folder))
    assert {k: v for k, v in before[1].items() if k[0] != "rng/torch"} == after[1]
    assert [before[i] == after[i] for i in (0, 2, 3)] == [True] * 3


@pytest.mark.usefixtures("quick")
def test_without_a_good_copy_nothing_is_written(tmp_path: Path) -> None:
    one = twice(copies=1).write(tmp_path / "one")
    _, docs = documents(one)
    rank = next(r for r, d in enumerate(docs) if "model/1" in d.index.names)
    flip(one, rank, "model/1")
    both = twice().write(tmp_path / "both")
    for rank in range(4):
        flip(both, rank, "model/1")
    lost = twice().write(tmp_path / "lost")
    for rank in (0, 2):
        (lost / f"rank-0000{rank}.shard").unlink()
    for folder in (one, both, lost):
        out = tmp_path / "out"
        with pytest.raises(IntegrityError) as e:
            run(Request(str(folder), str(out), Target(4), memory=MEMORY))
        assert e.value.rule == ("S-MISSING" if folder == lost else "B-DIGEST")
        assert e.value.where.file is not None
        assert not out.exists() or list(out.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_copies_that_are_damaged_in_different_tensors_serve_each_other(tmp_path: Path) -> None:
    folder = twice().write(tmp_path / "run")
    for i in range(4):
        flip(folder, 0 if i < 2 else 2, f"model/{i}")
        flip(folder, 3 if i < 2 else 1, f"model/{i}")
    outcome = repaired(folder, tmp_path / "out")
    assert len({r.tensor for r in outcome.account.recovered.values()}) >= 1


# ---- a job of processes ----------------------------------------------------------------------------------------------


def test_two_processes_of_torchrun_divide_the_work(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ckptspec"]
    command += ["reshard", str(folder), str(tmp_path / "out"), "--world-size", "3", "--format", "json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert ckptspec.validate(tmp_path / "out", level="bytes").findings == ()
    alone = run(Request(str(folder), str(tmp_path / "one"), Target(3), memory=MEMORY))
    assert content(tmp_path / "out" / "step-00000007") == content(Path(alone.folder))
    assert '"world_size": 3' in done.stdout


def together(world: int, work: Callable[[int, Channel], Any]) -> list[Any]:
    """Run processes of a job as threads that agree over one store, and return what each returned or raised."""
    store, found = LocalStore(), [None] * world

    def process(rank: int) -> None:
        channel = Channel(store, rank, world, threaded=False)
        try:
            found[rank] = work(rank, channel)
        except BaseException as e:
            found[rank] = e

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.usefixtures("quick")
def test_processes_write_the_same_as_one(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    alone = run(request(folder, tmp_path / "alone"))
    for world in (2, 3, 7):
        out = tmp_path / f"out{world}"
        found = together(world, lambda rank, channel, out=out: run(request(folder, out), channel))
        assert [type(f) for f in found] == [Outcome] * world, found
        assert content(good(found[0])) == content(Path(alone.folder))
        assert {f.manifest.save_id for f in found} == {found[0].manifest.save_id}
        assert found[0].account.nbytes_written == alone.account.nbytes_written
        assert [p.name for p in out.iterdir()] == ["step-00000007"]


@pytest.mark.usefixtures("quick")
def test_one_process_that_fails_fails_all_and_the_next_call_goes_on(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    alone = run(request(folder, tmp_path / "alone"))
    out = tmp_path / "out"

    def work(rank: int, channel: Channel) -> Outcome:
        watcher = Stopping(30_000, OSError(28, "No space left on device")) if rank == 1 else Watcher()
        return run(request(folder, out), channel, watcher)

    found = together(3, work)
    assert all(isinstance(e, SaveError) and e.rank == 1 and "No space left" in str(e) for e in found), found
    assert ckptspec.latest(out) is None
    again = together(2, lambda rank, channel: run(request(folder, out), channel))
    assert [type(f) for f in again] == [Outcome] * 2, again
    assert again[0].resumed > 0
    assert content(good(again[0])) == content(Path(alone.folder))


@pytest.mark.usefixtures("quick")
def test_processes_that_were_asked_for_different_things_are_told(tmp_path: Path) -> None:
    folder = job().write(tmp_path / "run")
    out = tmp_path / "out"
    found = together(2, lambda rank, channel: run(request(folder, out, block_size=(4096, 512)[rank]), channel))
    assert all(isinstance(e, SaveError) and e.rule == "P-AGREE" for e in found), found
    assert not out.exists()

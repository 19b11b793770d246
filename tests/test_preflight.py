"""Before the first byte: a save that cannot fit is refused in numbers on every rank; one that may fit is not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import run_phases
from hypothesis import given
from hypothesis import strategies as st

import ckptspec
from ckptspec.check.life.keeping import Keep
from ckptspec.check.life.room import Ask, Space, room
from ckptspec.engine.agree.channel import Channel, LocalStore
from ckptspec.engine.documents import load_manifest, open_shard
from ckptspec.engine.life import preflight
from ckptspec.engine.saves.save import Request
from ckptspec.engine.saves.save import save as engine_save
from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.format import objects
from ckptspec.format.declaration import Declaration
from ckptspec.storage import local, space
from ckptspec.storage.space import Left

MB = 1_000_000


# ---- the decision ----------------------------------------------------------------------------------------------------


def judged(ask: Ask, free: int | None, **known: Any) -> tuple[str | None, str | None]:
    found = room("run", ask, Space(free, **{"files": 99, **known}))
    return found.fault and found.fault.message, found.warning and found.warning.message


def test_what_fits_passes_and_what_does_not_is_refused_in_numbers() -> None:
    assert judged(Ask(MB, 3), MB) == (None, None)
    found = room("run", Ask(MB + 1, 3), Space(MB, 99, by="the user's quota")).fault
    assert found is not None
    assert str(found) == (
        "run: not enough room for this save, expected 1,000,001 bytes, "
        "found 1,000,000 bytes that the user's quota has left  [P-ROOM]"
    )
    assert judged(Ask(1, 100), MB)[0] == "not enough files (inodes) left for this save"
    assert judged(Ask(1, 1), MB, writable=False)[0] == "this user may not write here"


def test_what_the_file_system_does_not_tell_refuses_nothing() -> None:
    assert judged(Ask(1 << 60, 1 << 40, 9999, 9999), None, files=None) == (None, None)


def test_names_and_paths_have_their_limits() -> None:
    assert judged(Ask(1, 1, 4095, 255), MB, path_nbytes=4095, name_nbytes=255) == (None, None)
    assert "path" in str(judged(Ask(1, 1, 4096, 255), MB, path_nbytes=4095, name_nbytes=255)[0])
    assert "file name" in str(judged(Ask(1, 1, 95, 144), MB, path_nbytes=4095, name_nbytes=143)[0])


def test_what_retention_keeps_counts_at_the_first_save_and_is_a_warning_later() -> None:
    first = Ask(MB, 3, saves=4, present=0)
    assert judged(first, 4 * MB) == (None, None)
    assert judged(first, 4 * MB - 1)[0] == "this save fits, 4 of its size do not, and retention keeps so many"
    later = Ask(MB, 3, saves=4, present=2)
    assert judged(later, 2 * MB) == (None, None)
    assert judged(later, 2 * MB - 1) == (None, "this save fits, 2 of its size do not, and retention keeps so many")
    assert judged(later, MB - 1)[0] == "not enough room for this save"
    assert judged(Ask(MB, 3, saves=4, present=9), MB) == (None, None)
    assert "4,000,000 with what retention keeps" in room("run", first, Space(9 * MB, 9)).line()


@given(st.integers(0, 100), st.integers(0, 9), st.integers(1, 6), st.integers(0, 6), st.integers(0, 700))
def test_a_refused_save_would_not_have_fitted(nbytes: int, files: int, saves: int, present: int, free: int) -> None:
    found = room("run", Ask(nbytes, files, saves=saves, present=present), Space(free, 5))
    fits = nbytes <= free and files <= 5
    settled = nbytes * max(1, saves - present) <= free
    assert (found.fault is None) == (fits and (settled or present > 0))
    assert (found.warning is not None) == (fits and not settled and present > 0)
    assert found.line()


def test_how_many_lie_beside_each_other_follows_from_what_is_kept() -> None:
    found = [Keep(), Keep(last=1), Keep(last=5), Keep(last=2, best=("loss", "min", 3)), Keep(every=10)]
    assert [keep.saves for keep in found] == [2, 2, 6, 4, 2]


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_a_folder_is_asked_that_may_not_be_there_yet(tmp_path: Path) -> None:
    found = preflight.preflight(str(tmp_path / "a" / "b"), MB, 3, keep=Keep(last=3))
    v = os.statvfs(tmp_path)
    assert found.fault is None
    assert found.free is not None
    assert abs(found.free - v.f_bavail * v.f_frsize) < 10**9
    assert (found.need, found.settled, found.ask.saves, found.ask.present) == (MB, 4 * MB, 4, 0)
    (tmp_path / "a" / "b" / "step-00000001").mkdir(parents=True)
    assert preflight.preflight(str(tmp_path / "a" / "b"), MB, 3, keep=Keep(last=3)).ask.present == 1
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        preflight.preflight(str(tmp_path / "file" / "run"), 1, 1)


def test_the_least_of_disk_and_quotas_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = space.left(str(tmp_path))
    assert disk.nbytes is not None

    def quota(fd: int, kind: int, who: int) -> Any:
        found = space._Quota()
        found.valid = space._BLOCK_LIMITS | space._FILE_LIMITS
        found.space_hard, found.space_used, found.files_hard, found.files_used = 2048, MB, 10 + kind, 3
        return found

    monkeypatch.setattr(space, "quota_of", quota)
    assert space.left(str(tmp_path)) == Left(2048 * 1024 - MB, 7, "the user's quota")
    monkeypatch.setattr(space, "quota_of", lambda fd, kind, who: space._Quota())  # a quota that limits nothing
    assert space.left(str(tmp_path)).by == "the disk"


def test_a_file_system_that_reports_nothing_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = os.statvfs_result([4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255])
    monkeypatch.setattr(os, "statvfs", lambda path: zeros)
    assert space.left(str(tmp_path)) == Left(None, None)


# ---- a save ----------------------------------------------------------------------------------------------------------


def state(rank: int, world: int) -> dict[str, Any]:
    piece = torch.arange(30_000, dtype=torch.float32) + rank
    return {
        "same": torch.ones(1000, 7, dtype=torch.bfloat16),
        "flat": ckptspec.FlatShard(piece, group="g", offset=30_000 * rank, numel=30_000 * world - 5),
        "rows": ckptspec.Shard(torch.full((2, 9), float(rank)), (2 * world, 9), [((2 * rank, 0), (2, 9))]),
        "mine": ckptspec.Local(torch.zeros(100 * (rank + 1), dtype=torch.float64)),
        "step": 7,
    }


def measured(rank: int, world: int, folder: Path) -> None:
    """Compare what a save was said to take with what it took: payload of every chunk, and the states."""
    asked: list[int] = []
    real = preflight.preflight

    def recorded(run: str, nbytes: int, *args: Any, **how: Any) -> Any:
        asked.append(nbytes)
        return real(run, nbytes, *args, **how)

    preflight.preflight = recorded  # in a process of its own
    for copies in (1, 2):
        run = folder / f"copies-{copies}"
        ckptspec.save(run, state(rank, world), step=1, copies=copies)
        if rank == 0:
            path, m = load_manifest(run)
            indexes = [open_shard(path, entry, m).index for entry in m.shards]
            took = sum(extent.nbytes for index in indexes for extent in index.extents)
            assert asked[-1] == took <= m.nbytes < 1.1 * took
    assert len(asked) == (4 if rank == 0 else 0)  # before a folder is made and when all have declared; rank 0 alone


def refused(rank: int, world: int, folder: Path) -> None:
    """Every rank is refused alike, and none has made a shard."""
    made: list[str] = []
    real_create, real_left = local.create, space.left

    def create(path: str, nbytes: int = 0) -> int:
        made.append(path)
        return real_create(path, nbytes)

    local.create = create
    space.left = lambda path: Left(300_000, 1000) if rank == 0 else real_left(path)
    with pytest.raises(ckptspec.SaveError) as caught:
        ckptspec.save(folder / "run", state(rank, world), step=1)
    assert (caught.value.rule, caught.value.rank) == ("P-ROOM", 0)
    print(caught.value)
    assert [path for path in made if path.endswith(".shard")] == []
    local.create, space.left = real_create, lambda path: Left(500_000, 1000)
    ckptspec.save(folder / "run", state(rank, world), step=1)


def limited(rank: int, world: int, folder: Path) -> None:
    """A limit that only one rank has stops that rank before its first byte, and all ranks with it."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    with pytest.raises(ckptspec.SaveError, match="ulimit -f") as caught:
        ckptspec.save(folder / "limited", state(rank, world), step=1)
    assert (caught.value.rule, caught.value.rank) == ("P-ROOM", 1)
    assert caught.value.found == "at most 100,000 bytes a file"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ckptspec.save(folder / "limited", state(rank, world), step=1)


def saves(rank: int, world: int, folder: Path) -> None:
    """What each rank does."""
    measured(rank, world, folder)
    refused(rank, world, folder)
    limited(rank, world, folder)


def test_a_save_that_does_not_fit_is_refused_in_numbers_on_every_rank_before_the_first_byte(tmp_path: Path) -> None:
    printed = run_phases("test_preflight", [("saves", 3)], tmp_path)
    said = printed["saves"]
    assert len(set(said)) == 1
    assert "not enough room for this save, expected " in said[0]
    assert "found 300,000 bytes that the disk has left  [P-ROOM]" in said[0]
    assert "advice: free some space" in said[0]
    assert os.listdir(tmp_path / "run") == os.listdir(tmp_path / "limited") == ["step-00000001"]


def test_one_rank_alone_is_refused_too_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = {"w": torch.zeros(1000)}
    with monkeypatch.context() as patch:
        patch.setattr(space, "left", lambda path: Left(4000, 99))
        with pytest.raises(ckptspec.SaveError, match="not enough room for this save") as caught:
            ckptspec.save(tmp_path / "run", w, step=1)
        assert caught.value.rule == "P-ROOM"
        patch.setattr(space, "left", lambda path: Left(4100, 1))
        with pytest.raises(ckptspec.SaveError, match=r"not enough files \(inodes\)"):
            ckptspec.save(tmp_path / "run", w, step=1)
        patch.setattr(space, "left", lambda path: Left(4100, 2))
        patch.setattr(space, "writable", lambda path: False)
        with pytest.raises(ckptspec.SaveError, match="this user may not write here"):
            ckptspec.save(tmp_path / "nowhere", w, step=1)
        assert not (tmp_path / "nowhere").exists()
    assert os.listdir(tmp_path / "run") == []
    with pytest.raises(ckptspec.SaveError, match="the longest path of a save would be too long here"):
        ckptspec.save("/".join([str(tmp_path), *["x" * 200] * 20]), w, step=1)
    ckptspec.save(tmp_path / "run", w, step=1)


def test_a_first_save_is_refused_where_what_retention_keeps_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(step: int) -> None:
        snapshot = Snapshot(Declaration(), objects.pack({"x": "y" * 100_000}), {}, {}, {}, {})
        producer = {"name": "test", "version": "1"}
        request = Request(step=step, run_id="a", producer=producer, keep=Keep(last=3))
        engine_save(str(tmp_path), lambda: snapshot, request, Channel(LocalStore(), 0, 1), 1 << 25)

    monkeypatch.setattr(space, "left", lambda path: Left(399_999, 99))
    with pytest.raises(ckptspec.SaveError, match="this save fits, 4 of its size do not, and retention keeps so many"):
        save(1)
    monkeypatch.setattr(space, "left", lambda path: Left(401_000, 99))
    save(1)
    monkeypatch.setattr(space, "left", lambda path: Left(100_100, 99))
    save(2)  # a later one is made as long as it fits itself


@contextmanager
def small_disk(folder: Path, script: str) -> Iterator[subprocess.CompletedProcess[str]]:
    """Run a script where `folder` is a file system in memory of 4 MiB and 40 files, in namespaces of its own."""
    mount = f"mount -t tmpfs -o size=4m,nr_inodes=40 none {folder} && exec {sys.executable} -c '{script}' {folder}"
    tests = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    yield subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount], capture_output=True, text=True, env=env, timeout=60, check=False
    )


SCRIPT = """
import os, sys
from ckptspec.engine.life.preflight import preflight
from ckptspec.storage import local
run = os.path.join(sys.argv[1], "run")
for nbytes, files in ((3 << 20, 4), (4 << 20, 4), ((4 << 20) + 1, 4), (1, 39), (1, 40)):
    print(preflight(run, nbytes, files).fault is None)
local.make_folders(run)
os.close(local.create(os.path.join(run, "file"), 2 << 20))
print(preflight(run, 2 << 20, 4).fault is None, preflight(run, (2 << 20) + 1, 4).fault)
"""


def test_a_small_disk_takes_what_it_says_it_takes(tmp_path: Path) -> None:
    with small_disk(tmp_path, SCRIPT) as done:
        if "unshare" in done.stderr or "mount" in done.stderr or "not permitted" in done.stderr:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[:100]}")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[:5] == ["True", "True", "False", "True", "False"]
        assert lines[5].startswith("True ")
        assert "expected 2,097,153 bytes, found 2,097,152 bytes that the disk has left" in lines[5]

"""A path means one checkpoint, and the newest good one is found by what manifests say, not by names or times."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import make
import pytest
from make import builder

from ckptspec.engine.documents import load_manifest
from ckptspec.engine.locate import is_run, latest, newest, newest_manifest, resolve, scan_run
from ckptspec.errors import NotCommittedError
from ckptspec.format import lexical

ID = "abcdef0123456789abcdef0123456789"


def add(run: Path, step: int, name: str | None = None, *, world: int = 1) -> Path:
    """Write a checkpoint of `step` into the run, under its own name or another."""
    return make.checkpoint(run / (name or f"step-{step:08d}"), world, step=step, save_id=f"{step:032x}")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 10, 20 and 30."""
    for step in (10, 20, 30):
        add(tmp_path / "run", step)
    return tmp_path / "run"


def test_the_highest_step_is_the_newest_whatever_the_times(run: Path) -> None:
    os.utime(run / "step-00000010", (4e9, 4e9))
    assert latest(run) == str(run / "step-00000030")
    found = newest_manifest(run)
    assert found is not None
    assert found.step == 30


def test_the_manifests_step_decides_not_the_folders_name(run: Path) -> None:
    add(run, 99, "step-00000015")
    assert latest(run) == str(run / "step-00000015")
    assert [s.finding.code for s in newest(str(run)).skipped] == ["C-STEP"]
    (run / "step-00000030").rename(run / "step-00000098")
    assert [c.step for c in scan_run(str(run)).steps] == [99, 30, 20, 10]


@pytest.mark.parametrize("damage", ["no manifest", "cut manifest", "cut shard", "no shard", "link", "bad rule"])
def test_a_bad_newest_is_passed_over_with_the_reason(run: Path, damage: str) -> None:
    bad = run / "step-00000030"
    data = (bad / "manifest.json").read_bytes()
    if damage == "no manifest":
        (bad / "manifest.json").unlink()
    elif damage == "cut manifest":
        (bad / "manifest.json").write_bytes(data[:-5])
    elif damage == "cut shard":
        os.truncate(bad / "rank-00000.shard", 5)
    elif damage == "no shard":
        (bad / "rank-00000.shard").unlink()
    elif damage == "link":
        (bad / "rank-00000.shard").rename(run / "elsewhere")
        (bad / "rank-00000.shard").symlink_to("../elsewhere")
    else:
        make.write(bad, builder.edit({"manifest.json": data}, lambda d: d.update(world_size=2)))
    expected = {"no manifest": "C-MANIFEST", "cut manifest": "L-TAIL", "cut shard": "S-NBYTES",
                "no shard": "S-MISSING", "link": "S-FILE", "bad rule": "W-COUNT"}[damage]  # fmt: skip
    found = newest(str(run))
    assert found.path == str(run / "step-00000020")
    assert [(s.path, s.finding.code) for s in found.skipped] == [(str(bad), expected)]
    assert resolve(run).folder == found.path


def test_an_empty_run_differs_from_one_where_every_checkpoint_is_bad(run: Path, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (run / f"step-{step:08d}" / "manifest.json").write_bytes(b"")
    found = newest(str(run))
    assert (found.path, found.candidates, len(found.skipped)) == (None, 3, 3)
    with pytest.raises(NotCommittedError) as caught:
        resolve(run)
    assert caught.value.rule == "L-SIZE"
    assert str(caught.value.where.file) == "step-00000030/manifest.json"
    (tmp_path / "empty").mkdir()
    assert newest(str(tmp_path / "empty")).candidates == 0
    with pytest.raises(NotCommittedError) as caught:
        resolve(tmp_path / "empty")
    assert caught.value.rule == "C-EMPTY"
    assert latest(tmp_path / "empty") is None
    assert latest(tmp_path / "nowhere") is None


def test_folders_that_are_no_checkpoints_are_sorted_out_by_name(run: Path) -> None:
    for name in (f".tmp-00000040-{ID}", f".trash-{ID}", f".abandoned-00000050-{ID}"):
        add(run, 90, name)
    (run / "logs").mkdir()
    (run / "step-00000077").write_bytes(b"a file")
    scan = scan_run(str(run))
    assert [c.step for c in scan.steps] == [30, 20, 10]
    assert len(scan.special) == 3
    assert scan.others == ("logs", "step-00000077")
    assert latest(run) == str(run / "step-00000030")


def test_a_superseded_checkpoint_stands_in_only_where_its_step_has_no_final_folder(run: Path) -> None:
    add(run, 30, f".superseded-{ID}")
    assert latest(run) == str(run / "step-00000030")
    shutil.rmtree(run / "step-00000030")
    assert latest(run) == str(run / f".superseded-{ID}")
    os.truncate(run / f".superseded-{ID}" / "rank-00000.shard", 1)
    assert latest(run) == str(run / "step-00000020")


def test_of_two_folders_with_one_step_the_rightly_named_is_taken_and_the_other_mentioned(run: Path) -> None:
    shutil.copytree(run / "step-00000030", run / "step-00000025")
    found = newest(str(run))
    assert found.path == str(run / "step-00000030")
    assert [(s.path, s.finding.severity) for s in found.skipped] == [(str(run / "step-00000025"), "warning")]
    shutil.rmtree(run / "step-00000030")
    shutil.copytree(run / "step-00000025", run / "step-00000026")
    assert latest(run) == str(run / "step-00000025")


def test_below_a_step_only_older_ones_are_looked_at(run: Path) -> None:
    assert newest(str(run), below=30).path == str(run / "step-00000020")
    assert newest(str(run), below=10).path is None


def test_a_plain_copy_is_a_checkpoint_wherever_it_lies(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-00000020", tmp_path / "kept")
    located = resolve(tmp_path / "kept")
    assert (located.folder, located.run) == (str(tmp_path / "kept"), None)
    assert resolve(run / "step-00000020").run == str(run)
    assert resolve(run / "step-00000020" / "manifest.json").folder == str(run / "step-00000020")


def test_paths_are_understood_from_inside_the_folders_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run / "step-00000020")
    assert resolve("manifest.json").folder == "."
    assert resolve(".").run == str(run)
    monkeypatch.chdir(run)
    assert resolve("step-00000020").run == "."
    assert resolve("step-00000020/").run == "."
    assert resolve(".").folder == "./step-00000030"


def test_a_folder_without_a_commit_is_no_run(tmp_path: Path) -> None:
    torn = add(tmp_path, 1)
    assert not is_run(str(torn))
    (torn / "manifest.json").unlink()
    assert not is_run(str(torn))
    (tmp_path / "copy").mkdir()
    assert is_run(str(tmp_path / "copy"))
    shutil.copy(torn / "rank-00000.shard", tmp_path / "copy")
    assert not is_run(str(tmp_path / "copy"))
    for path in (torn, tmp_path / "copy"):
        with pytest.raises(NotCommittedError) as caught:
            load_manifest(path)
        assert caught.value.rule == "C-MANIFEST"


def test_staging_folders_are_refused_even_with_a_manifest(run: Path) -> None:
    for name in (f".tmp-00000040-{ID}", f".trash-{ID}"):
        with pytest.raises(NotCommittedError) as caught:
            resolve(add(run, 40, name))
        assert caught.value.rule == "C-STAGING"
    for name in (".tmp-anything", ".tmp-"):
        assert not is_run(str(add(run, 40, name)))
        with pytest.raises(NotCommittedError):
            resolve(run / name)
    assert resolve(add(run, 50, f".abandoned-00000050-{ID}")).run is None


def test_another_file_or_no_file_is_said_to_be_that(run: Path) -> None:
    with pytest.raises(NotCommittedError):
        resolve(run / "step-00000010" / "rank-00000.shard")
    with pytest.raises(FileNotFoundError):
        resolve(run / "step-00000011")


def test_a_manifest_that_shows_another_step_in_its_head_misleads_nobody(tmp_path: Path) -> None:
    make.checkpoint(tmp_path / "step-00000009", 1, step=9, save_id="9" * 32)
    bad = make.checkpoint(tmp_path / "step-00000007", 1, step=7, save_id="7" * 32)
    data = (bad / "manifest.json").read_bytes()
    body = lexical.unseal(data)
    note = b'"annotations": {"org.x": {"a": 1,\n "step": 500,\n "b": 2}}'
    head, rest = body.split(b'"format": "ckptspec",\n', 1)
    assert b'"annotations": {}' in rest
    body = head + b'"format": "ckptspec",\n ' + note + b"," + rest.replace(b'"annotations": {},', b"", 1)
    (bad / "manifest.json").write_bytes(lexical.seal(body))
    assert newest(str(tmp_path)).path == str(tmp_path / "step-00000009")

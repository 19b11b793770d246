"""The demo, end to end, on two ranks: they train, one is killed in the middle of a save, the job resumes byte-equal."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckptspec.demo.compare import PARTS, compare
from ckptspec.demo.main import Setting, run


def test_a_killed_job_resumes_byte_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "demo"
    code = run(root, Setting(ranks=2, steps=5, every=2, victim=1, dies_at=4))
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    assert "dies writing .tmp-00000004-" in said.out
    assert f"{root}/interrupted/step-00000002" in said.out
    assert "resumed from step-00000002" in said.out
    assert "bit for bit" in said.out
    assert all(not part.differs for part in compare(root / "final/uninterrupted", root / "final/interrupted", 2))
    steps = sorted(path.name for path in (root / "interrupted").glob("step-*"))
    assert steps == ["step-00000002", "step-00000004"]
    shutil.rmtree(root)


def test_one_changed_byte_is_found_with_its_part_and_rank(tmp_path: Path) -> None:
    for run_name in ("a", "b"):
        for rank in range(2):
            folder = tmp_path / run_name / f"rank-{rank}"
            folder.mkdir(parents=True)
            for part in PARTS:
                (folder / part).write_bytes(bytes([rank] * 10))
    assert [part.differs for part in compare(tmp_path / "a", tmp_path / "b", 2)] == [()] * len(PARTS)
    (tmp_path / "b/rank-1/master").write_bytes(bytes([1] * 9 + [2]))
    parts = {part.name: part for part in compare(tmp_path / "a", tmp_path / "b", 2)}
    assert parts["master"].differs == (1,)
    assert parts["master"].digests[0] != parts["master"].digests[1]
    assert parts["master"].nbytes == 20
    assert all(not part.differs for name, part in parts.items() if name != "master")


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    assert run(tmp_path) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]

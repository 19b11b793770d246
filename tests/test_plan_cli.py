"""`ckptspec plan` says what it takes, in lines and as JSON, and keeps the contract of the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import make
import pytest

from ckptspec.cli.main import main
from ckptspec.format import manifest, schemas
from ckptspec.format.target import of_manifest
from ckptspec.planner.plans import parse, verify

Ran = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two ranks in a run."""
    return make.checkpoint(tmp_path / "run" / "step-00000007", 2)


@pytest.fixture
def plan(folder: Path, capfd: pytest.CaptureFixture[str]) -> Ran:
    """Runs `ckptspec plan` for the run: code, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(["plan", str(folder.parent), *map(str, arguments)])
        return code, *capfd.readouterr()

    return call


def test_it_says_what_becomes_of_each_part_and_what_is_read(plan: Ran) -> None:
    code, out, err = plan("--world-size", 3)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].endswith("step-00000007: step 7, 2 ranks to 3")
    assert any(line.startswith("lossless: model: ") for line in lines)
    assert any(line.startswith("shards that each rank opens: 1 to 2; transfers to it: ") for line in lines)
    assert "with exchange (1)" in out
    assert any(line.startswith("transfers: ") and "sha256:" in line for line in lines)
    assert any(line.startswith("advice: run  ckptspec reshard ") for line in lines)


def test_it_says_how_the_global_batch_is_kept(plan: Ran) -> None:
    code, out, _ = plan("--world-size", 1, "--micro-batch", 2, "--accumulation", 3)
    assert code == 0
    assert any("global batch 12" in line for line in out.splitlines())


def test_as_json_it_is_a_plan_that_holds(plan: Ran, folder: Path) -> None:
    code, out, _ = plan("--mesh", "dp=4", "--format", "json")
    assert code == 0
    assert list(schemas.check("plan", json.loads(out))) == []
    verify(parse(out.encode()), manifest.parse((folder / "manifest.json").read_bytes()))


def test_the_plan_is_written_where_it_is_asked_for(plan: Ran, tmp_path: Path) -> None:
    code, out, _ = plan("--world-size", 1, "--output", tmp_path / "plan.json")
    assert code == 0
    (said,) = [line for line in out.splitlines() if line.startswith("transfers: ")]
    assert said.split()[-1] == parse((tmp_path / "plan.json").read_bytes()).transfers_digest


def test_transfers_are_columns(plan: Ran) -> None:
    code, out, _ = plan("--world-size", 1, "--transfers")
    assert code == 0
    head, *rows = [line.split("\t") for line in out.splitlines()]
    assert head == ["tensor", "source", "rank", "source rank", "offsets", "sizes", "elements"]
    assert ["model/embed", "model/embed", "0", "0", "0,0", "4,24", "96"] in rows
    assert ["model/scale", "model/scale", "0", "0", "", "", "1"] in rows


def test_transfers_to_one_rank_are_columns_in_json_too(plan: Ran) -> None:
    whole = [json.loads(line) for line in plan("--world-size", 2, "--transfers", "--format", "json")[1].splitlines()]
    code, out, _ = plan("--world-size", 2, "--transfers", "--rank", 1, "--format", "json")
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert {rank for columns in found for rank in columns["rank"]} == {1}
    assert sum(len(c["rank"]) for c in found) == sum(c["rank"].count(1) for c in whole)


def test_what_the_target_asks_for_in_vain_is_exit_code_1(plan: Ran, folder: Path, tmp_path: Path) -> None:
    target = of_manifest(manifest.parse((folder / "manifest.json").read_bytes())).document()
    target["tensors"]["model/new"] = {"dtype": "float32", "shape": [3], "layout": "rows"}
    (tmp_path / "target.json").write_text(json.dumps(target))
    code, out, _ = plan("--target", tmp_path / "target.json")
    assert code == 1
    assert "impossible: tensor model/new: the checkpoint does not hold it" in out.splitlines()
    (tmp_path / "map.json").write_text('{"model/new": "model/norm"}')
    code, out, _ = plan("--target", tmp_path / "target.json", "--map", tmp_path / "map.json")
    assert code == 1
    assert "shape" in out


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 2),
        (("--world-size", 2, "--mesh", "dp=2"), 2),
        (("--world-size", 0), 2),
        (("--mesh", "tp=2"), 2),
        (("--world-size", 2, "--rank", 1), 2),
        (("--world-size", 2, "--transfers", "--output", "x"), 2),
        (("--world-size", 2, "--transfers", "--rank", 2), 1),
        (("--target", "nowhere.json"), 3),
        (("--world-size", 2, "--map", "nowhere.json"), 3),
        (("--world-size", 2, "--output", "nowhere/plan.json"), 3),
    ],
)
def test_every_end_is_an_exit_code_and_words(plan: Ran, options: tuple[object, ...], code: int) -> None:
    ended, out, err = plan(*options)
    assert (ended, out) == (code, "")
    assert "Traceback" not in err
    assert err


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.shard"])
def test_a_plan_replaces_no_file_of_a_checkpoint(name: str, plan: Ran, folder: Path) -> None:
    before = (folder / name).read_bytes()
    code, _, err = plan("--world-size", 3, "--output", folder / name)
    assert code == 1
    assert "belongs to a checkpoint" in err
    assert (folder / name).read_bytes() == before


def test_a_map_that_nothing_asks_for_is_told(plan: Ran, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text('{"model/nrom": "model/norm"}')
    code, _, err = plan("--world-size", 3, "--map", tmp_path / "map.json")
    assert code == 0
    assert "'model/nrom'" in err

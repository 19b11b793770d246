"""The command `reshard`: what its options mean, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from written import job, line, manifest_of, tensor_parallel_zero, whole

import ckptspec
from ckptspec.cli.main import main
from ckptspec.format.target import of_manifest
from ckptspec.planner.sizing import of_world


@dataclass
class Ran:
    code: int
    out: str
    err: str


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Any:
    def call(*words: object) -> Ran:
        capfd.readouterr()
        code = main(["reshard", *map(str, words)])
        return Ran(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return job().write(tmp_path_factory.mktemp("source") / "run")


def test_a_world_size_an_axis_or_a_document_says_what_is_wanted(command: Any, folder: Path, tmp_path: Path) -> None:
    document = tmp_path / "target.json"
    document.write_text(json.dumps(of_world(manifest_of(folder), 2).document()))
    made = []
    for i, option in enumerate((("--world-size", 2), ("--mesh", "dp=2"), ("--target", document))):
        ran = command(folder.parent, tmp_path / str(i), *option, "--memory", "64MiB")
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.splitlines()[0] == f"{tmp_path / str(i)}/step-00000007: 5 tensors for 2 ranks, from 4"
        assert "private: rng/python: not carried is that of ranks 2, 3" in ran.out
        assert ckptspec.validate(tmp_path / str(i), level="bytes").findings == ()
        made.append(manifest_of(tmp_path / str(i) / "step-00000007"))
    assert made[0].meshes["main"] == made[1].meshes["main"] == made[2].meshes["main"] == line(2)
    assert made[0].tensors == made[1].tensors == made[2].tensors


def test_what_it_came_to_is_told_as_data(command: Any, folder: Path, tmp_path: Path) -> None:
    options = ("--format", "json", "--copies", 2, "--digest", "sha256", "--block-size", "4KiB", "--memory", 67108864)
    ran = command(folder, tmp_path / "out", "--world-size", 6, *options)
    assert ran.code == 0
    found = json.loads(ran.out)
    m = manifest_of(tmp_path / "out" / "step-00000007")
    assert (m.copies, m.block, m.block_size) == (2, "sha256", 4096)
    assert (found["save_id"], found["manifest_digest"], found["world_size"]) == (m.save_id, m.digest, 6)
    assert found["source"]["save_id"] == manifest_of(folder).save_id
    assert found["bytes"]["source"] == manifest_of(folder).nbytes
    assert found["bytes"]["read"] <= 1.05 * found["bytes"]["source"]
    assert found["private"][0] == {"name": "rng/torch", "gone": [], "without": [4, 5]}
    assert (found["recovered"], found["dropped"], found["renamed"], found["units_resumed"]) == ([], [], {}, 0)


def test_names_are_mapped_and_dropped(command: Any, folder: Path, tmp_path: Path) -> None:
    m = manifest_of(folder)
    tensors = {n.replace("model/w", "net/w"): e for n, e in m.tensors.items() if n != "rng/torch"}
    document, names = tmp_path / "target.json", tmp_path / "names.json"
    document.write_text(json.dumps(replace(of_manifest(m), tensors=tensors, aliases={}).document()))
    names.write_text('{"net/*": "model/*"}')
    wanted = ("--target", document, "--map", names)
    ran = command(folder, tmp_path / "out", *wanted)
    assert (ran.code, ran.out) == (1, "")
    assert "rng/torch, model/head" in ran.err
    assert "advice: name what may be left out with --drop NAME" in ran.err
    ran = command(folder, tmp_path / "out", *wanted, "--drop", "model/head", "--drop", "rng")
    assert ran.code == 0
    assert {"left out: model/head", "left out: rng/torch", "renamed: net/w was model/w"} <= set(ran.out.splitlines())
    found = whole(tmp_path / "out" / "step-00000007")
    assert found["net/w"].tobytes() == whole(folder)["model/w"].tobytes()


def test_a_plan_is_done_and_one_of_another_checkpoint_refused(command: Any, folder: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    assert main(["plan", str(folder), "--world-size", "3", "--output", str(plan)]) == 0
    assert command(folder, tmp_path / "out", "--plan", plan).code == 0
    assert manifest_of(tmp_path / "out" / "step-00000007").world_size == 3
    other = job().write(tmp_path / "other")
    ran = command(other, tmp_path / "two", "--plan", plan)
    assert (ran.code, "X-PLAN" in ran.err) == (1, True)
    assert not (tmp_path / "two").exists()
    plan.write_text("{}")
    assert command(folder, tmp_path / "two", "--plan", plan).code == 1


def test_what_is_no_request_is_a_usage_error(command: Any, folder: Path, tmp_path: Path) -> None:
    for options in (
        (),
        ("--world-size", 0),
        ("--world-size", 2, "--mesh", "dp=2"),
        ("--world-size", 2, "--plan", "x"),
        ("--plan", "x", "--map", "y"),
        ("--mesh", "pp=2"),
        ("--world-size", 2, "--memory", "1KiB"),
        ("--world-size", 2, "--memory", "much"),
        ("--world-size", 2, "--copies", 0),
        ("--world-size", 2, "--block-size", 1),
        ("--world-size", 2, "--digest", "md5"),
    ):
        ran = command(folder, tmp_path / "out", *options)
        assert (ran.code, ran.out) == (2, ""), options
        assert "Traceback" not in ran.err
    assert command(tmp_path / "nothing", tmp_path / "out", "--world-size", 2).code == 3
    (tmp_path / "empty").mkdir()
    assert command(tmp_path / "empty", tmp_path / "out", "--world-size", 2).code == 4
    assert not (tmp_path / "out").exists()


def test_sizes_that_do_not_divide_are_named(command: Any, tmp_path: Path) -> None:
    folder = tensor_parallel_zero(2, 2).write(tmp_path / "run")
    ran = command(folder, tmp_path / "out", "--world-size", 3)
    assert (ran.code, ran.out) == (1, "")
    assert "2 or 4" in ran.err


def test_an_interrupt_ends_with_130_and_the_same_command_goes_on(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from ckptspec.engine.resharding import batches, reshard\n"
        "from ckptspec.planner import strips\n"
        "from ckptspec.cli.main import main\n"
        "reshard.units = lambda found: strips.units(found, 20_000, 20_000)\n"
        "reshard.SYNC_NBYTES, batches.COPIES = 0, 4\n"
        "done = reshard._Reshard._finished\n"
        "def finished(self, numbers):\n"
        "    done(self, numbers)\n"
        "    if len(sys.argv) > 6:\n"
        "        print('finished', flush=True)\n"
        "        time.sleep(20)\n"
        "reshard._Reshard._finished = finished\n"
        "sys.exit(main(sys.argv[1:6]))\n"
    )
    command = [sys.executable, "-c", script, "reshard", str(folder), str(tmp_path / "out"), "--world-size", "3"]
    with subprocess.Popen([*command, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "finished\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (130, False)
    assert "the same call goes on from there" in err
    (kept,) = (tmp_path / "out").iterdir()
    assert kept.name.startswith(".tmp-00000007-")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "went on after" in done.stdout
    assert ckptspec.validate(tmp_path / "out", level="bytes").findings == ()


def test_it_runs_without_torch(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys\nsys.modules['torch'] = None\nfrom ckptspec.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", script, "reshard", str(folder), str(tmp_path / "out"), "--world-size", "3"]
    env = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    env["WORLD_SIZE"] = "2"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "torch" in done.stderr

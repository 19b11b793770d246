"""The command line keeps its contract: exit codes, streams, no traceback, nothing raw from a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import make
import pytest
from make import builder

from ckptspec.cli import main as frame
from ckptspec.cli import output
from ckptspec.cli.main import COMMANDS, main
from ckptspec.cli.tables import size
from ckptspec.format import schemas
from ckptspec.format import target as targets

FILES = make.files(2)
SHARD = "rank-00001.shard"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with steps 3 and 7."""
    make.checkpoint(tmp_path / "run" / "step-00000003", 2, step=3, save_id="3" * 32)
    make.write(tmp_path / "run" / "step-00000007", FILES)
    return tmp_path / "run"


@pytest.fixture
def newest(run: Path) -> Path:
    """The newest checkpoint of the run."""
    return run / "step-00000007"


class Ran:
    """How one command ended: code, and what it wrote."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code = code
        self.raw = out
        self.out = out.decode()
        self.err = err.decode()
        assert "Traceback" not in self.out + self.err


@pytest.fixture
def ckptspec(capfdbinary: pytest.CaptureFixture[bytes]) -> Any:
    """Run the command line in this process."""

    def call(*arguments: object) -> Ran:
        capfdbinary.readouterr()
        code = main([str(a) for a in arguments])
        return Ran(code, *capfdbinary.readouterr())

    return call


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the command line as a process of its own."""
    command = [sys.executable, "-m", "ckptspec", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=60, **options)


# validate


def test_a_good_checkpoint_is_one_line_and_exit_code_0(ckptspec: Any, newest: Path) -> None:
    for level in ("schema", "manifest", "shards", "bytes"):
        done = ckptspec("validate", newest, "--level", level)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"{newest}: step 7")
        assert done.out.endswith(f"level {level}: ok\n")


def test_a_finding_reads_where_what_expected_found_rule_and_advice_follows(ckptspec: Any, newest: Path) -> None:
    os.truncate(newest / SHARD, 100)
    done = ckptspec("validate", newest)
    assert done.code == 1
    first, *rest = done.out.splitlines()
    assert first.startswith(f"{SHARD}, bytes 100..{len(FILES[SHARD])}: partial write")
    assert first.endswith(f", expected {len(FILES[SHARD])} bytes, found 100 bytes  [S-NBYTES]")
    advice = [line for line in rest if line.startswith("advice: ")]
    assert f"advice: run  ckptspec validate {newest} --level bytes" in advice
    assert any("fall back to step 3" in line and "loses 4 steps" in line for line in advice)
    assert rest[-1].endswith("1 error at level shards; decision: fallback")


def test_the_command_in_an_advice_can_be_run_as_it_stands(ckptspec: Any, tmp_path: Path) -> None:
    odd = make.write(tmp_path / "it's a run" / "step-00000007", FILES)
    (odd / SHARD).unlink()
    done = ckptspec("validate", odd)
    command = next(x for x in done.out.splitlines() if x.startswith("advice: run  ckptspec "))
    text = command.replace("advice: run  ckptspec", f"{sys.executable} -m ckptspec")
    again = subprocess.run(text, shell=True, capture_output=True, timeout=60)
    assert again.returncode == 1
    assert b"S-MISSING" in again.stdout


@pytest.mark.parametrize("damage", [None, "shard", "manifest", "empty", "target"])
def test_the_json_report_obeys_its_schema_and_has_the_exit_code(
    ckptspec: Any, newest: Path, tmp_path: Path, damage: str | None
) -> None:
    path, options = newest, ["--level", "bytes", "--format", "json"]
    if damage == "shard":
        (newest / SHARD).write_bytes(FILES["rank-00000.shard"])
    elif damage == "manifest":
        (newest / "manifest.json").write_bytes(b"\xff\x00{")
    elif damage == "empty":
        path = tmp_path / "empty"
        path.mkdir()
    elif damage == "target":
        options += ["--world-size", "5", "--exact"]
    done = ckptspec("validate", path, *options)
    report = json.loads(done.out)
    assert list(schemas.check("report", report)) == []
    assert report["exit_code"] == done.code == {None: 0, "empty": 4}.get(damage, 1)
    assert done.out.isascii()


def test_a_target_is_given_in_one_of_three_ways(ckptspec: Any, newest: Path, tmp_path: Path) -> None:
    document = tmp_path / "target.json"
    document.write_text(json.dumps(targets.Target(3).document()))
    for option in (("--world-size", "3"), ("--mesh", "dp=3"), ("--target", document)):
        done = ckptspec("validate", newest, *option)
        assert done.code == 0
        assert "[R-WORLD] (warning)" in done.out
        assert "--nproc-per-node 3" in done.out
        assert f"ckptspec reshard {newest} {newest.parent}-3-ranks {option[0]} {option[1]}" in done.out
        assert done.out.endswith("ok with 1 warning; decision: reshard\n")
        exact = ckptspec("validate", newest, *option, "--exact")
        assert exact.code == 1
        assert "--nproc-per-node 2" in exact.out
    assert ckptspec("validate", newest, "--world-size", 2).code == 0
    assert ckptspec("validate", newest, "--mesh", "dp=2").code == 0


def test_a_target_that_is_none_is_a_finding(ckptspec: Any, newest: Path, tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text('{"format": "ckptspec-target"}')
    (tmp_path / "junk.json").write_bytes(b"\x00" * 100)
    for name in ("no.json", "junk.json"):
        done = ckptspec("validate", newest, "--target", tmp_path / name, "--format", "json")
        assert done.code == 1
        assert list(schemas.check("report", json.loads(done.out))) == []
    assert ckptspec("validate", newest, "--target", tmp_path / "absent.json").code == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate",),
        ("validate", "PATH", "--level", "deep"),
        ("validate", "PATH", "--world-size", "0"),
        ("validate", "PATH", "--world-size", "2", "--mesh", "dp=2"),
        ("validate", "PATH", "--mesh", "pp=2"),
        ("validate", "PATH", "--micro-batch", "0"),
        ("validate", "PATH", "--world-size", "3", "--write-map", "OUT"),
        ("validate", "PATH", "--mesh", "dp"),
        ("validate", "PATH", "--mesh", "dp=2,dp=3"),
        ("validate", "PATH", "--expect-digest", "abc"),
        ("validate", "PATH", "--format", "xml"),
        ("schema", "nothing"),
        ("reshard", "PATH", "OUT"),
        ("latest",),
        ("inspect", "PATH", "--nope"),
    ],
)
def test_a_wrong_use_is_exit_code_2_and_said_on_stderr(ckptspec: Any, newest: Path, arguments: tuple[str, ...]) -> None:
    done = ckptspec(*(newest if a == "PATH" else a for a in arguments))
    assert (done.code, done.out) == (2, "")
    assert "Error" in done.err


@pytest.mark.parametrize("command", ["validate", "inspect", "latest"])
def test_a_path_that_is_not_there_is_exit_code_3_in_one_line(ckptspec: Any, tmp_path: Path, command: str) -> None:
    done = ckptspec(command, tmp_path / "nowhere")
    assert (done.code, done.out) == (3, "")
    assert done.err == f"error: {tmp_path / 'nowhere'}: No such file or directory\n"


# latest


def test_latest_prints_the_path_alone(ckptspec: Any, run: Path, newest: Path) -> None:
    done = ckptspec("latest", run)
    assert (done.code, done.out, done.err) == (0, f"{newest}\n", "")


def test_latest_says_on_stderr_what_it_skipped_and_why(ckptspec: Any, run: Path, newest: Path) -> None:
    (newest / SHARD).unlink()
    done = ckptspec("latest", run)
    assert (done.code, done.out) == (0, f"{run / 'step-00000003'}\n")
    assert done.err.startswith(f"skipped step-00000007: {SHARD}: the shard is missing")
    document = json.loads(ckptspec("latest", run, "--format", "json").out)
    assert (document["path"], document["step"]) == (str(run / "step-00000003"), 3)
    assert document["skipped"][0]["finding"]["code"] == "S-MISSING"


def test_latest_tells_an_empty_run_from_one_where_all_are_bad(ckptspec: Any, run: Path, tmp_path: Path) -> None:
    for folder in run.iterdir():
        (folder / "manifest.json").unlink()
    done = ckptspec("latest", run)
    assert (done.code, done.out) == (1, "")
    assert done.err.count("skipped") == 2
    (tmp_path / "empty").mkdir()
    done = ckptspec("latest", tmp_path / "empty")
    assert (done.code, done.out) == (4, "")
    assert "no checkpoint" in done.err


# inspect, schema, help


def test_inspect_shows_every_part(ckptspec: Any, newest: Path) -> None:
    done = ckptspec("inspect", newest)
    assert (done.code, done.err) == (0, "")
    for part in ("model/embed", "[7, 24]", "bfloat16", "rows", SHARD, "dp=2", "optimizer/param_groups", "a-run"):
        assert part in done.out
    assert "bold" not in done.out
    document = json.loads(ckptspec("inspect", newest, "--format", "json").out)
    assert document["manifest"]["step"] == 7
    assert document["path"] == str(newest)


def test_inspect_of_what_is_no_checkpoint_is_an_error_with_its_rule(ckptspec: Any, newest: Path) -> None:
    (newest / "manifest.json").write_bytes(FILES["manifest.json"][:-1])
    done = ckptspec("inspect", newest)
    assert (done.code, done.out) == (1, "")
    assert "[L-TAIL]" in done.err


def test_inspect_of_an_empty_run_is_exit_code_4(ckptspec: Any, tmp_path: Path) -> None:
    done = ckptspec("inspect", tmp_path)
    assert (done.code, done.out) == (4, "")
    assert "[C-EMPTY]" in done.err


def test_a_table_of_very_many_rows_is_cut_and_says_so(ckptspec: Any, tmp_path: Path) -> None:
    plan = builder.sample(1, objects={f"o{i}": "same" for i in range(1500)})
    files = builder.build(builder.Plan(plan.manifest, plan.local, {f"o{i}": i for i in range(1500)}))
    out = ckptspec("inspect", make.write(tmp_path / "c", files)).out
    assert "and 500 more rows" in out


def test_sizes_are_read_as_people_do() -> None:
    shown = [size(n) for n in (0, 9999, 12_345, 5_000_000, 1_230_000_000_000, 10**21)]
    assert shown == ["0 B", "9999 B", "12.35 kB", "5 MB", "1.23 TB", "1e+06 PB"]


def test_schemas_are_printed_as_they_are_written(ckptspec: Any) -> None:
    names = ckptspec("schema", "--list").out.split()
    assert names == list(schemas.names())
    for name in names:
        assert json.loads(ckptspec("schema", name).out) == schemas.load(name)


def test_every_command_has_help_and_the_list_names_all(ckptspec: Any) -> None:
    shown = ckptspec("--help")
    assert shown.code == 0
    for name in COMMANDS:
        assert f"  {name} " in shown.out
        done = ckptspec(name, "--help")
        assert done.code == 0
        assert done.out.startswith(f"Usage: ckptspec {name}")
    assert ckptspec("--version").out.startswith("ckptspec ")


# Ends of every other kind


def test_a_fault_of_our_own_is_one_line(ckptspec: Any, newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise KeyError("a\nb\x1b[31m")

    monkeypatch.setattr("ckptspec.cli.validation.validate", broken)
    done = ckptspec("validate", newest)
    assert (done.code, done.out, done.err.count("\n")) == (3, "", 1)
    assert done.err.startswith("internal fault: KeyError:")
    assert "\x1b" not in done.err


def test_no_permission_is_exit_code_3(ckptspec: Any, newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*args: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied", os.fsencode(newest / "manifest.json"))

    monkeypatch.setattr("ckptspec.cli.validation.validate", locked)
    done = ckptspec("validate", newest)
    assert (done.code, done.err) == (3, f"error: {newest / 'manifest.json'}: Permission denied\n")


def test_an_interrupt_is_exit_code_130(ckptspec: Any, newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ckptspec.cli.validation.validate", stopped)
    done = ckptspec("validate", newest)
    assert (done.code, done.out, done.err.strip()) == (130, "", "interrupted")


def test_an_interrupt_from_outside_is_exit_code_130(newest: Path, tmp_path: Path) -> None:
    marker = tmp_path / "running"
    script = (
        "import sys, time, pathlib, ckptspec.cli.validation as v\n"
        "from ckptspec.cli.main import main\n"
        "def wait(*a, **k):\n"
        "    pathlib.Path(sys.argv[1]).touch()\n"
        "    time.sleep(30)\n"
        "v.validate = wait\n"
        "sys.exit(main(['validate', sys.argv[2]]))\n"
    )
    job = subprocess.Popen([sys.executable, "-c", script, marker, newest], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=30)
    assert (job.returncode, err.strip()) == (130, b"interrupted")


def test_a_reader_that_leaves_early_changes_neither_the_code_nor_the_words(newest: Path, tmp_path: Path) -> None:
    plan = builder.sample(1, objects={f"o{i}": "same" for i in range(900)})
    files = builder.build(builder.Plan(plan.manifest, plan.local, {f"o{i}": i for i in range(900)}))
    folder = make.write(tmp_path / "c", files)
    (folder / "rank-00000.shard").unlink()
    for command, code in (("inspect", "0"), ("validate", "1")):
        line = f"{sys.executable} -m ckptspec {command} {folder} | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60)
        assert (done.stdout.decode().strip(), done.stderr) == (code, b"")


def test_a_path_that_is_no_utf_8_comes_back_byte_for_byte(tmp_path: Path) -> None:
    run = Path(os.fsdecode(os.fsencode(tmp_path) + b"/r\xff\xfen"))
    make.write(run / "step-00000007", FILES)
    done = process("latest", run)
    assert (done.returncode, done.stdout) == (0, os.fsencode(run / "step-00000007") + b"\n")
    for environment in ({}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}):
        done = process("validate", run, env={**os.environ, **environment})
        assert (done.returncode, done.stderr) == (0, b"")
        assert rb"r\xff\xfen: step 7" in done.stdout
    report = json.loads(process("validate", run, "--format", "json").stdout)
    assert list(schemas.check("report", report)) == []


EVIL = "\x1b]0;owned\x07\u202egnp.\x9b31m"


def test_nothing_from_a_checkpoint_reaches_the_terminal_raw(ckptspec: Any, tmp_path: Path) -> None:
    safe = "".join(c for c in EVIL if ord(c) > 0xFF or c.isprintable())
    plan = builder.sample(1, objects={safe + "[red]x[/red]": "same"}, run_id=safe)
    files = builder.build(builder.Plan(plan.manifest, plan.local, {safe + "[red]x[/red]": 1}))
    good = make.write(tmp_path / "good", files)
    out = ckptspec("inspect", good).out
    assert "\u202e" not in out
    assert "[red]x[/red]" in out
    bad = make.write(tmp_path / "bad", builder.edit(files, lambda d: d["tensors"].update({EVIL: {}})))
    worse = make.write(tmp_path / "worse", builder.edit(files, lambda d: d["objects"].update({EVIL: "same"})))
    for folder in (bad, worse, good):
        for command in ("validate", "inspect"):
            for form in ("text", "json"):
                done = ckptspec(command, folder, "--format", form)
                raw = done.out + done.err
                assert all(c == "\n" or ord(c) >= 0x20 for c in raw), raw
                assert not {"\u202e", "\x9b", "\x7f"} & set(raw)


def test_clean_text_shows_what_it_hides() -> None:
    assert output.clean("a\x1bb\u202ec\udcffd\x9be") == "a\\x1bb\\u202ec\\xffd\\x9be"
    assert output.clean("plain ünïcode 文字") == "plain ünïcode 文字"


def test_the_command_line_imports_nothing_heavy_to_validate(newest: Path) -> None:
    script = (
        "import sys\n"
        "from ckptspec.cli.main import main\n"
        "code = main(['validate', sys.argv[1], '--level', 'bytes'])\n"
        "heavy = sorted({'torch', 'numpy', 'ml_dtypes', 'rich', 'ckptspec.demo'} & set(sys.modules))\n"
        "assert code == 0 and not heavy, (code, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, newest], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


def test_the_demo_says_what_to_install_where_torch_is_not(ckptspec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "torch" else find(name, *a))
    done = ckptspec("demo")
    assert done.code == 3
    assert "ckptspec[torch]" in done.err


def test_the_exit_codes_are_those_of_the_contract() -> None:
    codes = (frame.CLEAN, frame.FOUND, frame.USAGE, frame.COULD_NOT, frame.EMPTY, frame.INTERRUPTED)
    assert codes == (0, 1, 2, 3, 4, 130)


def test_two_runs_of_one_command_say_the_same(ckptspec: Any, run: Path, newest: Path) -> None:
    shutil.copy(newest / SHARD, newest / "rank-00009.shard")
    (newest / "rank-00000.shard").write_bytes(b"short")
    assert ckptspec("validate", newest).raw == ckptspec("validate", newest).raw

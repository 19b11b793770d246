"""What the README shows runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def block(title: str) -> str:
    found = re.search(rf"<!-- test: {title} -->\n```\w*\n(.*?)```", README, re.DOTALL)
    assert found, title
    return found[1]


def run(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_the_quick_start_and_the_commands_after_it_run(tmp_path: Path) -> None:
    code = block("quick start")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["run/step-00000100", "ok"]
    expected = {
        "validate run --level bytes": 0,
        "validate run --world-size 3": 0,
        "inspect run": 0,
        "latest run": 0,
        "diff run/step-00000100 run": 0,
        "rollback run --to 100": 0,
        "clean run --keep-last 3 --dry-run": 0,
    }
    for line in block("shell").splitlines():
        command = line.split("#")[0].split()
        assert command[0] == "ckptspec"
        result = run(command, tmp_path)
        assert result.returncode == expected.pop(" ".join(command[1:])), result.stdout + result.stderr
        assert "Traceback" not in result.stderr
    assert expected == {}


def test_every_link_leads_to_a_file() -> None:
    for document in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for link in re.findall(r"\]\(([^)#]+)\)", document):
            assert "://" in link or (ROOT / link).exists(), link


def test_the_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

"""What a run shows of itself: one line and one call for each save and restore, and a bar on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from forks import run_phases

import ckptspec


def test_every_save_and_restore_is_logged_and_observed_on_every_rank(tmp_path: Path) -> None:
    printed = run_phases("observe_cases", [("watched", 2)], tmp_path)
    seen = ["RestoreResult None", "SaveResult 1", "SaveResult 2", "SaveResult 3", "RestoreResult 3"]
    assert [text.splitlines()[-1] for text in printed["watched"]] == [str(seen)] * 2


def test_a_load_tells_how_far_it_is(tmp_path: Path) -> None:
    state = {"a": torch.ones(3_000_000), "b": torch.ones(5), "c": torch.ones(1000).half()}
    ckptspec.save(tmp_path, state, step=1)
    told: list[tuple[int, int]] = []
    ckptspec.load(tmp_path, state, progress=lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {12_000_000 + 20 + 2000}
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]
    assert len(told) > 3


SCRIPT = """
    import sys, torch, ckptspec
    state = {"w": torch.ones(3_000_000)}
    with ckptspec.Checkpointer(sys.argv[1]) as cp:
        cp.save(1, state, blocking=True)
        state["w"].zero_()
        print(cp.restore(state).step, bool(state["w"].all()))
"""


def shown(run: Path, *, terminal: bool) -> str:
    """Return what a restore writes to standard error, a terminal or a file."""
    read, write = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(run)]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=write, text=True, env=env, timeout=100, check=True)
    os.close(write)
    assert done.stdout.split() == ["1", "True"]
    found = b""
    while True:
        try:
            part = os.read(read, 1 << 16)
        except OSError:  # a terminal that is closed at the other end
            break
        if not part:
            break
        found += part
    os.close(read)
    return found.decode()


def test_a_restore_shows_a_bar_on_a_terminal_and_nothing_in_a_file(tmp_path: Path) -> None:
    assert "restoring" in shown(tmp_path / "a", terminal=True)
    assert shown(tmp_path / "b", terminal=False) == ""

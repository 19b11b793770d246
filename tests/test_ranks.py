"""run_ranks starts what it was asked, tells how it ended, and leaves no process behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ranks import run_ranks


def alive(pid: int) -> bool:
    """Return whether `pid` runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_each_rank_gets_its_number_its_arguments_and_the_environment() -> None:
    script = "import os, sys; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['EXTRA'], sys.argv[1])"
    results = run_ranks(script, 2, "hello", env={"EXTRA": "x"})
    assert [r.out for r in results] == ["0 2 x hello\n", "1 2 x hello\n"]
    assert [r.returncode for r in results] == [0, 0]


def test_a_killed_rank_is_reported_as_the_signal_that_ended_it() -> None:
    script = "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)"
    results = run_ranks(script, 2, expect={1: -9})
    assert [r.returncode for r in results] == [0, -9]


def test_an_unexpected_exit_code_fails_with_the_output_of_the_rank() -> None:
    with pytest.raises(AssertionError, match="what went wrong"):
        run_ranks("import sys; sys.exit('what went wrong')", 1)


def test_ranks_and_their_children_are_gone_after_a_timeout(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "part = pathlib.Path(sys.argv[1]) / 'part'\n"
        "part.write_text(f'{os.getpid()} {child.pid}')\n"
        "part.rename(part.with_name('pids'))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(AssertionError, match=r"rank\(s\) \[0\] still ran"):
        run_ranks(script, 1, str(tmp_path), timeout=2)
    pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5  # a signal is sent at once, a process takes a moment to die of it
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)


def test_the_ranks_meet_in_a_gloo_group() -> None:
    script = (
        "import torch, torch.distributed as dist\n"
        "from ranks import start_gloo\n"
        "rank, world = start_gloo()\n"
        "x = torch.tensor([rank + 1])\n"
        "dist.all_reduce(x)\n"
        "print(world, x.item())\n"
        "dist.destroy_process_group()\n"
    )
    assert [r.out for r in run_ranks(script, 2)] == ["2 3\n", "2 3\n"]

"""Under torchrun: a rank dies in a save; all are started again on the same store, believe nothing in it, and go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import free_port

import ckptspec

TESTS = Path(__file__).resolve().parent
STATIC = ["--master-addr", "127.0.0.1", "--master-port", "{port}"]
C10D = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:{port}"]
OWN = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # rank 0 serves a store, anew in every start


def torchrun(run: Path, options: list[str], env: dict[str, str]) -> str:
    """Start two ranks, again when one dies, and return what all of them printed once the job went well."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    common = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--monitor-interval", "0.1", *(option.format(port=free_port()) for option in options)]
    log = run.with_name("log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, str(TESTS / "elastic_ranks.py"), str(run)],
            env={**common, "GLOO_SOCKET_IFNAME": "lo", **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        code = process.wait(100)
    finally:
        if process.poll() is None:
            process.terminate()  # it ends its workers, and they end themselves after a while
            process.wait(60)
    text = log.read_text(errors="replace")
    assert code == 0, text
    return text


@pytest.mark.parametrize(
    ("options", "env", "old"),
    [
        pytest.param(STATIC, {}, True, id="the agent's store"),
        pytest.param(C10D, OWN, False, id="rank 0's store"),
        pytest.param(C10D, {}, True, id="the agents' store", marks=pytest.mark.long),
    ],
)
def test_after_an_elastic_restart_the_last_good_step_is_found_and_saving_goes_on(
    options: list[str], env: dict[str, str], old: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    text = torchrun(run, options, env)
    assert text.count("old keys\n") == old, text
    for rank in (0, 1):
        assert text.count(f"rank {rank} went on from step 2\n") == 1, text
    assert sorted(p.name for p in run.iterdir() if p.name.startswith("step-")) == [
        f"step-0000000{n}" for n in (1, 2, 3)
    ]
    assert ckptspec.validate(run, level="bytes").ok

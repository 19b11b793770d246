"""Plans and validates the manifests of large jobs on one core: time, memory and what was counted, a process a case.

python tools/scale.py [--only WORDS ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models

from ckptspec.check.manifests import check_manifest
from ckptspec.format import manifest as manifests
from ckptspec.format.manifest import Manifest
from ckptspec.format.target import Target
from ckptspec.planner.plans import needed, plan, transfers

Counts = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is measured: `make` is not, `run` is; it returns what was counted."""

    text: str
    make: Callable[[], Any]
    run: Callable[[Any], Counts]


def _read(data: bytes) -> Counts:
    decoded = manifests.decode(data)
    assert decoded.manifest is not None
    assert [*check_manifest(decoded.manifest)] == []
    return {"bytes": len(data), "tensors": len(decoded.manifest.tensors), "ranks": decoded.manifest.world_size}


def _whole(pair: tuple[Manifest, Target]) -> Counts:
    made = plan(*pair)
    assert made.possible
    return {
        "transfers": made.totals.transfers,
        "shards opened by a rank": max(made.ranks.shards_opened),
        "read / stored": round(made.totals.read_amplification, 3),
        "with exchange": round(made.totals.read_amplification_with_exchange, 3),
    }


def _one(pair: tuple[Manifest, Target]) -> Counts:
    rank = pair[1].world_size * 2 // 3
    moved = sum(len(columns.rank) for columns in transfers(*pair, rank=rank))
    return {"transfers": moved, "shards opened by a rank": len(needed(*pair, rank))}


def _same(job: models.Job) -> tuple[Manifest, Target]:
    return job.manifest(), job.target()


CASES: Mapping[str, Case] = {
    "read 70B": Case(
        "parse and validate: 70B on 1,024 ranks",
        lambda: manifests.dump(models.dense(128, 8).by_parameter().manifest()),
        _read,
    ),
    "read ZeRO": Case(
        "parse and validate: 70B with ZeRO-1 on 1,024 ranks",
        lambda: manifests.dump(models.dense(128, 8).zero().manifest()),
        _read,
    ),
    "read 1T": Case(
        "parse and validate: 1T MoE on 16,384 ranks",
        lambda: manifests.dump(models.mixture(16, 128, 8, 256, 64).manifest()),
        _read,
    ),
    "rank 70B": Case(
        "one rank: 70B 1,024 -> 768",
        lambda: (models.dense(128, 8).by_parameter().manifest(), models.dense(96, 8).by_parameter().target()),
        _one,
    ),
    "70B": Case(
        "70B 1,024 -> 768",
        lambda: (models.dense(128, 8).by_parameter().manifest(), models.dense(96, 8).by_parameter().target()),
        _whole,
    ),
    "same FSDP": Case(
        "the same: 70B, FSDP alone on 1,024 ranks", lambda: _same(models.dense(1024, 1).by_parameter()), _whole
    ),
    "same FSDP x TP": Case(
        "the same: 70B on 1,024 ranks, norms held by 8 each",
        lambda: _same(models.dense(128, 8).by_parameter()),
        _whole,
    ),
    "ZeRO": Case(
        "70B with ZeRO-1 1,024 -> 768",
        lambda: (models.dense(128, 8).zero().manifest(), models.dense(96, 8).zero().target()),
        _whole,
    ),
    "ZeRO to named": Case(
        "70B, ZeRO-1 on 1,024 -> by parameter on 768",
        lambda: (models.dense(128, 8).zero().manifest(), models.dense(96, 8).by_parameter().target()),
        _whole,
    ),
    "named to ZeRO": Case(
        "70B, by parameter on 768 -> ZeRO-1 on 1,024",
        lambda: (models.dense(96, 8).by_parameter().manifest(), models.dense(128, 8).zero().target()),
        _whole,
    ),
    "ZeRO TP": Case(
        "70B with ZeRO-1, TP 8 -> 4, 1,024 -> 512",
        lambda: (models.dense(128, 8).zero().manifest(), models.dense(128, 4).zero().target()),
        _whole,
    ),
    "stages": Case(
        "70B, TP 8 -> 4 and PP 16 -> 8, 1,024 ranks",
        lambda: (models.staged(16, 8, 8).manifest(), models.staged(8, 32, 4).target()),
        _whole,
    ),
    "rank 1T": Case(
        "one rank: 1T MoE 16,384 -> 8,192",
        lambda: (
            models.mixture(16, 128, 8, 256, 64).manifest(),
            models.mixture(8, 128, 8, 128, 64).target(),
        ),
        _one,
    ),
    "1T": Case(
        "1T MoE 16,384 -> 8,192",
        lambda: (
            models.mixture(16, 128, 8, 256, 64).manifest(),
            models.mixture(8, 128, 8, 128, 64).target(),
        ),
        _whole,
    ),
}


def measured(case: Case) -> dict[str, Any]:
    """Return seconds of one core, and of the clock, the most memory of this process in MiB, and what was counted."""
    import numpy  # noqa: F401 - 0.1 s that every first plan takes; not what is measured

    made = case.make()
    base = _peak()
    core, clock = time.process_time(), time.perf_counter()
    counts = case.run(made)
    core, clock = time.process_time() - core, time.perf_counter() - clock
    return {"core s": round(core, 3), "clock s": round(clock, 3), "MiB": _peak(), "MiB before": base, **counts}


def _peak() -> int:
    """Return the most memory that this process has had, in MiB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) >> 10


def main() -> int:
    """Measure each case in a process of its own, or be one."""
    parser = argparse.ArgumentParser(description="plan and validate manifests of large jobs, on one core")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.inside is not None:
        print(json.dumps(measured(CASES[o.inside])))
        return 0
    found = {}
    print("| case | core s | MiB (before) | counted |\n| --- | --- | --- | --- |")
    for name in o.only:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, __file__, "--inside", name], env=env, stdout=subprocess.PIPE, check=True)
        figures = found[name] = json.loads(done.stdout)
        counted = ", ".join(f"{k} {v:,}" for k, v in list(figures.items())[4:])
        memory = f"{figures['MiB']} ({figures['MiB before']})"
        print(f"| {CASES[name].text} | {figures['core s']:.2f} | {memory} | {counted} |", flush=True)
    if o.json is not None:
        o.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times durable saves and loads into existing tensors: ckptspec beside its peers and the raw disk, in one run.

python tools/bench/run.py [--ranks 2] [--case large|small|both] [--rounds 5] [--bytes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import contenders
import safetensors
import torch
import torch.distributed as dist
from contenders import Contender, rank
from rounds import PHASES, Sample, measure
from states import State, crumbs, fill, nbytes, spread, transformer

BASE = contenders.Ckptspec.name


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="time durable saves and loads, ckptspec beside its peers")
    parser.add_argument("--case", choices=["large", "small", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=10**9, help="size of the large state (default 1e9)")
    parser.add_argument("--tensors", type=int, default=260, help="tensors of the large state")
    parser.add_argument("--small", type=int, default=20_000, help="tensors of the small state")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="contenders whose names begin like this")
    parser.add_argument("--dcp-threads", type=int, default=2, help="writers of torch.distributed.checkpoint per rank")
    parser.add_argument("--dir", type=Path, default=Path("build"), help="where to write; must be a real disk")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where to keep every sample")
    return parser.parse_args()


def main() -> int:
    """Start the ranks, or be one of them."""
    o = options()
    warnings.simplefilter("ignore")
    if o.ranks > 1 and "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(o.ranks)]
        threads = str(max(1, (os.cpu_count() or 1) // o.ranks))
        env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore", **os.environ}
        return subprocess.call([*launch, *sys.argv], env=env)
    if o.ranks > 1:
        dist.init_process_group("gloo")
    o.dir.mkdir(parents=True, exist_ok=True)
    folder = shared_folder(o.dir)
    try:
        results = {case: run_case(case, o, folder) for case in (["large", "small"] if o.case == "both" else [o.case])}
    finally:
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank() == 0:
        o.json.parent.mkdir(parents=True, exist_ok=True)
        o.json.write_text(json.dumps({"machine": machine(), "ranks": o.ranks, "cases": results}, indent=1) + "\n")
        print(f"every sample: {o.json}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def run_case(case: str, o: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure one state with all contenders, print the table, and return everything measured."""
    state = transformer(o.bytes, o.tensors) if case == "large" else crumbs(o.small)
    count = sum(len(group) for group in state.values())
    if dist.is_initialized():
        state = spread(state)
    fill(state, seed=rank())
    size = nbytes(state) * o.ranks
    if shutil.disk_usage(folder).free < 3 * size:
        raise SystemExit(f"{folder} needs {3 * size:,} free bytes")
    samples = []
    for sample in measure(chosen(o, state), state, folder, o.rounds):
        samples.append(sample)
        if rank() == 0:
            print(f"  round {sample.round} {sample.contender} {sample.phase} {sample.seconds:.3f} s", file=sys.stderr)
    medians = medians_of(samples)
    if rank() == 0:
        print(f"\n{case}: {count:,} tensors, {size:,} bytes, {o.ranks} rank(s), median of {o.rounds} rounds")
        print("\n".join(table(medians, size)), flush=True)
    rows = [[s.contender, s.phase, s.round, round(s.seconds, 5)] for s in samples]
    return {"tensors": count, "bytes": size, "medians": medians, "ratios": ratios(medians), "samples": rows}


def chosen(o: argparse.Namespace, state: State) -> list[Contender]:
    """Return the contenders that take part."""
    everyone: list[Contender] = [
        contenders.Ckptspec(),
        contenders.TorchSave(),
        contenders.Safetensors(),
        contenders.DistributedCheckpoint(o.dcp_threads),
        contenders.RawDisk(state),
    ]
    return [c for c in everyone if not o.only or any(c.name.startswith(name) for name in o.only)]


def medians_of(samples: Iterable[Sample]) -> dict[str, dict[str, float]]:
    """Return the median seconds by contender and phase."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        seconds.setdefault(sample.contender, {}).setdefault(sample.phase, []).append(sample.seconds)
    return {name: {p: round(statistics.median(all_), 5) for p, all_ in of.items()} for name, of in seconds.items()}


def ratios(medians: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return how many times as long as ckptspec each contender took, by phase; empty when ckptspec took no part."""
    base = medians.get(BASE)
    if base is None:
        return {}
    return {name: {phase: round(of[phase] / base[phase], 3) for phase in PHASES} for name, of in medians.items()}


def table(medians: Mapping[str, Mapping[str, float]], size: int) -> Sequence[str]:
    """Return the lines of a table: seconds, GB/s, and the time over ckptspec's (above 1: ckptspec is faster)."""
    relative = ratios(medians)
    units = f"{'s':>8}{'GB/s':>8}{'x':>8}  " * len(PHASES)
    lines = [f"{'':30}" + "".join(f"{phase:^26}" for phase in PHASES), f"{'':30}{units}"]
    for name, of in medians.items():
        cells = []
        for phase in PHASES:
            factor = f"{relative[name][phase]:8.2f}" if relative else " " * 8
            cells.append(f"{of[phase]:8.3f}{size / of[phase] / 1e9:8.2f}{factor}  ")
        lines.append(f"{name:30}" + "".join(cells))
    return lines


def machine() -> dict[str, Any]:
    """Return what a reader of the numbers must know of the machine and the libraries."""
    return {
        "processors": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": safetensors.__version__,
    }


def shared_folder(parent: Path) -> Path:
    """Return a new folder that all ranks know."""
    name = [tempfile.mkdtemp(prefix="bench-", dir=parent) if rank() == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(name)
    return Path(name[0])


if __name__ == "__main__":
    sys.exit(main())

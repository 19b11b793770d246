"""What each rank does in tests/test_reload.py: jobs saved on some numbers of ranks, loaded on others in other forms."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from reload_jobs import FORMS, Job, Net
from torch.distributed.tensor import DTensor

import ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.pytorch.capture import capture

BEFORE, AFTER = 2, 3  # steps before and after the save
Arrays = Mapping[str, numpy.ndarray]

# ---- what is saved ---------------------------------------------------------------------------------------------------

SAVED: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (4, {}),
    "hsdp": (4, {}),
    "tensor": (4, {}),
    "pipeline": (4, {}),
    "experts": (4, {"scope": "partial", "exclude": ["optimizer/param_groups"]}),
    "zero": (4, {}),
    "ddp": (3, {}),
    "redundant": (3, {}),
    "aligned": (2, {}),
    "single": (1, {}),
}

PARAMETERS = [name for name, _ in Net().named_parameters()]
FIRST = ("embed", "up")
ADAM = ("step", "exp_avg", "exp_avg_sq")


def save(rank: int, world: int, folder: Path, only: list[str], _: list[str] | None = None) -> None:
    for name, (ranks, options) in SAVED.items():
        if ranks != world or name not in only:
            continue
        job = FORMS[name](world, 0)
        job.train(BEFORE)
        ckptspec.save(folder / name, job.state, step=BEFORE, **options)
        told = {"look": job.look(), "losses": job.train(AFTER)}
        if rank == 0:
            (folder / f"{name}.json").write_text(json.dumps(told))


# ---- and what it is loaded into --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reload:
    """A checkpoint by name, the form and number of ranks it is loaded on, how, and what each name then must hold.

    `wanted` gives the arrays by the names of the loaded state, from those of the checkpoint.
    """

    source: str
    form: str
    world: int
    options: Mapping[str, Any] = field(default_factory=dict)
    wanted: Callable[[Path, Arrays], Arrays] = lambda folder, arrays: arrays
    exact: bool = True

    @property
    def name(self) -> str:
        return f"{self.source} -> {self.form} {self.world}"


def out_of_stages(folder: Path, arrays: Arrays) -> Arrays:
    return {n.replace("optimizer0/", "optimizer/").replace("optimizer1/", "optimizer/"): a for n, a in arrays.items()}


def into_stages(folder: Path, arrays: Arrays) -> Arrays:
    return {n.replace("optimizer/", f"optimizer{i}/"): a for i in range(2) for n, a in arrays.items()}


def out_of_flat(folder: Path, arrays: Arrays) -> Arrays:
    """Every member of the flat buffers as a tensor of its own, under the name torch's optimizers use."""
    (group,) = load_manifest(folder)[1].flat_groups.values()
    out = dict(arrays)
    for member in group.members:
        path = member.name.removeprefix("model/")
        for kind in ("exp_avg", "exp_avg_sq", "master"):
            run = arrays[f"zero/{kind}"][member.offset : member.offset + math.prod(member.shape)]
            out[f"optimizer/state/{path}/{kind}"] = run.reshape(member.shape)
        out[f"optimizer/state/{path}/step"] = arrays["adam_step"]
    return out


def into_flat(key: str, folder: Path, arrays: Arrays) -> Arrays:
    """The flat buffers that named tensors make up."""
    out = dict(arrays)
    for kind in ("exp_avg", "exp_avg_sq"):
        out[f"zero/{kind}"] = numpy.concatenate([arrays[f"optimizer/state/{p}/{kind}"].reshape(-1) for p in PARAMETERS])
    out[f"zero/{key}"] = numpy.concatenate([arrays[f"model/{p}"].reshape(-1) for p in PARAMETERS])
    out["adam_step"] = arrays["optimizer/state/up.weight/step"]
    return out


OF_STAGES = {f"optimizer/state/{p}/*": f"optimizer{int(not p.startswith(FIRST))}/state/{p}/*" for p in PARAMETERS}
INTO_STAGES = {f"optimizer{i}/*": "optimizer/*" for i in range(2)}
NO_GROUPS = {"skip": ["*/param_groups"]}
OF_FLAT = {"names": {"optimizer/state/*/step": "adam_step"}, "skip": ["*/param_groups", "zero/master"]}
INTO_FLAT = {"names": {"adam_step": "optimizer/state/up.weight/step"}, "unexpected": "ignore"}
RELOADS = [
    Reload("fsdp", "fsdp", 2),
    Reload("fsdp", "fsdp", 3),
    Reload("fsdp", "single", 1),
    Reload("hsdp", "fsdp", 3),
    Reload("tensor", "fsdp", 4, exact=False),
    Reload("tensor", "single", 1, exact=False),
    Reload("ddp", "fsdp", 2),
    Reload("ddp", "fsdp", 3),  # as many ranks, and the same names on each: the layout alone is another
    Reload("fsdp", "ddp", 3),
    Reload("pipeline", "single", 1, {"names": OF_STAGES, **NO_GROUPS}, out_of_stages, exact=False),
    Reload("experts", "experts", 3, NO_GROUPS, exact=False),
    Reload("experts", "experts", 2, NO_GROUPS, exact=False),
    Reload("experts", "experts", 1, NO_GROUPS, exact=False),
    Reload("zero", "zero", 3),
    Reload("zero", "single", 1, OF_FLAT, out_of_flat),
    Reload("redundant", "redundant", 2),
    Reload("redundant", "single", 1),
    Reload("single", "redundant", 3),
    Reload("aligned", "aligned", 3),
    Reload("single", "fsdp", 2),
    Reload("single", "hsdp", 4),
    Reload("single", "tensor", 4, exact=False),
    Reload("single", "pipeline", 4, {"names": INTO_STAGES, "unexpected": "ignore"}, into_stages, exact=False),
    Reload("fsdp", "meta", 3, {"materialize": "cpu"}),
    Reload("single", "aligned", 4, INTO_FLAT, partial(into_flat, "params")),
]


def load(rank: int, world: int, folder: Path, _: list[str], only: list[str]) -> None:
    """Load checkpoints one after the other, every second one by exchange."""
    cases = [case for case in RELOADS if case.world == world and case.name in only]
    for number, case in enumerate(cases):
        reload(case, rank, folder, dist.group.WORLD if number % 2 else None)


def reload(case: Reload, rank: int, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Load one checkpoint; compare every tensor bit by bit, then the losses."""
    told = json.loads((folder / f"{case.source}.json").read_text())
    job = FORMS[case.form](case.world, 1)
    print(case.name, flush=True)
    result = ckptspec.load(folder / case.source, into=job.state, process_group=group, **case.options)
    laid_out_like_parameters(job)
    arrays = case.wanted(folder / case.source, ckptspec.read(folder / case.source))
    assert compare(job.state, arrays, rank, case.world) > 1
    assert job.state["steps"] == BEFORE, case.name
    first = job.look()
    assert first == told["look"] if case.exact else math.isclose(first, told["look"], rel_tol=1e-5), (case.name, first)
    numpy.testing.assert_allclose(job.train(AFTER), told["losses"], rtol=2e-4, err_msg=case.name)
    print("result", result.missing, result.unexpected, result.skipped, result.private, flush=True)


def laid_out_like_parameters(job: Job) -> None:
    """Check that what an optimizer keeps of a parameter is a DTensor where the parameter is one."""
    for optimizer in job.state.values() if isinstance(job.state.get("model"), torch.nn.Module) else ():
        for p, state in optimizer.state.items() if isinstance(optimizer, torch.optim.Optimizer) else ():
            assert set(state) == set(ADAM), list(state)
            for key in ADAM[1:] if isinstance(p, DTensor) else ():
                assert state[key].placements == p.placements, key


def compare(state: Any, arrays: Arrays, rank: int, world: int) -> int:
    """Compare every box of every tensor that this rank has of a state with what must lie there; return how many."""
    captured = capture(state, rank=rank, world=world)
    count = 0
    for name, leaf in captured.leaves.items():
        if leaf.entry.shape is None:
            continue
        for box in leaf.boxes:
            part = arrays[name][tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))]
            held = leaf.holding.part(box).contiguous()
            assert str(held.dtype) == f"torch.{part.dtype}", name
            assert held.reshape(-1).view(torch.uint8).numpy().tobytes() == part.tobytes(), (name, rank, box)
            count += 1
        assert leaf.padding is None or not leaf.padding.any(), name
    return count

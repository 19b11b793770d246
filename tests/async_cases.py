"""What the ranks do in tests of background saves: training goes on, a save is skipped, a disk fills, a rank dies."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckptspec
from ckptspec.engine.saves import rehearsal, writer
from ckptspec.pytorch.checkpointer import Checkpointer


def state(rank: int, value: float) -> dict[str, Any]:
    return {
        "w": torch.full((300_000,), value),
        "own": ckptspec.Local(torch.full((1000,), value + rank)),
        "small": {str(i): torch.full((7,), value + i) for i in range(20)},
        "step": int(value),
    }


def change(held: dict[str, Any]) -> None:
    """Do to the state what training does to it."""
    for t in (held["w"], held["own"].value, *held["small"].values()):
        t.add_(1000)
    held["step"] += 1


def loaded(folder: Path, rank: int, step: int) -> bool:
    into = state(rank, -1.0)
    ckptspec.load(folder / f"step-{step:08d}", into)
    want = state(rank, float(step))
    same = [torch.equal(into["w"], want["w"]), torch.equal(into["own"].value, want["own"].value)]
    return all(same) and all(torch.equal(into["small"][k], want["small"][k]) for k in want["small"])


def slow(seconds: float) -> None:
    """Make the writing of every shard take some time."""
    write = writer.write_shard

    def write_shard(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return write(*args, **more)

    from ckptspec.engine.saves import save

    save.write_shard = write_shard


def mutated(rank: int, world: int, folder: Path) -> None:
    """What is done to the state after the call is not in the checkpoint, and collectives go on beside the save."""
    slow(0.3)
    with Checkpointer(folder) as cp:
        for step in (1, 2, 3):
            held = state(rank, float(step))
            pending = cp.save(step, held)
            assert not pending.done()
            for _ in range(20):
                dist.all_reduce(torch.ones(10))
            change(held)
    assert all(loaded(folder, rank, step) for step in (1, 2, 3))
    print("equal")


def skipped(rank: int, world: int, folder: Path) -> None:
    """Ranks are busy at different times; which saves are skipped is the same on all."""
    slow(0.2 + 0.3 * rank)
    made = []
    with Checkpointer(folder / "skip", on_busy="skip") as cp:
        for step in range(1, 7):
            made.append(cp.save(step, state(rank, float(step))))
            time.sleep(0.25)
        result = cp.wait()
        assert result is None or result.ok
    print([p.step for p in made if p.outcome().skipped is None])


def full_disk(rank: int, world: int, folder: Path) -> None:
    """The disk of rank 1 is full for the second save: told at the next call on every rank, then all goes on."""
    from ckptspec.engine.saves import save

    write = writer.write_shard
    told = []
    fails = {2}

    def write_shard(path: str, *args: Any, **more: Any) -> Any:
        if rank == 1 and any(f"-{step:08d}-" in path for step in fails):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return write(path, *args, **more)

    save.write_shard = write_shard
    with Checkpointer(folder / "full", silence=20) as cp:
        for step in (1, 2, 3, 4):
            try:
                cp.save(step, state(rank, float(step)))
            except ckptspec.SaveError as e:
                told.append((step, e.rank))
                cp.save(step, state(rank, float(step)))
    with Checkpointer(folder / "warn", on_error="warn", max_failures=2, silence=20) as cp:
        fails |= {3}
        for step in (1, 2, 3, 4):
            cp.save(step, state(rank, float(step)))
    fails |= {6, 7, 8}
    try:
        with Checkpointer(folder / "many", on_error="warn", max_failures=2, silence=20) as cp:
            for step in (5, 6, 7, 8, 9):
                cp.save(step, state(rank, float(step)))
                last = step
    except ckptspec.SaveError as e:
        told.append((last, e.rank))
    print(told, ckptspec.latest(folder / "full"), ckptspec.latest(folder / "warn"), ckptspec.latest(folder / "many"))


def refused(rank: int, world: int, folder: Path) -> None:
    """A state that one rank cannot save is told to all at the same call, and training was not stopped for it."""
    cp = Checkpointer(folder / "refused", silence=20)
    held = state(rank, 1.0)
    if rank == 1:
        held["bad"] = object()
    cp.save(1, held)
    try:
        cp.wait()
    except ckptspec.SaveError as e:
        print(type(e).__name__, e.rank)
    cp.save(2, state(rank, 2.0))
    cp.close()
    assert loaded(folder / "refused", rank, 2)


def unclosed(rank: int, world: int, folder: Path) -> None:
    """Leave without close: the interpreter waits for the commit."""
    slow(0.5)
    Checkpointer(folder / "unclosed").save(1, state(rank, 1.0))


def restored(rank: int, world: int, folder: Path) -> None:
    """An empty run, a good one, damage on one rank, a state that does not fit, a step by number, nothing good."""
    run = folder / "restore"
    cp = Checkpointer(run, silence=20)
    into = state(rank, -1.0)
    fresh = cp.restore(into)
    assert (fresh.step, fresh.load, into["w"][0].item()) == (None, None, -1.0)
    for step in (1, 2, 3):
        cp.save(step, state(rank, float(step)))
    found = cp.restore(into)
    assert (found.step, found.skipped, into["w"][0].item(), into["step"]) == (3, (), 3.0, 3)
    spoil(run, 3, rank)
    into = state(rank, -1.0)
    found = cp.restore(into)
    assert (found.step, into["w"][0].item(), into["own"].value[0].item()) == (2, 2.0, 2.0 + rank)
    assert [Path(path).name for path, _ in found.skipped] == ["step-00000003"]
    told = [type(outcome(lambda: cp.restore(state(rank, -1.0), fallback=False))).__name__]
    wrong = {**state(rank, -1.0), "w": torch.zeros(5)}
    misfit = outcome(lambda: cp.restore(wrong))  # no reason to go back
    told.append("PlanError" if getattr(misfit, "cause", "PlanError") == "PlanError" else str(misfit))
    back = cp.restore(into, step=1)
    assert (back.step, into["w"][0].item(), len(back.abandoned)) == (1, 1.0, 2)
    assert ckptspec.latest(run) == str(run / "step-00000001")
    cp.save(2, state(rank, 2.0), blocking=True)
    for step in (1, 2):
        spoil(run, step, rank)
    told.append(type(outcome(lambda: cp.restore(into))).__name__)
    cp.close()
    print(told)


def spoil(run: Path, step: int, rank: int) -> None:
    """Change a byte of the payload of rank 1."""
    dist.barrier()
    if rank == 0:
        shard = run / f"step-{step:08d}" / "rank-00001.shard"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    dist.barrier()


def outcome(call: Any) -> BaseException | None:
    try:
        call()
    except Exception as e:
        return e
    return None


def cadenced(rank: int, world: int, folder: Path) -> None:
    """Steps by arithmetic; a time that only rank 0's clock knows; a signal that only the last rank gets."""
    saved: dict[str, list[int]] = {"steps": [], "time": [], "signal": []}
    with Checkpointer(folder / "steps", save_every=3) as cp:
        for step in range(1, 11):
            dist.all_reduce(torch.ones(1))
            saved["steps"] += [step] * cp.due(step)
            if cp.due(step):
                cp.save(step, state(rank, float(step)))
    with Checkpointer(folder / "time", save_every="400ms") as cp:
        for step in range(1, 21):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.05 + 0.01 * rank)
            if cp.due(step):
                saved["time"].append(step)
                cp.save(step, state(rank, float(step)))
    with Checkpointer(folder / "signal", save_on=[signal.SIGUSR1, signal.SIGTERM]) as cp:
        for step in range(1, 30):
            dist.all_reduce(torch.ones(1))
            if rank == world - 1 and step in (4, 12):
                os.kill(os.getpid(), signal.SIGUSR1 if step == 4 else signal.SIGTERM)
            if cp.due(step):
                saved["signal"].append(step)
                cp.save(step, state(rank, float(step)))
            if cp.stopping:
                break
        assert cp.stopping
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    print(saved)


def rehearsed(rank: int, world: int, folder: Path) -> None:
    """A dry run tells what a save takes, leaves nothing, and fails where the save would."""
    with Checkpointer(folder / "dry", silence=20) as cp:
        room = cp.dry_run(state(rank, 1.0))
        dist.barrier()
        assert not (folder / "dry").exists()
        assert not list(folder.glob(".probe-*"))
        told = [room.need > 300_000 * 4, type(outcome(lambda: cp.dry_run({"bad": object()}))).__name__]
        cp.save(1, state(rank, 1.0), blocking=True)
    elsewhere = Checkpointer(folder / ("dry" if rank == 0 else "no/such/place"), silence=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "LATE", 0.2)
        if rank:
            other = folder / "other"
            other.mkdir(exist_ok=True)
            elsewhere.run = str(other / "run")
        told.append(getattr(outcome(lambda: elsewhere.dry_run(state(rank, 1.0))), "rule", None))
    print(told)


def mirrored(rank: int, world: int, folder: Path) -> None:
    """Steps go to the mirror; what the run loses or damages comes from there, newest first."""
    run, mirror = folder / "mirrored", folder / "mirror"
    with Checkpointer(run, mirror=mirror, keep_last=2, silence=20) as cp:
        for step in (1, 2, 3):
            cp.save(step, state(rank, float(step)))
        cp.wait()
        if cp.uploads is not None:
            cp.uploads.wait()
            assert {s.step for s in cp.uploads.status() if s.state == "safe"} >= {2, 3}
    spoil(run, 3, rank)
    with Checkpointer(run, mirror=mirror, silence=20) as cp:
        into = state(rank, -1.0)
        found = cp.restore(into)
        told = [found.step, into["w"][0].item(), Path(str(found.path)).parent.name, len(found.skipped)]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(run)
    dist.barrier()
    with Checkpointer(run, mirror=mirror, silence=20) as cp:
        into = state(rank, -1.0)
        found = cp.restore(into)
        told += [found.step, into["own"].value[0].item() - rank]
        back = cp.restore(into, step=2)
        told += [back.step, into["w"][0].item()]
    bad = Checkpointer(folder / "x", mirror="nowhere://else", silence=20)
    told.append(getattr(outcome(lambda: bad.save(1, state(rank, 1.0))), "rule", None))
    print(told)


class Refuses:
    """An object that will not take its state."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, found: dict[str, int]) -> None:
        if self.refuses:
            raise ValueError("this object refuses")


def together(rank: int, world: int, folder: Path) -> None:
    """A fault that is no error of ours, then damage: no rank waits, and all go back to the same step."""
    told = []
    for who in (0, 1):
        run = folder / f"refused-{who}"
        cp = Checkpointer(run, silence=10)
        for step in (1, 2):
            cp.save(step, {**state(rank, float(step)), "o": Refuses(False)}, blocking=True)
        begun = time.monotonic()
        call = partial(cp.restore, {**state(rank, 0.0), "o": Refuses(rank == who)})
        told.append(type(outcome(call)).__name__)
        assert time.monotonic() - begun < 5
        spoil(run, 2, rank)
        told.append(str(cp.restore({**state(rank, 0.0), "o": Refuses(False)}).step))
        cp.close()
    print(told)


def in_turn(rank: int, world: int, folder: Path) -> None:
    """Two runs and a load beside a lazy save that is slow on one rank: every rank does them in the same order."""
    from ckptspec.pytorch import staging

    copy, model = staging._copy_pairs, torch.nn.Linear(9, 9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def late(pairs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.4 * rank)
        copy(pairs)

    staging._copy_pairs = late
    held = {"model": model, "optimizer": optimizer}
    with Checkpointer(folder / "a", silence=10) as a, Checkpointer(folder / "b", silence=10) as b:
        for step in (1, 2):
            a.save(step, held, staging="lazy", optimizers=[optimizer])
            b.save(step, state(rank, float(step)))
            ckptspec.load(folder / "b" / f"step-{step:08d}", state(rank, 0.0), silence=10)
        a.save(3, held, staging="lazy", optimizers=[optimizer])
        ckptspec.load(folder / "a" / "step-00000001", held, silence=10)  # into what is being copied
    assert ckptspec.latest(folder / "a") == str(folder / "a" / "step-00000003")
    print("done")


def grouped(rank: int, world: int, folder: Path) -> None:
    """A process group that is not of all ranks, or not given on all, is an error at once."""
    ckptspec.save(folder / "grouped", state(rank, 1.0), step=1, silence=10)
    alone = [dist.new_group([r]) for r in range(world)][rank]
    told = []
    for given in (alone, dist.group.WORLD if rank == 0 else None, dist.group.WORLD if rank else None):
        call = partial(ckptspec.load, folder / "grouped", state(rank, 0.0), process_group=given, silence=10)
        told.append(getattr(outcome(call), "rule", None))
    print(told)


def signalled(rank: int, world: int, folder: Path) -> None:
    """A signal in one run is none for the next one of the same process."""
    saved = []
    for run in ("one", "two"):
        with Checkpointer(folder / run, save_on=[signal.SIGTERM]) as cp:
            for step in range(1, 7):
                dist.all_reduce(torch.ones(1))
                if run == "one" and step == 2 and rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                if cp.due(step):
                    saved.append(run)
            saved.append(str(cp.stopping))
        dist.barrier()
    print(saved)


def aimed(rank: int, world: int, folder: Path) -> None:
    """Say how this job holds its state: the checkpoint it saves fits just that, and another job's is resharded."""
    made = ckptspec.target(state(rank, 1.0))
    ckptspec.save(folder / f"aim-{world}", state(rank, 1.0), step=1)
    assert ckptspec.validate(folder / f"aim-{world}", target=made, exact=True).findings == ()
    print(hashlib.sha256(json.dumps(made.document()).encode()).hexdigest())
    if rank == 0:
        (folder / f"target-{world}.json").write_text(json.dumps(made.document()))


def aimed_more(rank: int, world: int, folder: Path) -> None:
    aimed(rank, world, folder)

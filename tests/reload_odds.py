"""What each rank does for the second half of tests/test_reload.py: odd shapes and layouts, refusals, damage.

Checkpoints of 3 ranks are loaded on 2 and on 5, which is more than some tensors have elements.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reload_cases
import reload_private
import torch
import torch.distributed as dist
from reload_cases import compare
from reload_jobs import adamw, mesh
from reload_private import IGNORE, OLD, SILENCE, State, refused, whole
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.fetch import Opened

SHAPES: dict[str, tuple[int, ...]] = {
    "one": (1,), "three": (3,), "none": (0, 4), "thin": (4, 0), "rows": (7, 2), "columns": (2, 7), "scalar": (),
}  # fmt: skip
FLAT = {"a": (2, 2), "b": (0, 3), "c": (1,), "d": (3,)}  # members of a buffer of 13, of which the last 5 are padding

# ---- odd shapes, ties, dtypes ----------------------------------------------------------------------------------------


def odd(rank: int, world: int, *, fill: bool = True, dtype: torch.dtype = torch.float32) -> State:
    """DTensors by rows and by columns, plain ones, a tie, pieces, one rank's, and a flat buffer with padding inside."""
    grid = mesh(dp=world)

    def values(name: str, *shape: int) -> Tensor:
        return whole(name, *shape).to(dtype) if fill else torch.full(shape, -3.0).to(dtype)

    def cut(name: str, *placements: Any) -> Tensor:
        return distribute_tensor(values(name, *SHAPES[name]), grid, list(placements), src_data_rank=None)

    tied = values("tied", 3, 2)
    return {
        "rows": {n: cut(n, Shard(0)) for n in SHAPES if SHAPES[n]},
        "columns": {n: cut(n, Shard(1)) for n in ("none", "thin", "rows", "columns")},
        "same": {n: cut(n, Replicate()) for n in SHAPES},
        "plain": {n: values(n, *shape) for n, shape in SHAPES.items()},
        "tied": [tied, tied],
        "piece": piece(rank, world, values("piece", 4, 5)),
        "source": ckptspec.Replicated(values("source", 3) + (0 if rank == 1 else rank + 1), source=1),
        "flat": {"master": flat(rank, list(range(world)), "g", values("flat", 13), whole_members())},
    }


def piece(rank: int, world: int, t: Tensor) -> ckptspec.Shard:
    """Some columns of a tensor: a few on the first ranks, the others on the last; none in between on many ranks."""
    bounds = [min(i, 2) for i in range(world)] + [5]
    low, high = bounds[rank], bounds[rank + 1]
    return ckptspec.Shard(t[:, low:high].contiguous(), (4, 5), [((0, low), (4, high - low))])


def whole_members() -> list[State]:
    members: list[State] = []
    at = 0
    for name, shape in FLAT.items():
        members.append({"name": f"model/{name}", "offset": at, "shape": shape})
        at += torch.Size(shape).numel()
    return [*members, {"name": None, "offset": at, "shape": (13 - at,)}]


def flat(rank: int, ranks: Sequence[int], group: str, buffer: Tensor, members: Sequence[State]) -> ckptspec.FlatShard:
    """This rank's slice of a buffer that some ranks share; what lies behind it is not zero."""
    part, place = -(-len(buffer) // len(ranks)), list(ranks).index(rank)
    mine = torch.full((part,), 5).to(buffer.dtype)
    held = buffer[place * part : (place + 1) * part]
    mine[: len(held)] = held
    return ckptspec.FlatShard(
        mine, group=group, offset=place * part, numel=len(buffer), members=members, ranks=list(ranks)
    )


def save_odd(rank: int, world: int, folder: Path) -> None:
    ckptspec.save(folder / "odd", odd(rank, world), step=1, silence=SILENCE)
    ckptspec.save(folder / "half", odd(rank, world, dtype=torch.bfloat16), step=1, silence=SILENCE)


def load_odd(rank: int, world: int, folder: Path) -> None:
    arrays = ckptspec.read(folder / "odd")
    state = odd(rank, world, fill=False)
    ckptspec.load(folder / "odd", into=state, silence=SILENCE)
    compare(state, arrays, rank, world)
    assert torch.equal(state["source"].value, whole("source", 3))
    untied = {**odd(rank, world, fill=False), "tied": [torch.zeros(3, 2), torch.zeros(3, 2)]}
    ckptspec.load(folder / "odd", into=untied, silence=SILENCE)
    assert torch.equal(torch.stack(untied["tied"]), whole("tied", 3, 2).expand(2, 3, 2))
    state = odd(rank, world, fill=False)
    shared = torch.zeros(7, 2)
    state["plain"] |= {"rows": shared, "columns": shared.view(2, 7)}
    with refused(rank, None, "Q-ALIAS", "plain/"):
        ckptspec.load(folder / "odd", into=state, silence=SILENCE)


def load_half(rank: int, world: int, folder: Path) -> None:
    """Half precision is widened where that is asked for, from named tensors and out of flat buffers."""
    with refused(rank, None, "R-DTYPE", "expected bfloat16"):
        ckptspec.load(folder / "half", into=odd(rank, world, fill=False), silence=SILENCE)
    state = odd(rank, world, fill=False)
    result = ckptspec.load(folder / "half", into=state, cast=True, silence=SILENCE)
    compare(state, {n: a.astype("float32") for n, a in ckptspec.read(folder / "half").items()}, rank, world)
    assert result.cast is not None
    assert set(result.cast.values()) == {("bfloat16", "float32")}
    state = {"o": {"state": {n: {"master": torch.full(shape, 9.0)} for n, shape in FLAT.items()}}}
    ckptspec.load(folder / "half", into=state, cast=["o"], only=["o", "flat"], silence=SILENCE)
    found = torch.cat([state["o"]["state"][n]["master"].reshape(-1) for n in FLAT])
    assert torch.equal(found, whole("flat", 13)[: len(found)].bfloat16().float())


# ---- ZeRO under tensor parallelism -----------------------------------------------------------------------------------

CUT = {"m": (6, 4), "n": (3, 4), "s": (5,)}  # by rows, by columns, not at all


def zero_tp(rank: int) -> State:
    """ZeRO of 2 ranks beside ZeRO of 1: each has half of `m` and `n` and all of `s` in a buffer of its own."""
    half = rank // 2
    m, n, s = (whole(name, *shape) for name, shape in CUT.items())
    rows, columns = m[3 * half : 3 * half + 3], n[:, 2 * half : 2 * half + 2]
    buffer = torch.cat([rows.reshape(-1), columns.reshape(-1), s])
    members = [
        {"name": "model/m", "offset": 0, "shape": (3, 4), "of": {"shape": (6, 4), "offsets": (3 * half, 0)}},
        {"name": "model/n", "offset": 12, "shape": (3, 2), "of": {"shape": (3, 4), "offsets": (0, 2 * half)}},
        {"name": "model/s", "offset": 18, "shape": (5,)},
    ]
    ranks = [2] if half else [0, 1]
    return {f"zero{half}": {"exp_avg": flat(rank, ranks, f"zero{half}", buffer, members)}}


def load_zero_tp(rank: int, world: int, folder: Path) -> None:
    """As named tensors, plain and cut by columns, and as one buffer of whole tensors over all ranks."""
    run, grid = folder / "zero_tp", mesh(dp=world)
    named = {n: {"exp_avg": torch.zeros(shape)} for n, shape in CUT.items()}
    ckptspec.load(run, into={"o": {"state": named}}, silence=SILENCE)
    for n, shape in CUT.items():
        assert torch.equal(named[n]["exp_avg"], whole(n, *shape)), n
    cut = {
        n: {"exp_avg": distribute_tensor(torch.zeros(CUT[n]), grid, [Shard(1)], src_data_rank=None)} for n in ("m", "n")
    }
    state = {"o": {"state": {**cut, "s": named["s"]}}}
    ckptspec.load(run, into=state, silence=SILENCE)
    compare(state, {f"o/state/{n}/exp_avg": whole(n, *shape).numpy() for n, shape in CUT.items()}, rank, world)
    starts = {"m": 0, "n": 24, "s": 36}
    members = [{"name": f"model/{n}", "offset": starts[n], "shape": shape} for n, shape in CUT.items()]
    one = flat(rank, range(world), "z", torch.full((41,), 8.0), members)
    ckptspec.load(run, into={"z": {"exp_avg": one}}, silence=SILENCE)
    buffer = torch.cat([whole(n, *shape).reshape(-1) for n, shape in CUT.items()])
    compare({"z": {"exp_avg": one}}, {"z/exp_avg": buffer.numpy()}, rank, world)
    assert not one.tensor[max(0, 41 - one.offset) :].any()  # padding


# ---- ranks with nothing, ranks that disagree, damage -----------------------------------------------------------------


def few() -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def save_few(rank: int, world: int, folder: Path) -> None:
    model, zero = few()
    model(torch.ones(1, 3)).sum().backward()
    zero.step()
    ckptspec.save(folder / "few", {"model": model, "zero": zero}, step=1, silence=SILENCE)


def load_few(rank: int, world: int, folder: Path) -> None:
    """Two parameters on 5 ranks: three of them keep no state, and need none."""
    model, zero = few()
    ckptspec.load(folder / "few", into={"model": model, "zero": zero}, silence=SILENCE)
    arrays = ckptspec.read(folder / "few")
    names = {id(p): n for n, p in model.named_parameters()}
    for p, state in zero.optim.state.items():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        for key, t in state.items():
            assert t.numpy().tobytes() == arrays[f"zero/state/{names[id(p)]}/{key}"].tobytes()
    assert len(zero.optim.state) == int(rank < 2)
    bare = nn.Linear(3, 2)
    adam = adamw(bare.parameters())
    ckptspec.load(folder / "few", into={"model": bare, "zero": adam}, silence=SILENCE)
    assert len(adam.state) == 2


def disagree(rank: int, world: int, folder: Path) -> None:
    run, last = folder / "odd", world - 1

    def load(state: Any) -> ckptspec.LoadResult:
        return ckptspec.load(run, into=state, **IGNORE)

    good = odd(rank, world, fill=False)
    with refused(rank, last, "R-NAME", "different kinds of value"):
        load({**good, "plain": {"rows": 3}} if rank == last else good)
    with refused(rank, last, "R-SHAPE", "plain/rows"):
        load({**good, "plain": {"rows": torch.zeros(7)}} if rank == last else good)
    with refused(rank, 0, "P-STATE"):
        load(3 if rank == 0 else good)
    with refused(rank, 0, "R-LAYOUT", "no memory"):
        load({"plain": {"rows": torch.zeros(7, 2, device="meta")}} if rank == 0 else good)
    nothing: State = {}
    load(nothing if rank == last else good)  # a rank may have no part of it
    assert nothing == {}
    assert rank == last or compare(good, ckptspec.read(run), rank, world)


def damaged(rank: int, world: int, folder: Path) -> None:
    """A byte that one rank alone needs is not what it was: that one tells where, and all end."""
    run, name = folder / f"damaged-{world}", "rows/rows"
    if rank == 0:
        harm(shutil.copytree(folder / "odd", run), name)
    dist.barrier()
    one = {"rows": {"rows": odd(rank, world, fill=False)["rows"]["rows"]}}
    last = max(r for r in range(world) if r * -(-7 // world) < 7)  # the last one that has any of the seven rows
    with refused(rank, last, "B-DIGEST", f"rank-{OLD - 1:05d}.shard", name, "bytes ", "is now undefined"):
        ckptspec.load(run, into=one, only=[name], silence=SILENCE)


def harm(run: Path, name: str) -> None:
    """Flip a bit of the last element of a tensor whose end the last rank stores."""
    path, manifest = load_manifest(run)
    index = Opened(path, manifest).document(OLD - 1).index
    chunk = next(c for c in index.chunks if index.names[c.tensor] == name)
    file = Path(path) / f"rank-{OLD - 1:05d}.shard"
    data = bytearray(file.read_bytes())
    data[chunk.start + chunk.nbytes - 1] ^= 1
    file.write_bytes(data)


def another_layout(rank: int, world: int, folder: Path) -> None:
    """As many ranks, cut another way: refused only if it must be exact."""
    one = {"rows": {"rows": odd(rank, world, fill=False)["columns"]["rows"]}}
    with refused(rank, None, "R-LAYOUT", "rows/rows"):
        ckptspec.load(folder / "odd", into=one, exact=True, only=["rows/rows"], silence=SILENCE)
    ckptspec.load(folder / "odd", into=one, only=["rows/rows"], silence=SILENCE)
    compare(one, ckptspec.read(folder / "odd"), rank, world)


# ---- the phases ------------------------------------------------------------------------------------------------------


def odd_save(rank: int, world: int, folder: Path, *_: Any) -> None:
    reload_private.save(rank, world, folder)
    save_odd(rank, world, folder)
    save_few(rank, world, folder)
    ckptspec.save(folder / "zero_tp", zero_tp(rank), step=1, silence=SILENCE)
    another_layout(rank, world, folder)


def odd_load(rank: int, world: int, folder: Path, *_: Any) -> None:
    for check in (reload_private.load, load_odd, load_half, load_zero_tp, load_few, disagree, damaged):
        print(check.__name__, flush=True)
        check(rank, world, folder)


odd_load_2 = odd_load_5 = odd_load
save_4 = save_3 = save_2 = save_1 = reload_cases.save
load_4 = load_3 = load_2 = load_1 = reload_cases.load

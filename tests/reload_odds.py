"""What each rank does in the second half of tests/test_reload.py: deviations, refusals, damage, and odd shapes.

A checkpoint of 3 ranks is loaded on 2 and on 5, which is more than some tensors have elements.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reload_cases import compare
from reload_jobs import adamw, mesh
from states import leaves
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.fetch import Opened
from ckptspec.errors import CkptspecError

SILENCE = 30
State = dict[str, Any]


def whole(name: str, *shape: int) -> Tensor:
    """Values that name and shape decide."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


@contextmanager
def refused(rank: int, culprit: int | None, rule: str, *texts: str) -> Iterator[None]:
    """Check that all ranks are refused by a rule: the culprit by its own error, the others are told; None: any."""
    with pytest.raises(CkptspecError) as caught:
        yield
    error = caught.value
    assert error.rule == rule, error
    assert all(text in str(error) for text in texts), error
    told = isinstance(error, ckptspec.LoadError)
    assert culprit is None or told == (culprit != rank), (rank, error)
    assert culprit is None or not told or error.rank == culprit, (rank, error)


# ---- what a rank has of its own, and what only some have -------------------------------------------------------------


class Loader:
    """An object whose state is a rank's own, and holds more once it has begun."""

    def __init__(self, n: int) -> None:
        self.state: State = {"at": n} if n < 0 else {"at": n, "order": torch.full((2 + n,), n)}

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


def own(rank: int, world: int, *, fill: bool = True) -> State:
    """A state with everything that is private to a rank, and a tensor that rank 1 alone has."""
    value = rank if fill else -1
    state = {
        "w": whole("w", 5) if fill else torch.zeros(5),
        "seen": ckptspec.Local({"n": value, "at": (value, "x")}),
        "part": ckptspec.Local(torch.full((3 + (rank if fill else 0),), float(value))),
        "loader": ckptspec.Local(Loader(value)),
        "rng": ckptspec.RNG(),
        "step": 7 if fill else 0,
    }
    return {**state, "extra": whole("extra", 2), f"stage{rank}": rank} if fill and rank == 1 else state


def seed(rank: int) -> None:
    torch.manual_seed(rank)
    random.seed(rank)


def save_own(rank: int, world: int, folder: Path) -> None:
    seed(rank)
    ckptspec.save(folder / "own", own(rank, world), step=1, plain="held", silence=SILENCE)


def drawn(rank: int) -> tuple[float, float]:
    """What the generators give that were saved by a rank."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return torch.rand(1).item(), random.Random(rank).random()


IGNORE: dict[str, Any] = {"unexpected": "ignore", "silence": SILENCE}
PRIVATE = {"seen", "part", "loader", "rng/python", "rng/numpy", "rng/torch"}


def load_own(rank: int, world: int, folder: Path, old: int) -> None:
    run, mine = folder / "own", rank if rank < old else -1

    def fresh() -> State:
        state = own(rank, world, fill=False)
        if rank < old:  # what is private has the shape that it had on this rank
            state["part"] = ckptspec.Local(torch.full((3 + rank,), -1.0))
        return state

    def check(state: State, result: ckptspec.LoadResult, n: int, said: str) -> None:
        assert state["seen"].value == {"n": n, "at": (n, "x")}, state["seen"]
        assert state["part"].value.tolist() == [float(n)] * (3 + max(rank if rank < old else 0, 0))
        assert torch.equal(state["w"], whole("w", 5))
        assert state["step"] == 7
        assert {
            n.removesuffix("/at").removesuffix("/order"): how for n, how in result.private.items()
        } == dict.fromkeys(PRIVATE, said)
        assert leaves(state["loader"].value.state) == leaves(Loader(n).state)
        assert result.unexpected == ("extra", "stage1")

    seed(99)
    before = random.getstate(), torch.get_rng_state()
    state = fresh()
    check(state, ckptspec.load(run, into=state, **IGNORE), mine, "mapped" if rank < old else "kept")
    found = torch.rand(1).item(), random.random()
    assert found == drawn(rank if rank < old else 99)
    state = fresh()
    random.setstate(before[0])
    torch.set_rng_state(before[1])
    check(state, ckptspec.load(run, into=state, private="keep", **IGNORE), -1, "kept")
    assert (torch.rand(1).item(), random.random()) == drawn(99)
    with refused(rank, None, "R-WORLD", "seen", f"expected {old} ranks", 'private="keep"'):
        ckptspec.load(run, into=fresh(), private="error", **IGNORE)
    result = ckptspec.load(run, into=fresh(), private="error", skip=["seen", "part", "loader", "rng"], **IGNORE)
    assert not result.private
    assert {n.split("/")[0] for n in PRIVATE} <= {n.split("/")[0] for n in result.skipped}
    with refused(rank, None, "R-WORLD", f"expected {old} ranks"):
        ckptspec.load(run, into=fresh(), exact=True, **IGNORE)
    with refused(rank, None, "R-NAME", "unexpected in it: extra, stage1"):
        ckptspec.load(run, into=fresh(), silence=SILENCE)
    state = {**fresh(), **({"absent": torch.zeros(1)} if rank == 1 else {})}
    with refused(rank, 1, "R-NAME", "missing in the checkpoint: absent"):
        ckptspec.load(run, into=state, **IGNORE)
    result = ckptspec.load(run, into=state, missing="keep", **IGNORE)
    assert result.missing == (("absent",) if rank == 1 else ())
    with refused(rank, 0, "R-NAME", "leads to nothing", "nowhere"):
        ckptspec.load(run, into=fresh(), names={"w": "nowhere"} if rank == 0 else {}, **IGNORE)
    state = {"v": torch.zeros(5), "count": 0}
    result = ckptspec.load(run, into=state, names={"v": "w", "cou*": "st*"} | {"count": "step"}, **IGNORE)
    assert torch.equal(state["v"], whole("w", 5))
    assert state["count"] == 7
    assert dict(result.renamed) == {"v": "w", "count": "step"}


# ---- odd shapes, ties, dtypes ----------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, ...]] = {
    "one": (1,), "three": (3,), "none": (0, 4), "thin": (4, 0), "rows": (7, 2), "columns": (2, 7), "scalar": (),
}  # fmt: skip
FLAT = {"a": (2, 2), "b": (0, 3), "c": (1,), "d": (3,)}  # members of a buffer of 8, 5 of padding behind


def odd(rank: int, world: int, *, fill: bool = True, dtype: torch.dtype = torch.float32) -> State:
    """DTensors by rows and by columns, plain ones, a tie, and a flat buffer of 8 elements and padding inside."""
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
        "flat": {"master": flat(rank, world, values("flat", 13))},
    }


def flat(rank: int, world: int, buffer: Tensor) -> ckptspec.FlatShard:
    part = -(-len(buffer) // world)
    mine = torch.full((part,), 5).to(buffer.dtype)
    piece = buffer[rank * part : (rank + 1) * part]
    mine[: len(piece)] = piece
    members, at = [], 0
    for name, shape in FLAT.items():
        members.append({"name": f"model/{name}", "offset": at, "shape": shape})
        at += torch.Size(shape).numel()
    members.append({"name": None, "offset": at, "shape": (len(buffer) - at,)})
    return ckptspec.FlatShard(mine, group="g", offset=rank * part, numel=len(buffer), members=members)


def save_odd(rank: int, world: int, folder: Path) -> None:
    ckptspec.save(folder / "odd", odd(rank, world), step=1, silence=SILENCE)
    ckptspec.save(folder / "half", odd(rank, world, dtype=torch.bfloat16), step=1, silence=SILENCE)


def load_odd(rank: int, world: int, folder: Path) -> None:
    arrays = ckptspec.read(folder / "odd")
    state = odd(rank, world, fill=False)
    ckptspec.load(folder / "odd", into=state, silence=SILENCE)
    compare(state, arrays, rank, world)
    untied = {**odd(rank, world, fill=False), "tied": [torch.zeros(3, 2), torch.zeros(3, 2)]}
    ckptspec.load(folder / "odd", into=untied, silence=SILENCE)
    assert torch.equal(untied["tied"][0], whole("tied", 3, 2))
    assert torch.equal(untied["tied"][1], whole("tied", 3, 2))
    state = odd(rank, world, fill=False)
    shared = torch.zeros(7, 2)
    state["plain"] |= {"rows": shared, "columns": shared.view(2, 7)}
    with refused(rank, None, "Q-ALIAS", "plain/"):
        ckptspec.load(folder / "odd", into=state, silence=SILENCE)
    with refused(rank, None, "R-DTYPE", "expected bfloat16"):
        ckptspec.load(folder / "half", into=odd(rank, world, fill=False), silence=SILENCE)
    state = odd(rank, world, fill=False)
    result = ckptspec.load(folder / "half", into=state, cast=True, silence=SILENCE)
    exactly = {n: a.astype("float32") for n, a in ckptspec.read(folder / "half").items()}
    compare(state, exactly, rank, world)
    assert result.cast is not None
    assert set(result.cast.values()) == {("bfloat16", "float32")}
    state = {"o": {"state": {n: {"master": torch.full(shape, 9.0)} for n, shape in FLAT.items()}}}
    ckptspec.load(folder / "half", into=state, cast=["o"], only=["o", "flat"], silence=SILENCE)
    found = torch.cat([state["o"]["state"][n]["master"].reshape(-1) for n in FLAT])
    assert torch.equal(found, whole("flat", 13)[: len(found)].bfloat16().float())
    one = torch.zeros(4)
    state = {"o": {"state": {"a": {"master": one.view(2, 2)}, "d": {"master": one[1:]}}}}
    with refused(rank, None, "Q-ALIAS"):  # two members of one buffer are two tensors
        ckptspec.load(folder / "odd", into=state, only=["o"], silence=SILENCE)


# ---- ranks that disagree, ranks with nothing, damage -----------------------------------------------------------------


def few(world: int) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def save_few(rank: int, world: int, folder: Path) -> None:
    model, zero = few(world)
    model(torch.ones(1, 3)).sum().backward()
    zero.step()
    ckptspec.save(folder / "few", {"model": model, "zero": zero}, step=1, silence=SILENCE)


def load_few(rank: int, world: int, folder: Path) -> None:
    model, zero = few(world)
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
    run = folder / "odd"
    last = world - 1

    def load(state: State) -> ckptspec.LoadResult:
        return ckptspec.load(run, into=state, unexpected="ignore", silence=SILENCE)

    good = odd(rank, world, fill=False)
    with refused(rank, last, "R-NAME", "different kinds of value"):
        load({**good, "plain": {"rows": 3}} if rank == last else good)
    with refused(rank, last, "R-SHAPE", "plain/rows"):
        load({**good, "plain": {"rows": torch.zeros(7)}} if rank == last else good)
    with refused(rank, 0, "P-STATE"):
        load(3 if rank == 0 else good)  # type: ignore[arg-type]
    with refused(rank, 0, "R-LAYOUT", "no memory"):
        load({"plain": {"rows": torch.zeros(7, 2, device="meta")}} if rank == 0 else good)
    nothing: State = {}
    load(nothing if rank == last else good)  # a rank may have no part of it
    assert nothing == {}
    assert rank == last or compare(good, ckptspec.read(run), rank, world)


def damaged(rank: int, world: int, folder: Path, old: int) -> None:
    """A byte that the last rank alone needs is not what it was."""
    run, name = folder / f"damaged-{world}", "rows/rows"
    if rank == 0:
        harm(shutil.copytree(folder / "odd", run), name)
    dist.barrier()
    state = odd(rank, world, fill=False)
    pick = {"rows": {"rows": state["rows"]["rows"]}}
    last = max(r for r in range(world) if r * -(-7 // world) < 7)  # the last one that has any of the seven rows
    with refused(rank, last, "B-DIGEST", f"rank-{old - 1:05d}.shard", name, "is now undefined"):
        ckptspec.load(run, into=pick, only=["rows/rows"], silence=SILENCE)


def harm(run: Path, name: str) -> None:
    """Flip a bit of the last element of a tensor."""
    path, manifest = load_manifest(run)
    for rank in reversed(range(manifest.world_size)):
        index = Opened(path, manifest).document(rank).index
        chunks = [c for c in index.chunks if index.names[c.tensor] == name]
        if chunks:
            break
    file = Path(path) / f"rank-{rank:05d}.shard"
    data = bytearray(file.read_bytes())
    data[chunks[-1].start + chunks[-1].nbytes - 1] ^= 1
    file.write_bytes(data)


def odd_save(rank: int, world: int, folder: Path) -> None:
    for step in (save_own, save_odd, save_few):
        step(rank, world, folder)
    another_layout(rank, world, folder)


def another_layout(rank: int, world: int, folder: Path) -> None:
    """The same ranks, cut another way: refused if it must be exact."""
    state = odd(rank, world, fill=False)
    state["rows"]["rows"] = state["columns"]["rows"]
    one = {"rows": {"rows": state["columns"]["rows"]}}
    with refused(rank, None, "R-LAYOUT", "rows/rows"):
        ckptspec.load(folder / "odd", into=one, exact=True, only=["rows/rows"], silence=SILENCE)
    ckptspec.load(folder / "odd", into=one, only=["rows/rows"], silence=SILENCE)
    compare(one, ckptspec.read(folder / "odd"), rank, world)


def odd_load_2(rank: int, world: int, folder: Path) -> None:
    print("own", flush=True)
    load_own(rank, world, folder, 3)
    print("odd", flush=True)
    load_odd(rank, world, folder)
    print("few", flush=True)
    load_few(rank, world, folder)
    print("disagree", flush=True)
    disagree(rank, world, folder)
    print("damaged", flush=True)
    damaged(rank, world, folder, 3)


odd_load_5 = odd_load_2

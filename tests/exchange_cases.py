"""What the ranks do in tests of the exchange: rows read as columns and back, flat as named, damage, a dead rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckptspec
from ckptspec.storage import local

ROWS, COLUMNS = 1536, 1024  # 6 MiB in float32: several blocks for each rank, whatever the cut


def whole(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(name)))


def piece(t: torch.Tensor, dim: int, rank: int, world: int) -> ckptspec.Shard:
    """This rank's chunk of a tensor, along a dimension."""
    parts = t.chunk(world, dim)
    mine = parts[rank] if rank < len(parts) else t.narrow(dim, 0, 0)
    offsets = [0, 0]
    offsets[dim] = sum(p.shape[dim] for p in parts[:rank])
    return ckptspec.Shard(mine.contiguous(), t.shape, [(offsets, mine.shape)])


def state(rank: int, world: int, dim: int, *, fill: bool) -> dict[str, Any]:
    big, small = whole("big", ROWS, COLUMNS), whole("small", 7, 5)
    made = {
        "w": piece(big, dim, rank, world),
        "s": piece(small, dim, rank, world),
        "all": whole("replicated", 700, 300),
        "n": 3,
    }
    if not fill:
        for value in made.values():
            if not isinstance(value, int):
                getattr(value, "tensor", value).zero_()
        made["n"] = 0
    return made


def twice(*, fill: bool) -> dict[str, Any]:
    """What all ranks hold: with two copies any one shard can be lost."""
    made = {"all": whole("replicated", 2048, 1024), "small": whole("tiny", 9), "n": 3}
    return made if fill else {"all": torch.zeros(2048, 1024), "small": torch.zeros(9), "n": 0}


def equal(got: dict[str, Any], want: dict[str, Any]) -> bool:
    pairs = [(getattr(got[k], "tensor", got[k]), getattr(want[k], "tensor", want[k])) for k in ("w", "s", "all")]
    return got["n"] == want["n"] and all(torch.equal(a, b) for a, b in pairs)


def save_rows(rank: int, world: int, folder: Path) -> None:
    ckptspec.save(folder / "rows", state(rank, world, 0, fill=True), step=1)
    ckptspec.save(folder / "twice", twice(fill=True), step=1, copies=2)


def counted() -> list[int]:
    """Count the bytes that are read from payloads from now on."""
    read, seen = local.read_at, [0]

    def read_at(fd: int, view: memoryview, offset: int) -> None:
        seen[0] += len(view)
        read(fd, view, offset)

    local.read_at = read_at
    return seen


def load_columns(rank: int, world: int, folder: Path, exchange: bool) -> None:
    """Load as columns what was saved as rows, and print the bytes read."""
    seen = counted()
    into = state(rank, world, 1, fill=False)
    result = ckptspec.load(folder / "rows", into, process_group=dist.group.WORLD if exchange else None)
    assert equal(into, state(rank, world, 1, fill=True))
    print(seen[0], result.nbytes)


def with_exchange(rank: int, world: int, folder: Path) -> None:
    load_columns(rank, world, folder, True)


def more_with_exchange(rank: int, world: int, folder: Path) -> None:
    load_columns(rank, world, folder, True)


def without_exchange(rank: int, world: int, folder: Path) -> None:
    load_columns(rank, world, folder, False)


def in_place(rank: int, world: int, folder: Path) -> None:
    """Load in the layout that was saved: nothing is exchanged."""
    into = state(rank, world, 0, fill=False)
    ckptspec.load(folder / "rows", into, process_group=dist.group.WORLD)
    assert equal(into, state(rank, world, 0, fill=True))


def damaged(rank: int, world: int, folder: Path) -> None:
    """One byte of rank 1's shard is wrong: every rank hears of it, and the group is still usable."""
    if rank == 0:
        for run in ("rows", "twice"):
            (shard,) = (folder / run).rglob("rank-00001.shard")
            data = bytearray(shard.read_bytes())
            data[len(data) * 3 // 4] ^= 1
            shard.write_bytes(data)
    dist.barrier()
    try:
        ckptspec.load(folder / "rows", state(rank, world, 1, fill=False), process_group=dist.group.WORLD)
    except (ckptspec.IntegrityError, ckptspec.LoadError) as e:
        print(type(e).__name__, e.where.rank, e.rule)
    dist.barrier()
    for group in (dist.group.WORLD, None):
        into = twice(fill=False)
        result = ckptspec.load(folder / "twice", into, process_group=group)
        assert all(torch.equal(into[k], v) for k, v in twice(fill=True).items() if k != "n")
        print("recovered", len(result.recovered) > 0)
    dist.barrier()
    if rank == 0:
        (shard,) = (folder / "twice").rglob("rank-00001.shard")
        shard.unlink()
    dist.barrier()
    into = twice(fill=False)
    result = ckptspec.load(folder / "twice" / "step-00000001", into)
    assert all(torch.equal(into[k], v) for k, v in twice(fill=True).items() if k != "n")
    assert into["n"] == 3
    print("without a shard", len(result.recovered) > 0)


def dead(rank: int, world: int, folder: Path) -> None:
    """Rank 1 dies between the agreement and the exchange: the others do not wait for it for ever."""
    from ckptspec.pytorch import exchange, load

    if rank == 1:
        load.exchange = lambda *a: os._exit(0)
    try:
        ckptspec.load(folder / "rows", state(rank, world, 1, fill=False), process_group=dist.group.WORLD, silence=3)
    except ckptspec.CkptspecError as e:
        print(type(e).__name__, flush=True)
    assert exchange.DONE == 1
    os._exit(0)

"""What writers and readers promise and no other test proves: padding, strange dtypes, one fate for all ranks."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forks import run_phases

import ckptspec
from ckptspec.engine.documents import load_manifest, open_shard
from ckptspec.format.shard import Index

PACKAGE = Path(__file__).resolve().parents[1] / "ckptspec"
COLLECTIVES = {
    "all_gather", "all_gather_object", "all_reduce", "all_to_all", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "monitored_barrier", "new_group", "reduce", "reduce_scatter", "scatter", "send", "recv",
}  # fmt: skip


def index_of(run: Path) -> Index:
    """Return the index of the first shard of a run's checkpoint."""
    folder, manifest = load_manifest(run)
    return open_shard(folder, manifest.shards[0], manifest).index


def flat(values: torch.Tensor, numel: int) -> ckptspec.FlatShard:
    members = [{"name": "w", "offset": 0, "shape": [numel]}]
    return ckptspec.FlatShard(values, group="zero", offset=0, numel=numel, members=members)


def test_padding_is_neither_stored_nor_left_as_it_was(tmp_path: Path) -> None:
    noisy = torch.arange(1.0, 9.0)
    ckptspec.save(tmp_path, {"m": flat(noisy, 5)}, step=1)
    index = index_of(tmp_path)
    assert [(c.box.sizes, c.nbytes) for c in index.chunks] == [((5,), 20)]
    other = torch.arange(1.0, 9.0)
    other[5:] = -7.0
    ckptspec.save(tmp_path / "other", {"m": flat(other, 5)}, step=1)
    assert index_of(tmp_path / "other").digests == index.digests
    into = torch.full((8,), 9.0)
    ckptspec.load(tmp_path, into={"m": flat(into, 5)})
    assert into.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]


@pytest.mark.parametrize("name", ["complex32", "float4_e2m1fn_x2"])
def test_a_dtype_that_numpy_lacks_is_an_error_never_other_numbers(name: str, tmp_path: Path) -> None:
    raw = torch.arange(8, dtype=torch.uint8).view(getattr(torch, name))
    ckptspec.save(tmp_path, {"t": raw, "u": torch.ones(2)}, step=1)
    with pytest.raises(ckptspec.PlanError, match=name):
        ckptspec.read(tmp_path)
    assert ckptspec.read(tmp_path, ["u"])["u"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("part", ["engine", "pytorch", "storage"])
def test_nothing_that_saves_or_loads_calls_a_collective(part: str) -> None:
    for path in (PACKAGE / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                module, _, called = ast.unparse(node.func).rpartition(".")
                assert called not in COLLECTIVES or module not in ("dist", "torch.distributed"), (path.name, called)


def damage(folder: Path, value: float) -> None:
    """Flip one bit among the elements of that value in the one shard of rank 1."""
    (shard,) = folder.rglob("rank-00001.shard")
    data = bytearray(shard.read_bytes())
    data[data.index(torch.tensor(value).numpy().tobytes() * 8)] ^= 1
    shard.write_bytes(data)


def one_fate(rank: int, world: int, folder: Path) -> None:
    """What each rank does: save two runs and load, first what is damaged for rank 1 alone, then each another run."""
    first, second, damaged = (folder / name for name in ("first", "second", "damaged"))
    state = {"own": ckptspec.Local(torch.full((2000,), rank + 1.0)), "same": torch.ones(5)}
    for run in (first, second):
        ckptspec.save(run, state, step=1)
    if rank == 0:
        shutil.copytree(first, damaged)
        damage(damaged, 2.0)
    dist.barrier()
    into = {"own": ckptspec.Local(torch.zeros(2000)), "same": torch.zeros(5)}
    for run in (damaged, (damaged, second)[rank]):
        try:
            ckptspec.load(run, into=into, silence=30)
        except ckptspec.CkptspecError as e:
            print(type(e).__name__, e.rule)
        else:
            print("loaded")


def test_when_one_rank_cannot_load_none_does_and_all_load_the_same_checkpoint(tmp_path: Path) -> None:
    printed = run_phases("test_promises", [("one_fate", 2)], tmp_path)["one_fate"]
    told = [[line.split() for line in text.splitlines()] for text in printed]
    assert told[1][0][0] == "IntegrityError"
    assert [[rule for _, rule in lines] for lines in told] == [["B-DIGEST", "Q-FOLDER"]] * 2, printed

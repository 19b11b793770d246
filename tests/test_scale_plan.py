"""Plans for large jobs, counted: the work grows with what meets, never with the product of the numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import make  # noqa: F401 - puts tools/ on the path
import models
import pytest

from ckptspec.check.manifests import check_manifest
from ckptspec.format import manifest
from ckptspec.format.layout import Axis, Layout, Mesh, MeshLayout
from ckptspec.format.manifest import Manifest, TensorEntry
from ckptspec.format.target import Target
from ckptspec.planner import fates, lanes
from ckptspec.planner.book import Book
from ckptspec.planner.destination import destination
from ckptspec.planner.held import Held, Holders
from ckptspec.planner.plans import needed, plan, transfers
from ckptspec.planner.stored import Boxes, Grid

SMALL = models.Transformer(layers=3, width=1024, hidden=2816, heads=1024, kv=256, words=32_000)


def small(dp: int, tp: int = 1) -> models.Job:
    """Return a job of a small model."""
    return models.Job(SMALL, {"main": models.grid({"dp": dp, "tp": tp})})


@dataclass
class Work:
    """What making plans took: boxes of wanted tensors that were looked at, boxes of stored ones that were met."""

    held: int = 0
    met: int = 0
    largest: int = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Counts what is worked out."""
    counted = Work()
    of, met = Holders._of, Grid.met

    def held(self: Holders, ranks: range) -> Held:
        found = of(self, ranks)
        counted.held += len(found)
        return found

    def meets(self: Grid, *boxes: object) -> Boxes:
        found = met(self, *boxes)  # type: ignore[arg-type]
        counted.met += len(found.row)
        counted.largest = max(counted.largest, len(found.row))
        return found

    monkeypatch.setattr(Holders, "_of", held)
    monkeypatch.setattr(Grid, "met", meets)
    return counted


def counted(work: Work, source: Manifest, target: Target) -> Work:
    """Return the work of one plan."""
    before = replace(work)
    plan(source, target)
    return Work(work.held - before.held, work.met - before.met, work.largest)


Make = Callable[[int], models.Job]
KINDS: dict[str, Make] = {
    "parameters over dp": lambda n: small(n).by_parameter(),
    "parameters over dp and tp": lambda n: small(n // 8, 8).by_parameter(),
    "ZeRO": lambda n: small(n // 8, 8).zero(),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_work_grows_with_the_ranks_not_with_their_product(kind: str, work: Work) -> None:
    found = [counted(work, KINDS[kind](n).manifest(), KINDS[kind](n * 3 // 4).target()) for n in (64, 256, 1024)]
    for few, many in pairwise(found):
        assert many.held <= 4.1 * few.held
        assert many.met <= 4.3 * few.met


@pytest.mark.parametrize("kind", KINDS)
def test_transfers_are_so_many_for_each_rank(kind: str) -> None:
    made = [plan(KINDS[kind](n).manifest(), KINDS[kind](n * 3 // 4).target()) for n in (64, 1024)]
    few, many = (p.totals.transfers / p.target.world_size for p in made)
    assert many <= 1.2 * few
    assert max(made[1].ranks.shards_opened) <= 32  # two or three of its own, and up to 16 of each group of replicas


def test_equal_layers_are_worked_out_once() -> None:
    def leaves(layers: int) -> int:
        job = models.Job(replace(SMALL, layers=layers), {"main": models.grid({"dp": 64, "tp": 1})})
        aim = models.Job(replace(SMALL, layers=layers), {"main": models.grid({"dp": 48, "tp": 1})})
        return len(Book(fates.found(destination(job.by_parameter().manifest(), aim.by_parameter().target()))).leaves)

    assert leaves(40) == leaves(2)


def test_a_restore_in_the_same_layout_opens_one_shard_a_rank() -> None:
    for job in (small(1024).by_parameter(), small(8192).by_parameter()):
        made = plan(job.manifest(), job.target())
        assert set(made.ranks.shards_opened) == {1}
        assert made.totals.bytes_read == made.totals.bytes_delivered == made.totals.payload_bytes
        for rank in (0, 517, made.target.world_size - 1):
            assert needed(job.manifest(), job.target(), rank) == (rank,)


def test_what_is_held_by_the_eight_ranks_of_tp_is_read_from_them() -> None:
    job = models.dense(128, 8).by_parameter()
    made = plan(job.manifest(), job.target())
    assert set(made.ranks.shards_opened) == {8}  # its own, and those with norms that eight hold and one stores
    assert needed(job.manifest(), job.target(), 300) == tuple(range(296, 304))


def test_one_rank_takes_what_the_whole_plan_gives_it(work: Work) -> None:
    source, target = models.dense(128, 8).by_parameter().manifest(), models.dense(96, 8).by_parameter().target()
    whole = plan(source, target)
    everything = work.met
    for rank in (0, 300, 767):
        before = work.met
        assert len(needed(source, target, rank)) == whole.ranks.shards_opened[rank]
        assert work.met - before <= 4 * everything // 768 + 100
        moved = sum(len(columns.rank) for columns in transfers(source, target, rank=rank))
        assert moved == whole.ranks.transfers[rank]


def test_the_dense_model_in_other_stages() -> None:
    made = plan(models.staged(16, 8, 8).manifest(), models.staged(8, 32, 4).target())
    assert made.possible
    assert max(made.ranks.shards_opened) <= 20
    assert made.totals.bytes_read_once == made.totals.payload_bytes
    assert made.totals.read_amplification < 1.1
    assert made.totals.transfers < 500 * made.target.world_size


def test_the_mixture_of_experts() -> None:
    source = models.mixture(16, 128, 8, 256, 64).manifest()
    target = models.mixture(8, 128, 8, 128, 64).target()
    data = manifest.dump(source)
    decoded = manifest.decode(data)
    assert decoded.manifest is not None
    assert (decoded.findings, list(check_manifest(decoded.manifest))) == ((), [])
    assert len(data) < 4_000_000
    book = Book(fates.found(destination(source, target)))
    assert len(book.leaves) < 200 < 2000 < len(book.entries)
    assert len(needed(source, target, 5000)) <= 40


def test_zero_buffers_become_parameters_at_the_cost_of_what_meets() -> None:
    made = [plan(small(n, 4).zero().manifest(), small(n * 3 // 4, 4).by_parameter().target()) for n in (16, 32, 64)]
    assert all(p.possible and p.totals.bytes_read_once == p.totals.payload_bytes for p in made)
    for few, many in pairwise(made):
        assert many.totals.transfers <= 2 * few.totals.transfers


def test_rows_to_columns_meet_all_with_all_in_bounded_memory(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "ROWS", 4096)
    tensors = {"w": TensorEntry("float32", (4096, 4096), "x")}

    def layouts(*dims: tuple[str, ...]) -> dict[str, Layout]:
        return {"x": MeshLayout("main", dims)}

    source, target = ({"main": Mesh((Axis("dp", n, "data"),))} for n in (512, 384))
    m = Manifest("5" * 32, 1, 512, meshes=source, layouts=layouts(("dp",)), tensors=tensors)
    made = plan(m, Target(384, target, layouts((), ("dp",)), tensors))
    parts = -(-4096 // -(-4096 // 384))
    assert made.totals.transfers == 512 * parts
    assert work.largest <= 4096

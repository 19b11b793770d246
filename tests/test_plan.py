"""A plan says exactly what moves where, whatever the layouts: as each element by itself would have it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from plan_cases import Case, Row, named, regrouped, slow

from ckptspec.format import holding
from ckptspec.format.dtypes import DTYPES
from ckptspec.plan.plans import needed, plan, transfers
from ckptspec.plan.planned import Columns


@pytest.fixture(autouse=True, scope="module")
def small_boxes_are_shared_out() -> Iterator[None]:
    """Cut boxes among their holders from a few bytes on, so that small tensors meet the rule for large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holding, "CUT_FROM", 3)
        patch.setattr(holding, "STORERS", 3)
        yield


def rows(found: Iterator[Columns]) -> dict[tuple[str, str], list[Row]]:
    out: dict[tuple[str, str], list[Row]] = {}
    for c in found:
        columns = zip(c.rank, c.source_rank, c.offsets, c.sizes, c.elements, strict=True)
        out.setdefault((c.tensor, c.source), []).extend(columns)
    return out


def compare(case: Case) -> None:
    m, expected = case.manifest, slow(case)
    found = rows(transfers(m, case.target))
    assert found == expected.rows
    made = plan(m, case.target)
    world = range(case.target.world_size)
    flat = [(source, row) for (_, source), several in expected.rows.items() for row in several]
    size = {name: DTYPES[t.dtype].itemsize for name, t in m.tensors.items()}
    by_rank = [[(source, row) for source, row in flat if row[0] == rank] for rank in world]
    assert made.ranks.transfers == tuple(map(len, by_rank))
    assert made.ranks.bytes_delivered == tuple(sum(size[s] * row[4] for s, row in mine) for mine in by_rank)
    assert made.ranks.shards_opened == tuple(len({row[1] for _, row in mine}) for mine in by_rank)

    def nbytes(source: str, piece: int, blocks: set[int]) -> int:
        whole, b = expected.nbytes[source, piece], m.block_size
        return sum(min(whole, (i + 1) * b) - i * b for i in blocks)

    read = [0 for _ in world]
    once: dict[tuple[str, int], set[int]] = {}
    for (rank, source, piece), blocks in expected.blocks.items():
        read[rank] += nbytes(source, piece, blocks)
        once.setdefault((source, piece), set()).update(blocks)
    assert made.ranks.bytes_read == tuple(read)
    assert made.totals.bytes_read_once == sum(nbytes(*key, blocks) for key, blocks in once.items())
    for rank in (0, case.target.world_size - 1):
        mine = {row[1] for _, row in by_rank[rank]}
        assert needed(m, case.target, rank) == tuple(sorted(mine))
        one = rows(transfers(m, case.target, rank=rank))
        assert one == {k: v for k, several in expected.rows.items() if (v := [r for r in several if r[0] == rank])}


@settings(max_examples=150, deadline=None)
@given(named())
def test_from_any_layout_to_any_other(case: Case) -> None:
    compare(case)


@settings(max_examples=150, deadline=None)
@given(regrouped())
def test_between_flat_groups_and_parameters(case: Case) -> None:
    compare(case)

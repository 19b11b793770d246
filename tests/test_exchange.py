"""The exchange of a load: every block is read by one rank, and what each rank gets is checked and right."""

from __future__ import annotations

from pathlib import Path

from forks import run_phases

PHASES = [
    ("save_rows", 3),
    ("in_place", 3),
    ("with_exchange", 3),
    ("more_with_exchange", 4),
    ("without_exchange", 2),
    ("damaged", 3),
]


def payload(folder: Path) -> int:
    return sum(shard.stat().st_size for shard in (folder / "rows").rglob("*.shard"))


def test_rows_are_read_as_columns_with_each_block_read_once(tmp_path: Path) -> None:
    printed = run_phases("exchange_cases", PHASES, tmp_path)
    for phase in ("with_exchange", "more_with_exchange"):
        read = sum(int(text.split()[0]) for text in printed[phase])
        assert read <= 1.05 * payload(tmp_path), phase
    alone = sum(int(text.split()[0]) for text in printed["without_exchange"])
    assert alone > 1.7 * payload(tmp_path)  # without a group every rank reads all the rows
    for rank, text in enumerate(printed["damaged"]):
        first, *rest = text.splitlines()
        assert first.split()[1:] == ["1", "B-DIGEST"], (rank, first)
        assert rest[0] == "recovered True"
        if rank == 1:  # the others may have no use for what is damaged or gone
            assert rest[1:] == ["recovered True", "without a shard True"]


def test_a_rank_that_dies_in_the_exchange_leaves_nobody_waiting(tmp_path: Path) -> None:
    printed = run_phases("exchange_cases", [("save_rows", 3), ("dead", 3)], tmp_path, timeout=60)
    assert [text.splitlines()[-1] for i, text in enumerate(printed["dead"]) if i != 1] == ["LoadError"] * 2, printed

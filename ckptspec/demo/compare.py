"""Owns the proof: the final memory of two runs, dumped rank by rank as plain files, compared byte by byte."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

PARTS = ("parameters", "master", "exp_avg", "exp_avg_sq", "rng", "losses")


@dataclass(frozen=True)
class Part:
    """One part of the state over all ranks: its bytes, the sha256 of both runs, and the ranks where they differ."""

    name: str
    nbytes: int
    digests: tuple[str, str]
    differs: tuple[int, ...]


def compare(left: Path, right: Path, ranks: int) -> tuple[Part, ...]:
    """Compare every part of every rank of two folders rank-<n>/<part>; raises FileNotFoundError when one is absent."""
    return tuple(_part(name, left, right, ranks) for name in PARTS)


def _part(name: str, left: Path, right: Path, ranks: int) -> Part:
    pairs = [tuple((side / f"rank-{r}" / name).read_bytes() for side in (left, right)) for r in range(ranks)]
    a, b = (hashlib.sha256(b"".join(side)).hexdigest() for side in zip(*pairs, strict=True))
    differs = tuple(r for r, (mine, other) in enumerate(pairs) if mine != other)
    return Part(name, sum(len(mine) for mine, _ in pairs), (a, b), differs)

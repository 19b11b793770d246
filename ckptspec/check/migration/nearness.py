"""Owns how near two names are, by edits, within a bound on the work; knows nothing of what the names stand for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

WORK = 400_000  # letters looked at and cells of tables filled by one Nearness: some tenths of a second
SHARE = 0.4  # of the longer name's letters that may differ


def distance(a: str, b: str, limit: int) -> int:
    """Return how many letters must be put in, taken out or changed to make `a` into `b`; limit + 1 where it is more."""
    a, b = _middles(a, b)
    if len(a) > len(b):
        a, b = b, a
    if len(b) - len(a) > limit:
        return limit + 1
    row = list(range(len(a) + 1))
    for j, letter in enumerate(b, 1):
        corner, row[0] = row[0], j
        for i, other in enumerate(a, 1):
            above = row[i]
            row[i] = corner if letter == other else 1 + min(corner, above, row[i - 1])
            corner = above
        if min(row) > limit:
            return limit + 1
    return min(row[-1], limit + 1)


def _middles(a: str, b: str) -> tuple[str, str]:
    """Return two texts without the beginning and the end that they share."""
    room = min(len(a), len(b))
    head = next((i for i in range(room) if a[i] != b[i]), room)
    room -= head
    tail = next((i for i in range(room) if a[-1 - i] != b[-1 - i]), room)
    return a[head : len(a) - tail], b[head : len(b) - tail]


@dataclass
class Nearness:
    """Finds the nearest of many names, again and again, until `left` cells of work are spent."""

    left: int = WORK

    def nearest(self, name: str, names: Iterable[str]) -> str | None:
        """Return the one of `names` that differs from `name` in the fewest letters; None where two do, or none is near.

        What is near differs in at most SHARE of its letters.
        """
        best: list[str] = []
        limit = int(len(name) * SHARE)
        letters = Counter(name)
        for other in sorted(names, key=lambda n: abs(len(n) - len(name))):
            allowed = min(limit, int(max(len(name), len(other)) * SHARE))
            if abs(len(other) - len(name)) > limit or self.left <= 0:
                break  # those that follow are longer or shorter still
            self.left -= len(other)
            counts = Counter(other)
            if max((letters - counts).total(), (counts - letters).total()) > allowed:
                continue
            a, b = _middles(name, other)
            self.left -= len(a) * len(b)
            n = distance(a, b, allowed)
            if n <= allowed:
                best, limit = [*best, other] if best and n == limit else [other], n
        return best[0] if len(best) == 1 else None


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that is nearest to `name`, None where none is near or two are equally so."""
    return Nearness().nearest(name, names)

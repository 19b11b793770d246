"""A small world for the pairing of calls: ranks that leave calls out, come late, or call again, in every order.

The ranks ask `pairing.fit` itself. Time passes only when nothing else can happen: deadlines are far above what a step
takes. With rumours it passes at any moment, and then only this is asked: nobody waits for ever.
A program is a list of calls: the step of a save, or LOAD, SLEEP (past all deadlines), MEET (as a barrier does).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptspec.engine.agree import pairing
from ckptspec.engine.agree.agreement import COMMIT, Failure, Verdict
from ckptspec.engine.agree.pairing import Fit
from ckptspec.engine.agree.pulse import Beat

LOAD, SLEEP, MEET = -1, -2, -3


@dataclass(frozen=True)
class Rank:
    """Where a rank is in its program; `number` is its last attempt, and how it takes part in it. `ends`: its calls'."""

    left: tuple[int, ...]
    number: int = 0
    at: str = "idle"  # idle, coming (its beat is there), doubting, in
    ends: tuple[tuple[int, str], ...] = ()  # number and "committed" or the kind of the failure

    @property
    def step(self) -> int | None:
        return None if self.left[0] == LOAD else self.left[0]


@dataclass(frozen=True)
class World:
    """All ranks and what the store holds: verdicts and who joined by number, in order; `fast` counts absent ranks."""

    ranks: tuple[Rank, ...]
    breaks: int = 0
    verdicts: tuple[tuple[int, Verdict], ...] = ()
    joined: frozenset[tuple[int, int, int | None]] = frozenset()  # number, rank, step
    fast: int = 0  # failures that a rank had no part in and that were not for want of one

    def verdict(self, number: int) -> Verdict | None:
        return dict(self.verdicts).get(number)

    def inside(self, number: int) -> Mapping[int, int | None]:
        return {rank: step for n, rank, step in self.joined if n == number}

    def beats(self, ranks: Sequence[int]) -> list[Beat]:
        last = {rank: (n, step) for n, rank, step in sorted(self.joined, key=lambda j: j[0])}
        return [Beat(last[r][0], "save", 0, 0, last[r][1]) for r in ranks if r in last]


def put(w: World, at: int, rank: Rank) -> World:
    return replace(w, ranks=(*w.ranks[:at], rank, *w.ranks[at + 1 :]))


def decide(w: World, number: int, verdict: Verdict) -> World:
    if w.verdict(number) is not None:
        return w
    fast = isinstance(verdict, Failure) and verdict.kind != "silent" and len(w.inside(number)) < len(w.ranks)
    return replace(w, verdicts=tuple(sorted((*w.verdicts, (number, verdict)), key=lambda v: v[0])), fast=w.fast + fast)


def end(w: World, at: int, how: str) -> World:
    rank = w.ranks[at]
    return put(w, at, replace(rank, at="idle", left=rank.left[1:], ends=(*rank.ends, (rank.number, how))))


def come(w: World, at: int) -> World:
    """A rank shows its beat in the next number: the first half of joining."""
    rank = replace(w.ranks[at], at="coming", number=w.ranks[at].number + 1)
    return replace(put(w, at, rank), joined=w.joined | {(rank.number, at, rank.step)})


def look(w: World, at: int, *, patient: bool) -> World:
    """A rank looks at the verdict of the attempt it comes to, and does what that asks."""
    rank, found = w.ranks[at], w.verdict(w.ranks[at].number)
    others = range(1, len(w.ranks)) if at == 0 else range(1)
    fits = pairing.fit(found, rank.step, rank.number, w.beats(others))
    if fits is Fit.PASSED:
        return come(w, at)
    if fits is Fit.DOUBT and patient:
        return put(w, at, replace(rank, at="doubting"))
    if isinstance(found, Failure):
        return end(w, at, found.kind)
    return put(w, at, replace(rank, at="in"))


def steps(w: World) -> Iterator[World]:
    """Yield the worlds after one step that takes no time to speak of."""
    if all(rank.left and rank.left[0] == MEET and rank.at == "idle" for rank in w.ranks):
        yield replace(w, ranks=tuple(replace(rank, left=rank.left[1:]) for rank in w.ranks))
    for at, rank in enumerate(w.ranks):
        if rank.at == "idle" and rank.left and rank.left[0] not in (SLEEP, MEET):
            yield come(w, at)
        elif rank.at in ("coming", "doubting"):
            yield look(w, at, patient=True)
        elif rank.at == "in":
            yield from taking_part(w, at, rank)


def taking_part(w: World, at: int, rank: Rank) -> Iterator[World]:
    verdict, inside = w.verdict(rank.number), w.inside(rank.number)
    if verdict is not None:
        yield end(w, at, verdict.kind if isinstance(verdict, Failure) else "committed")
        return
    if w.breaks:
        yield decide(replace(w, breaks=w.breaks - 1), rank.number, Failure("broke", at, step=rank.step))
    others = inside.values() if at == 0 else [inside.get(0, rank.step)]
    if any((step is None) != (rank.step is None) for step in others):
        yield decide(w, rank.number, Failure("mixed", at, "mixed", step=rank.step))
    elif at == 0 and all(other.at == "in" and other.number == rank.number for other in w.ranks):
        alike = len(set(inside.values())) == 1
        yield decide(w, rank.number, COMMIT if alike else Failure("differ", 0, step=rank.step))


def timeouts(w: World) -> Iterator[World]:
    """Yield the worlds after some deadline passed: a sleeper wakes, a rank gives up on another, or on its doubt."""
    for at, rank in enumerate(w.ranks):
        if rank.at == "idle" and rank.left and rank.left[0] == SLEEP:
            yield put(w, at, replace(rank, left=rank.left[1:]))
        if rank.at == "doubting":
            yield look(w, at, patient=False)
        if rank.at == "in" and w.verdict(rank.number) is None:
            awaited = range(1, len(w.ranks)) if at == 0 else [0]
            absent = [other for other in awaited if other not in w.inside(rank.number)]
            if absent:
                yield decide(w, rank.number, Failure("silent", absent[0], "silent", step=rank.step))


def explore(programs: Sequence[Sequence[int]], breaks: int, *, rumours: bool = False) -> tuple[set[World], list[str]]:
    """Walk everything reachable; return the worlds where all is over, and what must never be."""
    first = World(tuple(Rank(tuple(program)) for program in programs), breaks)
    todo, known, ends, found = [first], {first}, set[World](), list[str]()
    while todo:
        w = todo.pop()
        going = [x for x in steps(w) if x != w]
        if rumours or not going:
            going += [x for x in timeouts(w) if x != w]
        if not going:
            ends.add(w)
            found += [f"rank {at} waits for ever: {rank}" for at, rank in enumerate(w.ranks) if rank.left]
        found += mixed(w)
        todo += [x for x in going if x not in known]
        known.update(going)
    return ends, found


def mixed(w: World) -> Iterator[str]:
    """Yield the attempts that were committed though not all ranks called the same."""
    for number, verdict in w.verdicts:
        inside = w.inside(number)
        if verdict == COMMIT and (len(inside) < len(w.ranks) or len(set(inside.values())) > 1):
            yield f"number {number} was committed with {inside}"


__all__ = ["LOAD", "MEET", "SLEEP", "explore"]

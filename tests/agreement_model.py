"""A small world for the agreement: every order of steps, delays, losses and deaths of three ranks, a store and a disk.

The ranks run `agreement.step` itself. What is modelled is what surrounds it: messages of a rank arrive in order, late
or never; the answer to Compete may be lost after it was obeyed; any rank, the store, or a rank's connection may die at
any point; a rank may think another silent that is not; the file system may refuse the rename, or report an error after
doing it; and who is uncertain settles by reading. A step is one arrow of the graph, time does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ckptspec.engine.agree import agreement as ag
from ckptspec.engine.agree.agreement import COMMIT, Failure, Outcome, Stage, State


@dataclass(frozen=True)
class Proc:
    """One rank: its machine, where its program is, its messages under way (oldest first), the answer it waits for."""

    state: State
    at: str = "work"
    sent: tuple[object, ...] = ()
    asking: ag.Verdict | None = None
    answer: ag.Verdict | None = None
    dead: bool = False
    settled: bool | None = None

    @property
    def done(self) -> bool:
        return self.dead or self.state.stage.final

    @property
    def free(self) -> bool:
        return not self.done and self.asking is None and self.answer is None


@dataclass(frozen=True)
class World:
    """Everything there is. `deaths`, `breaks` and `losses` are how many more may happen."""

    procs: tuple[Proc, ...]
    deaths: int
    breaks: int
    losses: int
    rumours: bool  # whether ranks may be thought silent that are not
    store: bool = True
    decision: ag.Verdict | None = None
    hands: frozenset[int] = frozenset()
    told: Outcome | None = None
    disk: str = "staged"  # staged, visible, fenced


def start(ranks: int, deaths: int, breaks: int, losses: int, rumours: bool) -> World:
    return World(tuple(Proc(State(rank)) for rank in range(ranks)), deaths, breaks, losses, rumours)


def put(w: World, rank: int, proc: Proc) -> World:
    return replace(w, procs=(*w.procs[:rank], proc, *w.procs[rank + 1 :]))


def feed(w: World, rank: int, event: ag.Event, **changes: object) -> World:
    """Give a rank an event; what it then wants to say or ask is under way."""
    proc = replace(w.procs[rank], **changes)  # type: ignore[arg-type]
    state, actions = ag.step(proc.state, event)
    proc = replace(proc, state=state)
    for action in actions:
        if isinstance(action, ag.Compete):
            proc = replace(proc, asking=action.verdict)
        else:
            proc = replace(proc, sent=(*proc.sent, action.outcome))
    return put(w, rank, proc)


def steps(w: World) -> Iterator[World]:
    """Yield the worlds after one step that needs no accident."""
    for rank, proc in enumerate(w.procs):
        yield from messages(w, rank, proc)
        if proc.dead:
            continue
        yield from answers(w, rank, proc)
        if proc.state.stage is Stage.UNCERTAIN and proc.settled is None:
            yield settle(w, rank, proc)
        if proc.free:
            yield from acts(w, rank, proc)


def accidents(w: World) -> Iterator[World]:
    """Yield the worlds after one accident more: the store, a rank or a connection dies, or a rank raises."""
    if w.losses and w.store:
        yield replace(w, store=False, losses=w.losses - 1)
    for rank, proc in enumerate(w.procs):
        if w.deaths and not proc.dead:
            yield put(replace(w, deaths=w.deaths - 1), rank, replace(proc, dead=True))
        # The coordinator's program between decision and telling breaks in its own ways: see `commit`.
        if proc.free and w.breaks and not (rank == 0 and proc.state.stage is Stage.COMMITTING):
            yield feed(replace(w, breaks=w.breaks - 1), rank, ag.Broke(Failure("broke", rank)))
        if proc.free and w.losses:
            yield feed(replace(w, losses=w.losses - 1), rank, ag.Lost(Failure("lost", None, "store")), sent=())


def messages(w: World, rank: int, proc: Proc) -> Iterator[World]:
    """The oldest message of a rank arrives, or is lost with its process, its connection or the store."""
    if not proc.sent:
        return
    first, rest = proc.sent[0], replace(proc, sent=proc.sent[1:])
    if not w.store:
        yield put(w, rank, replace(proc, sent=()))
        return
    if proc.dead:
        yield put(w, rank, replace(proc, sent=()))
    if isinstance(first, Outcome):
        yield replace(put(w, rank, rest), told=first)
    else:
        yield replace(put(w, rank, rest), hands=w.hands | {rank})


def answers(w: World, rank: int, proc: Proc) -> Iterator[World]:
    """A rank's Compete is obeyed by the store, then answered; or the store is gone before, or between the two."""
    if proc.asking is not None:
        if not w.store:
            yield feed(w, rank, ag.Lost(Failure("lost", None, "store")), asking=None)
        elif not proc.sent:
            stands = w.decision or proc.asking
            yield replace(put(w, rank, replace(proc, asking=None, answer=stands)), decision=stands)
    elif proc.answer is not None:
        yield feed(w, rank, ag.Decided(proc.answer), answer=None)
        if not w.store:
            yield feed(w, rank, ag.Lost(Failure("lost", None, "store")), answer=None)


def settle(w: World, rank: int, proc: Proc) -> World:
    """Read the disk; where the save is not visible, take its staging away."""
    visible = w.disk == "visible"
    return put(replace(w, disk=w.disk if visible else "fenced"), rank, replace(proc, settled=visible))


def acts(w: World, rank: int, proc: Proc) -> Iterator[World]:
    """What a rank does by itself: its program, a look at the store, or giving up on another."""
    stage = proc.state.stage
    if stage is Stage.WORKING:
        yield feed(w, rank, ag.HandedIn(), sent=(*proc.sent, "hand"))
    if rank == 0 and stage is Stage.COMMITTING:
        yield from commit(w, proc)
        return
    if proc.sent:
        return  # its connection carries what it sent before what it asks
    if not w.store:
        yield feed(w, rank, ag.Lost(Failure("lost", None, "store")))
        return
    if w.decision is not None and stage is not Stage.COMMITTING:
        yield feed(w, rank, ag.Decided(w.decision))
    if rank == 0:
        yield from gather(w, stage)
        return
    if w.told is not None:
        yield feed(w, rank, ag.Told(w.told))
    if w.rumours or w.procs[0].done:
        yield feed(w, rank, ag.Silent(Failure("silent", 0, "silent")))


def gather(w: World, stage: Stage) -> Iterator[World]:
    if stage is Stage.GATHERED:
        yield feed(w, 0, ag.Ready())
    elif len(w.hands) == len(w.procs) and stage is Stage.HANDED:
        yield feed(w, 0, ag.Gathered())
    for other in range(1, len(w.procs)):
        if stage is Stage.HANDED and other not in w.hands and (w.rumours or w.procs[other].done):
            yield feed(w, 0, ag.Silent(Failure("silent", other, "silent")))


def commit(w: World, proc: Proc) -> Iterator[World]:
    """The coordinator's program once "commit" won: rename, flush, tell; each may go wrong."""
    certain, vague = ag.Broke(Failure("refused", 0, certain=True)), ag.Broke(Failure("EIO", 0))
    if proc.at == "flush":
        yield feed(w, 0, ag.Published())
        if w.breaks:
            yield feed(replace(w, breaks=w.breaks - 1), 0, vague)
        return
    if w.disk == "fenced":
        yield feed(w, 0, certain)
        return
    yield put(replace(w, disk="visible"), 0, replace(proc, at="flush"))
    if w.breaks:
        left = replace(w, breaks=w.breaks - 1)
        yield feed(left, 0, certain)  # the name was taken
        yield feed(left, 0, vague)
        yield feed(replace(left, disk="visible"), 0, vague)


def faults(w: World) -> Iterator[str]:
    """Yield what must never be, in this one moment."""
    for rank, proc in enumerate(w.procs):
        stage = proc.state.stage
        if w.disk == "visible" and (stage is Stage.FAILED or proc.settled is False):
            yield f"rank {rank} was told failed, and the save is visible"
        if w.disk != "visible" and (stage is Stage.COMMITTED or proc.settled):
            yield f"rank {rank} was told committed, and the save is not visible"
    verdicts = {p.state.failure for p in w.procs if p.state.stage is Stage.FAILED and p.state.failure}
    told = {f for f in verdicts if f.kind != "store" and not f.certain}
    if len(told) > 1:
        yield f"ranks were told different failures: {told}"


def stuck(w: World) -> Iterator[str]:
    """Yield the ranks that never end, in a world where only accidents can still happen."""
    for rank, proc in enumerate(w.procs):
        if not proc.done:
            yield f"rank {rank} waits for ever in {proc.state.stage.value}"


def explore(first: World) -> tuple[int, set[tuple[Stage, ...]], list[str]]:
    """Walk everything reachable; return how many worlds there are, how the ranks alive can end, and the faults.

    No world is reached twice on one path, so every path ends, and a rank that waits for ever is found at an end.
    """
    after: dict[World, set[World]] = {}
    todo, ends, found = [first], set[tuple[Stage, ...]](), list[str]()
    while todo:
        w = todo.pop()
        if w in after:
            continue
        found += faults(w)
        going = {x for x in steps(w) if x != w}
        if not going:
            found += stuck(w)
            ends.add(tuple(p.state.stage for p in w.procs if not p.dead))
        after[w] = going | set(accidents(w))
        todo += after[w]
    assert ordered(after), "a path of steps leads back to where it was"
    return len(after), ends, found


def ordered(after: dict[World, set[World]]) -> bool:
    """Return whether no path leads back: worlds without a way in are taken off until none is left."""
    ways = dict.fromkeys(after, 0)
    for targets in after.values():
        for w in targets:
            ways[w] += 1
    todo = [w for w, n in ways.items() if n == 0]
    for w in todo:
        for x in after[w]:
            ways[x] -= 1
            if ways[x] == 0:
                todo.append(x)
    return len(todo) == len(after)


__all__ = ["COMMIT", "explore", "start"]

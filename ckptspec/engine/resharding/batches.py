"""Owns which bytes are read and written together: windows of whole blocks on one side, copies into chunks on the other.

Pure: it plans within a number of bytes and moves none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm

from ckptspec.engine.resharding.runs import Copy, Run
from ckptspec.engine.resharding.tables import Chunk
from ckptspec.errors import PlanError, Where
from ckptspec.format.box import Box, intersect, iter_pieces
from ckptspec.planner.joins import meetings
from ckptspec.planner.strips import Part, Unit

Runs = Callable[[int, Part], tuple[Sequence[Run], Sequence[Run]]]
Read = tuple[Run, int, int]  # of a run's chunk: the first byte, and the byte behind
COPIES = 4096  # in one batch: a batch of tiny tensors must end too
INTERVALS = 8  # of a strip in one batch, at least: what is stored of each is rounded up to whole blocks


@dataclass
class Window:
    """Blocks [first, last) of a stored chunk, of which bytes up to `used` are wanted; `tensor` is whose they are."""

    chunk: Chunk
    tensor: str
    first: int
    last: int
    used: int


@dataclass(frozen=True)
class Comb:
    """A box of a wanted chunk that does not lie there in a row; `run` is the chunk's run that it is a part of."""

    run: Run
    box: Box
    copies: tuple[Copy, ...]


@dataclass
class Batch:
    """What is read, then copied and written, in one go; `block` is the size of the source's blocks.

    `units` are the numbers of those it has parts of, `done` of those that end in it.
    """

    block: int
    windows: dict[tuple[int, int], list[Window]] = field(default_factory=dict)
    copies: dict[tuple[int, int], list[Copy]] = field(default_factory=dict)
    combs: list[Comb] = field(default_factory=list)
    nbytes: int = 0
    count: int = 0
    units: set[int] = field(default_factory=set)
    done: list[int] = field(default_factory=list)

    def cost(self, reads: Iterable[Read]) -> int:
        """Return the bytes that these reads would add."""
        total = 0
        for run, low, high in reads:
            first, last = low // self.block, -(-high // self.block)
            near = self._near(run.chunk, first)
            if near is not None:
                first = max(first, near.last)
            total += max(0, min(last * self.block, run.chunk.nbytes) - first * self.block)
        return total

    def _near(self, chunk: Chunk, first: int) -> Window | None:
        """Return the window that a read from block `first` on goes on with, if there is one."""
        several = self.windows.get(chunk.key)
        return several[-1] if several and several[-1].first <= first <= several[-1].last else None

    def add(self, step: Step) -> None:
        """Take in what one step reads and makes of it."""
        for run, low, high in step.reads:
            self.nbytes += self.cost(((run, low, high),))
            first, last = low // self.block, -(-high // self.block)
            near = self._near(run.chunk, first)
            if near is None:
                self.windows.setdefault(run.chunk.key, []).append(Window(run.chunk, run.name, first, last, high))
            else:
                near.last, near.used = max(near.last, last), max(near.used, high)
        for copy in step.copies:
            self.copies.setdefault(copy.target.chunk.key, []).append(copy)
        self.combs += step.combs
        self.count += len(step.copies) + sum(len(comb.copies) for comb in step.combs)


@dataclass(frozen=True)
class Step:
    """Reads, and what is made of them alone: copies that fill wanted chunks in a row, and combs."""

    reads: Sequence[Read]
    copies: Sequence[Copy] = ()
    combs: Sequence[Comb] = ()


def batches(units: Iterable[tuple[int, Unit]], runs: Runs, block: int, room: int) -> Iterator[Batch]:
    """Yield the batches that move these (number, unit), in order, each reading at most `room` bytes.

    `runs` gives what is stored and what is wanted of a part. Raises what it raises, and PlanError [T-COVER] where what
    is wanted is not all stored.
    """
    batch = Batch(block)
    for number, unit in units:
        for part in unit:
            for step in _steps(part, *runs(number, part), block, room):
                cost = batch.cost(step.reads)
                if batch.count and (batch.nbytes + cost > room or batch.count >= COPIES):
                    yield batch
                    batch = Batch(block)
                batch.add(step)
                batch.units.add(number)
        batch.done.append(number)
    if batch.count or batch.done:
        yield batch


def _steps(part: Part, sources: Sequence[Run], targets: Sequence[Run], block: int, room: int) -> Iterator[Step]:
    """Yield the steps for a part of a strip, each needing at most `room`.

    Interval by interval, where what is stored of one fits; where it does not, since too many chunks have a little of
    each, chunk by chunk.
    """
    itemsize = part.strip.itemsize
    for box in iter_pieces(part.box, itemsize, max(itemsize, room // INTERVALS)):
        step = _step(part, box, sources, targets)
        if Batch(block).cost(step.reads) > room:
            rest = part.box if box.offsets == part.box.offsets else box
            yield from _by_chunk(part, rest, sources, targets, block, room)
            if rest is part.box:
                return
        else:
            yield step


def _step(part: Part, box: Box, sources: Sequence[Run], targets: Sequence[Run]) -> Step:
    """Return the step for one interval of a strip, which is a box."""
    itemsize = part.strip.itemsize
    wanted = _clipped(targets, box)
    if not part.strip.strands:
        return Step((), [Copy(None, run, shared, itemsize) for run, shared in wanted])
    stored = _clipped(sources, box)
    copies: list[Copy] = []
    spans: dict[int, tuple[int, int]] = {}
    for i, j, shared in _met(stored, wanted):
        run = stored[i][0]
        copies.append(Copy(run, wanted[j][0], shared, itemsize))
        low, high = run.view.hull(shared)
        known = spans.get(i, (low, high))
        spans[i] = min(low, known[0]), max(high, known[1])
    reads = [(stored[i][0], low * itemsize, high * itemsize) for i, (low, high) in spans.items()]
    return Step(reads, copies)


Clipped = Sequence[tuple[Run, Box]]


def _clipped(runs: Sequence[Run], box: Box) -> Clipped:
    shared = ((run, run.box if run.box == box else intersect(run.box, box)) for run in runs)
    return [(run, clipped) for run, clipped in shared if clipped is not None]


def _met(stored: Clipped, wanted: Clipped) -> list[tuple[int, int, Box]]:
    """Return which of what is stored meets which of what is wanted; raises PlanError [T-COVER] for a gap."""
    found = list(meetings([box for _, box in stored], [box for _, box in wanted]))
    filled = [0] * len(wanted)
    for _, j, shared in found:
        filled[j] += shared.numel
    for (run, box), count in zip(wanted, filled, strict=True):
        if count != box.numel:
            message = "what is stored does not make up what is wanted"
            where, numbers = Where(tensor=run.name), f"{count} of {box.numel} elements"
            raise PlanError(message, rule="T-COVER", where=where, found=numbers)
    return found


def _by_chunk(
    part: Part, box: Box, sources: Sequence[Run], targets: Sequence[Run], block: int, room: int
) -> Iterator[Step]:
    """Yield the steps for a box of a strip that take as many stored chunks together as fit, and write in combs."""
    itemsize = part.strip.itemsize
    stored, wanted = _clipped(sources, box), _clipped(targets, box)
    met: dict[int, list[tuple[int, Box]]] = {}
    for i, j, shared in _met(stored, wanted):
        met.setdefault(i, []).append((j, shared))
    reads: list[Read] = []
    pairs: list[tuple[int, Copy]] = []
    for i, several in met.items():
        run = stored[i][0]
        for piece in iter_pieces(stored[i][1], itemsize, room // 2):
            low, high = (e * itemsize for e in run.view.hull(piece))
            if reads and Batch(block).cost([*reads, (run, low, high)]) > room:
                yield Step(reads, (), _combs(pairs, wanted))
                reads, pairs = [], []
            reads.append((run, low, high))
            for j, shared in several:
                inner = intersect(shared, piece)
                if inner is not None:
                    pairs.append((j, Copy(run, wanted[j][0], inner, itemsize)))
    if reads:
        yield Step(reads, (), _combs(pairs, wanted))


def _combs(pairs: Iterable[tuple[int, Copy]], wanted: Clipped) -> list[Comb]:
    """Return the combs that copies into wanted chunks make: one for each chunk, where they are a box together."""
    by_target: dict[int, list[Copy]] = {}
    for j, copy in pairs:
        by_target.setdefault(j, []).append(copy)
    out = []
    for j, copies in by_target.items():
        run, hull = wanted[j][0], _hull([copy.box for copy in copies])
        if hull.numel == sum(copy.box.numel for copy in copies):
            out.append(Comb(run, hull, tuple(copies)))
        else:
            out += [Comb(run, copy.box, (copy,)) for copy in copies]
    return out


def _hull(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that holds all of these."""
    low = tuple(map(min, zip(*(b.offsets for b in boxes), strict=True)))
    high = tuple(map(max, zip(*(b.stops for b in boxes), strict=True)))
    return Box(low, tuple(h - o for o, h in zip(low, high, strict=True)))


# ---- slices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Bytes [low, high) of a wanted chunk's payload, and the copies that fill them."""

    chunk: Chunk
    low: int
    high: int
    copies: tuple[Copy, ...]


def slices(batch: Batch, block: int, room: int) -> Iterator[list[Piece]]:
    """Yield the pieces to be written, those that follow each other in a file together, at most `room` bytes each.

    They are cut between blocks of `block` bytes, the result's. A piece that begins a chunk has room for what leads it.
    """
    run: list[Piece] = []
    for key in sorted(batch.copies):
        for piece in _pieces(batch.copies[key], block, room):
            if run and not (_follows(run[-1], piece) and _span(run[0], piece) <= room):
                yield run
                run = []
            run.append(piece)
    if run:
        yield run


LEAD = 4096 + 64  # the most bytes of frame before a payload, and a few more


def _follows(one: Piece, other: Piece) -> bool:
    """Tell whether a piece ends its chunk and the other begins the next one of the same shard."""
    a, b = one.chunk, other.chunk
    return (a.rank, a.row + 1) == (b.rank, b.row) and one.high == a.nbytes and other.low == 0


def _span(first: Piece, last: Piece) -> int:
    return last.chunk.start + last.high - (first.chunk.start + first.low - (LEAD if first.low == 0 else 0))


def _pieces(copies: Sequence[Copy], block: int, room: int) -> Iterator[Piece]:
    """Yield the pieces of one chunk, ascending."""
    chunk = copies[0].target.chunk
    itemsize = copies[0].itemsize
    spans = sorted(((*copy.target.view.hull(copy.box), copy) for copy in copies), key=lambda s: (s[0], s[1]))
    step = _step_elements(itemsize, block, room - LEAD)
    run: list[Copy] = []
    at = end = -1
    for low, high, copy in spans:
        if run and low > end:
            yield from _cut(chunk, at, end, run, itemsize, step)
            run = []
        if not run:
            at = end = low
        run.append(copy)
        end = max(end, high)
    yield from _cut(chunk, at, end, run, itemsize, step)


def _step_elements(itemsize: int, block: int, room: int) -> int:
    """Return the most elements of a piece: whole blocks, where whole blocks of whole elements fit."""
    unit = lcm(itemsize, block)
    return (room // unit * unit or room) // itemsize


def _cut(chunk: Chunk, low: int, high: int, copies: Sequence[Copy], itemsize: int, step: int) -> Iterator[Piece]:
    """Yield elements [low, high) of a chunk in pieces that end at multiples of `step` elements."""
    for start in range(low // step * step, high, step):
        first, last = max(low, start), min(high, start + step)
        here = copies if first == low and last == high else [c for copy in copies for c in _within(copy, first, last)]
        yield Piece(chunk, first * itemsize, last * itemsize, tuple(here))


def _within(copy: Copy, low: int, high: int) -> Iterator[Copy]:
    """Yield the parts of a copy that go to elements [low, high) of its target."""
    first, last = copy.target.view.hull(copy.box)
    if low <= first and last <= high:
        yield copy
    elif first < high and low < last:
        for view in copy.target.view.within(max(low, first), min(high, last)):
            box = intersect(view.box, copy.box)
            if box is not None:
                yield Copy(copy.source, copy.target, box, copy.itemsize)

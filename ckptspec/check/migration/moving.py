"""Owns what to do when a checkpoint shall be loaded on other ranks or in another layout: advice, most work saved first.

No text from inside a checkpoint enters a command.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckptspec.check.advice import MEMORY
from ckptspec.check.migration import parts
from ckptspec.check.migration.batches import Batch, Batching, batching, data_size
from ckptspec.check.paths import beside, word
from ckptspec.errors import PlanError
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import FlatLayout
from ckptspec.format.manifest import Manifest
from ckptspec.format.report import Advice, Cost, Verdict
from ckptspec.planner import sizing
from ckptspec.planner.fates import APPROXIMATE, LOST, Found
from ckptspec.planner.plans import BUFFERS

SAMPLES = "org.ckptspec.consumed_samples"  # a manifest's annotation: how many samples the run has trained on
COUNTERS = ("consumed_samples", "samples_consumed", "consumed_train_samples", "samples_seen")
TRIES = 8  # multiples of the unit that are tried in each direction


@dataclass(frozen=True)
class Move:
    """What is known of a move to other ranks or another layout: sizes, bytes, what is private, batch and samples.

    `words` are the options that say the target again, `payload` the bytes stored, each element once. `private` has the
    names of each kind of state of a rank's own, `data` the number of data-parallel ranks then and now, if known.
    """

    old: int
    new: int
    words: tuple[str, ...]
    reads: parts.Reads
    payload: int = 0
    flat: bool = False
    private: Mapping[str, list[str]] = field(default_factory=dict)
    data: tuple[int, int] | None = None
    batching: Batching | None = None
    batch: Batch | None = None
    samples: int | None = None
    lost: tuple[str, ...] = ()


def move(
    found: Found,
    judged: Sequence[Verdict],
    words: tuple[str, ...] = (),
    batch: Batch | None = None,
    samples: int | None = None,
) -> Move:
    """Return what is known of the move that a destination is; `judged` is what becomes of each part."""
    d = found.destination
    m = d.manifest
    old, new = data_size(m.world_size, m.meshes), data_size(d.world_size, d.meshes)
    data = None if old is None or new is None else (old, new)
    made = batching(*data, batch) if batch is not None and data is not None else None
    lost = tuple(v.part for v in judged if v.verdict in (LOST, APPROXIMATE))
    flat = any(isinstance(m.layouts[t.layout], FlatLayout) for t in m.tensors.values())
    known = samples if samples is not None else noted(m)
    shared = (t for t in m.tensors.values() if t.shape is not None)
    payload = sum(prod(t.shape or ()) * DTYPES[t.dtype].itemsize for t in shared)
    return Move(
        old=m.world_size,
        new=d.world_size,
        words=words,
        reads=parts.reads(found),
        payload=payload,
        flat=flat,
        private=parts.owned(d),
        data=data,
        batching=made,
        batch=batch,
        samples=known,
        lost=lost,
    )


def noted(m: Manifest) -> int | None:
    """Return the samples that a checkpoint's annotation says were consumed, if it does."""
    n = m.annotations.get(SAMPLES)
    return n if type(n) is int and n >= 0 else None


def counted(state: object, private: frozenset[str], left: int = 10_000) -> int | None:
    """Return the samples consumed that a state tree tells under a name of COUNTERS; what is a rank's own is left out.

    None where it tells none, or two that differ. `left` bounds the values that are looked at.
    """
    found: set[int] = set()
    stack: list[tuple[str, object]] = [("", state)]
    while stack and left:
        left -= 1
        name, node = stack.pop()
        if name in private or type(node) is not dict:
            continue
        for key, value in node.items():
            if key in COUNTERS and type(value) is int and value >= 0:
                found.add(value)
            stack.append((f"{name}/{key}" if name else str(key), value))
    return found.pop() if len(found) == 1 else None


def advice(path: str, run: str | None, m: Move, code: str) -> Iterator[Advice]:
    """Yield what to do, in the order of work saved: load it as it is, write it anew, and what to see to in the job."""
    loses = " and ".join(f"part of the {part}" for part in m.lost) or "nothing"
    how = f" with torchrun --nproc-per-node {m.new} (or --nnodes times --nproc-per-node = {m.new})" if m.new > 1 else ""
    text = f"load it as it is: start {_ranks(m.new)}{how}, and ckptspec.load reads what each rank needs"
    text += "; ZeRO's flat groups are cut anew" if m.flat and m.old != m.new else ""
    params = {"world_size": m.new}
    cost = Cost(bytes_read=m.reads.total, peak_memory=m.reads.most + min(m.reads.most, BUFFERS))
    plan = ("ckptspec", "plan", word(path), *m.words) if m.words else ()
    yield Advice("load", code, text, params, plan, loses, cost)
    if m.words:
        out = beside(run or path, f"{m.new}-ranks")
        text = f"or write it once for {_ranks(m.new)}, so that later loads read no more than they need"
        argv = ("ckptspec", "reshard", word(path), word(out), *m.words)
        yield Advice("reshard", code, text, params, argv, loses, Cost(m.payload, MEMORY))
    if m.old != m.new:
        yield from _own(m, code)
    if (m.old != m.new) if m.data is None else (m.data[0] != m.data[1]):
        yield from _batch(m, code)


def _own(m: Move, code: str) -> Iterator[Advice]:
    """Yield what to do about state that is each rank's own."""
    low, high = sorted((m.old, m.new))
    if parts.RANDOM in m.private:
        rest = parts.ranks(low, high)
        what = f"give {rest} seeds of their own, such as seed + rank" if m.new > m.old else f"those of {rest} end"
        text = f"rank r goes on with the generators of rank r, {what}: not the numbers of a run on {_ranks(m.old)}"
        yield Advice("reseed", code, text, {"ranks": [low, high]})
    if parts.LOADER in m.private or m.samples is not None:
        where = "from the samples consumed so far, which the checkpoint does not tell"
        if m.samples is not None:
            where = f"from the {m.samples:,} samples consumed so far"
        text = f"place the data loader anew on {_ranks(m.new)}, {where}: positions on {_ranks(m.old)} do not map"
        yield Advice("data", code, text, {} if m.samples is None else {"samples": m.samples})


def _batch(m: Move, code: str) -> Iterator[Advice]:
    """Yield what keeps the global batch, where the number of data-parallel ranks changes or is not known."""
    if m.batching is not None:
        b = m.batching
        params = {"global_batch": b.total, "exact": b.exact, "choices": [dict(vars(c)) for c in b.choices]}
        yield Advice("batch", code, b.text(), params)
    elif m.batch is not None:
        text = "see that the global batch stays the same: no mesh tells how many ranks are data-parallel"
        yield Advice("batch", code, text)
    else:
        yield Advice("batch", code, "keep the global batch: --micro-batch and --accumulation tell how")


def _ranks(n: int) -> str:
    return "1 rank" if n == 1 else f"{n:,} ranks"


# ---- sizes that work -------------------------------------------------------------------------------------------------


def sizes_near(m: Manifest, world_size: int) -> list[int]:
    """Return the nearest world sizes that work, the nearest first: one below, one above, where there are."""
    step = sizing.unit(m)
    base = world_size // step
    below = (n * step for n in range(base, max(0, base - TRIES), -1))
    above = (n * step for n in range(base + 1, base + 1 + TRIES))
    found = [next((n for n in some if _works(m, n)), None) for some in (below, above)]
    return sorted((n for n in found if n), key=lambda n: abs(n - world_size))


def _works(m: Manifest, world_size: int) -> bool:
    try:
        sizing.of_world(m, world_size)
    except PlanError:
        return False
    return True


def other_sizes(path: str, sizes: Iterable[int]) -> Iterator[Advice]:
    """Yield the advice to take a world size that works."""
    for n in sizes:
        text = f"take {_ranks(n)}, the nearest that the checkpoint's meshes allow"
        argv = ("ckptspec", "validate", word(path), "--world-size", str(n))
        yield Advice(f"size-{n}", "R-TARGET", text, {"world_size": n}, argv)

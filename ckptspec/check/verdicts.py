"""Owns what is gone with what cannot be read of a checkpoint, what of that has another copy, and what is whole."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod

from ckptspec.check.migration.ranges import joined, ranges, text
from ckptspec.format.box import Box, contains
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import BoxesLayout, Layout, MeshLayout
from ckptspec.format.manifest import Manifest, TensorEntry
from ckptspec.format.placement import resolve
from ckptspec.format.report import Verdict

SHOWN = 20  # tensors that get a verdict of their own
STEPS = 1 << 20  # boxes of bad ranks that are looked at; what comes after is said to be unknown
RANGES = 64  # ranges that one verdict lists
LISTED = 4096  # ranks without a shard that are looked for
PRIVATE = "state private to a rank"


@dataclass(frozen=True)
class Damage:
    """One stored piece of which bytes are damaged: `box` of a tensor in the shard of `rank`."""

    rank: int
    tensor: str
    box: Box


@dataclass(frozen=True)
class Loss:
    """What no readable shard stores, by tensor in bytes, and what is private to the `ranks` whose shards are gone.

    `sizes` has the bytes of every tensor that was looked at; `unknown` counts those that were too many to look at.
    `boxes` are the lost parts, `recoverable` the bytes that a readable shard has another copy of, `local` the tensors
    of a rank's own that are damaged.
    """

    ranks: tuple[int, ...]
    tensors: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    private: bool = False
    unknown: int = 0
    boxes: dict[str, tuple[Box, ...]] = field(default_factory=dict)
    recoverable: dict[str, int] = field(default_factory=dict)
    local: tuple[tuple[str, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes lost."""
        return sum(self.tensors.values())

    @property
    def mended(self) -> bool:
        """Whether another copy has all that ranks share; what is private to a rank has none."""
        return not self.tensors and not self.unknown and not self.local

    def intact(self) -> str:
        """Return in words what the readable shards still hold completely, and what is gone."""
        whole = len(self.sizes) - len(self.tensors)
        kept = sum(n for name, n in self.sizes.items() if name not in self.tensors)
        total = sum(self.sizes.values())
        said = f"intact elsewhere: {whole} of {len(self.sizes)} tensors ({kept:,} of {total:,} bytes)"
        if self.recoverable:
            said += f"; {sum(self.recoverable.values()):,} bytes of what cannot be read have another copy"
        if self.tensors:
            first = ", ".join(f"{name} ({n:,} bytes)" for name, n in islice(self.tensors.items(), 3))
            more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
            said += f"; gone: {self.nbytes:,} bytes of {first}{more}"
        return f"{said}; {self.unknown} tensors were not looked at" if self.unknown else said


def losses(m: Manifest, bad: Collection[int], damage: Iterable[Damage] = ()) -> Loss:
    """Return what is lost when the shards of the `bad` ranks are: only what no other rank stores a copy of [Q-REPLICA].

    `damage` are pieces of other shards that are damaged. Needs no index: the manifest's layouts say who stores what.
    The manifest keeps its own rules.
    """
    broken: dict[str, list[Damage]] = {}
    for d in damage:
        broken.setdefault(d.tensor, []).append(d)
    shared = {name: t for name, t in m.tensors.items() if t.shape is not None}
    sizes: dict[str, int] = {}
    boxes: dict[str, tuple[Box, ...]] = {}
    copied: dict[str, int] = {}
    steps = 0
    for name, t in shared.items():
        steps += len(bad) * boxes_a_rank(m.layouts[t.layout])
        if steps > STEPS:
            continue
        itemsize = DTYPES[t.dtype].itemsize
        sizes[name] = prod(t.shape or ()) * itemsize
        lost, kept = _lost(m, name, t, bad, broken.get(name, ()))
        if lost:
            boxes[name] = tuple(joined(lost))
        if kept:
            copied[name] = sum(box.numel for box in kept) * itemsize
    return Loss(
        ranks=tuple(sorted(bad)),
        tensors={n: sum(b.numel for b in lost) * DTYPES[shared[n].dtype].itemsize for n, lost in boxes.items()},
        sizes=sizes,
        private=bool(bad) and bool(private_names(m)),
        unknown=len(shared) - len(sizes),
        boxes=boxes,
        recoverable=copied,
        local=tuple(_local(m, broken)),
    )


def _local(m: Manifest, broken: dict[str, list[Damage]]) -> Iterator[tuple[str, int]]:
    for name, found in broken.items():
        if m.tensors[name].shape is None:
            yield from ((name, d.rank) for d in found)


def boxes_a_rank(layout: Layout) -> int:
    """Return how many boxes of one tensor a rank may hold: a few, unless a file asks for very many."""
    if isinstance(layout, MeshLayout):
        return prod(len(sizes) for sizes in layout.blocks.values())
    return len(layout.boxes) if isinstance(layout, BoxesLayout) else 1


def _lost(
    m: Manifest, name: str, t: TensorEntry, bad: Collection[int], broken: Collection[Damage]
) -> tuple[set[Box], set[Box]]:
    """Return the pieces of a tensor that only `bad` or `broken` places store, and those that others store as well."""
    shape, itemsize = t.shape or (), DTYPES[t.dtype].itemsize
    place = resolve(m.layouts[t.layout], m.meshes)
    pieces = {box for rank in bad for box in place.stored(shape, itemsize, name, m.copies, rank)}
    pieces |= {d.box for d in broken}
    if m.copies == 1:
        return pieces, set()
    unread = {*bad, *(d.rank for d in broken)}  # who finds damage in a tensor reads no more of it from that shard
    copied = set()
    for box in pieces:
        storers = place.storers(shape, itemsize, name, m.copies, within=box)
        if any(r not in unread and contains(b, box) for r, b in storers):
            copied.add(box)
    return pieces - copied, copied


def verdicts(m: Manifest, loss: Loss) -> Iterator[Verdict]:
    """Yield what becomes of each part when shards, or pieces of them, are gone: the largest loss first."""
    ranks = _ranks(loss.ranks)
    worst = sorted(loss.tensors.items(), key=lambda item: (-item[1], item[0]))
    by = f"were stored only by {ranks}" if loss.ranks else "are damaged, and no other shard stores a copy"
    for name, n in worst[:SHOWN]:
        found = list(islice(ranges(m, name, loss.boxes[name]), RANGES + 1))
        more = sum(1 for _ in ranges(m, name, loss.boxes[name])) - RANGES if len(found) > RANGES else 0
        said = f": {text(m, found[:RANGES], more)}" if found else ", all of it padding"
        reason = f"{n:,} of {loss.sizes[name]:,} bytes {by}{said}"
        yield Verdict(f"tensor {name}", "lost", reason, gone=tuple(found[:RANGES]))
    if len(worst) > SHOWN:
        rest = sum(n for _, n in worst[SHOWN:])
        yield Verdict(f"{len(worst) - SHOWN} more tensors", "lost", f"{rest:,} bytes {by}")
    yield from _whole(loss)
    if loss.private:
        yield Verdict(PRIVATE, "lost", f"that of {ranks} was in the shards that are gone")
    for name, rank in loss.local[:SHOWN]:
        yield Verdict(f"tensor {name} of rank {rank}", "lost", "it is damaged, and each rank stores its own only")


def _whole(loss: Loss) -> Iterator[Verdict]:
    """Yield what is there: by another copy, and untouched."""
    copied = [n for n in loss.recoverable if n not in loss.tensors]
    if copied:
        n = sum(loss.recoverable[name] for name in copied)
        reason = f"the {n:,} bytes that cannot be read have another copy, which load and reshard read"
        yield Verdict(f"tensors that have another copy: {len(copied)}", "lossless", reason)
    whole = len(loss.sizes) - len(loss.tensors) - len(copied)
    if whole:
        yield Verdict(f"untouched tensors: {whole}", "lossless", "every byte is stored by a shard that is there")


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = "rank" + ("s " if len(ranks) > 1 else " ") + ", ".join(map(str, ranks[:8]))
    return shown + (" and more" if len(ranks) > 8 else "")


def unlisted(m: Manifest) -> set[int]:
    """Return the ranks that no shard is listed for; of very many, none: they are no shards that went missing."""
    if not 0 < m.world_size - len(m.shards) <= LISTED:
        return set()
    return set(range(m.world_size)) - {entry.rank for entry in m.shards}


def private_names(m: Manifest) -> tuple[str, ...]:
    """Return the names of what each rank stores of its own."""
    tensors = (n for n, t in m.tensors.items() if t.shape is None)
    return (*tensors, *(n for n, kind in m.objects.items() if kind == "rank"))

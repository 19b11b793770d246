"""Owns what becomes of each part of a state: what is gone with the shards that cannot be read, and what is whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import prod

from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import BoxesLayout, Layout, LocalLayout, MeshLayout
from ckptspec.format.manifest import Manifest, TensorEntry
from ckptspec.format.placement import resolve
from ckptspec.format.report import Verdict

SHOWN = 20  # tensors that get a verdict of their own
STEPS = 1 << 20  # boxes of bad ranks that are looked at; what comes after is said to be unknown


@dataclass(frozen=True)
class Loss:
    """What no readable shard stores, by tensor in bytes, and what is private to the `ranks` whose shards are gone.

    `sizes` has the bytes of every tensor that was looked at; `unknown` counts those that were too many to look at.
    """

    ranks: tuple[int, ...]
    tensors: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    private: bool = False
    unknown: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes lost."""
        return sum(self.tensors.values())

    def intact(self) -> str:
        """Return in words what the readable shards still hold completely, and what is gone."""
        whole = len(self.sizes) - len(self.tensors)
        kept = sum(n for name, n in self.sizes.items() if name not in self.tensors)
        total = sum(self.sizes.values())
        text = f"intact elsewhere: {whole} of {len(self.sizes)} tensors ({kept:,} of {total:,} bytes)"
        if self.tensors:
            first = ", ".join(f"{name} ({n:,} bytes)" for name, n in islice(self.tensors.items(), 3))
            more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
            text += f"; gone: {self.nbytes:,} bytes of {first}{more}"
        return f"{text}; {self.unknown} tensors were not looked at" if self.unknown else text


def losses(m: Manifest, bad: Collection[int]) -> Loss:
    """Return what is lost when the shards of the `bad` ranks are: only what no other rank stores a copy of [Q-REPLICA].

    Needs no index: the manifest's layouts say who stores what. The manifest keeps its own rules.
    """
    gone: dict[str, int] = {}
    sizes: dict[str, int] = {}
    shared = {name: t for name, t in m.tensors.items() if t.shape is not None}
    steps = 0
    for name, t in shared.items():
        steps += len(bad) * boxes_a_rank(m.layouts[t.layout])
        if steps > STEPS:
            continue
        sizes[name] = prod(t.shape or ()) * DTYPES[t.dtype].itemsize
        if lost := _lost(m, name, t, bad):
            gone[name] = lost
    local = any(isinstance(m.layouts[t.layout], LocalLayout) for t in m.tensors.values())
    private = local or "rank" in m.objects.values()
    return Loss(tuple(sorted(bad)), gone, sizes, private, len(shared) - len(sizes))


def boxes_a_rank(layout: Layout) -> int:
    """Return how many boxes of one tensor a rank may hold: a few, unless a file asks for very many."""
    if isinstance(layout, MeshLayout):
        return prod(len(sizes) for sizes in layout.blocks.values())
    return len(layout.boxes) if isinstance(layout, BoxesLayout) else 1


def _lost(m: Manifest, name: str, t: TensorEntry, bad: Collection[int]) -> int:
    """Return the bytes of a tensor that only `bad` ranks store."""
    shape, itemsize = t.shape or (), DTYPES[t.dtype].itemsize
    place = resolve(m.layouts[t.layout], m.meshes)
    pieces = {box for rank in bad for box in place.stored(shape, itemsize, name, m.copies, rank)}
    if m.copies > 1:
        pieces = {
            box
            for box in pieces
            if all(r in bad for r, b in place.storers(shape, itemsize, name, m.copies, within=box) if b == box)
        }
    return sum(box.numel for box in pieces) * itemsize


def verdicts(loss: Loss) -> Iterator[Verdict]:
    """Yield what becomes of each part when the shards of some ranks are gone, the largest loss first."""
    ranks = "rank" + ("s " if len(loss.ranks) > 1 else " ") + ", ".join(map(str, loss.ranks[:8]))
    ranks += " and more" if len(loss.ranks) > 8 else ""
    worst = sorted(loss.tensors.items(), key=lambda item: (-item[1], item[0]))
    for name, n in worst[:SHOWN]:
        reason = f"{n:,} of {loss.sizes[name]:,} bytes were stored only by {ranks}"
        yield Verdict(f"tensor {name}", "lost", reason)
    if len(worst) > SHOWN:
        rest = sum(n for _, n in worst[SHOWN:])
        yield Verdict(f"{len(worst) - SHOWN} more tensors", "lost", f"{rest:,} bytes were stored only by {ranks}")
    whole = len(loss.sizes) - len(loss.tensors)
    if whole:
        yield Verdict(f"{whole} other tensors", "lossless", "every byte is stored by a shard that is there")
    if loss.private:
        yield Verdict("state private to a rank", "lost", f"that of {ranks} was in the shards that are gone")

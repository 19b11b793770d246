"""Owns what becomes of each part of a state: what is gone with the shards that cannot be read, and what is whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import LocalLayout
from ckptspec.format.manifest import Manifest
from ckptspec.format.placement import storers
from ckptspec.format.report import Verdict

SHOWN = 20  # tensors that get a verdict of their own
STEPS = 1 << 20  # stored boxes that are looked at: what is lost is then a lower bound


@dataclass(frozen=True)
class Loss:
    """What no readable shard stores, by tensor in bytes, and what is private to the `ranks` whose shards are gone."""

    ranks: tuple[int, ...]
    tensors: dict[str, int] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    rank_objects: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes lost."""
        return sum(self.tensors.values())

    @property
    def total(self) -> int:
        """The bytes of all tensors that are not local."""
        return sum(self.sizes.values())

    def intact(self) -> str:
        """Return in words what the readable shards still hold completely."""
        whole = len(self.sizes) - len(self.tensors)
        kept = sum(n for name, n in self.sizes.items() if name not in self.tensors)
        text = f"intact elsewhere: {whole} of {len(self.sizes)} tensors ({kept:,} of {self.total:,} bytes)"
        if not self.tensors:
            return text
        first = ", ".join(f"{name} ({n:,} bytes)" for name, n in islice(self.tensors.items(), 3))
        more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
        return f"{text}; gone: {self.nbytes:,} bytes of {first}{more}"


def losses(m: Manifest, bad: Collection[int]) -> Loss:
    """Return what is lost when the shards of the `bad` ranks are: only what no other rank stores a copy of [Q-REPLICA].

    Needs no index: the manifest's layouts say who stores what.
    """
    gone: dict[str, int] = {}
    sizes: dict[str, int] = {}
    local = tuple(n for n, t in m.tensors.items() if isinstance(m.layouts[t.layout], LocalLayout))
    steps = STEPS
    for name, t in m.tensors.items():
        if t.shape is None:
            continue
        itemsize = DTYPES[t.dtype].itemsize
        sizes[name] = itemsize
        for n in t.shape:
            sizes[name] *= n
        kept: dict[object, bool] = {}
        for rank, box in islice(storers(m.layouts[t.layout], m.meshes, t.shape, itemsize, name, m.copies), steps):
            steps -= 1
            kept[box] = kept.get(box, False) or rank not in bad
        lost = sum(box.numel for box, safe in kept.items() if not safe) * itemsize  # type: ignore[attr-defined]
        if lost:
            gone[name] = lost
    return Loss(tuple(sorted(bad)), gone, local, sizes, "rank" in m.objects.values())


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
    if loss.local or loss.rank_objects:
        yield Verdict("state private to a rank", "lost", f"that of {ranks} was in the shards that are gone")

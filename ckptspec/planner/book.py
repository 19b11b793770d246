"""Owns the list of all ways from stored to wanted tensors, those of one kind kept once: a model has many equal layers.

A leaf is what goes from one stored tensor to one wanted tensor. Where layouts, shapes and places agree, names do not
matter, so that a plan is worked out for kinds of leaves, not for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptspec.format.box import intersect
from ckptspec.format.dtypes import dtype
from ckptspec.format.manifest import Manifest
from ckptspec.planner.fates import Found
from ckptspec.planner.held import Holders
from ckptspec.planner.lanes import Lane, Leaf
from ckptspec.planner.routes import Route
from ckptspec.planner.stored import Shape, Stored, shape_of


@dataclass(frozen=True)
class Entry:
    """One wanted and one stored tensor, and the number of the kind of leaf between them."""

    wanted: str
    source: str
    leaf: int


@dataclass
class Book:
    """The entries in order of their names, and the leaves they are of."""

    found: Found
    entries: list[Entry] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    _known: dict[object, int] = field(default_factory=dict)
    _shapes: dict[tuple[str, tuple[int, ...]], Shape] = field(default_factory=dict)
    _holders: dict[tuple[str, tuple[int, ...]], Holders] = field(default_factory=dict)
    _stored: dict[object, Stored] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for wanted, route in sorted(self.found.routes.items()):
            for source, lanes in sorted(_lanes(route).items()):
                self.entries.append(Entry(wanted, source, self._leaf(wanted, source, lanes)))

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's manifest."""
        return self.found.destination.manifest

    def _leaf(self, wanted: str, source: str, lanes: tuple[Lane, ...]) -> int:
        d = self.found.destination
        w, s = d.tensors[wanted], self.manifest.tensors[source]
        stored = self._store(source)
        places = tuple((lane.strand.box, lane.strand.view, lane.land) for lane in lanes)
        key = (w.layout, w.shape, s.layout, s.shape, stored.itemsize, stored.crc, places)
        if key not in self._known:
            self._known[key] = len(self.leaves)
            holders = Holders(d.layouts[w.layout], d.meshes, w.shape or ())
            holders = self._holders.setdefault((w.layout, holders.shape), holders)
            self.leaves.append(Leaf(holders, stored, lanes))
        return self._known[key]

    def _store(self, source: str) -> Stored:
        s = self.manifest.tensors[source]
        shape = s.shape or ()
        if (s.layout, shape) not in self._shapes:
            self._shapes[s.layout, shape] = shape_of(self.manifest.layouts[s.layout], self.manifest.meshes, shape)
        itemsize = dtype(s.dtype).itemsize
        made = Stored.named(self._shapes[s.layout, shape], itemsize, self.manifest.copies, source)
        return self._stored.setdefault((s.layout, shape, itemsize, made.crc), made)

    def signatures(self) -> Iterator[tuple[int, ...]]:
        """Yield for each stored tensor that is read the leaves it is read by: what two read of it is read once."""
        by_source: dict[str, list[int]] = {}
        for entry in self.entries:
            by_source.setdefault(entry.source, []).append(entry.leaf)
        yield from map(tuple, by_source.values())


def _lanes(route: Route) -> dict[str, tuple[Lane, ...]]:
    """Return the lanes of a route by the stored tensor they come from."""
    out: dict[str, list[Lane]] = {}
    for strand in route.strands:
        out.setdefault(strand.source, []).append(Lane(strand))
    for land, strands in route.lands:
        for strand in strands:
            if intersect(strand.box, land.box) is not None:
                out.setdefault(strand.source, []).append(Lane(strand, land))
    return {source: tuple(lanes) for source, lanes in out.items()}

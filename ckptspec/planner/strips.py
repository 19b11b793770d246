"""Owns the order in which a checkpoint is walked so that each stored and each wanted chunk is met once, ascending.

A strip is one tensor by its own elements, whatever it is called and however it is held on either side: named, or as a
piece of flat ones. Walked row-major, it meets what is stored and what is wanted of it in their own order, since a part
of a row-major order keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ckptspec.format.box import Box, iter_pieces
from ckptspec.format.dtypes import dtype
from ckptspec.planner.routes import Route, Strand
from ckptspec.planner.views import View

UNIT = 256 << 20  # bytes of strips that are finished, and taken up again after a kill, together
LARGEST = 1 << 30  # bytes of one strip from which on it is cut: each cut may read blocks twice


@dataclass(frozen=True)
class Land:
    """A wanted tensor that gets a strip, all of it or, for a flat one, at `view`, in the strip's coordinates."""

    name: str
    view: View | None = None


@dataclass(frozen=True)
class Strip:
    """One tensor's elements: `strands` say where they are stored (none: they are zero), `lands` where they go.

    `rank` is whose it is, for what is private to a rank.
    """

    dtype: str
    shape: tuple[int, ...]
    strands: tuple[Strand, ...]
    lands: tuple[Land, ...]
    rank: int | None = None

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Part:
    """A run of a strip's row-major elements that is a box."""

    strip: Strip
    box: Box

    @property
    def nbytes(self) -> int:
        """The bytes of the box."""
        return self.box.numel * self.strip.itemsize


Unit = tuple[Part, ...]


def strips(wanted: Iterable[tuple[str, Route]], sources: Sequence[str]) -> list[Strip]:
    """Return the strips that fill the wanted tensors, in an order that keeps flat tensors sequential.

    `wanted` are (name, route) in the order they shall be written, `sources` all stored names in order. What several
    wanted tensors take from the same elements is one strip.
    """
    place = {name: i for i, name in enumerate(sources)}
    found: dict[tuple[Strand, ...], tuple[tuple[int, ...], Route, list[Land]]] = {}
    zeros: list[tuple[tuple[int, ...], Strip]] = []
    for number, (name, route) in enumerate(wanted):
        for start, strands, land in _parts(name, route):
            if strands:
                first = strands[0]
                key = (1, number, start) if first.view is None else (0, place[first.source], first.view.start)
                found.setdefault(strands, (key, route, []))[2].append(land)
            elif land.view is not None:
                zeros.append(((1, number, start), Strip(route.dtype, land.view.box.sizes, (), (land,))))
    keyed = [
        (key, Strip(route.dtype, _shape(strands), strands, tuple(lands)))
        for strands, (key, route, lands) in found.items()
    ]
    return [strip for _, strip in sorted([*keyed, *zeros], key=lambda pair: pair[0])]


def _parts(name: str, route: Route) -> Iterator[tuple[int, tuple[Strand, ...], Land]]:
    """Yield (where in the wanted tensor, the strands, the land) of every strip that a route is woven of."""
    if not route.lands:
        if route.strands:
            yield 0, _ordered(route.strands), Land(name)
        return
    for view, strands in route.lands:
        yield view.start, _ordered(strands), Land(name, view)
    for start, stop in route.padding(0, route.shape[0]):
        yield start, (), Land(name, View(start, Box((0,), (stop - start,))))


def _ordered(strands: tuple[Strand, ...]) -> tuple[Strand, ...]:
    """Return strands in one order, whatever wanted tensor they were found for."""
    return tuple(sorted(strands, key=lambda s: (s.box.offsets, s.source))) if len(strands) > 1 else strands


def _shape(strands: Sequence[Strand]) -> tuple[int, ...]:
    """Return the shape of what the strands tile."""
    return tuple(map(max, zip(*(s.box.stops for s in strands), strict=True))) if strands[0].box.ndim else ()


def units(found: Iterable[Strip], unit: int = UNIT, largest: int = LARGEST) -> list[Unit]:
    """Return the strips in order, cut and put together in units, the same way every time."""
    out: list[Unit] = []
    run: list[Part] = []
    held = 0
    for strip in found:
        for box in iter_pieces(Box.whole(strip.shape), strip.itemsize, largest):
            part = Part(strip, box)
            if run and held + part.nbytes > unit:
                out.append(tuple(run))
                run, held = [], 0
            run.append(part)
            held += part.nbytes
    if run:
        out.append(tuple(run))
    return out


def share(sizes: Sequence[int], count: int) -> list[range]:
    """Return `count` runs of things of these sizes, in order, as equal in bytes as whole things allow."""
    total, done, at = sum(sizes), 0, 0
    out: list[range] = []
    for i in range(count):
        start = at
        while at < len(sizes) and (i == count - 1 or (done + sizes[at] / 2) * count <= total * (i + 1)):
            done += sizes[at]
            at += 1
        out.append(range(start, at))
    return out

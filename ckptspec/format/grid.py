"""Owns the placement of mesh and flat layouts: dimensions cut over the axes of a mesh, the other axes replicating."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ckptspec.errors import FormatError
from ckptspec.format.box import Box
from ckptspec.format.cutting import WHOLE, Coord, Cutting, Span, Spans, boxes_of, packed, shape_of
from ckptspec.format.holding import Placement, Ranks
from ckptspec.format.layout import Mesh, coordinate, ranks_where


@dataclass(frozen=True)
class Cut:
    """How one dimension is cut: the mesh axes, by position, and the rule."""

    dim: int
    axes: tuple[int, ...]
    rule: Cutting


@dataclass(frozen=True)
class _Seat:
    """What a rank's coordinate decides: its coordinate for each cut, and the ranks that share them."""

    coords: tuple[Coord, ...]
    ranks: Ranks


class GridPlacement(Placement):
    """A mesh or flat layout: every cut dimension by its rule, the other dimensions whole."""

    def __init__(self, mesh: Mesh, at: Mapping[str, int], cuts: Iterable[Cut]) -> None:
        self._mesh = mesh
        self._pins = {mesh.index(name): i for name, i in at.items()}
        self._cuts = tuple(cuts)
        self._ndim = 1 + max((c.dim for c in self._cuts), default=-1)
        self._seats: dict[int, _Seat | None] = {}
        self._groups: dict[tuple[Coord, ...], Ranks] = {}

    @property
    def mesh(self) -> Mesh:
        """The mesh the layout is on."""
        return self._mesh

    @property
    def pins(self) -> Mapping[int, int]:
        """The pinned axes, by position, with their index."""
        return self._pins

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """The dimensions that are cut."""
        return self._cuts

    def ranks(self) -> Ranks:
        return ranks_where(self._mesh, self._pins)

    def boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        seat = self._seat(rank)
        return () if seat is None else boxes_of(self._spans(shape, seat))

    def local_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...] | None:
        seat = self._seat(rank)
        return None if seat is None else shape_of(self._spans(shape, seat))

    def local_boxes(self, shape: Sequence[int], rank: int) -> tuple[Box, ...]:
        seat = self._seat(rank)
        return () if seat is None else boxes_of(packed(self._spans(shape, seat)))

    def group(self, rank: int, box: Box) -> Ranks:
        seat = self._seat(rank)
        return () if seat is None else seat.ranks  # whoever shares the coordinates shares every box

    def parts(self, shape: Sequence[int], within: Box | None = None) -> Iterator[tuple[Box, Ranks]]:
        self._fit(shape)
        within = Box.whole(shape) if within is None else within
        rules = {c.dim: c.rule for c in self._cuts}
        choices: list[list[tuple[Coord, Span]]] = []
        for dim, (n, start, stop) in enumerate(zip(shape, within.offsets, within.stops, strict=True)):
            rule = rules.get(dim, WHOLE)
            choices.append(list(rule.cover(n, start, stop)))
        for choice in product(*choices):
            (box,) = boxes_of([(span,) for _, span in choice])
            yield box, self._group(tuple(choice[c.dim][0] for c in self._cuts))

    def _spans(self, shape: Sequence[int], seat: _Seat) -> Spans:
        self._fit(shape)
        spans: list[tuple[Span, ...]] = [((0, n),) for n in shape]
        for c, coord in zip(self._cuts, seat.coords, strict=True):
            spans[c.dim] = c.rule.spans(shape[c.dim], coord)
        return spans

    def _fit(self, shape: Sequence[int]) -> None:
        if len(shape) < self._ndim:
            found = f"shape {tuple(shape)}"
            raise FormatError("the layout cuts a dimension the tensor lacks", rule="T-DIMS", found=found)

    def _seat(self, rank: int) -> _Seat | None:
        if rank not in self._seats:
            coord = coordinate(self._mesh, rank)
            seat = None
            if coord is not None and all(coord[axis] == i for axis, i in self._pins.items()):
                coords = tuple(tuple(coord[axis] for axis in c.axes) for c in self._cuts)
                seat = _Seat(coords, self._group(coords))
            self._seats[rank] = seat
        return self._seats[rank]

    def _group(self, coords: tuple[Coord, ...]) -> Ranks:
        if coords not in self._groups:
            fixed = dict(self._pins)
            for c, coord in zip(self._cuts, coords, strict=True):
                fixed.update(zip(c.axes, coord, strict=True))
            self._groups[coords] = ranks_where(self._mesh, fixed)
        return self._groups[coords]

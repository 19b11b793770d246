"""Owns the snapshot: all that the engine needs of a rank's state, whatever library the state came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckptspec.engine.holding import Holding
from ckptspec.engine.saves.writer import Stored
from ckptspec.errors import StateError, Where
from ckptspec.format.box import Box
from ckptspec.format.declaration import Declaration
from ckptspec.format.dtypes import dtype
from ckptspec.format.holding import Placement
from ckptspec.format.placement import resolve


@dataclass(frozen=True)
class Snapshot:
    """One rank's state: declaration, packed state tree, holdings and boxes by name, local shapes, objects.

    `ties` are names declared to be a tensor of another name, on any rank; `tied` are those of both kinds held here.
    """

    declaration: Declaration
    state: bytes
    holdings: Mapping[str, Holding]
    boxes: Mapping[str, tuple[Box, ...]]
    local_shapes: Mapping[str, tuple[int, ...]]
    objects: Mapping[str, bytes]
    ties: Mapping[str, str] = field(default_factory=dict)
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replica:
    """One box that this rank holds with others; `group` are the ranks that hold it."""

    name: str
    box: Box
    group: tuple[int, ...]


class Placed:
    """A snapshot laid out by what all ranks declared: what this rank stores, and what it holds as a replica."""

    def __init__(self, snapshot: Snapshot, declared: Declaration, rank: int, copies: int) -> None:
        self._snapshot = snapshot
        self._declared = declared
        self._rank = rank
        self._copies = copies
        self._placements: dict[str, Placement] = {}

    def _placement(self, layout: str) -> Placement:
        if layout not in self._placements:
            self._placements[layout] = resolve(self._declared.layouts[layout], self._declared.meshes)
        return self._placements[layout]

    def stored(self) -> Iterator[Stored]:
        """Yield what this rank stores, in the order of its state [T-HOLD].

        Raises StateError [P-DECLARE] where the rank holds other boxes than its declaration implies at its coordinate.
        """
        for name, holding in self._snapshot.holdings.items():
            entry = self._declared.tensors[name]
            if entry.shape is None:
                shape = self._snapshot.local_shapes[name]
                whole = Box.whole(shape)
                yield Stored(name, entry.dtype, shape, () if whole.empty else (whole,), holding)
                continue
            place = self._placement(entry.layout)
            held = place.boxes(entry.shape, self._rank)
            own = self._snapshot.boxes[name]
            if held != own and held != tuple(b for b in own if not b.empty):
                raise self._differs(name, held)
            itemsize = dtype(entry.dtype).itemsize
            boxes = place.kept(held, itemsize, name, self._copies, self._rank)
            if boxes:
                yield Stored(name, entry.dtype, entry.shape, boxes, holding)

    def _differs(self, name: str, held: tuple[Box, ...]) -> StateError:
        return StateError(
            "this rank holds other parts than its declaration says",
            rank=self._rank,
            rule="P-DECLARE",
            where=Where(tensor=name, rank=self._rank),
            expected=str([(b.offsets, b.sizes) for b in held]),
            found=str([(b.offsets, b.sizes) for b in self._snapshot.boxes[name]]),
        )

    def replicas(self) -> Iterator[Replica]:
        """Yield every box this rank holds that other ranks hold too."""
        for name, boxes in self._snapshot.boxes.items():
            entry = self._declared.tensors[name]
            if entry.shape is None:
                continue
            place = self._placement(entry.layout)
            for box in boxes:
                if not box.empty and len(group := place.group(self._rank, box)) > 1:
                    yield Replica(name, box, group)

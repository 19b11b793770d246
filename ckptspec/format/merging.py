"""Owns making one declaration of what all ranks declare; refuses what two ranks hold in two ways, and gaps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ckptspec.errors import SaveError, Where
from ckptspec.format.declaration import HEAD, TABLES, Boxes, Declaration
from ckptspec.format.faults import layout_faults
from ckptspec.format.layout import BoxesLayout
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.narrow import HoldersError, Ranks
from ckptspec.format.placement import resolve
from ckptspec.format.settling import Answer, Book, Numbers, Settled, holder_key, numbers

NAMED = tuple(table for table in TABLES if table not in (*HEAD, "flat_groups"))
_IN_WORDS = {"tensors": "a tensor", "objects": "a Python value", "aliases": "an alias", "omitted": "left out"}


@dataclass(frozen=True)
class Group:
    """Ranks whose bodies are equal: the digest, those of its pieces, the ranks ascending, and each one's own boxes."""

    digest: str
    pieces: tuple[bytes, ...]
    ranks: Ranks
    boxes: Mapping[int, tuple[Boxes, ...]]


class Merger:
    """What groups of ranks declare, put together; time and memory grow with the distinct pieces and the ranks.

    Which groups have an entry is a number with a bit for each. Raises SaveError [P-DECLARE] naming the entry and a rank
    where one name is declared in two ways, a layout's rank lacks a tensor, or listed boxes do not make it up.
    """

    def __init__(self, groups: Sequence[Group], pieces: Mapping[bytes, Declaration], world: int) -> None:
        self._groups = groups
        self._pieces = pieces
        self._world = world
        self._ranks: dict[int, Ranks] = {}
        self._tables: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
        self._masks: dict[bytes, int] = {}
        self._held: dict[str, int] = {}
        self._table_of: dict[str, str] = {}
        self._classes: dict[str, frozenset[tuple[int, str]]] = {}
        self._shares: dict[tuple[Any, frozenset[tuple[int, str]]], str] = {}
        for bit, group in enumerate(groups):
            for digest in group.pieces:
                self._masks[digest] = self._masks.get(digest, 0) | 1 << bit
        for digest, mask in self._masks.items():
            self._enter(pieces[digest], mask)
        self._book = Book(self._tables["layouts"], self._tables["meshes"])

    # ---- gathering ---------------------------------------------------------------------------------------------------

    def ranks_of(self, mask: int) -> Ranks:
        """Return the ranks of the groups in a mask, ascending."""
        if mask not in self._ranks:
            found = [rank for bit in _bits(mask) for rank in self._groups[bit].ranks]
            self._ranks[mask] = tuple(sorted(found))
        return self._ranks[mask]

    def _enter(self, piece: Declaration, mask: int) -> None:
        layouts = self._tables["layouts"]
        for table, entries in self._tables.items():
            for name, entry in getattr(piece, table).items():
                known = entries.setdefault(name, entry)
                if known is not entry and not _alike(known, entry, layouts):
                    raise self._conflict(name, table, (self._held.get(name, 1), known), (mask, entry))
                if table in NAMED:
                    self._hold(name, table, mask)
                if table == "tensors" and isinstance(layouts.get(entry.layout), BoxesLayout):
                    self._classes[name] = self._classes.get(name, frozenset()) | {(mask, entry.layout)}

    def _hold(self, name: str, table: str, mask: int) -> None:
        other = self._table_of.setdefault(name, table)
        if other != table:
            words = (self._held[name], _IN_WORDS[other]), (mask, _IN_WORDS[table])
            raise self._conflict(name, "names", *words)
        self._held[name] = self._held.get(name, 0) | mask

    def _conflict(self, name: str, table: str, one: tuple[int, Any], two: tuple[int, Any]) -> SaveError:
        first, second = self.ranks_of(one[0])[0], self.ranks_of(two[0])[0]
        return SaveError(
            f"ranks {first} and {second} declare {table.removesuffix('s')} {name!r} in two ways",
            rank=second,
            rule="P-DECLARE",
            where=Where(tensor=name, rank=second),
            expected=f"{one[1]} as rank {first} has it",
            found=str(two[1]),
            advice="ranks that hold a name must hold it with one dtype, global shape and layout; "
            "give different things different names, or wrap per-rank values in ckptspec.Local",
        )

    # ---- the holders -------------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """Raise SaveError [P-DECLARE] where a group has some of another's tensors and none of its own.

        Stages and experts bring their own; who only lacks something has most likely forgotten it. A layout that pins
        axes says itself who holds the tensor.
        """
        layouts, tensors = self._tables["layouts"], self._tables["tensors"]
        shared = {n for n, t in tensors.items() if t.shape is not None and not getattr(layouts[t.layout], "at", None)}
        shared |= self._tables["aliases"].keys()
        above = [(1 << len(self._groups)) - 1] * len(self._groups)  # who has all that a group has
        for mask in {self._held[name] for name in shared}:
            for bit in _bits(mask):
                above[bit] &= mask
        for bit, mask in enumerate(above):
            for other in _bits(mask):
                if not above[other] >> bit & 1:
                    raise self._lacking(bit, other, shared)

    def _lacking(self, bit: int, other: int, shared: AbstractSet[str]) -> SaveError:
        rank, has = self._groups[bit].ranks[0], self._groups[other].ranks[0]
        only = 1 << other
        name = next(n for n in self._table_of if n in shared and self._held[n] & (only | 1 << bit) == only)
        return SaveError(
            f"rank {rank} does not hold tensor {name!r} as rank {has} does, and has none that rank {has} lacks",
            rank=rank,
            rule="P-DECLARE",
            where=Where(tensor=name, rank=rank),
            expected="every tensor on every rank, or ranks that hold different parts of the model",
            found=f"held by {len(self.ranks_of(self._held[name]))} of {self._world} ranks",
            advice='put it into every rank\'s state, wrap it in ckptspec.Local, or save with plain="held" '
            "to keep plain tensors for whoever holds them",
        )

    # ---- the layouts -------------------------------------------------------------------------------------------------

    @cached_property
    def declaration(self) -> Declaration:
        """What all ranks declare together, layouts as their holders make them."""
        tensors = {name: self._settled(name, entry) for name, entry in self._tables["tensors"].items()}
        named = {table: self._tables[table] for table in TABLES if table not in HEAD}
        return Declaration(self._book.meshes, self._book.layouts, **{**named, "tensors": tensors})

    def _settled(self, name: str, entry: TensorEntry) -> TensorEntry:
        if name in self._classes:
            return replace(entry, layout=self._listed(name, entry))
        ranks = self.ranks_of(self._held[name])
        try:
            layout = self._book.settle(entry.layout, ranks)
        except HoldersError as e:
            raise self._misheld(name, entry, e, len(ranks)) from None
        return entry if layout == entry.layout else replace(entry, layout=layout)

    def _misheld(self, name: str, entry: TensorEntry, e: HoldersError, count: int) -> SaveError:
        return SaveError(
            f"tensor {name!r} is not held by the ranks its layout {entry.layout!r} names",
            rank=e.rank,
            rule="P-DECLARE",
            where=Where(tensor=name, rank=e.rank),
            expected="every rank that the layout gives a part",
            found=f"held by {count} ranks, {'also' if e.holds else 'not'} by rank {e.rank}",
            advice="every rank of the tensor's mesh must have it in its state",
        )

    def _listed(self, name: str, entry: TensorEntry) -> str:
        """Return the layout of the boxes that the holders of a tensor list, entering it when it is new [T-BOXES]."""
        key = entry.shape, self._classes[name]
        if key not in self._shares:
            rows = sorted(self._rows(self._classes[name]), key=lambda row: row[0])
            layout = BoxesLayout(tuple(rows))
            for fault in layout_faults(layout, {}, entry.shape, self._world):
                raise self._misboxed(name, entry, fault.message)
            text = repr([(rank, b.offsets, b.sizes) for rank, b in rows]).encode()
            self._shares[key] = f"boxes:{hashlib.sha256(text).hexdigest()[:12]}"
            self._book.layouts.setdefault(self._shares[key], layout)
        return self._shares[key]

    def _rows(self, classes: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Any]]:
        for mask, label in classes:
            number = int(label.removeprefix("boxes."))
            for bit in _bits(mask):
                for rank, boxes in self._groups[bit].boxes.items():
                    yield from ((rank, box) for box in boxes[number])

    def _misboxed(self, name: str, entry: TensorEntry, message: str) -> SaveError:
        ranks = self.ranks_of(self._held[name])
        return SaveError(
            f"the boxes that ranks hold do not make up tensor {name!r}: {message}",
            rank=ranks[0],
            rule="P-DECLARE",
            where=Where(tensor=name),
            expected=f"boxes that cover shape {list(entry.shape or ())}, any two equal or disjoint",
            found=f"the boxes of {len(ranks)} ranks",
            advice="every rank that has a part must wrap it in ckptspec.Shard with its own boxes",
        )

    # ---- what ranks are told -----------------------------------------------------------------------------------------

    def settled(self, own: Declaration) -> Settled:
        """Return the merged declaration for the coordinator, whose own declaration gives names their order."""
        merged = self.declaration
        order = {table: dict.fromkeys([*getattr(own, table), *getattr(merged, table)]) for table in NAMED}
        named = {table: {name: getattr(merged, table)[name] for name in names} for table, names in order.items()}
        holders = {name: holder_key(self.ranks_of(self._held[name]), self._world) for name in own.objects}
        return Settled(replace(merged, **named), holders)

    def answers(self, group: Group) -> Iterator[tuple[tuple[Boxes, ...], Answer]]:
        """Yield for each way in which ranks of a group hold boxes what those ranks are told."""
        masks: dict[int, int] = {}
        held = [_renumbered(self._holding[digest], masks) for digest in group.pieces[1:]]
        ranks = [self.ranks_of(mask) for mask in masks]
        speakers: dict[tuple[Boxes, ...], int] = {}
        for rank, boxes in group.boxes.items():
            speakers.setdefault(boxes, rank)
        for boxes, rank in speakers.items():
            answer = Answer(ranks, held)
            if boxes:
                self._list(answer, group, rank)
            yield boxes, answer

    @cached_property
    def _holding(self) -> Mapping[bytes, Numbers]:
        """The mask of each piece's names; those of a piece that one body alone has may be held by more."""
        return {
            digest: numbers(
                (n for table in NAMED for n in getattr(self._pieces[digest], table)), self._held.__getitem__
            )
            for digest in self._masks
        }

    def _list(self, answer: Answer, group: Group, rank: int) -> None:
        places: dict[str, int] = {}
        tensors = self.declaration.tensors
        for digest in group.pieces[1:]:
            names = [name for name in self._pieces[digest].tensors if name in self._classes]
            answer.boxes.append(numbers(names, lambda n: places.setdefault(tensors[n].layout, len(places))))
        for layout in places:
            place = resolve(self._book.layouts[layout], {})
            answer.listed.append((layout, [(box, place.group(rank, box)) for box in place.boxes((), rank)]))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _renumbered(found: Numbers, places: dict[int, int]) -> Numbers:
    if isinstance(found, int):
        return places.setdefault(found, len(places)) if found else 0  # a piece without names asks for nobody
    return {name: places.setdefault(mask, len(places)) for name, mask in found.items()}


def _alike(one: Any, two: Any, layouts: Mapping[str, Any]) -> bool:
    """Whether two entries say the same; a tensor's role decides nothing, and its boxes are put together later."""
    if not isinstance(one, TensorEntry) or not isinstance(two, TensorEntry):
        return bool(one == two)
    both = all(isinstance(layouts.get(t.layout), BoxesLayout) for t in (one, two))
    return one == replace(two, role=one.role, layout=one.layout if both else two.layout)

"""Owns what a rank must know of the others' declarations: who holds what it holds; refuses to send it the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

from ckptspec.format.box import Box
from ckptspec.format.declaration import HEAD, TABLES, Body, Declaration
from ckptspec.format.layout import BoxesLayout, FlatLayout, Layout, LocalLayout, Mesh, MeshLayout
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.narrow import Ranks, grid, narrow, strided, tag

Numbers = Union[int, dict[str, int]]  # one number for all names of a piece, or one for each
Held = list[tuple[Box, Ranks]]  # boxes, each with all ranks that hold it


@dataclass(frozen=True)
class Settled:
    """What is declared together, as far as a rank needs it, and for each object the key of the ranks that hold it."""

    declaration: Declaration
    holders: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Answer:
    """What the coordinator tells the ranks that declared alike, piece by piece of their body (the first one left out).

    `held` says which of the sets `ranks` holds the names of a piece; `boxes` says which of the layouts `listed` its
    tensors have, where they have boxes: only boxes that this rank holds are in them.
    """

    ranks: list[Ranks] = field(default_factory=list)
    held: list[Numbers] = field(default_factory=list)
    listed: list[tuple[str, Held]] = field(default_factory=list)
    boxes: list[Numbers] = field(default_factory=list)

    def plain(self) -> list[Any]:
        """Return the answer as plain lists."""
        listed = [
            [name, [[list(b.offsets), list(b.sizes), pack_ranks(ranks)] for b, ranks in held]]
            for name, held in self.listed
        ]
        return [[pack_ranks(ranks) for ranks in self.ranks], self.held, listed, self.boxes]


def answer_of(plain: Sequence[Any]) -> Answer:
    """Return the answer that `plain` gave."""
    ranks, held, listed, boxes = plain
    rows = [(name, [(Box(tuple(o), tuple(s)), unpack_ranks(r)) for o, s, r in found]) for name, found in listed]
    return Answer([unpack_ranks(r) for r in ranks], held, rows, boxes)


def pack_ranks(ranks: Ranks) -> list[Any]:
    """Return ascending ranks as [first, sizes, strides] where they are runs within runs, else as [all of them]."""
    sizes = grid(ranks)
    regular = strided(ranks, sizes)
    return [list(ranks)] if regular is None else [regular.offset, list(sizes), list(regular.strides)]


def unpack_ranks(plain: Sequence[Any]) -> Ranks:
    """Return the ranks that `pack_ranks` wrote."""
    if len(plain) == 1:
        return tuple(plain[0])
    found = [plain[0]]
    for size, stride in zip(plain[1], plain[2], strict=True):
        found = [rank + i * stride for rank in found for i in range(size)]
    return tuple(found)


def numbers(names: Iterable[str], number: Callable[[str], int]) -> Numbers:
    """Return the number of all names, or of each where they differ."""
    found = {name: number(name) for name in names}
    return next(iter(found.values()), 0) if len(set(found.values())) <= 1 else found


def pick(found: Numbers, name: str) -> int:
    """Return the number of a name."""
    return found if isinstance(found, int) else found[name]


class Book:
    """Layouts and their meshes as they are settled, each name once."""

    def __init__(self, declared: Mapping[str, Layout], meshes: Mapping[str, Mesh]) -> None:
        self.layouts: dict[str, Layout] = {}
        self.meshes: dict[str, Mesh] = {}
        self._declared, self._declared_meshes = declared, meshes
        self._known: dict[tuple[str, Ranks], str] = {}

    def listed(self, name: str) -> bool:
        """Whether a declared layout lists boxes."""
        return isinstance(self._declared[name], BoxesLayout)

    def settle(self, name: str, ranks: Ranks) -> str:
        """Return the name under which a declared layout stands as `ranks` hold it; raises HoldersError."""
        key = name, ranks
        if key not in self._known:
            layout = self._declared[name]
            if isinstance(layout, (MeshLayout, FlatLayout)):
                found = narrow(name, layout, self._declared_meshes[layout.mesh], ranks)
                self.layouts[found.name], self.meshes[found.layout.mesh] = found.layout, found.mesh
                self._known[key] = found.name
            else:
                self.layouts[name], self._known[key] = LocalLayout(), name
        return self._known[key]


def holder_key(ranks: Ranks, world: int) -> str:
    """Return what names these holders in a hand-in: nothing for everybody."""
    return "" if len(ranks) == world else tag(ranks)


def settle(body: Body, world: int, answer: Answer) -> Settled:
    """Return what a rank declared as it stands among all ranks' declarations."""
    book = Book(body.pieces[0].layouts, body.pieces[0].meshes)
    found: dict[str, dict[str, Any]] = {table: {} for table in TABLES if table not in HEAD}
    holders = {}
    for i, piece in enumerate(body.pieces[1:]):
        for table, entries in found.items():
            entries.update(getattr(piece, table))
        for name in piece.objects:
            holders[name] = holder_key(answer.ranks[pick(answer.held[i], name)], world)
        for name, entry in piece.tensors.items():
            found["tensors"][name] = replace(entry, layout=_layout(book, answer, i, name, entry))
    return Settled(Declaration(book.meshes, book.layouts, **found), holders)


def _layout(book: Book, answer: Answer, piece: int, name: str, entry: TensorEntry) -> str:
    if not book.listed(entry.layout):
        return book.settle(entry.layout, answer.ranks[pick(answer.held[piece], name)])
    layout, held = answer.listed[pick(answer.boxes[piece], name)]
    if layout not in book.layouts:
        book.layouts[layout] = BoxesLayout(tuple((rank, box) for box, ranks in held for rank in ranks))
    return layout

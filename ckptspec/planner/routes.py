"""Owns where the elements of a wanted tensor are stored: under its name, in flat groups, or by name for a flat one.

ZeRO's flat buffers and optimizer state by parameter are two forms of one thing; a route leads from either to either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod

from ckptspec.errors import PlanError, Where
from ckptspec.format.box import Box, intersect
from ckptspec.format.manifest import FlatGroup, Manifest, TensorEntry
from ckptspec.format.names import split
from ckptspec.format.tiling import tiled
from ckptspec.planner.members import Members, Parameters, Piece, StateName, nearness, same_parameter, state_name, tails
from ckptspec.planner.renames import Renames
from ckptspec.planner.transfers import Need
from ckptspec.planner.views import View


@dataclass(frozen=True)
class Ask:
    """One need of a wanted box, and where it goes in a flat wanted tensor: there `land` is a run that holds its box."""

    need: Need
    land: View | None = None


@dataclass(frozen=True)
class Strand:
    """One stored tensor that gives `box` of a named tensor; `view` says where that lies in a flat one."""

    source: str
    box: Box
    view: View | None = None


@dataclass(frozen=True)
class Route:
    """The way to one wanted tensor that has another form or name than what is stored.

    `strands` tile a named tensor. For a flat one, `lands` are the views of its members, in order, each with the strands
    of the tensor it is a piece of; what no member holds is padding, and zero. A `local` one has a shape on each rank.
    """

    dtype: str
    shape: tuple[int, ...]
    strands: tuple[Strand, ...] = ()
    lands: tuple[tuple[View, tuple[Strand, ...]], ...] = ()
    sources: tuple[str, ...] = ()
    local: bool = False

    def asks(self, box: Box, rank: int | None = None) -> Iterator[Ask]:
        """Yield the needs that fill `box` of the wanted tensor; `rank` is whose, where what is stored is local."""
        if box.empty:
            return
        if self.local:
            yield Ask(Need(self.sources[0], box, rank))
            return
        if not self.lands:
            yield from _asks(self.strands, box, None, rank)
            return
        start, stop = box.offsets[0], box.stops[0]
        for view, strands in self.lands[max(0, bisect_right(self._starts, start) - 1) :]:
            if view.start >= stop:
                return
            for land in view.within(start, stop):
                yield from _asks(strands, land.box, land, rank)

    @cached_property
    def _starts(self) -> Sequence[int]:
        return [view.start for view, _ in self.lands]

    def padding(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the runs of a flat tensor's [start, stop) that no member holds: they are zero."""
        if not self.lands:
            return
        at = start
        for view, _ in self.lands[max(0, bisect_right(self._starts, start) - 1) :]:
            if view.start >= stop:
                break
            if view.start > at:
                yield at, view.start
            at = max(at, view.stop)
        if at < stop:
            yield at, stop


def _asks(strands: Sequence[Strand], box: Box, land: View | None, rank: int | None) -> Iterator[Ask]:
    for strand in strands:
        shared = box if strand.box == box else intersect(strand.box, box)
        if shared is not None:
            yield Ask(Need(strand.source, shared, rank, strand.view), land)


@dataclass
class Routes:
    """The ways to wanted tensors in one checkpoint; `groups` are the wanted flat groups, `names` an explicit map.

    Keeps account of what was used: `leftover` is what nobody asked for.
    """

    manifest: Manifest
    groups: Mapping[str, FlatGroup] = field(default_factory=dict)
    names: Renames = field(default_factory=Renames)
    renamed: dict[str, str] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)
    _pieces_used: set[tuple[str, str]] = field(default_factory=set)
    _found: dict[str, Route | None] = field(default_factory=dict)

    @cached_property
    def _stored(self) -> Members:
        return Members(self.manifest.flat_groups)

    @cached_property
    def _wanted(self) -> Members:
        return Members(self.groups)

    @cached_property
    def _states(self) -> Mapping[tuple[str, int], list[tuple[str, str]]]:
        """The stored names of optimizer state, each with the parameter's path, by kind and the end of that path."""
        out: dict[tuple[str, int], list[tuple[str, str]]] = {}
        for name in (*self.manifest.tensors, *self.manifest.aliases):
            found = state_name(name)
            if found is not None:
                out.setdefault((found.kind, tails(found.parameter)[-1]), []).append((name, found.parameter))
        return out

    @cached_property
    def _parameters(self) -> Parameters:
        """All that may be meant by a parameter's path: what is not looked for may be what it means all the same."""
        tensors = (n for n in (*self.manifest.tensors, *self.manifest.aliases) if state_name(n) is None)
        return Parameters(chain(tensors, self._stored.names, self._wanted.names))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The values of optimizer state that flat groups hold of their members, and those a map of names speaks of."""
        named = (split(name)[-1] for name in self.names.wanted())
        return tuple(dict.fromkeys((*self._stored.kind_of.values(), *(kind for kind in named if "*" not in kind))))

    def find(self, name: str) -> Route | None:
        """Return the way to the wanted tensor `name`, None where the checkpoint has nothing for it.

        Raises PlanError [R-NAME] where what is stored could be meant in two ways, or in part.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Route | None:
        stored = self.names.of(name)
        if stored != name:
            self.renamed[name] = stored
        target = self.manifest.aliases.get(stored, stored)
        if target in self.manifest.tensors and not self._other_geometry(name, target):
            self._used |= {stored, target}
            self._use_copies(target)
            return _straight(self.manifest.tensors[target], target)
        if name in self._wanted.group_of:
            return self._to_flat(name, stored)
        return self._to_named(name, stored)

    def _other_geometry(self, name: str, target: str) -> bool:
        """Tell whether a wanted flat tensor and the stored one of its name hold their members in other places."""
        wanted, stored = self._wanted.group_of.get(name), self._stored.group_of.get(target)
        if wanted is None or not wanted.members:
            return False
        if stored is None or not stored.members:
            return False
        return (wanted.numel, wanted.members) != (stored.numel, stored.members)

    def _use_copies(self, flat: str) -> None:
        """Count as used what other groups hold too of the members of a flat tensor that is read as it is."""
        if flat not in self._stored.group_of:
            return
        own: dict[str, set[Box]] = {}
        for p in self._stored.listed(flat):
            own.setdefault(p.name, set()).add(p.view.box)
        for member, boxes in own.items():
            held: dict[str, set[Box]] = {}
            for p in self._stored.pieces(self._stored.kind_of[flat], member):
                held.setdefault(p.flat, set()).add(p.view.box)
            self._pieces_used |= {(other, member) for other, theirs in held.items() if theirs <= boxes}

    # ---- a named tensor ----------------------------------------------------------------------------------------------

    def _to_named(self, name: str, stored: str) -> Route | None:
        """Return the way to a named tensor out of flat groups: a parameter, or a value an optimizer keeps of one."""
        pieces = self._stored.pieces("parameter", stored)
        state = state_name(stored)
        if not pieces and state is not None:
            pieces = self._state_pieces(name, stored, state)
        return self._woven(name, stored, pieces) if pieces else None

    def _state_pieces(self, name: str, stored: str, state: StateName) -> list[Piece]:
        known = dict.fromkeys(self.manifest.aliases.get(n, n) for n in self._parameters.called(state.parameter))
        found = {n: pieces for n in known if (pieces := self._stored.pieces(state.kind, n))}
        if not found:
            return []
        near = {n: max(_common(stored, p.flat) for p in pieces) for n, pieces in found.items()}
        best = [n for n in near if near[n] == max(near.values())]
        if len(best) > 1:
            raise _ambiguous(name, state.parameter, best)
        return found[best[0]]

    def _woven(self, name: str, stored: str, pieces: Sequence[Piece], wanted: Box | None = None) -> Route:
        """Return the way through pieces of flat tensors; what several hold is read from the nearest to `stored`.

        Pieces that have nothing of the `wanted` box do not count as used.
        """
        shapes = {p.shape for p in pieces}
        dtypes = {self.manifest.tensors[p.flat].dtype for p in pieces}
        if len(shapes) > 1 or len(dtypes) > 1:
            found = f"shapes {sorted(shapes)}, dtypes {sorted(dtypes)}"
            raise _unlike(name, "flat groups hold pieces of it that do not go together", found)
        nearest = sorted(pieces, key=lambda p: -_common(stored, p.flat))
        by_box: dict[Box, Piece] = {}
        for p in nearest:
            if not p.view.box.empty:
                by_box.setdefault(p.view.box, p)
        shape = pieces[0].shape
        if not (Box.whole(shape).empty and not by_box) and not tiled(Box.whole(shape), list(by_box)):
            held = f"{sum(b.numel for b in by_box)} of {prod(shape)} elements in {len(by_box)} pieces"
            raise _unlike(name, "the flat groups do not hold all of it, or overlap", held)
        used = (p for p in pieces if wanted is None or p.view.box.empty or intersect(p.view.box, wanted) is not None)
        self._pieces_used |= {(p.flat, p.name) for p in used}
        strands = tuple(Strand(p.flat, p.view.box, p.view) for p in by_box.values())
        sources = tuple(dict.fromkeys(s.source for s in strands))
        return Route(dtypes.pop(), shape, strands, (), sources)

    # ---- a flat tensor -----------------------------------------------------------------------------------------------

    def _to_flat(self, name: str, stored: str) -> Route | None:
        """Return the way to a wanted flat tensor, member by member; None where the checkpoint has none of them."""
        kind = self._stored.kind_of.get(stored, self._wanted.kind_of[name])  # a map may say another one
        group = self._wanted.group_of[name]
        lands: list[tuple[View, tuple[Strand, ...]]] = []
        absent: list[str] = []
        dtypes: set[str] = set()  # of all that was found, of another shape or not
        for p in self._wanted.listed(name):
            route = self._member(name, stored, p, kind)
            if route is None and p.view.box.empty:
                continue
            if route is not None:
                dtypes.add(route.dtype)
            if route is None or route.shape != p.shape:
                absent.append(p.name if route is None else f"{p.name} (stored as {list(route.shape)})")
                continue
            lands.append((p.view, route.strands))
        if not dtypes:
            return None
        if absent or len(dtypes) > 1:
            more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
            found = ", ".join(absent[:5]) + more if absent else f"dtypes {sorted(dtypes)}"
            raise _unlike(name, f"the checkpoint does not hold all that lies in this flat tensor as {kind}", found)
        sources = tuple(dict.fromkeys(s.source for _, strands in lands for s in strands))
        return Route(dtypes.pop(), (group.numel,), (), tuple(lands), sources)

    def _member(self, name: str, near: str, p: Piece, kind: str) -> Route | None:
        """Return the way to the tensor that a wanted member is a piece of."""
        stored = self.names.of(p.name)
        if stored != p.name:
            self.renamed[p.name] = stored
        alias = self.manifest.aliases.get(stored, stored)
        pieces = self._stored.pieces(kind, stored) or self._stored.pieces(kind, alias)
        if pieces:
            return self._woven(name, near, pieces, p.view.box)
        found = self._named(stored, kind)
        if len(found) > 1:
            found = sorted(found, key=lambda n: -_common(near, n))
            if _common(near, found[0]) == _common(near, found[1]):
                raise _ambiguous(name, p.name, found)
        if not found:
            return None
        target = self.manifest.aliases.get(found[0], found[0])
        self._used |= {found[0], target}
        return _straight(self.manifest.tensors[target], target)

    def _named(self, member: str, kind: str) -> list[str]:
        """Return the stored names of a member itself, or of a value of it: those whose path is nearest to its name."""
        if kind == "parameter":
            return [member] if member in self.manifest.tensors or member in self.manifest.aliases else []
        near: dict[str, int] = {}
        for key in tails(member):
            for name, path in self._states.get((kind, key), ()):
                if member in same_parameter(path, [*self._parameters.called(path), member]):
                    near[name] = nearness(path, member)
        return [n for n in near if near[n] == min(near.values())]

    # ---- account -----------------------------------------------------------------------------------------------------

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All that can be asked for by itself: tensors, aliases, objects; each member of a flat tensor."""
        m = self.manifest
        out: list[Entry] = []
        for name in (*m.tensors, *m.aliases):
            members = dict.fromkeys(p.name for p in self._stored.listed(name)) if name in self._stored.group_of else {}
            out += [Entry(name, member) for member in members] or [Entry(name)]
        return (*out, *map(Entry, m.objects))

    def unused(self, objects: Collection[str] = ()) -> Iterator[bool]:
        """Yield for each of the entries whether nobody asked for it here; `objects` are those that were used."""
        for entry in self.entries:
            used = entry.name in self._used or entry.name in objects
            yield not used and (entry.name, entry.member) not in self._pieces_used

    def leftover(self, objects: Collection[str] = ()) -> Iterator[str]:
        """Yield what is stored and was not asked for: names, and for a flat tensor read in part `name: member`."""
        return named(self.entries, [*self.unused(objects)])


@dataclass(frozen=True)
class Entry:
    """One thing that is stored: a tensor, an alias, an object, or what a flat tensor holds of one member."""

    name: str
    member: str | None = None


def named(entries: Sequence[Entry], left: Sequence[bool]) -> Iterator[str]:
    """Yield the names of the entries that are left: a flat tensor by its own where all its members are."""
    used = {e.name for e, unused in zip(entries, left, strict=True) if not unused}
    names = (
        e.name if e.member is None or e.name not in used else f"{e.name}: {e.member}"
        for e, unused in zip(entries, left, strict=True)
        if unused
    )
    yield from dict.fromkeys(names)


def _straight(entry: TensorEntry, name: str) -> Route:
    """Return the way to a tensor that is stored under a name of its own."""
    shape = entry.shape or ()
    return Route(entry.dtype, shape, (Strand(name, Box.whole(shape)),), (), (name,), entry.shape is None)


def _common(a: str, b: str) -> int:
    """Return how many leading tokens two names share."""
    count = 0
    for x, y in zip(a.split("/"), b.split("/"), strict=False):
        if x != y:
            break
        count += 1
    return count


def _ambiguous(name: str, parameter: str, found: Sequence[str]) -> PlanError:
    message = f"more than one tensor could be {parameter!r}"
    shown = ", ".join(map(repr, found[:5]))
    advice = "say which with a map of names"
    return PlanError(message, rule="R-NAME", where=Where(tensor=name), found=shown, advice=advice)


def _unlike(name: str, message: str, found: str) -> PlanError:
    return PlanError(message, rule="R-NAME", where=Where(tensor=name), found=found)

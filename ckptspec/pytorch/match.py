"""Owns which entry of a state is which of a checkpoint, for one rank; compares names and kinds, moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckptspec.engine.fetch import Opened
from ckptspec.errors import PlanError, Where
from ckptspec.format import objects
from ckptspec.format.manifest import FlatGroup
from ckptspec.format.objects import TensorRef
from ckptspec.planner.renames import Renames
from ckptspec.planner.routes import Entry, Route, Routes, named
from ckptspec.pytorch.adapters.base import Saved
from ckptspec.pytorch.book import Book
from ckptspec.pytorch.capture import capture
from ckptspec.pytorch.declare import flat_groups
from ckptspec.pytorch.places import Places, above
from ckptspec.pytorch.record import Capture
from ckptspec.pytorch.select import as_fine

MAPPED, KEPT, REFUSED = "map", "keep", "error"
Wanted = Callable[[str], bool]


@dataclass(frozen=True)
class Terms:
    """What a load settles before names are compared: this rank, and how names and private state are to be treated."""

    rank: int
    world: int
    wanted: Wanted
    names: Renames = field(default_factory=Renames)
    private: str = MAPPED


@dataclass
class Match:
    """A walked state beside a checkpoint: `matched` are the stored entries by the names they have here.

    `kept` are private names that have no counterpart for this rank, `mapped` those of the rank of the same number on
    another number of ranks. `stored` are the checkpoint's entries as finely cut as the state's.
    """

    captured: Capture
    book: Book
    routes: Routes
    here: dict[str, Any]
    stored: dict[str, Any]
    wanted: Wanted
    matched: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    mapped: tuple[str, ...] = ()

    def fits(self, wanted: Wanted) -> bool:
        """Tell whether state and checkpoint have the very same names, as far as they are wanted, and flat buffers."""
        names = {n for n in self.here if wanted(n)}
        flats = (n for shards in self.captured.groups.values() for n, _ in shards if n in names)
        return names == {n for n in self.stored if wanted(n)} and not any(self.route(n).lands for n in flats)

    def route(self, name: str) -> Route:
        """Return the way to a matched tensor."""
        route = self.routes.find(name)
        assert route is not None
        return route

    def unused(self) -> Iterator[bool]:
        """Yield for each of the routes' entries whether this rank has no use for it."""
        for name in self.matched:
            if isinstance(self.matched[name], TensorRef):
                self.routes.find(name)
        private = {self.routes.names.of(n) for n in (*self.kept, *self.mapped)}
        if self.book.world_size != self.captured.world:  # what a rank that is gone had of its own goes with it
            private |= {n for names in self._places.values() for n in names if self.wanted(n)}
        yield from self.routes.unused(self._used_objects(private) | private)

    @cached_property
    def _places(self) -> Mapping[str, Sequence[str]]:
        """The places of the state that are this rank's own, each with what any rank had of its own there."""
        places = {self.routes.names.of(p): p for p in self.captured.private}
        out: dict[str, list[str]] = {}
        for name in self.book.privates() if places else ():
            for place in (p for p in (name, *above(name)) if p in places):
                out.setdefault(places[place], []).append(name)
        return out

    def private(self, name: str, stored: str, *, keeps: bool) -> bool:
        """Tell whether a name is each rank's own; where this rank `keeps` what it has, whatever else is there too."""
        return self.book.private(stored) or (keeps and any(p in self._places for p in (name, *above(name))))

    def _used_objects(self, private: set[str]) -> set[str]:
        """Return the checkpoint's objects of which every part is matched; one that is cut into nothing is used."""
        taken = {self.routes.names.of(n) for n in self.matched} | private
        unmatched = {n for n, v in self.stored.items() if n not in taken and not isinstance(v, TensorRef)}
        unmatched |= {place for n in unmatched for place in above(n)}
        return {n for n in self.routes.manifest.objects if n in self.book.parts and n not in unmatched}

    def left(self, unused: Sequence[bool]) -> tuple[str, ...]:
        """Return the names of what no rank has a use for; a flat tensor that is not wanted by its own alone."""
        entries = [e if e.member is None or self.wanted(e.name) else Entry(e.name) for e in self.routes.entries]
        return tuple(named(entries, unused))


def match(opened: Opened, into: Any, terms: Terms, *, wide: bool) -> Match:
    """Return the state `into` beside the checkpoint: this rank's own shard, or with `wide` all of it.

    Raises PlanError [R-NAME] for an explicit map that leads nowhere, and for names of different kinds.
    """
    asked = _asked(into, terms) if wide else None
    book = Book(opened, terms.rank, wide=wide, names=terms.names, asked=asked)
    finder = Routes(opened.manifest, {}, terms.names) if wide else None
    wanted = _not_kept(book, terms) if wide else terms.wanted
    saved = Saved(opened.manifest, book.tree, book.shapes, wanted, finder)
    captured = capture(into, rank=terms.rank, world=terms.world, tie=False, saved=saved)
    # An object among values is a part of its own, that it may be told what was loaded for it.
    places = dict.fromkeys(captured.opened)
    here = dict(objects.parts(captured.tree))
    stored = as_fine(book.parts, dict.fromkeys(map(terms.names.of, (*here, *places))))
    here = as_fine(here, {**book.parts, **book.renamed, **places})
    _apart(here, places)
    routes = Routes(opened.manifest, _groups(captured), terms.names)
    found = Match(captured, book, routes, here, stored, terms.wanted)
    if not wide:
        found.matched = stored
        _same_kinds(found, terms.wanted)
        return found
    _pair(found, terms)
    _same_kinds(found, terms.wanted)
    return found


def _apart(here: Mapping[str, Any], places: Mapping[str, Any]) -> None:
    """Refuse an object inside a container that cannot be cut up: it would not be told what was loaded for it."""
    for place in places:
        around = next((name for name in above(place) if name in here), None)
        if around is not None:
            message = "an object cannot be loaded out of a dict whose keys are neither text nor integers"
            raise PlanError(message, rule="R-NAME", where=Where(tensor=around), advice="give the objects names")


def _asked(into: Any, terms: Terms) -> Wanted:
    """Return what tells whether a stored value could be part of what is to be loaded."""
    places = Places(into)
    return lambda stored: any(map(places.about, (stored, *terms.names.leading_to(stored))))


def _keeps(book: Book, terms: Terms) -> bool:
    """Tell whether what is private stays as it is on this rank."""
    return not book.own or (terms.private == KEPT and book.world_size != terms.world)


def _not_kept(book: Book, terms: Terms) -> Wanted:
    """Return what tells whether a name is to be loaded, and is not private and to stay as it is on this rank."""
    if not _keeps(book, terms):
        return terms.wanted
    return lambda name: terms.wanted(name) and not book.private(terms.names.of(name))


def _groups(captured: Capture) -> Mapping[str, FlatGroup]:
    return flat_groups(captured) if captured.groups else {}


def _pair(m: Match, terms: Terms) -> None:
    """Fill in what is matched: by name, by an explicit map, by a route; and what each rank keeps for itself."""
    same_world, keeps = m.book.world_size == terms.world, _keeps(m.book, terms)
    kept: list[str] = []
    mapped: list[str] = []
    for name, value in m.here.items():
        stored = terms.names.of(name)
        lost = m.book.damage is not None and not m.book.own
        if (lost or not same_world) and m.private(name, stored, keeps=keeps):
            if lost and same_world and terms.wanted(name) and terms.private != KEPT:
                assert m.book.damage is not None
                raise m.book.damage  # no other rank has a copy of what is private to this one
            goes = terms.private == MAPPED and stored in m.stored
            if terms.wanted(name):
                (mapped if goes else kept).append(name)
            if not goes:
                continue
        if stored in m.stored:
            m.matched[name] = m.stored[stored]
        elif isinstance(value, TensorRef) and terms.wanted(name) and m.routes.find(name) is not None:
            m.matched[name] = TensorRef(name)
        elif stored != name and terms.wanted(name):
            message = "the map of names leads to nothing in the checkpoint"
            raise PlanError(message, rule="R-NAME", where=Where(tensor=name), found=repr(stored))
    m.kept, m.mapped = tuple(kept), tuple(mapped)
    if terms.private == REFUSED and (kept or mapped):
        raise _private(m, terms)


def _private(m: Match, terms: Terms) -> PlanError:
    names = (*m.kept, *m.mapped)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return PlanError(
        f"what is private to a rank has no exact counterpart on another number of ranks: {', '.join(names[:10])}{more}",
        rule="R-WORLD",
        expected=f"{m.routes.manifest.world_size} ranks",
        found=f"{terms.world} ranks",
        advice='private="map" gives each rank that of the same number, private="keep" leaves it as it is',
    )


def _same_kinds(m: Match, wanted: Wanted) -> None:
    """Refuse a tensor in one and a Python value in the other under one name."""
    for name in m.matched.keys() & m.here.keys():
        tensor = isinstance(m.matched[name], TensorRef), isinstance(m.here[name], TensorRef)
        if tensor[0] != tensor[1] and wanted(name):
            kinds = ["a tensor" if t else "a Python value" for t in tensor]
            raise PlanError(
                "the checkpoint and the state hold different kinds of value here",
                rule="R-NAME",
                where=Where(tensor=name),
                expected=f"{kinds[0]} as in the checkpoint",
                found=kinds[1],
            )

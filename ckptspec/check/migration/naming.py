"""Owns how what is asked for by name compares with what a checkpoint has; proposes names, and never takes one itself.

It is judged by the routes that a load takes: a named tensor out of flat ones, or the reverse, is no missing name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckptspec.check.migration.nearness import Nearness
from ckptspec.check.migration.pairs import LOOKED, Pair, pairs
from ckptspec.check.migration.unlike import Couple, dtypes, shapes
from ckptspec.check.registry import capped, fault
from ckptspec.errors import PlanError, Where
from ckptspec.format.manifest import Manifest
from ckptspec.format.names import split
from ckptspec.format.report import Finding
from ckptspec.format.signature import Described
from ckptspec.planner.routes import Route, Routes


@dataclass(frozen=True)
class Asked:
    """Tensors, aliases and objects that somebody asks for; aliases and objects None: whatever there is will do.

    `asker` is who asks, in words. What lies under a top key that a `partial` asker has nothing under is not its affair.
    An `open` one takes whatever names there are.
    """

    tensors: Mapping[str, Described]
    aliases: Mapping[str, str] | None = None
    objects: Mapping[str, str] | None = None
    asker: str = "the target"
    partial: bool = False
    open: bool = False


@dataclass
class Compared:
    """What a comparison found: the way to each tensor, the findings, and names that a map could lead to others.

    `other_form` are tensors that are read out of what is stored in another form; `proposed` are {wanted: stored} pairs
    of one dtype and shape; `nowhere` are names that the explicit map leads to nothing.
    """

    routes: Routes
    found: dict[str, Route] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    other_form: list[str] = field(default_factory=list)
    proposed: dict[str, str] = field(default_factory=dict)
    nowhere: list[str] = field(default_factory=list)

    @property
    def renamed(self) -> dict[str, str]:
        """The wanted names that the explicit map led to another one."""
        return dict(self.routes.renamed)


def compare(asked: Asked, routes: Routes, *, exact: bool = False) -> Compared:
    """Return how what is asked for compares with the checkpoint of `routes` [R-NAME] [R-DTYPE] [R-SHAPE].

    With `exact` a tensor must be stored under its name, in its own form.
    """
    work = _Comparison(asked, Compared(routes), exact)
    work.find()
    work.names()
    out = work.out
    if not asked.open:
        out.findings += capped(_idle(out))
    couples = list(work.couples())
    out.findings += capped(dtypes(asked.asker, couples))
    out.findings += capped(shapes(asked.asker, couples))
    return out


class _Comparison:
    def __init__(self, asked: Asked, out: Compared, exact: bool) -> None:
        self.asked, self.out, self.exact = asked, out, exact
        self.manifest: Manifest = out.routes.manifest
        self.missing: list[str] = []
        self.likely: dict[str, Route] = {}  # the ways to names that a pair proposes
        self.calm = Routes(self.manifest)  # finds what is stored under a name, and keeps no account of it

    def find(self) -> None:
        """Look for the way to every tensor that is asked for."""
        for name in dict.fromkeys((*self.asked.tensors, *(self.asked.aliases or ()))):
            try:
                route = self.out.routes.find(name)
            except PlanError as e:
                self.out.findings.append(Finding.of_error(e))
                continue
            if route is None:
                self._lost(name)
            elif self.straight(name, route):
                self.out.found[name] = route
            elif self.exact and not self.stored(name):
                self.missing.append(name)
            else:
                self.out.found[name] = route
                self.out.other_form.append(name)

    def _lost(self, name: str) -> None:
        stored = self.out.routes.names.of(name)
        if stored == name:
            self.missing.append(name)
            return
        self.out.routes.renamed.pop(name, None)
        self.out.nowhere.append(name)
        message = "the map of names leads to nothing in the checkpoint"
        self.out.findings.append(fault("R-NAME", message, Where(tensor=name), None, repr(stored)))

    def stored(self, name: str) -> str | None:
        """Return the stored tensor that has this name, or that the map or an alias leads to; None where there is none.

        What it holds may lie in other places.
        """
        mapped = self.out.routes.names.of(name)
        target = self.manifest.aliases.get(mapped, mapped)
        return target if target in self.manifest.tensors else None

    def straight(self, name: str, route: Route) -> bool:
        """Tell whether a tensor is stored as it is, under its name or the one it is mapped to."""
        return not route.lands and route.sources == (self.stored(name),) and route.strands[0].view is None

    def described(self, route: Route) -> Described:
        """Return what a way leads to."""
        return Described(route.dtype, None if route.local else route.shape)

    def couples(self) -> Iterator[Couple]:
        """Yield the tensors that were found, or seem to be there under another name, beside what is asked for."""
        for name, route in {**self.out.found, **self.likely}.items():
            if name in self.asked.tensors:
                stored = self.stored(name) or name
                yield Couple(name, stored, self.described(route), self.asked.tensors[name])

    # ---- names -------------------------------------------------------------------------------------------------------

    def names(self) -> None:
        """Add what is missing and what nobody asked for, both lists, and which of them seem to be the same."""
        asked, m = self.asked, self.manifest
        objects = list(m.objects if asked.objects is None else filter(relatives(asked.objects), m.objects))
        entries, left = self.out.routes.entries, [*self.out.routes.unused(objects)]
        surplus = {}
        for entry, unused in zip(entries, left, strict=True):
            if unused and not (asked.aliases is None and entry.name in m.aliases):
                surplus[entry.member or entry.name] = entry.name
        taken = {self.out.routes.names.of(n) for n in self.out.found}
        free = [n for n in surplus if n not in taken and n not in m.objects and self._way(n) is not None]
        found = pairs(self.missing, free, self._fits)
        self._propose(found)
        self.out.findings += capped(self._prefixes([p for p in found if p.kind == "prefix"]))
        near = {p.wanted: p.stored for p in found if p.kind == "near"}
        paired = {p.wanted for p in found if p.kind == "prefix"}
        missing = [n for n in self.missing if n not in paired]
        self.out.findings += capped(self._missing(missing, near, free))
        gone = {p.stored for p in found if p.kind == "prefix"}
        names = [n for n in self._leftover(objects) if n not in gone and n.partition(": ")[2] not in gone]
        if not asked.open:
            self.out.findings += capped(self._surplus(names))
        if asked.objects is not None:
            there = relatives((*m.objects, *m.tensors))
            absent = [n for n in asked.objects if not there(n)]
            self.out.findings += capped(self._missing(absent, {}, m.objects, "object"))

    def _leftover(self, objects: Iterable[str]) -> Iterator[str]:
        for name in self.out.routes.leftover(set(objects)):
            if not (self.asked.aliases is None and name in self.manifest.aliases):
                yield name

    def _way(self, name: str) -> Route | None:
        try:
            return self.calm.find(name)
        except PlanError:
            return None  # of more than one meaning, so nothing to propose

    def _fits(self, wanted: str, stored: str) -> bool:
        route = self._way(stored)
        return route is not None and self.described(route) == self.asked.tensors.get(wanted)

    def _propose(self, found: Iterable[Pair]) -> None:
        for p in found:
            route = self._way(p.stored)
            if p.kind == "prefix" and route is not None and p.wanted in self.asked.tensors:
                self.likely[p.wanted] = route
            if self._fits(p.wanted, p.stored) and "*" not in p.wanted + p.stored:
                self.out.proposed[p.wanted] = p.stored

    def _prefixes(self, found: list[Pair]) -> Iterator[Finding]:
        """Yield one finding for all names that differ alike."""
        alike: dict[tuple[str, str], list[Pair]] = {}
        for p in found:
            alike.setdefault((p.wanted_part, p.stored_part), []).append(p)
        for (ours, theirs), group in alike.items():
            first = group[0]
            many = f"{len(group)} names differ" if len(group) > 1 else "a name differs"
            how = " and ".join(
                text
                for part, text in (
                    (ours, f"{self.asked.asker} has {ours!r} in them"),
                    (theirs, f"the checkpoint has {theirs!r}"),
                )
                if part
            )
            message = f"{many} by a prefix alone: {how or 'in the order of their parts'}"
            example = f"{first.wanted!r} is there as {first.stored!r}"
            yield fault("R-NAME", message, Where(tensor=first.wanted), None, example)

    def _missing(
        self, names: Iterable[str], near: Mapping[str, str], others: Iterable[str], kind: str = "tensor"
    ) -> Iterator[Finding]:
        nearness = Nearness()
        for i, name in enumerate(names):
            other = near.get(name) or (nearness.nearest(name, others) if i < LOOKED else None)
            reason = self._omitted(name)
            message = f"{self.asked.asker} wants {kind} {name!r}, which the checkpoint has not{reason}"
            yield fault("R-NAME", message, Where(tensor=name), None, f"{other!r} is near" if other else None)

    def _omitted(self, name: str) -> str:
        """Return in words that a name was left out of the checkpoint on purpose, if so."""
        omitted = self.manifest.omitted
        place = next((p for p in (name, *_above(name)) if p in omitted), None) if omitted else None
        return "" if place is None else f": {place!r} was omitted as {omitted[place]}"

    def _surplus(self, names: Iterable[str]) -> Iterator[Finding]:
        """Yield what nobody asked for; what is under a top key of which a partial asker has nothing, in one line."""
        own = {split(self.out.routes.names.of(n))[0] for n in self.out.found}
        own |= {split(n)[0] for n in (*self.out.proposed.values(), *self.asked.tensors, *(self.asked.objects or ()))}
        foreign: dict[str, list[str]] = {}
        for name in names:
            top = split(name.partition(": ")[0])[0]
            if self.asked.partial and top not in own:
                foreign.setdefault(top, []).append(name)
                continue
            kind = "object" if name in self.manifest.objects else "tensor"
            message = f"the checkpoint holds {kind} {name!r}, which {self.asked.asker} has not"
            yield fault("R-NAME", message, Where(tensor=name))
        for top, group in foreign.items():
            what = f"{len(group)} names" if len(group) > 1 else f"{group[0]!r}"
            message = f"the checkpoint holds {what} under {top!r}, of which {self.asked.asker} says nothing"
            yield Finding("R-NAME", "warning", message, Where(tensor=top))


def _idle(out: Compared) -> Iterator[Finding]:
    """Yield the entries of an explicit map that nothing used: most likely they are misspelt."""
    for name in out.routes.names.idle({*out.renamed, *out.nowhere}):
        message = f"the map of names speaks of {name!r}, which nothing asks for"
        yield Finding("X-MAP", "warning", message, Where(tensor=name))


def relatives(names: Iterable[str]) -> Callable[[str], bool]:
    """Return what tells whether a name is one of `names`, or above or below one.

    How finely a state is cut into objects depends on what is in it.
    """
    known = set(names)
    above = {place for name in known for place in _above(name)}
    return lambda name: name in known or name in above or any(place in known for place in _above(name))


def _above(name: str) -> Iterator[str]:
    return (name[:i] for i, c in enumerate(name) if c == "/")

"""Owns what a reshard takes from a checkpoint, name by name; refuses what would be lost, cast or guessed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptspec.check.targets import nearest
from ckptspec.errors import PlanError, Where
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.patterns import matches
from ckptspec.planner.destination import Destination
from ckptspec.planner.routes import Route

SHOWN = 8  # names in one message


@dataclass(frozen=True)
class Fitting:
    """All that a destination takes: routes to its tensors, the stored names of local tensors and objects, what is left.

    `dropped` are stored names that were named to be left out.
    """

    destination: Destination
    routes: Mapping[str, Route]
    local: Mapping[str, str]
    objects: Mapping[str, str]
    dropped: tuple[str, ...]


def fitting(destination: Destination, drop: Sequence[str]) -> Fitting:
    """Return the fitting of a destination; `drop` are patterns of stored names that may be left out.

    Raises PlanError: [R-NAME] for a wanted name that the checkpoint has not, or a stored one that nobody wants and
    `drop` does not name; [R-DTYPE], [R-SHAPE] for a tensor that is stored as another.
    """
    found = {name: destination.routes.find(name) for name in destination.tensors}
    _refuse_missing(destination, [name for name, route in found.items() if route is None])
    routes, local = {}, {}
    for name, route in found.items():
        assert route is not None
        stored = route.sources[0] if route.local else None
        _refuse_unlike(name, destination.tensors[name], route, stored)
        if stored is None:
            routes[name] = route
        else:
            local[name] = stored
    objects = _objects(destination)
    dropped = tuple(_left(destination, routes, objects.values(), drop))
    _heeded(destination)
    return Fitting(destination, routes, local, objects, dropped)


def _refuse_missing(d: Destination, missing: Sequence[str]) -> None:
    if not missing:
        return
    known = (*d.manifest.tensors, *d.manifest.aliases)
    near = [(name, nearest(name, known)) for name in missing[:SHOWN]]
    shown = [name + (f" ({other} is near)" if other else "") for name, other in near]
    raise PlanError(
        "the checkpoint has nothing for a wanted tensor",
        rule="R-NAME",
        where=Where(tensor=missing[0]),
        found=_list(shown, len(missing)),
        advice="say with --map FILE what it is called there, or leave it out of the target",
    )


def _list(shown: Sequence[str], total: int) -> str:
    more = f" and {total - len(shown)} more" if total > len(shown) else ""
    return ", ".join(shown) + more


def _refuse_unlike(name: str, wanted: TensorEntry, route: Route, local: str | None) -> None:
    where = Where(tensor=name)
    if wanted.dtype != route.dtype:
        message = "the target wants another dtype, and nothing is cast"
        raise PlanError(message, rule="R-DTYPE", where=where, expected=wanted.dtype, found=route.dtype)
    stored = None if local is not None else route.shape
    if wanted.shape != stored:
        message = "the target wants another shape, and nothing is cut or filled"
        texts = ["one of each rank's own" if s is None else str(list(s)) for s in (wanted.shape, stored)]
        raise PlanError(message, rule="R-SHAPE", where=where, expected=texts[0], found=texts[1])


def _objects(d: Destination) -> dict[str, str]:
    """Return the stored name of every wanted object."""
    held = d.manifest.objects
    found = {name: d.names.of(name) for name in d.objects}
    for name, stored in found.items():
        if stored not in held:
            near = nearest(stored, held)
            message = "the checkpoint has no such object"
            raise PlanError(message, rule="R-NAME", where=Where(tensor=name), found=f"{near} is near" if near else None)
        if d.objects[name] == "same" and held[stored] == "rank":
            message = "the target wants one object for all ranks, and each rank has its own"
            raise PlanError(message, rule="R-NAME", where=Where(tensor=name))
    return found


def _heeded(d: Destination) -> None:
    """Refuse a map of names of which a part is about nothing: what it was meant for is taken otherwise [X-MAP]."""
    renamed = {n for n in (*d.objects, *d.aliases) if d.names.of(n) != n}
    idle = d.names.idle({*d.routes.renamed, *renamed})
    if idle:
        message = f"the map of names speaks of {idle[0]!r}, which nothing asks for"
        raise PlanError(message, rule="X-MAP", where=Where(tensor=idle[0]), advice="correct the map, or leave it out")


def _left(d: Destination, routes: Mapping[str, Route], objects: Iterable[str], drop: Sequence[str]) -> Iterator[str]:
    """Yield the stored names that are left out because `drop` names them; raises for others, and for idle patterns."""
    tied = {d.names.of(name): routes[to].sources for name, to in d.aliases.items() if to in routes}
    unused = d.routes.leftover(set(objects))
    left = [name for name in unused if d.manifest.aliases.get(name) not in tied.get(name, ())]
    idle = [pattern for pattern in drop if not any(_dropped(name, (pattern,)) for name in left)]
    if idle:
        message = "nothing that the target leaves over has this name"
        advice = "leave it out of the target" if any(_dropped(name, idle) for name in d.manifest.tensors) else None
        raise PlanError(message, rule="R-NAME", found=f"--drop {idle[0]}", advice=advice)
    lost = [name for name in left if not _dropped(name, drop)]
    if lost:
        raise PlanError(
            "the target does not ask for all that the checkpoint holds, and nothing is lost in silence",
            rule="R-NAME",
            where=Where(tensor=lost[0]),
            found=_list(lost[:SHOWN], len(lost)),
            advice="name what may be left out with --drop NAME, or add it to the target",
        )
    yield from left


def _dropped(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a pattern names a stored name, or the flat tensor or the member of `flat: member`."""
    flat, _, member = name.partition(": ")
    return matches(name, patterns) or (bool(member) and (matches(flat, patterns) or matches(member, patterns)))

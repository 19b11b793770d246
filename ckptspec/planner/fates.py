"""Owns whether there is a way to each wanted tensor, and why not; what follows for a state is `check.migration`'s."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ckptspec.errors import PlanError
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.report import Verdict
from ckptspec.planner.destination import Destination
from ckptspec.planner.routes import Route

LOSSLESS, APPROXIMATE, LOST, IMPOSSIBLE = "lossless", "approximate", "lost", "impossible"
ABSENT = "the checkpoint does not hold it"
SHOWN = 20  # names of one kind that get a verdict of their own


@dataclass(frozen=True)
class Found:
    """The ways to the wanted tensors that ranks share, and why there is none to others, by name.

    `private` are the wanted tensors that are each rank's own, with their stored names.
    """

    destination: Destination
    routes: Mapping[str, Route] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    private: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        """Whether a rank reads what is in the shard of its own number alone: a tensor or an object of its own."""
        d = self.destination
        return bool(self.private) or any(d.manifest.objects.get(name) == "rank" for name in d.objects)


def found(destination: Destination) -> Found:
    """Return the ways to all wanted tensors."""
    routes: dict[str, Route] = {}
    faults: dict[str, str] = {}
    private: dict[str, str] = {}
    for name, wanted in destination.tensors.items():
        try:
            route = destination.routes.find(name)
        except PlanError as e:
            faults[name] = f"{e.message}: {e.found}" if e.found else e.message
            continue
        fault = _fault(destination, wanted, route)
        if fault is not None:
            faults[name] = fault
        elif route is not None and wanted.shape is None:
            private[name] = route.sources[0]
        elif route is not None:
            routes[name] = route
    return Found(destination, routes, faults, private)


def _fault(destination: Destination, wanted: TensorEntry, route: Route | None) -> str | None:
    """Return why a wanted tensor cannot be had, or None."""
    if route is None:
        return ABSENT
    stored = destination.manifest.tensors
    private = any(stored[name].shape is None for name in route.sources)
    if private != (wanted.shape is None):
        one = "private to each rank" if private else "shared by the ranks"
        other = "shared" if private else "private"
        return f"it is {one} in the checkpoint and {other} in the target"
    if route.dtype != wanted.dtype:
        return f"it is {route.dtype} in the checkpoint, {wanted.dtype} in the target, and nothing is cast in silence"
    if not private and route.shape != wanted.shape:
        return f"its shape is {list(route.shape)} in the checkpoint, {list(wanted.shape or ())} in the target"
    return None


def impossible(found: Found) -> Iterator[Verdict]:
    """Yield what cannot be had: wanted tensors without a way, and objects that the checkpoint does not hold."""
    d = found.destination
    missing = (name for name in d.objects if name not in d.manifest.objects)
    yield from _each("tensor", found.faults)
    yield from _each("object", dict.fromkeys(missing, ABSENT))


def _each(kind: str, reasons: Mapping[str, str]) -> Iterator[Verdict]:
    for name, reason in islice(reasons.items(), SHOWN):
        yield Verdict(f"{kind} {name}", IMPOSSIBLE, reason)
    if len(reasons) > SHOWN:
        yield Verdict(f"{len(reasons) - SHOWN} more of kind {kind}", IMPOSSIBLE, "as those before")

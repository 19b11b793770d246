"""Owns what an adapter is: an object of a state opened as a tree; knows no kind of object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptspec.errors import PlanError, Where
from ckptspec.format.manifest import Manifest, TensorEntry
from ckptspec.format.names import escape, split
from ckptspec.format.objects import TensorRef
from ckptspec.planner.routes import Routes

ABSENT: Any = object()  # stands for "nothing here": None is a value

# In which order objects are given what was loaded: what may draw random numbers on the way comes before RNG.
PIECES, MODULES, OPTIMIZERS, OBJECTS, GENERATORS = range(5)


@dataclass(frozen=True)
class Saved:
    """What a load reads from: the manifest, a state tree, shapes of this rank's local tensors, and what is asked for.

    `wanted` tells whether a name is to be loaded. `routes`, on another layout than the one saved, lead to tensors that
    the checkpoint has in another form.
    """

    manifest: Manifest
    tree: Any
    shapes: Mapping[str, tuple[int, ...]]
    wanted: Callable[[str], bool]
    routes: Routes | None = None

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a stored tensor, or of one that a route leads to; that one has no layout."""
        found = self.manifest.tensors.get(name)
        if found is None and self.routes is not None:
            route = self.routes.find(name)
            if route is not None:
                return TensorEntry(route.dtype, route.shape, "")
        return self.manifest.tensors[name] if found is None else found

    def elsewhere(self, kept: Any) -> bool:
        """Tell whether more of a subtree than `kept` may be found under other names, or in flat groups."""
        return self.routes is not None and (kept is ABSENT or bool(self.routes.names))

    def derived(self, name: str, keeps: Callable[[str], bool]) -> Mapping[str, TensorRef]:
        """Return what flat groups, or a map of names, hold of the subtree at `name`, one level deep, by its keys.

        Those that `keeps` refuses are left out; where none is wanted, all are.
        """
        if self.routes is None:
            return {}
        places = {k: f"{name}/{escape(k)}" for k in self.routes.kinds if keeps(k)}
        if not any(map(self.wanted, places.values())):
            return {}
        return {k: TensorRef(n) for k, n in places.items() if self.routes.find(n) is not None}

    def below(self, name: str) -> Any:
        """Return the subtree at a name, ABSENT where the checkpoint has none."""
        node = self.tree
        for token in split(name) if name else ():
            if isinstance(node, dict):
                node = next((v for k, v in node.items() if str(k) == token), ABSENT)
            elif isinstance(node, (list, tuple)) and token.isdecimal() and int(token) < len(node):
                node = node[int(token)]
            else:
                return ABSENT
        return node


@dataclass(frozen=True)
class Context:
    """Where an object stands: its name, this rank and the number of ranks, the names of parameters, and, in a load,
    what is read."""

    name: str
    rank: int
    world: int
    parameters: Callable[[Sequence[Any], str], Mapping[int, str]]
    saved: Saved | None = None

    @property
    def found(self) -> Any:
        """The checkpoint's subtree for this object; ABSENT outside a load, and where it has none."""
        return ABSENT if self.saved is None else self.saved.below(self.name)

    def join(self, *tokens: Any) -> str:
        """Return the name of what lies below this object by these keys."""
        return "/".join([self.name, *(escape(str(t)) for t in tokens)])


@dataclass
class Chosen:
    """What a load settled on, seen from one object: its names below that are loaded, and the deviations allowed."""

    names: frozenset[str]
    keep_missing: bool = False
    ignore_unexpected: bool = False
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


class Adapter:
    """An object of a state, opened: `tree` is what is saved of it, or what a load fills and hands to `restore`.

    `order` is when it is restored, `role` that of its plain tensors, `private` whether each rank has its own, `omitted`
    what is left out on purpose: full names and reasons.
    """

    order = OBJECTS
    role: str | None = None
    private = False

    def __init__(self, value: Any, tree: Any) -> None:
        self.value = value
        self.tree = tree
        self.omitted: dict[str, str] = {}

    def review(self, chosen: Chosen) -> Iterator[PlanError]:
        """Yield why what is about to be loaded does not fit the object; note deviations that were asked for."""
        yield from ()

    def restore(self) -> Any:
        """Give the object its tree, now filled; return what stands in its place from now on: the object, or another."""
        return self.value


def misfit(name: str, message: str, *, rule: str = "R-NAME", **details: Any) -> PlanError:
    """Return the error for a part of the checkpoint that the object at `name` cannot take."""
    return PlanError(message, rule=rule, where=Where(tensor=name), **details)

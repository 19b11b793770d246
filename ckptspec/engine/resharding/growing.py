"""Owns the state trees of a reshard's result: what each rank's holds, under which names, and how objects are called.

An object is named by the largest subtree without a tensor, so what becomes of tensors decides the names of objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckptspec.engine.resharding.trees import Forest, Grown, Step, items, prefixes, value_of
from ckptspec.errors import PlanError, Where
from ckptspec.format.names import escape
from ckptspec.format.objects import TensorRef


@dataclass
class Growing:
    """Makes the states of the result out of those of the source.

    `tensors` gives the tensor at each place of the wanted state (aliases have places of their own), `objects` the
    stored name of each wanted object, `stored` the stored name of each tensor's place. `made` becomes the kind of every
    object by the name it has in the result.
    """

    forest: Forest
    kinds: Mapping[str, str]
    tensors: Mapping[str, str]
    objects: Mapping[str, str]
    stored: Mapping[str, str]
    made: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.tensors:
            if name in self._above:
                raise PlanError("a tensor would lie below another tensor", rule="R-NAME", where=Where(tensor=name))

    @cached_property
    def _above(self) -> frozenset[str]:
        """The containers of the result that hold a tensor on some rank; the root always does."""
        return frozenset(p for name in self.tensors for p in prefixes(name)) | {""}

    @cached_property
    def _wanted(self) -> Mapping[str, str]:
        """Every wanted place by the stored name that it takes its order from."""
        return {stored: name for name, stored in (*self.stored.items(), *self.objects.items())}

    @cached_property
    def _union(self) -> tuple[str, ...]:
        """All wanted places in the order of the union of the source's states, new ones last."""
        known = (self._wanted[name] for name in self.forest.places if name in self._wanted)
        return tuple(dict.fromkeys((*known, *self.tensors, *self.objects)))

    @cached_property
    def _together(self) -> Mapping[str, tuple[str, ...]]:
        """The wanted objects that make up each object of the result, in the order of the union."""
        out: dict[str, list[str]] = {}
        for name in self._union:
            if name in self.objects:
                out.setdefault(self._called(name), []).append(name)
        return {name: tuple(several) for name, several in out.items()}

    def _called(self, name: str) -> str:
        """Return what the object in which `name` lies is called in the result."""
        for container in prefixes(name):
            if container not in self._above:
                return container
        return name

    def state(self, rank: int, held: Callable[[str], bool]) -> Any:
        """Return the state of `rank`, which holds the tensors for which `held` is true."""
        here = {name: tensor for name, tensor in self.tensors.items() if held(tensor)}
        above = {p for name in here for p in prefixes(name)} | {""}
        grown = Grown(self.forest.root)
        done: set[str] = set()
        for name in self._order(rank):
            if name in here:
                grown.put(name, self._steps(name), TensorRef(here[name]))
            elif name in self.objects and (called := self._called(name)) not in done:
                done.add(called)
                if called.rpartition("/")[0] in above:
                    self._place(grown, rank, called, above)
        return grown.state()

    def _order(self, rank: int) -> Iterator[str]:
        """Yield the wanted places, those of the rank's own old state first and in its order."""
        own = dict.fromkeys(self._wanted[name] for name in self.forest.ranks.get(rank, ()) if name in self._wanted)
        yield from own
        yield from (name for name in self._union if name not in own)

    def _steps(self, name: str) -> tuple[Step, ...] | None:
        return self.forest.places.get(name)

    def _place(self, grown: Grown, rank: int, called: str, above: set[str]) -> None:
        for name in self._together[called]:
            data = self._data(rank, name)
            if data is not None:
                made = (called, self.kinds[self.objects[name]])
                self._put(grown, rank, name, self._steps(name), value_of(data), made, above)

    def _data(self, rank: int, name: str) -> bytes | None:
        """Return the packed value that a rank has of a wanted object."""
        stored = self.objects.get(name)
        if stored is None:
            return None
        if self.kinds[stored] == "same":
            return self.forest.same.get(stored)
        return self.forest.private.get(rank, {}).get(stored)

    def _put(
        self,
        grown: Grown,
        rank: int,
        name: str,
        steps: tuple[Step, ...] | None,
        value: Any,
        made: tuple[str, str],
        above: set[str],
    ) -> None:
        """Put an object, or, where tensors of this rank lie below its name, its entries beside them."""
        if name not in above:
            called, kind = made
            grown.put(name, steps, value)
            if self.made.setdefault(called, kind) != kind:
                self.made[called] = "rank"
            return
        if not isinstance(value, (dict, list, tuple)):
            message = "an object stands where wanted tensors lie below"
            raise PlanError(message, rule="R-NAME", where=Where(tensor=name))
        for key, item in items(value):
            below = f"{name}/{escape(str(key))}"
            if below not in self.tensors and self._data(rank, below) is None:
                place = None if steps is None else (*steps, (type(value), key))
                self._put(grown, rank, below, place, item, (below, made[1]), above)

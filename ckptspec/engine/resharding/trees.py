"""Owns the state trees of a checkpoint's ranks taken apart by name, and put together anew; reads and writes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptspec.errors import ShardError, Where
from ckptspec.format.names import escape, split
from ckptspec.format.objects import TensorRef, pack, parts, unpack

Step = tuple[type, Any]  # the kind of a container, and the key or index in it


def leaves(state: Any) -> Iterator[tuple[str, tuple[Step, ...], Any]]:
    """Yield (name, steps from the root, part) of every named part of a state; raises ShardError as `parts` does."""
    yield from _leaves(state, "", (), dict(parts(state, reading=True)))


def _leaves(
    tree: Any, prefix: str, steps: tuple[Step, ...], found: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Step, ...], Any]]:
    for key, item in items(tree):
        name = prefix + escape(str(key))
        here = (*steps, (type(tree), key))
        if name in found:
            yield name, here, item
        else:
            yield from _leaves(item, name + "/", here, found)


def items(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the (key, item) pairs of a dict, list or tuple; of anything else none."""
    if isinstance(tree, dict):
        yield from tree.items()
    elif isinstance(tree, (list, tuple)):
        yield from enumerate(tree)


@dataclass
class Forest:
    """All states of a checkpoint together: where each name stands, the objects, and what each rank's state has.

    Objects are kept packed. `ranks` has, for every rank, the names in its state, in order.
    """

    root: type = dict
    places: dict[str, tuple[Step, ...]] = field(default_factory=dict)
    same: dict[str, bytes] = field(default_factory=dict)
    private: dict[int, dict[str, bytes]] = field(default_factory=dict)
    ranks: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _orders: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)

    def add(self, rank: int, state: Any, kinds: Mapping[str, str]) -> None:
        """Take in the state of one rank; `kinds` are the manifest's objects.

        Raises ShardError [O-KIND] for an object the manifest has not, or of kind same that another rank has otherwise.
        """
        if not self.ranks:
            self.root = type(state)
        order = []
        for name, steps, part in leaves(state):
            order.append(name)
            self.places.setdefault(name, steps)
            if type(part) is not TensorRef:
                self._object(rank, name, pack(part), kinds.get(name))
        names = tuple(order)
        self.ranks[rank] = self._orders.setdefault(names, names)  # most ranks have the same

    def _object(self, rank: int, name: str, data: bytes, kind: str | None) -> None:
        if kind == "rank":
            self.private.setdefault(rank, {})[name] = data
        elif kind is None or self.same.setdefault(name, data) != data:
            message = "the manifest has no such object" if kind is None else "another rank holds another value"
            raise ShardError(message, rule="O-KIND", where=Where(tensor=name, rank=rank))


class _Node:
    """A container being put together: children by token."""

    __slots__ = ("children", "kind")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.children: dict[str, tuple[Any, Any]] = {}

    def built(self) -> Any:
        """Return the dict, list or tuple; a list that lacks an index becomes a dict of those it has."""
        found = {token: (key, _built(child)) for token, (key, child) in self.children.items()}
        if self.kind is dict:
            return dict(found.values())
        if all(token.isdecimal() for token in found):
            numbered = sorted((int(token), item) for token, (_, item) in found.items() if str(int(token)) == token)
            if [i for i, _ in numbered] == list(range(len(found))):
                return self.kind([item for _, item in numbered])
        return {int(token) if token.isdecimal() else key: item for token, (key, item) in found.items()}


def _built(child: Any) -> Any:
    return child.built() if isinstance(child, _Node) else child


class Grown:
    """One rank's new state, put together name by name."""

    def __init__(self, root: type) -> None:
        self._root = _Node(root)

    def put(self, name: str, steps: tuple[Step, ...] | None, value: Any) -> None:
        """Put a part where it stood, or with `steps` None in nested dicts by the tokens of its name."""
        tokens = split(name)
        steps = steps or tuple((dict, token) for token in tokens)
        node = self._root
        for depth, token in enumerate(tokens[:-1]):
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = (steps[depth][1], _Node(steps[depth + 1][0]))
            assert isinstance(child[1], _Node), name
            node = child[1]
        node.children[tokens[-1]] = (steps[-1][1], value)

    def state(self) -> Any:
        """Return the state."""
        return self._root.built()


def prefixes(name: str) -> Iterator[str]:
    """Yield the names of the containers above a name, the root (an empty text) first."""
    yield ""
    at = name.find("/")
    while at >= 0:
        yield name[:at]
        at = name.find("/", at + 1)


def value_of(data: bytes) -> Any:
    """Return an object's value out of its packed bytes; numpy stays unimported."""
    return unpack(data, numpy=False)

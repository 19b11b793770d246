"""Owns what a checkpoint has for one rank of a load, by name: its own tree, or that of all ranks put together.

A rank that loads what it saved needs its own shard's tree alone. On another layout its names may lie in any shard: then
tensors are known from the manifest, and values are read from the nearest shard that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptspec.engine.fetch import Opened
from ckptspec.errors import IntegrityError, ShardError
from ckptspec.format import objects
from ckptspec.format.names import split
from ckptspec.format.objects import TensorRef
from ckptspec.planner.renames import Renames
from ckptspec.pytorch.elsewhere import values

Asked = Callable[[str], bool]


class Book:
    """The entries of a checkpoint for `rank`: its tree, and its parts by name; `wide` looks beyond its own shard.

    A wide one does without the rank's own shard where that cannot be read and copies are stored; `damage` says why.
    What a map of `names` speaks of stands in the tree under the wanted name too; the parts go by the stored names.
    Values that are in other shards alone are read where their name is `asked` for.
    """

    def __init__(
        self, opened: Opened, rank: int, *, wide: bool, names: Renames | None = None, asked: Asked | None = None
    ) -> None:
        self._opened = opened
        self._manifest = opened.manifest
        self.wide = wide
        self.world_size = opened.manifest.world_size
        self.own = rank < self.world_size
        self.nearest = rank if self.own else rank % self.world_size
        self.damage: IntegrityError | ShardError | None = None
        tree = self._readable() if wide and self._manifest.copies > 1 else opened.document(self.nearest).state
        self.parts: dict[str, Any] = dict(objects.parts(tree, reading=True))
        self.tree = tree
        if wide:
            self._widen(asked or (lambda name: True))
        self.renamed = {wanted: v for n, v in self.parts.items() for wanted in names.leading_to(n)} if names else {}
        if self.renamed:
            self.tree = _with(self.tree, self.renamed, over=True)

    def _readable(self) -> Any:
        """Return the tree of the nearest shard that can be read; of another rank's, nothing private counts."""
        world = self._manifest.world_size
        for step in range(world):
            place = (self.nearest + step) % world
            try:
                tree = self._opened.document(place).state
            except (IntegrityError, ShardError) as e:
                self.damage = self.damage or e
            else:
                self.own = self.own and step == 0
                self.nearest = place
                return tree
        assert self.damage is not None
        raise self.damage

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of the rank's local tensors; none where it has no shard of its own."""
        if not self.own:
            return {}
        index = self._opened.document(self.nearest).index
        tensors = self._manifest.tensors
        listed = zip(index.names, index.shapes, strict=True)
        return {name: shape for name, shape in listed if name in tensors and tensors[name].shape is None}

    def private(self, name: str) -> bool:
        """Tell whether each rank has a value or tensor of its own under this name, or around it."""
        m = self._manifest
        if name in m.objects:
            return m.objects[name] == "rank"
        entry = m.tensors.get(m.aliases.get(name, name))
        if entry is not None:
            return entry.shape is None
        return any(m.objects.get(name[:i]) == "rank" for i, c in enumerate(name) if c == "/")

    def privates(self) -> Iterator[str]:
        """Yield the names of all that each rank has of its own, whichever rank it is."""
        yield from (n for n, kind in self._manifest.objects.items() if kind == "rank")
        yield from (n for n, t in self._manifest.tensors.items() if t.shape is None)

    def _widen(self, asked: Asked) -> None:
        """Put in what other ranks have: tensors by name, values from the shards that hold them."""
        m = self._manifest
        if not self.own:  # what another rank keeps for itself is not this one's
            self.parts = {n: v for n, v in self.parts.items() if not self.private(n)}
        private = {n for n, t in m.tensors.items() if t.shape is None}
        found = {n: TensorRef(n) for n in m.tensors if n not in private}
        found |= {n: TensorRef(to) for n, to in m.aliases.items() if to not in private}
        far = {n for n, kind in m.objects.items() if kind == "same" and n not in self.parts and asked(n)}
        more = {n: v for n, v in {**found, **values(self._opened, far, self.nearest)}.items() if n not in self.parts}
        if more:
            self.tree = _with(self.tree, more, over=False)
            self.parts |= more


def _with(tree: Any, entries: Mapping[str, Any], *, over: bool) -> Any:
    """Return a tree that has these entries too; what is there already stays, unless they go `over` it."""
    out = _copied(tree)
    for name, value in entries.items():
        _put(out, name, value, over)
    return out


def _copied(tree: Any) -> Any:
    """Return a tree whose dicts can be added to without a change to the one given."""
    return {k: _copied(v) for k, v in tree.items()} if type(tree) is dict else tree


def _put(tree: Any, name: str, value: Any, over: bool) -> None:
    """Put a value at its place in a tree, making dicts on the way; a list, or a value, in the way stays as it is."""
    *path, last = split(name)
    node = tree
    for token in path:
        if type(node) is not dict:
            return
        node = node.setdefault(_key(node, token), {})
    if type(node) is dict and (over or _key(node, last) not in node):
        node[_key(node, last)] = value


def _key(node: Mapping[Any, Any], token: str) -> Any:
    """Return the key of a dict that a token of a name stands for: text or a number; the token where there is none."""
    number = token not in node and token.removeprefix("-").isdecimal()
    return int(token) if number and int(token) in node else token

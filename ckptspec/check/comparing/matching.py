"""Owns which parts of two checkpoints are one and the same, from their manifests alone; sees no byte of a tensor."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ckptspec.check.comparing.differences import Difference, Fact
from ckptspec.format.layout import FlatLayout, MeshLayout, layout_document, mesh_document
from ckptspec.format.manifest import FlatGroup, Manifest, TensorEntry

SHOWN = 60  # characters of one value of a manifest
_HEAD = (
    "run_id save_id step created_at wall_clock_seconds parent producer commit world_size copies block block_size "
    "schema_version annotations"
)


@dataclass
class Pair:
    """A tensor of A and a tensor of B, by their own names, that stand under `name` in both; `also` are other names."""

    name: str
    a: str
    b: str
    also: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Matched:
    """What two manifests have in common and what they have not.

    `pairs` have one dtype and shape (or are both local); their values are still to be compared, and those of `objects`.
    """

    names: tuple[str, ...]
    pairs: tuple[Pair, ...]
    objects: tuple[str, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    left_out: int


def names_of(m: Manifest) -> list[str]:
    """Return every name of the manifest that stands for a tensor or an object, in its order."""
    return [*m.tensors, *m.aliases, *m.objects]


def match(a: Manifest, b: Manifest, wanted: Callable[[str], bool]) -> Matched:
    """Return how the names of two checkpoints match; `wanted` tells which names are asked for."""
    every = tuple(dict.fromkeys((*names_of(a), *names_of(b))))
    names = tuple(name for name in every if wanted(name))
    work = _Matching(a, b)
    for name in names:
        work.add(name)
    work.about_flat_groups()
    pairs = tuple(pair for pair in work.pairs.values() if pair is not None)
    found, notes = tuple(work.differences), tuple(dict.fromkeys(work.notes))
    return Matched(names, pairs, tuple(work.objects), found, notes, len(every) - len(names))


class _Matching:
    """Two manifests being matched name by name."""

    def __init__(self, a: Manifest, b: Manifest) -> None:
        self.a, self.b = a, b
        self.groups = [{t: g for g in m.flat_groups.values() for t in g.tensors.values()} for m in (a, b)]
        self.pairs: dict[tuple[str, str], Pair | None] = {}
        self.objects: list[str] = []
        self.differences: list[Difference] = []
        self.notes: list[str] = []

    def add(self, name: str) -> None:
        """Match one name that at least one side has."""
        texts = _what(self.a, name), _what(self.b, name)
        if texts[0] is None or texts[1] is None:
            kind = "only_b" if texts[0] is None else "only_a"
            self.differences.append(Difference(kind, name, a=texts[0], b=texts[1]))
            self._about_omitted(name, texts[0] is None)
        elif (name in self.a.objects) != (name in self.b.objects):
            self.differences.append(Difference("kind", name, a=texts[0], b=texts[1]))
        elif name in self.a.objects:
            self.objects.append(name)
            if texts[0] != texts[1]:
                self.notes.append(f"{name!r} is {texts[0]} in A, {texts[1]} in B: compared rank by rank")
        else:
            self._tensors(name)

    def _about_omitted(self, name: str, in_b: bool) -> None:
        side, omitted = ("A", self.a.omitted) if in_b else ("B", self.b.omitted)
        places = [name, *(name[:i] for i in range(len(name) - 1, 0, -1) if name[i] == "/")]
        place = next((p for p in places if p in omitted), None)
        if place is not None:
            self.notes.append(f"{side} left {place!r} out on purpose: {omitted[place]}")

    def _tensors(self, name: str) -> None:
        a, b = self.a.aliases.get(name, name), self.b.aliases.get(name, name)
        if (name in self.a.aliases) != (name in self.b.aliases):
            here, there = ("A", "B") if name in self.a.aliases else ("B", "A")
            target = a if here == "A" else b
            self.notes.append(f"{name!r} is an alias of {target!r} in {here}, a tensor of its own in {there}")
        if (a, b) in self.pairs:
            pair = self.pairs[a, b]
            if pair is not None:
                pair.also.append(name)
            return
        faults = list(_unlike(name, self.a.tensors[a], self.b.tensors[b]))
        faults += self._members(name, a, b) if not faults else []
        self.differences += faults
        self.pairs[a, b] = None if faults else Pair(name, a, b)

    def _members(self, name: str, a: str, b: str) -> Iterator[Difference]:
        """Yield the difference of two flat tensors that hold other things, so that their elements have no pairs."""
        first, second = self.groups[0].get(a), self.groups[1].get(b)
        known = [group is not None and bool(group.members) for group in (first, second)]
        if first is not None and second is not None and all(known):
            if first.members != second.members:
                yield Difference("members", name, a=_first_unlike(first, second), b=_first_unlike(second, first))
        elif any(known):
            side = "A" if known[0] else "B"
            self.notes.append(f"only {side} says what lies in the flat tensor {name!r}: compared element by element")

    def about_flat_groups(self) -> None:
        """Note what may be one value in two forms: flat on one side, by name on the other."""
        only = {kind: [d.name for d in self.differences if d.kind == kind] for kind in ("only_a", "only_b")}
        for groups, mine, others in ((0, "only_a", "only_b"), (1, "only_b", "only_a")):
            flat = [name for name in only[mine] if name in self.groups[groups]]
            if flat and any(name not in self.groups[1 - groups] for name in only[others]):
                here, there = ("A", "B") if groups == 0 else ("B", "A")
                self.notes.append(
                    f"{here} holds {len(flat)} of these in flat groups (the first: {flat[0]!r}); {there} may hold the "
                    "same values as named tensors: the two forms are not compared"
                )


def _what(m: Manifest, name: str) -> str | None:
    """Return in few words what stands under a name, None where nothing does."""
    if name in m.objects:
        return {"same": "an object", "rank": "an object of each rank"}[m.objects[name]]
    target = m.aliases.get(name, name)
    if target not in m.tensors:
        return None
    t = m.tensors[target]
    text = f"{t.dtype} {_shape(t)}"
    return text if target == name else f"{text}, an alias of {target!r}"


def _shape(t: TensorEntry) -> str:
    return "local to each rank" if t.shape is None else str(list(t.shape))


def _unlike(name: str, a: TensorEntry, b: TensorEntry) -> Iterator[Difference]:
    if a.dtype != b.dtype:
        yield Difference("dtype", name, a=a.dtype, b=b.dtype)
    if a.shape != b.shape:
        yield Difference("shape", name, a=_shape(a), b=_shape(b))


def _first_unlike(group: FlatGroup, other: FlatGroup) -> str:
    """Return the first member of `group` that `other` has not at its place."""
    for i, member in enumerate(group.members):
        if i >= len(other.members) or other.members[i] != member:
            of = "" if member.of_shape is None else f", at {list(member.of_offsets or ())} of {list(member.of_shape)}"
            return f"member {i}: {member.name or 'padding'} {list(member.shape)} from element {member.offset}{of}"
    return f"{len(group.members)} members"


def facts(a: Manifest, b: Manifest) -> Iterator[Fact]:
    """Yield what differs between two saves and is no difference of state: who saved it, when, on what, laid out how."""
    for key in _HEAD.split():
        first, second = getattr(a, key), getattr(b, key)
        if first != second:
            yield Fact(key, _brief(first), _brief(second))
    common = [name for name in a.tensors if name in b.tensors]
    changed = {
        "layouts": _laid_out_anew(a, b, common),
        "roles": sum(a.tensors[name].role != b.tensors[name].role for name in common),
        "annotations": sum(a.tensors[name].annotations != b.tensors[name].annotations for name in common),
    }
    for what, count in changed.items():
        if count:
            yield Fact(f"{what} of {count} {'tensor' if count == 1 else 'tensors'}")
    if a.omitted != b.omitted:
        yield Fact("omitted names", len(a.omitted), len(b.omitted))


def _brief(value: Any) -> Any:
    if value is None or isinstance(value, int):
        return value
    text = value if isinstance(value, str) else json.dumps(dict(value), ensure_ascii=False)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _laid_out_anew(a: Manifest, b: Manifest, common: list[str]) -> int:
    """Return how many tensors have another layout, or one over another mesh; each two layouts are compared once."""
    counts = Counter((a.tensors[name].layout, b.tensors[name].layout) for name in common)
    return sum(n for (first, second), n in counts.items() if _layout(a, first) != _layout(b, second))


def _layout(m: Manifest, name: str) -> object:
    layout = m.layouts[name]
    mesh = m.meshes.get(layout.mesh) if isinstance(layout, (MeshLayout, FlatLayout)) else None
    return layout_document(layout), None if mesh is None else mesh_document(mesh)

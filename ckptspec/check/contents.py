"""Owns the manifest-level rules about names, aliases, objects and flat groups; sees the manifest only, never a file."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ckptspec.check.registry import Rules, fault
from ckptspec.check.worlds import at, one_of
from ckptspec.format.box import Box
from ckptspec.format.digest import ALGORITHMS
from ckptspec.format.layout import FlatLayout
from ckptspec.format.manifest import FlatGroup, Manifest, Member
from ckptspec.format.names import name_fault
from ckptspec.format.report import Finding
from ckptspec.format.tiling import overlap

rule: Rules[Manifest] = Rules("manifest: contents")
SECTIONS = ("tensors", "objects", "aliases", "omitted")


def _names(m: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (section, name) of everything the state tree has a place for."""
    for section in SECTIONS:
        for name in getattr(m, section):
            yield section, name


@rule("N-NAME")
def names(m: Manifest) -> Iterator[Finding]:
    """Every name is a valid one, those inside flat groups too."""
    for section, name in _names(m):
        if problem := name_fault(name):
            yield fault("N-NAME", problem, at(section, name), None, repr(name))
    for group, g in m.flat_groups.items():
        for i, member in enumerate(g.members):
            if member.name is not None and (problem := name_fault(member.name)):
                yield fault("N-NAME", problem, at("flat_groups", group, "members", i, "name"), None, repr(member.name))


@rule("N-UNIQUE")
def unique(m: Manifest) -> Iterator[Finding]:
    """No name is used in two of the tables."""
    seen: dict[str, str] = {}
    for section, name in _names(m):
        if (first := seen.setdefault(name, section)) != section:
            yield fault("N-UNIQUE", f"the name is used in {first} and in {section}", at(section, name))


@rule("N-ALIAS")
def aliases(m: Manifest) -> Iterator[Finding]:
    """Aliases point at tensors."""
    for name, target in m.aliases.items():
        if target not in m.tensors:
            kind = "an alias" if target in m.aliases else "no tensor"
            yield fault("N-ALIAS", f"the alias points at {kind}", at("aliases", name), "a tensor's name", repr(target))


@rule("N-OMITTED")
def omitted(m: Manifest) -> Iterator[Finding]:
    """What is omitted does not lie below a tensor or an alias of one: a leaf has nothing below it."""
    # With `/` as the lowest character, what lies below a name follows it at once.
    ordered = sorted([(_key(n), False, n) for n in (*m.tensors, *m.aliases)] + [(_key(n), True, n) for n in m.omitted])
    leaf = "\0"
    for key, is_omitted, name in ordered:
        below = key.startswith(leaf)
        if not is_omitted and not below:
            leaf = key + "\0"
        elif is_omitted and below:
            found = repr(leaf[:-1].replace("\0", "/"))
            yield fault(
                "N-OMITTED", "the omitted name lies below a tensor that is there", at("omitted", name), None, found
            )


def _key(name: str) -> str:
    return name.replace("/", "\0")


@rule("G-TENSOR")
def group_tensors(m: Manifest) -> Iterator[Finding]:
    """The tensors of a group are there, one-dimensional, of the group's length, and share one flat layout."""
    for name, group in m.flat_groups.items():
        layouts = {m.tensors[t].layout for t in group.tensors.values() if t in m.tensors}
        if len(layouts) > 1:
            yield fault(
                "G-TENSOR", "the tensors of the group differ in layout", at("flat_groups", name), "one", sorted(layouts)
            )
        for kind, tensor in group.tensors.items():
            where = at("flat_groups", name, "tensors", kind)
            entry = m.tensors.get(tensor)
            if entry is None:
                yield fault("G-TENSOR", "the group names a tensor that is not there", where, None, repr(tensor))
            elif entry.shape != (group.numel,):
                found = None if entry.shape is None else list(entry.shape)
                yield fault("G-TENSOR", "the tensor has another shape", where, [group.numel], str(found))
            elif not isinstance(m.layouts.get(entry.layout), (FlatLayout, type(None))):
                yield fault("G-TENSOR", "the tensor is not laid out flat", where, "a flat layout", repr(entry.layout))


@rule("G-TILE")
def group_tiles(m: Manifest) -> Iterator[Finding]:
    """The members follow each other from 0 to the end of the group."""
    for name, group in m.flat_groups.items():
        if not group.members:
            continue  # nobody knows what lies in the group
        end = 0
        for i, member in enumerate(group.members):
            if member.offset != end:
                where = at("flat_groups", name, "members", i, "offset")
                message = "the member leaves a gap" if member.offset > end else "the member overlaps the one before"
                yield fault("G-TILE", message, where, end, member.offset)
                break
            end += prod(member.shape)
        else:
            if end != group.numel:
                message = "the members do not add up to the group"
                yield fault("G-TILE", message, at("flat_groups", name, "numel"), f"{end} elements", group.numel)


def _piece(member: Member) -> Box | None:
    """Return the member as a box of its larger tensor, or None where it is not inside it."""
    of, offsets = member.of_shape, member.of_offsets
    if of is None or offsets is None:
        return Box.whole(member.shape)
    if not len(of) == len(offsets) == len(member.shape):
        return None
    fits = all(o >= 0 and o + s <= n for o, s, n in zip(offsets, member.shape, of, strict=True))
    return Box(offsets, member.shape) if fits else None


@rule("G-OF")
def group_pieces(m: Manifest) -> Iterator[Finding]:
    """A piece lies inside its tensor, and no two members of a group hold one element."""
    for name, group in m.flat_groups.items():
        yield from _group_pieces(name, group)


def _group_pieces(name: str, group: FlatGroup) -> Iterator[Finding]:
    seen: dict[str, tuple[int, Member, list[Box]]] = {}
    for i, member in enumerate(group.members):
        where = at("flat_groups", name, "members", i, tensor=member.name)
        box = _piece(member)
        if box is None:
            of = f"inside {list(member.of_shape or ())}"
            found = f"{list(member.of_offsets or ())} + {list(member.shape)}"
            yield fault("G-OF", "the piece does not lie inside its tensor", where, of, found)
        elif member.name is not None:
            j, first, boxes = seen.setdefault(member.name, (i, member, []))
            shapes = first.of_shape or first.shape, member.of_shape or member.shape
            if shapes[0] != shapes[1]:
                message = f"the tensor has another shape in member {j}"
                yield fault("G-OF", message, where, list(shapes[0]), list(shapes[1]))
            elif not box.empty:
                boxes.append(box)
    for tensor, (i, _, boxes) in seen.items():
        if overlap(boxes) is not None:
            where = at("flat_groups", name, "members", i, tensor=tensor)
            yield fault("G-OF", "two members of the group hold the same elements of the tensor", where)


@rule("D-ALG")
def digests(m: Manifest) -> Iterator[Finding]:
    """The block digest is one of the closed set."""
    if m.block not in ALGORITHMS:
        where = at("digest", "block")
        yield fault("D-ALG", "unknown digest algorithm", where, one_of(dict.fromkeys(ALGORITHMS)), repr(m.block))

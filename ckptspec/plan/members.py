"""Owns which named tensor each piece of a flat group is: members by name, and names of optimizer state by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptspec.format.box import Box
from ckptspec.format.manifest import FlatGroup, Member
from ckptspec.format.names import split
from ckptspec.plan.views import View

STATE = "state"
PARAMETER_KINDS = frozenset(("parameter", "parameters", "param", "params", "flat_param"))  # a group's own parameters


@dataclass(frozen=True)
class Piece:
    """What a flat tensor holds of a named one: `view` says where, in the named tensor's coordinates; `shape` is its."""

    flat: str
    name: str
    view: View
    shape: tuple[int, ...]


def piece(flat: str, member: Member) -> Piece | None:
    """Return a member of a group as a piece of its tensor; None for padding."""
    if member.name is None:
        return None
    shape = member.shape if member.of_shape is None else member.of_shape
    offsets = (0,) * len(member.shape) if member.of_offsets is None else member.of_offsets
    return Piece(flat, member.name, View(member.offset, Box(offsets, member.shape)), shape)


def dotted(name: str) -> str:
    """Return a name with dots between its tokens, as torch writes the path of a parameter."""
    return ".".join(split(name))


@dataclass(frozen=True)
class StateName:
    """The name of one value that an optimizer keeps of a parameter: `<place>/state/<parameter>/<kind>`."""

    place: str
    parameter: str
    kind: str


def state_name(name: str) -> StateName | None:
    """Return a name taken apart as that of optimizer state by parameter, or None where it is none."""
    tokens = split(name)
    if len(tokens) < 3 or tokens[-3] != STATE:
        return None
    return StateName("/".join(tokens[:-3]), tokens[-2], tokens[-1])


def same_parameter(path: str, names: Iterable[str]) -> list[str]:
    """Return those of the tensor `names` that an optimizer calls `path`, the nearest kind of match alone.

    The path is a tensor's last token, or its last tokens with dots between, or, dotted too, its end.
    """
    known = list(dict.fromkeys(names))
    for rule in (_last_token, _last_tokens, _end):
        found = [name for name in known if rule(path, name)]
        if found:
            return found
    return []


def _last_token(path: str, name: str) -> bool:
    return split(name)[-1] == path


def _last_tokens(path: str, name: str) -> bool:
    tokens = split(name)
    return any(".".join(tokens[i:]) == path for i in range(len(tokens)))


def _end(path: str, name: str) -> bool:
    return dotted(name).endswith("." + path)


def kinds(group: FlatGroup) -> Mapping[str, str]:
    """Return a group's flat tensors by kind: the last token where that tells them apart; a parameter has one kind."""
    last = {key: split(key)[-1] for key in group.tensors}
    plain = {key: "parameter" if kind in PARAMETER_KINDS else kind for key, kind in last.items()}
    distinct = len(set(plain.values())) == len(plain)
    return {plain[key] if distinct else key: flat for key, flat in group.tensors.items()}


class Members:
    """The members of many flat groups, by kind of tensor and name."""

    def __init__(self, groups: Mapping[str, FlatGroup]) -> None:
        self._groups = groups

    @cached_property
    def _pieces(self) -> Mapping[str, Mapping[str, list[Piece]]]:
        """Pieces by kind, then by the name of the tensor they are pieces of."""
        out: dict[str, dict[str, list[Piece]]] = {}
        for group in self._groups.values():
            for kind, flat in kinds(group).items():
                for member in group.members:
                    found = piece(flat, member)
                    if found is not None:
                        out.setdefault(kind, {}).setdefault(found.name, []).append(found)
        return out

    @cached_property
    def _ends(self) -> Mapping[str, Mapping[str, list[str]]]:
        """The member names of each kind, by the last of their dotted parts: few are looked at for one parameter."""
        out: dict[str, dict[str, list[str]]] = {}
        for kind, names in self._pieces.items():
            for name in names:
                out.setdefault(kind, {}).setdefault(dotted(name).rpartition(".")[2], []).append(name)
        return out

    @cached_property
    def group_of(self) -> Mapping[str, FlatGroup]:
        """The group of every flat tensor."""
        return {flat: group for group in self._groups.values() for flat in group.tensors.values()}

    @cached_property
    def kind_of(self) -> Mapping[str, str]:
        """The kind of every flat tensor in its group."""
        return {flat: kind for group in self._groups.values() for kind, flat in kinds(group).items()}

    def pieces(self, kind: str, name: str) -> list[Piece]:
        """Return the pieces of one kind of the tensor `name`."""
        return self._pieces.get(kind, {}).get(name, [])

    def of_state(self, wanted: StateName) -> list[str]:
        """Return the names of the members that are the value an optimizer keeps: more than one is an ambiguity."""
        ends = self._ends.get(wanted.kind, {})
        return same_parameter(wanted.parameter, ends.get(wanted.parameter.rpartition(".")[2], ()))

    def listed(self, flat: str) -> Iterator[Piece]:
        """Yield the pieces of one flat tensor in order."""
        for member in self.group_of[flat].members:
            found = piece(flat, member)
            if found is not None:
                yield found

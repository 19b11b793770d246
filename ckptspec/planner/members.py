"""Owns which named tensor each piece of a flat group is: members by name, and names of optimizer state by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ckptspec.format.box import Box
from ckptspec.format.manifest import FlatGroup, Member
from ckptspec.format.names import split
from ckptspec.planner.views import View

STATE = "state"
PARTS = 8  # of a name's end, by which tensors are found; the rules look at all of it
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


def tails(name: str) -> list[int]:
    """Return keys by which tensors are found that end alike: of the last part of a name, the last two, and so on."""
    parts = _plain(name).split(".")[-PARTS:]
    return [hash(".".join(parts[-n:])) for n in range(1, len(parts) + 1)]


def same_parameter(path: str, names: Iterable[str]) -> list[str]:
    """Return those of the tensor `names` that an optimizer calls `path`, the nearest kind of match alone.

    The path is a tensor's name, its last token, its last tokens with dots between, or, dotted too, its end. One that is
    a number is no end: an optimizer's own numbers are not those of a list of parameters.
    """
    rules = (_whole, _last_token) if path.isdecimal() else (_whole, _last_token, _last_tokens, _end)
    known = list(dict.fromkeys(names))
    for rule in rules:
        found = [name for name in known if rule(path, name)]
        if found:
            return found
    return []


def nearness(path: str, name: str) -> int:
    """Return how near a path is to a tensor's name that it can mean: less is nearer."""
    return [rule(path, name) for rule in (_whole, _last_token, _last_tokens, _end)].index(True)


def _plain(path: str) -> str:
    """Return a name or path with nothing but dots between its parts: a key may hold a slash, a path a place."""
    return dotted(path).replace("/", ".")


def _whole(path: str, name: str) -> bool:
    return path == name or _plain(path) == _plain(name)


def _last_token(path: str, name: str) -> bool:
    return split(name)[-1] == path


def _last_tokens(path: str, name: str) -> bool:
    tokens = split(name)
    return any(_plain(".".join(tokens[i:])) == _plain(path) for i in range(len(tokens)))


def _end(path: str, name: str) -> bool:
    return _plain(name).endswith("." + _plain(path))


class Parameters:
    """Names of tensors that an optimizer may keep values of, found by what it calls them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._named: dict[int, list[str]] = {}
        self._called: dict[str, list[str]] = {}
        for name in dict.fromkeys(names):
            for key in tails(name):
                self._named.setdefault(key, []).append(name)

    def called(self, path: str) -> list[str]:
        """Return the tensors that `path` can mean, the nearest kind of match alone."""
        if path not in self._called:
            self._called[path] = same_parameter(path, self._named.get(tails(path)[-1], ()))
        return self._called[path]


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

    @property
    def names(self) -> Iterator[str]:
        """The names of the members of all groups; one of several groups comes as often."""
        return (m.name for group in self._groups.values() for m in group.members if m.name is not None)

    def listed(self, flat: str) -> Iterator[Piece]:
        """Yield the pieces of one flat tensor in order."""
        for member in self.group_of[flat].members:
            found = piece(flat, member)
            if found is not None:
                yield found

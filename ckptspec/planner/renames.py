"""Owns explicit maps between names: what a wanted name is called in the checkpoint; refuses maps that are none."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ckptspec.errors import PlanError, Where

SIZE_LIMIT = 256 << 20  # bytes of a map file, as for a manifest
ENTRIES = 1 << 20


@dataclass(frozen=True)
class Renames:
    """A map from wanted names to stored names; a key and its value may both hold one `*`, which stands for any text.

    An exact key goes before every pattern, and of two patterns the one with more letters before its `*`.
    """

    exact: Mapping[str, str] = field(default_factory=dict)
    patterns: tuple[tuple[str, str, str], ...] = ()

    def of(self, name: str) -> str:
        """Return the stored name that a wanted name stands for: itself where the map says nothing."""
        if name in self.exact:
            return self.exact[name]
        for head, tail, stored in self.patterns:
            if len(name) >= len(head) + len(tail) and name.startswith(head) and name.endswith(tail):
                return stored.replace("*", name[len(head) : len(name) - len(tail)], 1)
        return name

    def idle(self, used: Collection[str]) -> tuple[str, ...]:
        """Return the wanted names and patterns that stand for none of the `used` names: most likely misspelt ones."""
        names = [n for n, stored in self.exact.items() if n not in used and stored != n]
        for head, tail, _ in self.patterns:
            least = len(head) + len(tail)
            if not any(len(n) >= least and n.startswith(head) and n.endswith(tail) for n in used):
                names.append(f"{head}*{tail}")
        return tuple(names)

    def wanted(self) -> Iterator[str]:
        """Yield the wanted names and patterns."""
        yield from self.exact
        yield from (f"{head}*{tail}" for head, tail, _ in self.patterns)

    def document(self) -> dict[str, str]:
        """Return the map as it is written: {wanted: stored}."""
        return {**self.exact, **{f"{head}*{tail}": stored for head, tail, stored in self.patterns}}

    def leading_to(self, stored: str) -> Iterator[str]:
        """Yield the wanted names that stand for a stored name; of a pattern that leads to one name none is known."""
        yield from self._exactly.get(stored, ())
        for head, tail, pattern in self.patterns:
            first, star, last = pattern.partition("*")
            if star and len(stored) >= len(first) + len(last) and stored.startswith(first) and stored.endswith(last):
                wanted = f"{head}{stored[len(first) : len(stored) - len(last)]}{tail}"
                if self.of(wanted) == stored:  # not what another entry of the map is about
                    yield wanted

    @cached_property
    def _exactly(self) -> Mapping[str, list[str]]:
        out: dict[str, list[str]] = {}
        for wanted, stored in self.exact.items():
            out.setdefault(stored, []).append(wanted)
        return out

    def __bool__(self) -> bool:
        return bool(self.exact or self.patterns)


def renames(names: Mapping[str, str] | None) -> Renames:
    """Return the Renames of {wanted: stored}; raises PlanError [X-MAP] for what is no such map."""
    exact, patterns = {}, []
    for wanted, stored in (names or {}).items():
        if not isinstance(wanted, str) or not isinstance(stored, str) or not wanted or not stored:
            raise _no_map("names are texts", f"{wanted!r}: {stored!r}"[:200])
        if wanted.count("*") > 1 or stored.count("*") > wanted.count("*"):
            raise _no_map("a name has at most one *, and the stored one none that the wanted one lacks", wanted[:200])
        if "*" in wanted:
            head, _, tail = wanted.partition("*")
            patterns.append((head, tail, stored))
        else:
            exact[wanted] = stored
    return Renames(exact, tuple(sorted(patterns, key=lambda p: (-len(p[0]), -len(p[1]), p))))


def parse(data: bytes, *, file: str | None = None) -> Renames:
    """Return the Renames in a JSON file's bytes, {"wanted name": "stored name"}; raises PlanError [X-MAP]."""
    try:
        if len(data) > SIZE_LIMIT:
            raise ValueError(f"longer than {SIZE_LIMIT} bytes")
        document = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as e:
        raise _no_map("the map is not JSON", str(e)[:80], file) from None
    if not isinstance(document, dict) or len(document) > ENTRIES:
        raise _no_map("a map is one object of names", type(document).__name__, file)
    return renames(document)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; raises ValueError for a name that is there twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        raise ValueError("a name is there twice")
    return out


def _no_map(message: str, found: str, file: str | None = None) -> PlanError:
    expected = '{"wanted name": "name in the checkpoint", ...}'
    return PlanError(message, rule="X-MAP", where=Where(file), expected=expected, found=found)

"""Owns patterns of names: a name, all that lies below it, or a glob; knows nothing of what the names stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

Patterns = Iterable[str] | None


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name is one of the patterns, below one of them, or matched by one as a glob."""
    return any(name == p or name.startswith(p + "/") or fnmatchcase(name, p) for p in patterns)


def listed(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns as a tuple; a single text is one pattern, not its letters."""
    return (patterns,) if isinstance(patterns, str) else tuple(patterns)


def asked_for(only: Patterns, skip: Patterns) -> Callable[[str], bool]:
    """Return what tells whether a name is asked for: by `only` (None: every name is), and not by `skip`."""
    chosen, dropped = listed(only) if only is not None else None, listed(skip or ())
    if chosen is None and not dropped:
        return lambda name: True
    return lambda name: (chosen is None or matches(name, chosen)) and not matches(name, dropped)

"""Owns paths as words of commands, those the caller gave and new ones beside them, and lists of names in a sentence."""

from __future__ import annotations

from collections.abc import Sequence


def word(path: str) -> str:
    """Return a path as a word of a command that no program takes for an option."""
    return f"./{path}" if path.startswith("-") else path


def beside(path: str, name: str) -> str:
    """Return a path for something new beside `path`: its name, a dash, and `name`."""
    stripped = path.rstrip("/")
    last = stripped.rpartition("/")[2]
    return name if last in ("", ".", "..") else f"{stripped}-{name}"


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more

"""Owns which names a load is about: it compares the state with the checkpoint and lists every deviation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckptspec.errors import PlanError
from ckptspec.format.manifest import Manifest

Patterns = Iterable[str] | None
SHOWN = 40


@dataclass(frozen=True)
class Selection:
    """The names to load, and those left out on request: by only/skip, missing, unexpected."""

    names: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a name is one of the patterns, below one of them, or matched by one as a glob."""
    return any(name == p or name.startswith(p + "/") or fnmatchcase(name, p) for p in patterns)


def select(
    state: Sequence[str],
    checkpoint: Sequence[str],
    *,
    only: Patterns = None,
    skip: Patterns = None,
    missing: str = "error",
    unexpected: str = "error",
    manifest: Manifest | None = None,
) -> Selection:
    """Return the selection; raises PlanError [R-NAME] with both lists printed for names that only one side has."""
    if missing not in ("error", "keep") or unexpected not in ("error", "ignore"):
        raise ValueError('missing is "error" or "keep", unexpected is "error" or "ignore"')
    chosen, dropped = tuple(only) if only is not None else None, tuple(skip or ())

    def wanted(name: str) -> bool:
        return (chosen is None or matches(name, chosen)) and not matches(name, dropped)

    have, here = set(checkpoint), set(state)
    absent = tuple(n for n in state if wanted(n) and n not in have)
    extra = tuple(n for n in checkpoint if wanted(n) and n not in here)
    if (absent and missing == "error") or (extra and unexpected == "error"):
        raise _mismatch(absent, extra, manifest)
    names = tuple(n for n in state if wanted(n) and n in have)
    skipped = tuple(dict.fromkeys(n for n in (*state, *checkpoint) if not wanted(n)))
    return Selection(names, skipped, absent, extra)


def _list(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "none"


def _mismatch(absent: Sequence[str], extra: Sequence[str], manifest: Manifest | None) -> PlanError:
    omitted = [f"{n} was omitted as {manifest.omitted[n]}" for n in absent if manifest and n in manifest.omitted]
    note = f" ({'; '.join(omitted)})" if omitted else ""
    return PlanError(
        f"names differ: missing in the checkpoint: {_list(absent)}{note}; unexpected in it: {_list(extra)}",
        rule="R-NAME",
        advice='rename the keys, or pass missing="keep" / unexpected="ignore" / only= / skip= to leave names out',
    )

"""Owns which names a load is about: it compares the state with the checkpoint and lists every deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptspec.errors import PlanError
from ckptspec.format.manifest import Manifest
from ckptspec.format.names import escape
from ckptspec.format.patterns import Patterns as Patterns
from ckptspec.format.patterns import asked_for as asked_for
from ckptspec.format.patterns import listed as listed
from ckptspec.format.patterns import matches as matches

SHOWN = 40


@dataclass(frozen=True)
class Selection:
    """The names to load, and those left out on request: by only/skip, missing, unexpected."""

    names: tuple[str, ...]
    skipped: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def select(
    state: Sequence[str],
    checkpoint: Sequence[str],
    *,
    only: Patterns = None,
    skip: Patterns = None,
    missing: str = "error",
    unexpected: str = "error",
    manifest: Manifest | None = None,
    left: Sequence[str] = (),
) -> Selection:
    """Return the selection; raises PlanError [R-NAME] with both lists printed for names that only one side has.

    `left` is what of the checkpoint nobody has a use for, by names there: a map may give such a name another meaning
    in the state.
    """
    if missing not in ("error", "keep") or unexpected not in ("error", "ignore"):
        raise ValueError('missing is "error" or "keep", unexpected is "error" or "ignore"')
    wanted = asked_for(only, skip)
    have, here = set(checkpoint), set(state)
    absent = tuple(n for n in state if wanted(n) and n not in have)
    extra = tuple(n for n in (*(n for n in checkpoint if n not in here), *left) if wanted(n))
    if (absent and missing == "error") or (extra and unexpected == "error"):
        raise _mismatch(absent, extra, manifest)
    names = tuple(n for n in state if wanted(n) and n in have)
    skipped = tuple(dict.fromkeys(n for n in (*state, *checkpoint, *left) if not wanted(n)))
    return Selection(names, skipped, absent, extra)


def _list(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "none"


def _mismatch(absent: Sequence[str], extra: Sequence[str], manifest: Manifest | None) -> PlanError:
    omitted = _omitted(absent, manifest.omitted) if manifest else []
    note = f" ({'; '.join(omitted)})" if omitted else ""
    return PlanError(
        f"names differ: missing in the checkpoint: {_list(absent)}{note}; unexpected in it: {_list(extra)}",
        rule="R-NAME",
        advice='rename the keys, or pass missing="keep" / unexpected="ignore" / only= / skip= to leave names out',
    )


def _omitted(names: Sequence[str], omitted: Mapping[str, str]) -> list[str]:
    """Return in words which names, or places above them, were left out of the checkpoint on purpose."""
    found: dict[str, None] = {}
    for name in names if omitted else ():
        places = [name, *(name[:i] for i in range(len(name) - 1, 0, -1) if name[i] == "/")]
        place = next((p for p in places if p in omitted), None)
        if place is not None:
            found[f"{place} was omitted as {omitted[place]}"] = None
    return list(found)[:SHOWN]


def as_fine(parts: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return parts with the objects cut up in whose place the other side has something below: an optimizer that never
    stepped is one object, one that did has its groups beside its tensors."""
    if not any(type(value) in (dict, list, tuple) for value in parts.values()):
        return dict(parts)
    inside = {name[:i] for name in others for i, c in enumerate(name) if c == "/"}
    out: dict[str, Any] = {}

    def put(name: str, value: Any) -> None:
        entries = _entries(value) if name in inside else None
        if entries is None:
            out[name] = value
        for key, item in entries or ():
            put(f"{name}/{escape(str(key))}", item)

    for name, value in parts.items():
        put(name, value)
    return out


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """Return what is in a container by key; None for what is no container, or whose keys have no names."""
    if isinstance(value, dict):
        return list(value.items()) if all(type(k) in (str, int) for k in value) else None
    return list(enumerate(value)) if type(value) in (list, tuple) else None

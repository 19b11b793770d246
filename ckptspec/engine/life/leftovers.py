"""Owns what lies in a run folder beside its checkpoints: what each is, how old, who is at it; removes nothing."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from ckptspec.check.life.leftovers import Leftover
from ckptspec.engine.life.lease import is_lease
from ckptspec.engine.life.signs import Signs, locked, signs
from ckptspec.engine.locate import committed, newest
from ckptspec.engine.saves.staging import MANIFEST, saved
from ckptspec.format import names
from ckptspec.format.manifest import Manifest
from ckptspec.storage import local

# What lies in a step's folder before its manifest does, where the manifest comes last: each name has its save's id.
_UNLINKED = re.compile(r"(?:rank-[0-9]+-|\.manifest-|\.journal-)([0-9a-f]{32})(?:\.shard|\.json|-[0-9a-f]+)\Z")
_HIDDEN = re.compile(r"\.manifest-[0-9a-f]{32}\.json\Z")
_JOURNAL = ".journal-"  # of a reshard, locked while its process lives


def at(path: str, ids: tuple[str, ...], signs: Signs) -> str | None:
    """Return who is at a leftover."""
    return signs.at(*ids) or _resharding(path)


def _resharding(path: str) -> str | None:
    """Return whether a reshard lives that writes in a staging folder."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in local.names(path):
            if name.startswith(_JOURNAL):
                fd = local.open_read(os.path.join(path, name))
                try:
                    if locked(fd):
                        return "a reshard"
                finally:
                    os.close(fd)
    return None


def save_ids(name: str, path: str) -> tuple[str, ...]:
    """Return the ids of the saves that a leftover is of, by its name and by what it holds."""
    special = names.parse_special(name)
    if special is None:
        return tuple(dict.fromkeys(m[1] for m in map(_UNLINKED.match, local.names(path)) if m))
    return tuple(dict.fromkeys(filter(None, (special.id, saved(path)))))


class Leftovers:
    """What lies in a run folder beside its checkpoints, with all that a ruling asks for."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._signs = signs(run)
        self._newest = newest(run)

    def all(self) -> Iterator[Leftover]:
        """Yield every leftover by name."""
        for name in local.names(self._run):
            kind = self._kind(name)
            if kind == "lease":
                yield self._lease(name)
            elif kind is not None:
                with contextlib.suppress(FileNotFoundError):  # another process has just removed it
                    yield self._folder(name, kind)

    def _kind(self, name: str) -> str | None:
        if is_lease(name):
            return "lease"
        special = names.parse_special(name)
        path = os.path.join(self._run, name)
        if not os.path.isdir(path) or os.path.islink(path):
            return None
        if special is not None:
            return "staging" if special.kind == "tmp" else special.kind
        if names.parse_step_folder(name) is None or os.path.lexists(os.path.join(path, MANIFEST)):
            return None
        found = local.names(path)  # where manifests come last: a save that died before, or a removal after it hid it
        hidden = any(_HIDDEN.match(n) for n in found)
        return "staging" if hidden or (found and all(_UNLINKED.match(n) for n in found)) else None

    def _lease(self, name: str) -> Leftover:
        sign = next((s for s in self._signs.signs if s.name == name), None)
        age = self._age(os.path.join(self._run, name))
        if sign is None:  # it never became one, or is gone by now
            return Leftover(name, "lease", age)
        return Leftover(name, "lease", age, sign.holder if sign.alive else None, sign.dead)

    def _folder(self, name: str, kind: str) -> Leftover:
        path = os.path.join(self._run, name)
        ids = save_ids(name, path)
        live = at(path, ids, self._signs)
        dead = kind == "staging" and self._signs.died(ids[:1])
        return Leftover(name, kind, self._age(path), live, dead, self._only(name, kind, path))

    def _age(self, path: str) -> float:
        """Return the seconds since a file, or anything in a folder, changed; a rename counts too."""
        times = [self._changed(path)]
        if os.path.isdir(path):
            times += [self._changed(entry.path) for entry in os.scandir(path)]
        return max(0.0, self._signs.now - max(times))

    def _changed(self, path: str) -> float:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return 0.0
        return max(status.st_mtime, status.st_ctime)

    def _only(self, name: str, kind: str, path: str) -> str | None:
        """Return what would be lost with a folder, None where nothing would be."""
        if kind == "abandoned":
            return None
        m, finding = committed(path)
        if kind == "superseded":
            hidden = m is None and any(_HIDDEN.match(n) for n in local.names(path))  # its removal was cut off
            return None if hidden else self._superseded(m)
        special = names.parse_special(name)
        own = special is not None and m is not None and m.save_id == special.id
        if m is None or finding is not None or (kind == "staging" and own):
            return None
        if kind == "trash":
            latest = self._newest.manifest
            newer = latest is None or latest.step < m.step
            return f"it holds step {m.step}, newer than any good checkpoint of the run" if newer else None
        return self._superseded(m)  # swapped with the save that replaced it, which then died

    def _superseded(self, m: Manifest | None) -> str | None:
        if m is None:
            return "nobody can tell which step it was"
        final, finding = committed(os.path.join(self._run, names.step_folder(m.step)))
        if final is None or finding is not None or final.step != m.step:
            return f"step {m.step} has no other good checkpoint"
        return None

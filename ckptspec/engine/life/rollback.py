"""Owns going back to an older step: newer checkpoints are set aside, none is deleted; refuses to go back to nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from ckptspec.engine.locate import Candidate, candidates, committed
from ckptspec.engine.saves.staging import saved
from ckptspec.errors import NotCommittedError, Where
from ckptspec.format import names
from ckptspec.format.manifest import NAME
from ckptspec.storage import local


@dataclass(frozen=True)
class RolledBack:
    """Where a run now resumes, and the folders that were set aside as (old path, new path), oldest first."""

    path: str
    abandoned: tuple[tuple[str, str], ...]


def _untraced(point: str) -> None:
    """Observe nothing: tests stop a roll-back here."""


def rollback(
    run: str | os.PathLike[str], to: int, *, dry_run: bool = False, trace: Callable[[str], None] = _untraced
) -> RolledBack:
    """Rename every checkpoint above step `to` to `.abandoned-`, durably, so that no restart can resume it [P-ROLLBACK].

    They go oldest first, so at a crash the newest is still the newest, or `to` is: what a reader finds is the old state
    or the new one. Damaged ones go too: repaired, they would be the newest again. With `dry_run` nothing is changed.
    Raises NotCommittedError where `to` is no good checkpoint of the run, or OSError.
    """
    folder = os.fspath(run)
    found = candidates(folder)
    kept = _good(folder, found, to)
    moves = []
    for candidate in sorted((c for c in found if c.step > to), key=_oldest_first):
        old = os.path.join(folder, candidate.name)
        moves.append((old, os.path.join(folder, names.abandoned_folder(candidate.step, _id(old)))))
    for old, new in () if dry_run else moves:
        trace(old)
        local.rename_noreplace(old, new)
        local.fsync_folder(folder)
    trace("done")
    return RolledBack(kept, tuple(moves))


def _oldest_first(candidate: Candidate) -> tuple[int, bool, str]:
    # A superseded one goes before the final one of its step: else it would come to light in between.
    return candidate.step, not candidate.superseded, candidate.name


def _id(folder: str) -> str:
    """Return the save id for the new name, or a fresh one where the manifest cannot tell it."""
    return saved(folder) or secrets.token_hex(16)


def _good(run: str, found: tuple[Candidate, ...], to: int) -> str:
    reason = None
    for candidate in found:
        if candidate.step == to:
            path = os.path.join(run, candidate.name)
            _, finding = committed(path)
            if finding is None:
                return path
            reason = reason or finding
    steps = sorted({c.step for c in found})
    shown = ", ".join(map(str, steps[-20:])) or "none"
    message = f"step {to} is no good checkpoint of this run" + (f": {reason.message}" if reason else "")
    where = Where(os.path.join(os.path.basename(os.path.abspath(run)), names.step_folder(to), NAME))
    raise NotCommittedError(
        message,
        rule=reason.code if reason else "C-MANIFEST",
        where=where,
        expected=f"one of the steps {shown}",
        found=str(to),
    )

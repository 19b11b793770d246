"""Owns what a run's last checkpoints tell of its pace; refuses to mix runs, and reads no more than a few manifests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime

from ckptspec.check.life.cadence import Point
from ckptspec.engine.locate import committed, scan_run
from ckptspec.format.manifest import Manifest

LAST = 10  # checkpoints that tell the pace


def points(run: str, last: int = LAST) -> list[Point]:
    """Return the newest good checkpoints of a run, newest first, as far as they are of the newest one's run_id."""
    found: list[Point] = []
    run_id = None
    for m in _good(run):
        run_id = run_id if run_id is not None else m.run_id
        if m.run_id == run_id and (not found or m.step != found[-1].step):
            parent = m.parent["save_id"] if m.parent is not None else None
            found.append(Point(m.step, m.wall_clock_seconds, _made(m), m.save_id, parent))
        if len(found) == last:
            break
    return found


def _good(run: str) -> Iterator[Manifest]:
    for candidate in scan_run(run, exact=False).steps:
        m, finding = committed(os.path.join(run, candidate.name))
        if m is not None and finding is None:
            yield m


def _made(m: Manifest) -> float | None:
    """Return when a checkpoint was made, in seconds since 1970; None for a date that no calendar has."""
    try:
        return datetime.fromisoformat(m.created_at.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None

"""Owns planning for a checkpoint on disk: reads the manifest; what follows from it is `planner`'s and `check`'s."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckptspec.check.migration import parts
from ckptspec.engine.documents import load_manifest
from ckptspec.format.manifest import Manifest
from ckptspec.format.target import Target
from ckptspec.planner import plans
from ckptspec.planner.planned import Plan
from ckptspec.planner.renames import Renames, renames


def plan(path: str | os.PathLike[str], target: Target, *, names: Mapping[str, str] | None = None) -> Plan:
    """Return what it takes to bring the checkpoint at `path` to `target`: verdicts, and for each rank what it reads.

    No shard is opened. `names` is an explicit map {"wanted name": "name in the checkpoint"}, with one `*` at most.
    What cannot be had is told in the verdicts, see `Plan.possible`. Raises PlanError [R-TARGET] for a target at odds
    with itself, [X-MAP] for no map, NotCommittedError, ManifestError, UnsupportedVersionError or OSError.
    """
    _, manifest = load_manifest(path)
    return judged(manifest, target, renames(names))


def judged(manifest: Manifest, target: Target, names: Renames) -> Plan:
    """Return the plan for a checkpoint whose manifest was read, with all there is to say of each part of its state."""
    return plans.plan(manifest, target, names, judge=parts.verdicts)

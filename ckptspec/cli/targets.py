"""Owns the options that say what a checkpoint shall be loaded on, shared by commands; refuses two of them at once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from ckptspec.errors import PlanError
from ckptspec.format import target as targets
from ckptspec.format.manifest import Manifest
from ckptspec.format.target import Target
from ckptspec.planner import sizing

WORLD_LIMIT = 1 << 24
_AXIS = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._:/+-]*)=([0-9]{1,8})\Z")
F = TypeVar("F", bound=Callable[..., Any])


def options(
    target: str = "Would it load on this target document?",
    world_size: str = "Would it load on N ranks?",
    mesh: str = "Would it load with its own axes at these sizes?",
) -> Callable[[F], F]:
    """Return a decorator that gives a command --target (as `file`), --world-size and --mesh, with these helps."""

    def decorate(f: F) -> F:
        f = click.option("--mesh", metavar="AXIS=N,..", help=mesh)(f)
        f = click.option("--world-size", type=click.IntRange(1, WORLD_LIMIT), metavar="N", help=world_size)(f)
        return click.option("--target", "file", type=click.Path(readable=False), metavar="FILE", help=target)(f)

    return decorate


@dataclass(frozen=True)
class Wanted:
    """What the options said: at most one of a target document's path, a world size, and sizes by axis."""

    file: str | None = None
    world_size: int | None = None
    sizes: dict[str, int] | None = None

    def __bool__(self) -> bool:
        return (self.file, self.world_size, self.sizes) != (None, None, None)

    def target(self, manifest: Manifest) -> Target | None:
        """Return the target that is meant for this checkpoint, None where no option was given.

        Raises PlanError [R-TARGET] for sizes that do not work, [X-TARGET] for a file that is no target, OSError, and
        click's usage error for an axis that no mesh has.
        """
        if self.world_size is not None:
            return sizing.of_world(manifest, self.world_size)
        if self.sizes is not None:
            return _of_axes(manifest, self.sizes)
        return None if self.file is None else read_target(self.file)


def wanted(file: str | None, world_size: int | None, mesh: str | None) -> Wanted:
    """Return what the options say; raises click's usage error where two are given or --mesh is not AXIS=N,.."""
    if sum(option is not None for option in (file, world_size, mesh)) > 1:
        raise click.UsageError("give one of --target, --world-size and --mesh")
    return Wanted(file, world_size, None if mesh is None else sizes(mesh))


def read_target(file: str) -> Target:
    """Return the target in a file; raises PlanError [X-TARGET], OSError."""
    with open(file, "rb") as f:
        return targets.parse(f.read(targets.SIZE_LIMIT + 1), file=file)


def sizes(text: str) -> dict[str, int]:
    """Return the sizes by axis that AXIS=N,AXIS=N says; raises click's usage error for anything else."""
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.match(part.strip())
        if match is None or match[1] in found or not 1 <= int(match[2]) <= WORLD_LIMIT:
            raise click.BadParameter(f"{text!r} is not AXIS=N,AXIS=N with each axis once", param_hint="--mesh")
        found[match[1]] = int(match[2])
    return found


def _of_axes(manifest: Manifest, axes: dict[str, int]) -> Target:
    try:
        return sizing.of_axes(manifest, axes)
    except PlanError as e:
        if e.found not in axes:
            raise
        raise click.BadParameter(f"{e.message}: {e.found}, expected {e.expected}", param_hint="--mesh") from None

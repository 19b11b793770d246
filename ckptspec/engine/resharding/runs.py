"""Owns runs: which elements of a chunk, on either side of a move, are which box of a strip; moves nothing."""

from __future__ import annotations

from dataclasses import dataclass

from ckptspec.engine.resharding.tables import Chunk
from ckptspec.format.box import Box
from ckptspec.planner.views import View


@dataclass(frozen=True)
class Run:
    """Elements of a chunk of the tensor called `name`: `box`, in the strip's coordinates, inside `view`.

    The view's run of elements is counted from the chunk's first element.
    """

    chunk: Chunk
    name: str
    view: View
    box: Box


@dataclass(frozen=True)
class Copy:
    """One box to copy from a stored chunk to a wanted one; `source` None is zeros."""

    source: Run | None
    target: Run
    box: Box
    itemsize: int

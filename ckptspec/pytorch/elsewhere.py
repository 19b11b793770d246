"""Owns the search for values that only other ranks' shards have, in as few shards as can be; decides nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptspec.engine.fetch import Opened
from ckptspec.errors import IntegrityError, ShardError
from ckptspec.format import objects
from ckptspec.format.manifest import Manifest
from ckptspec.format.placement import resolve
from ckptspec.pytorch.places import above


def values(opened: Opened, names: set[str], without: int) -> dict[str, Any]:
    """Return the values of shared objects by name, each out of the first shard found to have it, not that of `without`.

    A manifest does not say who has which object: first it is looked for where the tensors nearest by name are.
    """
    out: dict[str, Any] = {}
    fault: IntegrityError | ShardError | None = None
    every = (shard.rank for shard in opened.manifest.shards)
    for rank in dict.fromkeys([*_likely(opened.manifest, names), *every]) if names else ():
        if not names:
            break
        if rank == without:
            continue
        try:
            tree = opened.document(rank).state
        except (IntegrityError, ShardError) as e:
            if opened.manifest.copies < 2:
                raise
            fault = fault or e  # others have it too, or may have
        else:
            out |= {n: v for n, v in objects.parts(tree, reading=True) if n in names}
            names = names - out.keys()
    if names and fault is not None:
        raise fault
    return out


def _likely(manifest: Manifest, names: set[str]) -> Iterator[int]:
    """Yield, for each of the names, a rank that holds the tensor that shares the longest path with it."""
    near: dict[str, str] = {}
    for tensor, entry in manifest.tensors.items():
        if entry.shape is not None:
            for place in above(tensor):
                near.setdefault(place, entry.layout)
    known: dict[str, int] = {}
    for name in sorted(names):
        layout = next((near[place] for place in reversed([*above(name)]) if place in near), None)
        if layout is not None:
            if layout not in known:
                known[layout] = next(iter(resolve(manifest.layouts[layout], manifest.meshes).ranks()), 0)
            yield known[layout]

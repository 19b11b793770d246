"""Owns the destination: a target with what it leaves open taken from the checkpoint, and the way to each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ckptspec.errors import PlanError, Where
from ckptspec.format.faults import fit_faults, layout_faults, mesh_faults
from ckptspec.format.layout import BoxesLayout, Layout, LocalLayout, Mesh
from ckptspec.format.manifest import FlatGroup, Manifest, TensorEntry
from ckptspec.format.target import Target
from ckptspec.planner.renames import Renames
from ckptspec.planner.routes import Routes
from ckptspec.planner.sizing import of_world


@dataclass(frozen=True)
class Destination:
    """All that a target asks of a checkpoint: where each tensor shall be held, by whom, and what else there is."""

    manifest: Manifest
    world_size: int
    meshes: Mapping[str, Mesh]
    layouts: Mapping[str, Layout]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, str]
    flat_groups: Mapping[str, FlatGroup]
    aliases: Mapping[str, str]
    names: Renames = field(default_factory=Renames)

    @cached_property
    def routes(self) -> Routes:
        """The ways from the wanted tensors to what is stored."""
        return Routes(self.manifest, self.flat_groups, self.names)

    def private(self) -> Iterator[str]:
        """Yield the names of what is private to each rank: local tensors and objects."""
        for name, entry in self.tensors.items():
            if isinstance(self.layouts[entry.layout], LocalLayout):
                yield name
        yield from (name for name, kind in self.objects.items() if kind == "rank")

    @property
    def same_world(self) -> bool:
        """Whether there are as many ranks as wrote the checkpoint."""
        return self.world_size == self.manifest.world_size


def destination(manifest: Manifest, target: Target, names: Renames | None = None) -> Destination:
    """Return the destination that `target` is for this checkpoint; roles and annotations are the checkpoint's.

    A target without meshes keeps the checkpoint's own, their data axes resized. Raises PlanError [R-TARGET] where the
    target is at odds with itself, or what is kept cannot be on its ranks.
    """
    t = target
    if t.meshes is None and t.tensors is None:
        t = _over(of_world(manifest, t.world_size), t)
    kept = t.tensors is None
    tensors = manifest.tensors if t.tensors is None else {n: _known(n, e, manifest) for n, e in t.tensors.items()}
    meshes = {**(manifest.meshes if kept else {}), **(t.meshes or {})}
    layouts = {**(manifest.layouts if kept else {}), **(t.layouts or {})}
    used = {tensors[n].layout for n in tensors}
    if missing := sorted(used - layouts.keys()):
        raise PlanError("the target names a layout that it has not", rule="R-TARGET", found=repr(missing[0]))
    layouts = {n: x for n, x in layouts.items() if n in used}
    over = {x.mesh for x in layouts.values() if not isinstance(x, (LocalLayout, BoxesLayout))}
    if gone := sorted(over - meshes.keys()):
        raise PlanError("the target names a mesh that it has not", rule="R-TARGET", found=repr(gone[0]))
    meshes = {n: x for n, x in meshes.items() if n in over}
    _check(t.world_size, meshes, layouts, tensors)
    groups = manifest.flat_groups if t.flat_groups is None else t.flat_groups
    groups = {n: g for n, g in groups.items() if all(flat in tensors for flat in g.tensors.values())}
    aliases = manifest.aliases if t.aliases is None else t.aliases
    aliases = {n: to for n, to in aliases.items() if to in tensors and n not in tensors}
    objects = manifest.objects if t.objects is None else t.objects
    return Destination(manifest, t.world_size, meshes, layouts, tensors, objects, groups, aliases, names or Renames())


def _check(
    world: int, meshes: Mapping[str, Mesh], layouts: Mapping[str, Layout], tensors: Mapping[str, TensorEntry]
) -> None:
    """Raise PlanError [R-TARGET] for the first mesh, layout or tensor that does not go with the rest."""
    problems = chain(
        (f"mesh {n!r}: {fault}" for n, x in meshes.items() for fault in mesh_faults(x, world)),
        (f"layout {n!r}: {fault}" for n, x in layouts.items() for fault in layout_faults(x, meshes, None, world)),
    )
    for problem in problems:
        raise PlanError(problem, rule="R-TARGET", expected=f"meshes and layouts for {world} ranks")
    fitting = {(t.layout, t.shape): n for n, t in tensors.items() if t.shape is not None}
    for (layout, shape), name in fitting.items():
        for fault in fit_faults(layouts[layout], shape or ()):
            where = Where(tensor=name)
            raise PlanError(str(fault), rule="R-TARGET", where=where, expected="a layout that fits", found=repr(layout))


def _over(whole: Target, partial: Target) -> Target:
    """Return a whole target with what a partial one says in its place."""
    said = {k: v for k, v in vars(partial).items() if v is not None}
    return Target(**{**vars(whole), **said})


def _known(name: str, entry: TensorEntry, manifest: Manifest) -> TensorEntry:
    """Return a target's tensor with the role and annotations of the checkpoint's of that name."""
    held = manifest.tensors.get(name)
    return entry if held is None else TensorEntry(entry.dtype, entry.shape, entry.layout, held.role, held.annotations)

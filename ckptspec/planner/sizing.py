"""Owns what a checkpoint's own layouts become on other sizes: axes resized, flat groups cut anew; moves nothing.

A mesh over all ranks follows the new world size by its data axes. A mesh over some ranks keeps those that are still
there; what was pinned to an index that is gone goes to that index modulo the new size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

from ckptspec.errors import PlanError
from ckptspec.format.box import Box
from ckptspec.format.layout import Axis, BoxesLayout, FlatLayout, Layout, LocalLayout, Mesh, MeshLayout, members
from ckptspec.format.manifest import Manifest
from ckptspec.format.narrow import mesh_of
from ckptspec.format.target import Target, of_manifest

_RESIZE = "or resize other axes with --mesh"


@dataclass(frozen=True)
class Fixed:
    """What of a world cannot follow another world size: the product of the axes that are not of kind data.

    A mesh that has no axis of kind data does not follow at all.
    """

    mesh: str
    ranks: int
    follows: bool


def fixed(manifest: Manifest) -> tuple[Fixed, ...]:
    """Return, for every mesh over all ranks, the ranks that one index of its data axes stands for."""
    whole = {n: m for n, m in manifest.meshes.items() if m.size == manifest.world_size}
    others = {n: [a for a in m.axes if a.kind != "data"] for n, m in whole.items()}
    return tuple(Fixed(n, prod(a.size for a in o), len(o) < len(whole[n].axes)) for n, o in others.items())


def unit(manifest: Manifest) -> int:
    """Return the number of which every possible world size is a multiple."""
    return lcm(*(f.ranks for f in fixed(manifest)))


def of_world(manifest: Manifest, world_size: int) -> Target:
    """Return the checkpoint's own layouts on `world_size` ranks, as a target that leaves nothing open.

    Only axes of kind data change. Raises PlanError [R-TARGET] naming the sizes that work.
    """
    if world_size == manifest.world_size:
        return of_manifest(manifest)
    if world_size < 1:
        raise PlanError("no world has this size", rule="R-TARGET", expected="1 or more ranks", found=str(world_size))
    _divides(manifest, world_size)
    meshes = {}
    for name, mesh in manifest.meshes.items():
        whole = mesh.size == manifest.world_size
        meshes[name] = _follow(mesh, world_size) if whole else _remaining(name, mesh, world_size)
    return _target(manifest, meshes, world_size)


def of_axes(manifest: Manifest, sizes: Mapping[str, int]) -> Target:
    """Return the checkpoint's own layouts with the axes named in `sizes` at another size, as a target.

    Raises PlanError [R-TARGET] when no mesh has an axis of a given name, when only one over some ranks has it,
    and when the meshes do not agree on the ranks.
    """
    named = _named(manifest, sizes)
    totals = {named[n].size for n in named if manifest.meshes[n].size == manifest.world_size}
    if len(totals) > 1:
        found = ", ".join(map(str, sorted(totals)))
        raise PlanError("the resized meshes differ in size", rule="R-TARGET", expected="one world size", found=found)
    world = totals.pop() if totals else manifest.world_size
    meshes = {}
    for name, mesh in manifest.meshes.items():
        if name in named and mesh.size == manifest.world_size:
            meshes[name] = named[name]
        elif mesh.size == manifest.world_size and world != manifest.world_size:
            _divides(manifest, world, only=name)
            meshes[name] = _follow(mesh, world)
        else:
            meshes[name] = _remaining(name, mesh, world)
    return _target(manifest, meshes, world)


def _named(manifest: Manifest, sizes: Mapping[str, int]) -> dict[str, Mesh]:
    """Return the meshes that have one of the axes, resized."""
    known = {axis.name for mesh in manifest.meshes.values() for axis in mesh.axes}
    for name in sizes:
        if name not in known:
            expected = "one of " + ", ".join(sorted(known)) if known else "none: the checkpoint has no mesh"
            raise PlanError("no mesh of the checkpoint has this axis", rule="R-TARGET", expected=expected, found=name)
        if sizes[name] < 1:
            message = f"axis {name!r} cannot have this size"
            raise PlanError(message, rule="R-TARGET", expected="1 or more", found=str(sizes[name]))
    named = {n: _resized(m, sizes) for n, m in manifest.meshes.items() if any(a.name in sizes for a in m.axes)}
    followed = {a.name for n in named if manifest.meshes[n].size == manifest.world_size for a in named[n].axes}
    for name, mesh in named.items():
        alone = [a.name for a in mesh.axes if a.name in sizes and a.name not in followed]
        if alone and mesh != manifest.meshes[name]:
            message = f"mesh {name!r} is over some ranks, and nobody knows over which it would be at another size"
            expected = f"{alone[0]} at its own size, or a target document that says which ranks"
            raise PlanError(message, rule="R-TARGET", expected=expected, found=str(sizes[alone[0]]))
    return named


def _divides(manifest: Manifest, world: int, only: str | None = None) -> None:
    found = f"{world} ranks"
    concerned = [f for f in fixed(manifest) if only is None or f.mesh == only]
    if stuck := [f.mesh for f in concerned if not f.follows]:
        message = f"mesh {stuck[0]!r} has no axis of kind data that could follow"
        expected = f"{manifest.world_size} ranks, as saved"
        raise PlanError(message, rule="R-TARGET", expected=expected, found=found, advice=_RESIZE)
    bad = [f for f in concerned if world % f.ranks]
    if not bad:
        return
    step = unit(manifest)
    near = [n for n in (world // step * step, (world // step + 1) * step) if n]
    message = f"the axes of mesh {bad[0].mesh!r} that are not of kind data need a multiple of {bad[0].ranks} ranks"
    expected = f"{' or '.join(map(str, near))}, the nearest world sizes that work (multiples of {step})"
    raise PlanError(message, rule="R-TARGET", expected=expected, found=found, advice=_RESIZE)


def _resized(mesh: Mesh, sizes: Mapping[str, int]) -> Mesh:
    axes = tuple(Axis(a.name, sizes.get(a.name, a.size), a.kind) for a in mesh.axes)
    return mesh if axes == mesh.axes else replace(mesh, axes=axes, ranks=None)


def _follow(mesh: Mesh, world: int) -> Mesh:
    """Return a mesh over all ranks at another world size: one data axis changes, or all become the last of them."""
    data = [i for i, a in enumerate(mesh.axes) if a.kind == "data"]
    total = world // prod(a.size for a in mesh.axes if a.kind != "data")
    sizes = [a.size for a in mesh.axes]
    for i in data:
        others = prod(sizes[j] for j in data if j != i)
        if total % others == 0:
            sizes[i] = total // others
            break
    else:
        for i in data:
            sizes[i] = 1
        sizes[data[-1]] = total
    axes = tuple(replace(a, size=n) for a, n in zip(mesh.axes, sizes, strict=True))
    return mesh if axes == mesh.axes else replace(mesh, axes=axes, ranks=None)


def _remaining(name: str, mesh: Mesh, world: int) -> Mesh:
    """Return a mesh over some ranks, those that are gone replaced where one axis is all there is to follow."""
    ranks = tuple(members(mesh))
    if ranks[-1] < world:
        return mesh
    if len(mesh.axes) > 1:
        message = f"mesh {name!r} is over listed ranks of which some are gone"
        expected = f"at least {ranks[-1] + 1} ranks, or a target document that lays its tensors out anew"
        raise PlanError(message, rule="R-TARGET", expected=expected, found=f"{world} ranks")
    kept = tuple(sorted({rank % world for rank in ranks}))
    return mesh_of((replace(mesh.axes[0], size=len(kept)),), kept)


def _target(manifest: Manifest, meshes: Mapping[str, Mesh], world: int) -> Target:
    layouts = {n: _layout(x, manifest, meshes, world) for n, x in manifest.layouts.items()}
    return replace(of_manifest(manifest), world_size=world, meshes=dict(meshes), layouts=layouts)


def _layout(layout: Layout, manifest: Manifest, meshes: Mapping[str, Mesh], world: int) -> Layout:
    """Return a layout on the resized meshes: pins inside their axes, explicit bounds left to equal parts."""
    if isinstance(layout, LocalLayout):
        return layout
    if isinstance(layout, BoxesLayout):
        return BoxesLayout(_listed(layout.boxes, world))
    mesh = meshes[layout.mesh]
    at = {axis: i % mesh.axis(axis).size for axis, i in layout.at.items()}
    if isinstance(layout, MeshLayout):
        return layout if at == layout.at else replace(layout, at=at)
    same = mesh == manifest.meshes[layout.mesh]
    return layout if same else FlatLayout(layout.mesh, layout.axes, at, layout.align)


def _listed(boxes: Sequence[tuple[int, Box]], world: int) -> tuple[tuple[int, Box], ...]:
    return tuple(dict.fromkeys((rank % world, box) for rank, box in boxes))

"""Owns the rules between a checkpoint and a target: what differs, so that loading would fail; moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ckptspec.check.registry import Rules, fault
from ckptspec.check.worlds import at
from ckptspec.errors import Where
from ckptspec.format.faults import layout_faults, mesh_faults
from ckptspec.format.layout import FlatLayout, Layout, LocalLayout, MeshLayout
from ckptspec.format.manifest import Manifest, TensorEntry
from ckptspec.format.names import escape
from ckptspec.format.placement import resolve
from ckptspec.format.report import Finding
from ckptspec.format.target import Target

SUGGEST = 20  # names for which the nearest one is looked for
FEW = 8


@dataclass(frozen=True)
class Fit:
    """A checkpoint and what it shall be loaded on."""

    manifest: Manifest
    target: Target

    def shared(self) -> Iterator[tuple[str, TensorEntry, TensorEntry]]:
        """Yield (name, the checkpoint's entry, the target's entry) of every tensor that both have."""
        m = self.manifest
        for name, wanted in (self.target.tensors or {}).items():
            held = m.tensors.get(m.aliases.get(name, name))
            if held is not None:
                yield name, held, wanted


rule: Rules[Fit] = Rules("target")


def _in_target(*tokens: object) -> Where:
    return Where("target", "".join("/" + escape(str(token)) for token in tokens))


@rule("R-TARGET")
def consistent(f: Fit) -> Iterator[Finding]:
    """The target's meshes fit its world, its layouts their meshes and tensors."""
    t = f.target
    meshes, layouts = t.meshes or {}, t.layouts or {}
    for name, mesh in meshes.items():
        for problem in mesh_faults(mesh, t.world_size):
            yield fault("R-TARGET", problem.message, _in_target("meshes", name))
    for name, layout in layouts.items():
        for problem in islice(layout_faults(layout, meshes, None, t.world_size), FEW):
            yield fault("R-TARGET", problem.message, _in_target("layouts", name))
    for name, tensor in (t.tensors or {}).items():
        if tensor.layout not in layouts:
            message = "the target names a layout that it has not"
            yield fault("R-TARGET", message, _in_target("tensors", name), None, repr(tensor.layout))
            continue
        found = layout_faults(layouts[tensor.layout], meshes, tensor.shape, t.world_size)
        for problem in islice(found, FEW):
            if problem.rule != "T-LAYOUT":
                yield fault("R-TARGET", problem.message, _in_target("tensors", name))


@rule("R-WORLD")
def worlds(f: Fit) -> Iterator[Finding]:
    """This release loads a checkpoint on as many ranks as wrote it, and on no other number."""
    have, want = f.manifest.world_size, f.target.world_size
    if have != want:
        message = "the checkpoint cannot be loaded on another world size by this release"
        yield fault("R-WORLD", message, at("world_size"), f"{have} ranks, as saved", f"{want} ranks in the target")


@rule("R-LAYOUT")
def layouts(f: Fit) -> Iterator[Finding]:
    """Each rank of the target holds the boxes that it held in the checkpoint; asked only where the worlds agree."""
    m, t = f.manifest, f.target
    if m.world_size != t.world_size:
        return
    known: dict[Any, bool] = {}
    for name, held, wanted in f.shared():
        key = (held.layout, wanted.layout, held.shape)
        if held.shape != wanted.shape or wanted.layout not in (t.layouts or {}):
            continue
        if key not in known:
            known[key] = _same_layout(f, held, wanted)
        if not known[key]:
            message = "the target holds the tensor by another layout"
            yield fault("R-LAYOUT", message, at("tensors", name, "layout", tensor=name), held.layout, wanted.layout)
    if t.tensors is None:
        for name, mesh in (t.meshes or {}).items():
            if name in m.meshes and (mesh.shape, mesh.ranks) != (m.meshes[name].shape, m.meshes[name].ranks):
                yield fault(
                    "R-LAYOUT", "the target has another mesh", at("meshes", name), _mesh(m, name), _mesh(t, name)
                )


def _mesh(owner: Manifest | Target, name: str) -> str:
    return " x ".join(f"{axis.name}={axis.size}" for axis in (owner.meshes or {})[name].axes)


def _same_layout(f: Fit, held: TensorEntry, wanted: TensorEntry) -> bool:
    """Tell whether both layouts give every rank the same boxes, whatever their meshes and axes are called."""
    m, t = f.manifest, f.target
    one, other = m.layouts[held.layout], (t.layouts or {})[wanted.layout]
    if isinstance(one, LocalLayout) or isinstance(other, LocalLayout):
        return type(one) is type(other)
    if one == other and _mesh_of(one, m) == _mesh_of(other, t):
        return True
    shape = held.shape or ()
    if isinstance(one, FlatLayout) != isinstance(other, FlatLayout) or any(layout_faults(other, t.meshes or {}, shape)):
        return False
    ours, theirs = resolve(one, m.meshes), resolve(other, t.meshes or {})
    return ours.ranks() == theirs.ranks() and dict(ours.parts(shape)) == dict(theirs.parts(shape))


def _mesh_of(layout: Layout, owner: Manifest | Target) -> object:
    return (owner.meshes or {}).get(layout.mesh) if isinstance(layout, (MeshLayout, FlatLayout)) else None


@rule("R-NAME")
def names(f: Fit) -> Iterator[Finding]:
    """Both have the same tensors and objects, as far as the target says which it has."""
    m, t = f.manifest, f.target
    if t.tensors is not None:
        unsaid = m.aliases if t.aliases is None else {}  # a target that names no aliases may have any of them
        yield from _differ("tensor", {**m.tensors, **m.aliases}, {**t.tensors, **(t.aliases or unsaid)})
    if t.objects is not None:
        yield from _differ("object", m.objects, t.objects)


def _differ(kind: str, held: Iterable[str], wanted: Iterable[str]) -> Iterator[Finding]:
    have, want = dict.fromkeys(held), dict.fromkeys(wanted)
    missing, surplus = [n for n in want if n not in have], [n for n in have if n not in want]
    for i, name in enumerate(missing):
        near = nearest(name, surplus or have) if i < SUGGEST else None
        message = f"the target wants {kind} {name!r}, which the checkpoint has not"
        yield fault("R-NAME", message, Where(tensor=name), None, f"{near!r} is near" if near else None)
    for name in surplus:
        message = f"the checkpoint holds {kind} {name!r}, which the target has not"
        yield fault("R-NAME", message, Where(tensor=name))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the one of `names` that shares the longest beginning and end with `name`, if that is most of it."""
    best, score = None, 0
    for other in names:
        room = min(len(name), len(other))
        head = next((i for i in range(room) if name[i] != other[i]), room)
        tail = next((i for i in range(room - head) if name[-1 - i] != other[-1 - i]), room - head)
        if head + tail > score:
            best, score = other, head + tail
    return best if best is not None and score * 5 >= max(len(name), len(best)) * 3 else None


@rule("R-DTYPE")
def dtypes(f: Fit) -> Iterator[Finding]:
    """Dtypes are the same: nothing is cast in silence."""
    for name, held, wanted in f.shared():
        if held.dtype != wanted.dtype:
            where = at("tensors", name, "dtype", tensor=name)
            yield fault("R-DTYPE", "the target wants another dtype", where, held.dtype, wanted.dtype)


@rule("R-SHAPE")
def shapes(f: Fit) -> Iterator[Finding]:
    """Shapes are the same: nothing is padded or cut."""
    for name, held, wanted in f.shared():
        if held.shape != wanted.shape:
            where = at("tensors", name, "shape", tensor=name)
            yield fault("R-SHAPE", "the target wants another shape", where, _shape(held), _shape(wanted))


def _shape(entry: TensorEntry) -> str:
    return "a shape of each rank's own" if entry.shape is None else str(list(entry.shape))


def check_target(manifest: Manifest, target: Target) -> Iterator[Finding]:
    """Yield what stands between a sound checkpoint and loading it on `target`; a target at odds with itself first."""
    fit = Fit(manifest, target)
    broken = list(consistent(fit))
    yield from broken or rule.run(fit)

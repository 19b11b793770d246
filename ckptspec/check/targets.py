"""Owns the rules between a checkpoint and a target: what would fail, and what would reshard; moves nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

from ckptspec.check.migration.naming import Asked, Compared, compare
from ckptspec.check.migration.nearness import nearest as nearest
from ckptspec.check.registry import Rules, fault
from ckptspec.check.worlds import at
from ckptspec.errors import PlanError, Where
from ckptspec.format.faults import layout_faults, mesh_faults
from ckptspec.format.layout import FlatLayout, Layout, LocalLayout, MeshLayout
from ckptspec.format.manifest import Manifest, TensorEntry
from ckptspec.format.names import escape
from ckptspec.format.placement import resolve
from ckptspec.format.report import Finding
from ckptspec.format.signature import Described
from ckptspec.format.target import Target
from ckptspec.planner.destination import Destination, destination
from ckptspec.planner.renames import Renames

FEW = 8
MANY = 1000  # the comparison of names has a limit for each of its lists


@dataclass(frozen=True)
class Fit:
    """A checkpoint and what it shall be loaded on; `exact` asks for the world size and the layouts that were saved."""

    manifest: Manifest
    target: Target
    destination: Destination
    exact: bool = False

    @cached_property
    def compared(self) -> Compared:
        """How the names that the target has compare with the checkpoint's."""
        t, d = self.target, self.destination
        wanted = {n: Described(e.dtype, e.shape) for n, e in d.tensors.items()}
        asked = Asked(wanted, t.aliases, t.objects)
        if t.tensors is None:
            stored = (*self.manifest.tensors, *self.manifest.aliases)
            named = {w: s for s in stored for w in d.names.leading_to(s)} if d.names else {}
            asked = Asked(wanted, {**self.manifest.aliases, **d.names.exact, **named}, open=True)
        return compare(asked, d.routes, exact=self.exact)

    def eased(self, finding: Finding) -> Finding:
        """Return what only makes a load reshard as a warning, unless exactness is asked for."""
        return finding if self.exact else replace(finding, severity="warning")


rule: Rules[Fit] = Rules("target")


def _in_target(*tokens: object) -> Where:
    return Where("target", "".join("/" + escape(str(token)) for token in tokens))


def consistent(t: Target) -> Iterator[Finding]:
    """Yield where a target's meshes do not fit its world, or its layouts their meshes and tensors [R-TARGET]."""
    meshes, layouts = t.meshes or {}, t.layouts or {}
    for name, mesh in meshes.items():
        for problem in mesh_faults(mesh, t.world_size):
            yield fault("R-TARGET", problem.message, _in_target("meshes", name))
    for name, layout in layouts.items():
        for problem in islice(layout_faults(layout, meshes, None, t.world_size), FEW):
            yield fault("R-TARGET", problem.message, _in_target("layouts", name))
    known: set[object] = set()
    for name, tensor in (t.tensors or {}).items():
        if tensor.layout not in layouts:
            message = "the target names a layout that it has not"
            yield fault("R-TARGET", message, _in_target("tensors", name), None, repr(tensor.layout))
        elif (tensor.layout, tensor.shape) not in known:
            known.add((tensor.layout, tensor.shape))
            found = layout_faults(layouts[tensor.layout], meshes, tensor.shape, t.world_size)
            for problem in islice(found, FEW):
                if problem.rule != "T-LAYOUT":
                    yield fault("R-TARGET", problem.message, _in_target("tensors", name))


@rule("R-TARGET")
def settled(f: Fit) -> Iterator[Finding]:
    """What the target leaves open can be filled in from the checkpoint without a contradiction."""
    d = f.destination
    if f.target.tensors is None:
        yield from consistent(Target(d.world_size, d.meshes, d.layouts, d.tensors))


@rule("R-WORLD")
def worlds(f: Fit) -> Iterator[Finding]:
    """As many ranks as wrote the checkpoint can load it as it lies; another number reshards while loading."""
    have, want = f.manifest.world_size, f.target.world_size
    if have != want:
        message = "the target has another world size" + ("" if f.exact else ": loading reshards")
        found = fault("R-WORLD", message, at("world_size"), f"{have} ranks, as saved", f"{want} ranks in the target")
        yield f.eased(found)


@rule("R-LAYOUT")
def layouts(f: Fit) -> Iterator[Finding]:
    """Each rank of the target holds the boxes that it held in the checkpoint; asked only where the worlds agree."""
    if f.manifest.world_size != f.target.world_size:
        return
    known: dict[object, bool] = {}
    moved: dict[tuple[str, str], list[str]] = {}
    formed = set(f.compared.other_form)
    for name, route in f.compared.found.items():
        wanted = f.destination.tensors.get(name)
        if wanted is None or name in formed:
            continue
        held = f.manifest.tensors[route.sources[0]]
        key = (held.layout, wanted.layout, held.shape)
        if key not in known:
            known[key] = held.shape != wanted.shape or _same_layout(f, held, wanted)
        if not known[key]:
            moved.setdefault((held.layout, wanted.layout), []).append(name)
    end = "" if f.exact else ": loading reshards"
    for (old, new), names in moved.items():
        message = f"the target holds {_count(names)} by another layout{end}"
        yield f.eased(fault("R-LAYOUT", message, at("tensors", names[0], "layout", tensor=names[0]), old, new))
    if f.compared.other_form:
        names = f.compared.other_form
        message = f"the target holds {_count(names)} in another form than is stored, flat or named{end}"
        yield f.eased(fault("R-LAYOUT", message, Where(tensor=names[0])))


def _count(names: list[str]) -> str:
    return "the tensor" if len(names) == 1 else f"this tensor and {len(names) - 1} more"


def _same_layout(f: Fit, held: TensorEntry, wanted: TensorEntry) -> bool:
    """Tell whether both layouts give every rank the same boxes, whatever their meshes and axes are called."""
    m, d = f.manifest, f.destination
    one, other = m.layouts[held.layout], d.layouts[wanted.layout]
    if isinstance(one, LocalLayout) or isinstance(other, LocalLayout):
        return type(one) is type(other)
    if one == other and _mesh_of(one, m) == _mesh_of(other, d):
        return True
    shape = held.shape or ()
    if isinstance(one, FlatLayout) != isinstance(other, FlatLayout) or any(layout_faults(other, d.meshes, shape)):
        return False
    ours, theirs = resolve(one, m.meshes), resolve(other, d.meshes)
    return ours.ranks() == theirs.ranks() and dict(ours.parts(shape)) == dict(theirs.parts(shape))


def _mesh_of(layout: Layout, owner: Manifest | Destination) -> object:
    return owner.meshes.get(layout.mesh) if isinstance(layout, (MeshLayout, FlatLayout)) else None


@rule("R-NAME")
def names(f: Fit) -> Iterator[Finding]:
    """Both have the same tensors and objects, as far as the target says which it has, in whatever form."""
    yield from (x for x in f.compared.findings if x.code in ("R-NAME", "X-MAP"))


@rule("Q-ALIAS")
def aliases(f: Fit) -> Iterator[Finding]:
    """Tensors that are one memory in the target are one tensor in the checkpoint: else the last one read would win."""
    for name, target in (f.target.aliases or {}).items():
        one, other = f.compared.found.get(name), f.compared.found.get(target)
        if one is not None and other is not None and one.sources != other.sources:
            message = f"the target has one memory for {name!r} and {target!r}, which are two tensors in the checkpoint"
            yield fault("Q-ALIAS", message, Where(tensor=name))


@rule("R-DTYPE")
def dtypes(f: Fit) -> Iterator[Finding]:
    """Dtypes are the same: nothing is cast in silence."""
    yield from (x for x in f.compared.findings if x.code == "R-DTYPE")


@rule("R-SHAPE")
def shapes(f: Fit) -> Iterator[Finding]:
    """Shapes are the same: nothing is padded or cut."""
    yield from (x for x in f.compared.findings if x.code == "R-SHAPE")


@dataclass(frozen=True)
class Judged:
    """What stands between a sound checkpoint and a target; `fit` None: the target cannot be settled at all."""

    findings: tuple[Finding, ...]
    fit: Fit | None = None
    names: Renames = field(default_factory=Renames)


def judge(manifest: Manifest, target: Target, *, exact: bool = False, names: Renames | None = None) -> Judged:
    """Return what stands between a sound checkpoint and loading it on `target`; a target at odds with itself first."""
    names = names or Renames()
    broken = list(consistent(target))
    if broken:
        return Judged(tuple(broken), None, names)
    try:
        fit = Fit(manifest, target, destination(manifest, target, names), exact)
    except PlanError as e:
        return Judged((Finding.of_error(e, file="target"),), None, names)
    broken = list(settled(fit))
    return Judged(tuple(broken), None, names) if broken else Judged(tuple(rule.run(fit, MANY)), fit, names)

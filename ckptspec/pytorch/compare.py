"""Owns the comparison of the state's tensors with the checkpoint's, before a byte is read; moves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ckptspec.engine.fetch import Opened
from ckptspec.errors import PlanError, Where
from ckptspec.format.box import Box
from ckptspec.format.layout import BoxesLayout, Layout, MeshLayout
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.placement import resolve
from ckptspec.planner.routes import Route
from ckptspec.pytorch.overlap import Filled
from ckptspec.pytorch.record import Leaf
from ckptspec.pytorch.select import listed, matches

Cast = bool | Sequence[str]
_SHOWN = 20


class Comparison:
    """What the tensors of one rank's state have in common with those of a checkpoint; collects the casts it allows.

    With `exact` a tensor must be laid out as it was saved.
    """

    def __init__(self, opened: Opened, rank: int, cast: Cast | None, *, exact: bool) -> None:
        self.opened = opened
        self.manifest = opened.manifest
        self.rank = rank
        self.cast = cast
        self.exact = exact
        self.casts: dict[str, tuple[str, str]] = {}
        self.filled = Filled()
        self.rows: dict[str, int] | None = None

    def fault(self, name: str, route: Route, leaf: Leaf) -> PlanError | None:
        """Return why a tensor of the state cannot take the one stored: dtype, shape, memory or layout."""
        where = Where(tensor=name, rank=self.rank)
        if route.dtype != leaf.entry.dtype:
            if not self._may_cast(name):
                advice = 'convert the state first, or pass cast=["name or glob"]'
                return PlanError("dtypes differ", rule="R-DTYPE", where=where, expected=route.dtype,
                                 found=leaf.entry.dtype, advice=advice)  # fmt: skip
            self.casts[name] = (route.dtype, leaf.entry.dtype)
        return self._shapes(route, leaf, where) or self._memory(name, _target(name, route), leaf.tensor, where)

    def _may_cast(self, name: str) -> bool:
        return self.cast is True or (bool(self.cast) and matches(name, listed(self.cast)))  # type: ignore[arg-type]

    def _shapes(self, route: Route, leaf: Leaf, where: Where) -> PlanError | None:
        entry = self.manifest.tensors[route.sources[0]] if route.sources else None
        local = entry is not None and entry.shape is None
        shape = self._local_shape(route.sources[0]) if local else route.shape
        found = tuple(leaf.tensor.shape) if leaf.entry.shape is None else leaf.entry.shape
        if shape != found:
            return PlanError("shapes differ", rule="R-SHAPE", where=where, expected=str(list(shape)),
                             found=str(list(found)))  # fmt: skip
        if local != (leaf.entry.shape is None):
            kinds = {True: "local: every rank its own", False: "shared by all ranks"}
            return PlanError("layouts differ", rule="R-LAYOUT", where=where, expected=kinds[local],
                             found=kinds[leaf.entry.shape is None],
                             advice="wrap it in ckptspec.Local, or unwrap it, as it was saved")  # fmt: skip
        return self._boxes(entry, leaf, where) if self.exact and entry is not None and not local else None

    def _local_shape(self, name: str) -> tuple[int, ...]:
        index = self.opened.document(self.rank).index
        if self.rows is None:
            self.rows = {name: row for row, name in enumerate(index.names)}
        return index.shapes[self.rows[name]]

    def _boxes(self, entry: TensorEntry, leaf: Leaf, where: Where) -> PlanError | None:
        layout, shape = self.manifest.layouts[entry.layout], entry.shape or ()
        held = resolve(layout, self.manifest.meshes).boxes(shape, self.rank)
        asked = leaf.boxes if leaf.reads is None else leaf.reads
        if held == asked:
            return None
        here, whole = tuple(b for b in asked if not b.empty), Box.whole(shape)
        if held == here or (whole.empty and not here) or (here == (whole,) and unsplit(layout, whole)):
            return None
        return PlanError(
            "layouts differ, and exact=True asks for the one that was saved",
            rule="R-LAYOUT",
            where=where,
            expected=f"layout {entry.layout!r}: boxes {[(b.offsets, b.sizes) for b in held]}",
            found=f"boxes {[(b.offsets, b.sizes) for b in here]}",
            advice="build the state with the meshes and placements it was saved with, or load without exact=True",
        )

    def _memory(self, name: str, target: str, t: Tensor, where: Where) -> PlanError | None:
        """Return why memory cannot be filled: expanded, or one memory for two tensors of the checkpoint."""
        strides = t.stride()
        if 0 in strides and any(s == 0 and n > 1 for s, n in zip(strides, t.shape, strict=True)):
            return PlanError("an expanded tensor cannot be filled", rule="R-LAYOUT", where=where,
                             advice="give it memory of its own: tensor.clone()")  # fmt: skip
        other = self.filled.overlap(t, target)
        if other is None:
            return None
        return PlanError(
            "two tensors share memory in the state but not in the checkpoint",
            rule="Q-ALIAS",
            where=Where(tensor=name),
            expected=f"memory of its own: {other!r} is another tensor",
            found="memory in common",
            advice="untie them before the load",
        )


def _target(name: str, route: Route) -> str:
    """Return what fills a tensor: two that are filled from the very same elements may share their memory."""
    if len(route.sources) != 1 or route.lands:
        return name
    views = {s.view.start for s in route.strands if s.view is not None}  # of one flat tensor, each member its own
    return f"{route.sources[0]}: {min(views)}" if views else route.sources[0]


def unsplit(layout: Layout, whole: Box) -> bool:
    """Tell whether whoever holds a tensor by this layout holds all of it: then any rank can read it so."""
    if isinstance(layout, BoxesLayout):
        return all(box == whole for _, box in layout.boxes)
    return isinstance(layout, MeshLayout) and not any(layout.dims)


def together(faults: Sequence[PlanError]) -> PlanError:
    """Return one error for all faults."""
    if len(faults) == 1:
        return faults[0]
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    details: Mapping[str, object] = {**faults[0].details(), "where": None, "expected": None, "found": None}
    return PlanError("; ".join(_short(f) for f in faults[:_SHOWN]) + more, **details)  # type: ignore[arg-type]


def _short(fault: PlanError) -> str:
    return str(fault).partition("\nadvice:")[0]

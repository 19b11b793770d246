"""Owns torch.optim optimizers in a state: what they keep of each parameter, by the parameter's name, and their groups.

{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

from ckptspec.errors import PlanError
from ckptspec.format.layout import Layout, MeshLayout
from ckptspec.format.names import escape
from ckptspec.pytorch.adapters.base import ABSENT, OPTIMIZERS, Adapter, Chosen, Context, misfit
from ckptspec.pytorch.adapters.keys import SCALARS, keys_of
from ckptspec.pytorch.adapters.template import Template
from ckptspec.pytorch.layouts import WORLD
from ckptspec.pytorch.pieces import assemble

FROZEN, NEVER_STEPPED = "frozen", "never_stepped"
_NAMES = ("params", "param_names")  # of a group: what it is about, not state
Group = MutableMapping[str, Any]


class OptimizerAdapter(Adapter):
    """An optimizer; `state` and `parameters` are what this rank keeps, which ZeRO makes less than all."""

    order = OPTIMIZERS
    role = "optimizer"

    def __init__(
        self,
        value: Any,
        context: Context,
        *,
        state: MutableMapping[Any, Any] | None = None,
        parameters: Sequence[Tensor] | None = None,
    ) -> None:
        self._context = context
        self._keys = keys_of(type(getattr(value, "optim", value)))  # ZeRO keeps what the optimizer inside it does
        self._groups: Sequence[Group] = value.param_groups
        everything = [p for g in self._groups for p in g["params"]]
        self._names = context.parameters(everything, context.name)
        self._group_of = {id(p): g for g in self._groups for p in g["params"]}
        self._state = value.state if state is None else state
        self._own = {self._names[id(p)]: p for p in (everything if parameters is None else parameters)}
        groups = [{k: v for k, v in g.items() if k not in _NAMES} for g in self._groups]
        for group, names in zip(groups, self._group_names(), strict=True):
            group["params"] = names
        super().__init__(value, {"state": self._states(), "param_groups": groups})
        self.omitted = self._omitted()

    def _group_names(self) -> list[list[str]]:
        return [[self._names[id(p)] for p in g["params"]] for g in self._groups]

    def _omitted(self) -> dict[str, str]:
        return {
            self._context.join("state", name): NEVER_STEPPED if p.requires_grad else FROZEN
            for name, p in self._own.items()
            if not self._state.get(p)
        }

    def _states(self) -> dict[str, Any]:
        saved = self._context.found
        saved = saved.get("state") if isinstance(saved, dict) else None
        states = {}
        for name, p in self._own.items():
            live = dict(self._state.get(p) or {})
            kept = saved.get(name, ABSENT) if isinstance(saved, dict) else ABSENT
            if self._context.saved is not None and self._context.saved.elsewhere(kept):
                kept = self._derived(name, live, kept)
            state = live if kept is ABSENT else self._template(name, p, live, kept)
            if state:
                states[name] = state
        return states

    def _derived(self, name: str, live: Mapping[str, Any], kept: Any) -> Any:
        """Return what there is of one parameter, with what ZeRO's flat groups, or a map of names, lead to.

        What the optimizer does not keep of a parameter, such as a master copy, it does not get. Raises PlanError for a
        part without which no step could be taken.
        """
        assert self._context.saved is not None
        place = self._context.join("state", name)
        found = self._context.saved.derived(place, lambda key: self._keys is None or key in self._keys or key in live)
        if not found:
            return kept
        whole = {**found, **kept} if isinstance(kept, dict) else found
        if "step" in (self._keys or ()) and "step" not in whole and "step" not in live:
            raise misfit(
                place,
                "the flat groups hold no `step` for this parameter, and the optimizer needs one",
                found=", ".join(whole),
                advice=f'say which tensor counts the steps: names={{"{self._context.join("state")}/*/step": ...}}',
            )
        return whole

    # ---- loading -----------------------------------------------------------------------------------------------------

    def _template(self, name: str, p: Tensor, live: dict[str, Any], saved: Any) -> dict[str, Any]:
        """Return what a load fills for one parameter: live values where there are any, else new tensors, not yet its.

        Raises PlanError where only a part would be loaded for a parameter without state.
        """
        context = self._context
        assert context.saved is not None
        source = context.saved
        rule = device_rule(p, self._group_of[id(p)])

        def make(where: str, target: str, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            layout = source.manifest.layouts.get(source.entry(target).layout)
            if shape == tuple(p.shape) and (shape or where.rpartition("/")[2] not in SCALARS):
                layout = None  # whatever the one saved, the parameter's own is the right one
            return new_state(p, layout, kind, shape, rule(where))

        place = context.join("state", name)
        template = Template(context.saved, make)
        state = template.like(saved, live, place)
        state = state if isinstance(state, dict) else {}
        if state and not live and template.dropped:
            raise misfit(
                place, "a parameter without state cannot take a part of it", advice=f"skip or load all of {place!r}"
            )
        return {**live, **state}

    def review(self, chosen: Chosen) -> Iterator[PlanError]:
        """Yield where the groups hold other parameters than those of the checkpoint."""
        place = self._context.join("param_groups")
        saved = self._context.found
        if not any(n == place or n.startswith(place + "/") for n in chosen.names) or not isinstance(saved, dict):
            return
        groups = saved.get("param_groups", ())
        if len(groups) != len(self._groups):
            advice = f"skip={[place]!r} keeps the groups as they are"
            yield misfit(place, "another number of parameter groups", expected=str(len(groups)),
                         found=str(len(self._groups)), advice=advice)  # fmt: skip
            return
        for i, (there, here) in enumerate(zip(groups, self._group_names(), strict=True)):
            known, held = set(there["params"]), set(here)
            missing, extra = [n for n in here if n not in known], [n for n in there["params"] if n not in held]
            if (missing and not chosen.keep_missing) or (extra and not chosen.ignore_unexpected):
                advice = f"skip={[place]!r} keeps the groups as they are"
                yield misfit(f"{place}/{i}", "the group holds other parameters", expected=_some(extra) or "no others",
                             found=_some(missing) or "none of them", advice=advice)  # fmt: skip
            chosen.missing += [f"{place}/{i}/params/{escape(n)}" for n in missing]
            chosen.unexpected += [f"{place}/{i}/params/{escape(n)}" for n in extra]

    def restore(self) -> Any:
        """Give each parameter its state, and the groups their values; no step is run and nothing is converted."""
        for name, state in self._states_of_tree().items():
            p = self._own[name]
            whole = assemble(state, self._context.join("state", name))
            known = self._state.get(p)
            if isinstance(known, dict):
                known.update(whole)
            else:
                self._state[p] = whole
        self.set_groups(self._groups)
        return self.value

    def _states_of_tree(self) -> Mapping[str, Any]:
        states: Mapping[str, Any] = self.tree["state"]
        return states

    def set_groups(self, groups: Sequence[Group]) -> None:
        """Give these groups the values of the tree."""
        for group, values in zip(groups, self.tree["param_groups"], strict=True):
            group.update({k: v for k, v in values.items() if k not in _NAMES})


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def device_rule(p: Tensor, group: Mapping[str, Any]) -> Callable[[str], torch.device]:
    """Return where a value of the state lives, by its place: as torch decides when it loads an optimizer."""
    on_device = bool(group.get("capturable") or group.get("fused"))

    def device(where: str) -> torch.device:
        return torch.device("cpu") if where.endswith("/step") and not on_device else p.device

    return device


def new_state(
    p: Tensor, layout: Layout | None, kind: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return new memory for one value of a parameter's state, laid out as the parameter is where it can be.

    A value of a DTensor's shape has the DTensor's mesh and placements; one of another shape that was saved in parts is
    laid out over that mesh by the same axes; what was saved plain is plain. `layout` is the one saved, None where it
    says nothing of the one wanted.
    """
    if isinstance(p, DTensor) and (layout is None or (isinstance(layout, MeshLayout) and not _plain(layout))):
        if shape == tuple(p.shape):
            local = torch.empty_like(p.to_local().detach(), dtype=kind)
            return DTensor.from_local(
                local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        if layout is not None:
            return _over_mesh(p, layout, kind, shape)
    if shape == tuple(p.shape) and not isinstance(p, DTensor):
        return torch.empty_like(p.detach(), dtype=kind, device=device)
    return torch.empty(shape, dtype=kind, device=device)


def _plain(layout: MeshLayout) -> bool:
    """Tell whether a layout is that of plain tensors: whole on all ranks, or on those of them that have it."""
    return not any(layout.dims) and layout.mesh.partition("@")[0] == WORLD


def _over_mesh(p: DTensor, layout: MeshLayout, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    names = p.device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(p.device_mesh.ndim))
    dims = {axis: d for d, axes in enumerate(layout.dims) for axis in axes}
    placements = [Shard(dims[n]) if n in dims else Replicate() for n in names]
    return empty_dtensor(*shape, dtype=kind, device_mesh=p.device_mesh, placements=placements)

"""Owns the walk from a state tree to what a rank declares and holds; refuses what cannot be saved, naming the key."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptspec.errors import StateError
from ckptspec.format.box import Box, contains
from ckptspec.format.layout import BoxesLayout, LocalLayout, MeshLayout
from ckptspec.format.names import escape
from ckptspec.format.objects import TensorRef
from ckptspec.format.pause import collector_paused
from ckptspec.format.placement import resolve
from ckptspec.pytorch.adapters.base import Context, Saved
from ckptspec.pytorch.adapters.names import Parameters
from ckptspec.pytorch.adapters.pieces import PiecesAdapter
from ckptspec.pytorch.adapters.registry import Open, opener
from ckptspec.pytorch.dtensors import placed
from ckptspec.pytorch.how import How
from ckptspec.pytorch.layouts import WORLD, flat, world_mesh
from ckptspec.pytorch.pieces import MARK, has_pieces
from ckptspec.pytorch.record import Capture, Declared, Recorder
from ckptspec.pytorch.select import matches
from ckptspec.pytorch.values import PLAIN, SMALL_ARRAY, from_numpy, refuse
from ckptspec.pytorch.wrappers import FlatShard, Local, Owned, Replicated, Shard

_DICTS = (dict, OrderedDict, defaultdict)
_SCALARS = frozenset((str, int, float, bool, type(None), bytes, complex, torch.dtype, torch.Size, torch.device))
_TENSORS = (Tensor, FlatShard, Shard)
DEPTH_LIMIT = 64
REPLICATED, LOCAL, HELD = "replicated", "local", "held"
EXCLUDED = "excluded"
_SHARED, _PRIVATE = MeshLayout(WORLD), LocalLayout()


def capture(
    state: Any,
    *,
    rank: int,
    world: int,
    plain: str = REPLICATED,
    tie: bool = True,
    ties: Mapping[str, str] | None = None,
    exclude: Sequence[str] = (),
    saved: Saved | None = None,
) -> Capture:
    """Return what a rank holds of `state`; raises StateError [P-STATE] naming the key of what cannot be saved.

    With `tie`, tensors that are the same memory become one payload and aliases; `ties` says which names, here or on
    other ranks, are further names of a tensor. `exclude` are names, prefixes and globs to leave out. `saved` is what a
    load reads: objects then are opened in the shape it has.
    """
    if plain not in (REPLICATED, LOCAL, HELD):
        raise ValueError(f"plain must be {REPLICATED!r}, {HELD!r} or {LOCAL!r}, not {plain!r}")
    if chained := next((target for target in (ties or {}).values() if target in (ties or {})), None):
        raise ValueError(f"ties must lead to a tensor, and {chained!r} is tied itself")
    if type(state) not in (*_DICTS, list, tuple):
        raise StateError("a state is a dict, list or tuple", rule="P-STATE", found=type(state).__name__)
    walk = _Walk(Capture(rank, world, plain, ties=ties or {}), tie, tuple(exclude), saved, state)
    with collector_paused():
        walk.out.tree = walk.node(state, "", How(local=plain == LOCAL), 0)
    return walk.out


class _Walk:
    """One walk over a state tree."""

    def __init__(self, out: Capture, tie: bool, exclude: tuple[str, ...], saved: Saved | None, state: Any) -> None:
        self.out = out
        self.add = Recorder(out, tie).add
        self.exclude = exclude
        self.saved = saved
        self.state = state
        self.parameters: Parameters | None = None

    def node(self, value: Any, name: str, how: How, depth: int) -> Any:
        kind = type(value)
        if kind in _DICTS or kind is list or kind is tuple:
            return self.container(value, name, how, depth + 1)
        if self.saved is not None and isinstance(value, _TENSORS) and not self.saved.wanted(name):
            return TensorRef(name)  # it stays as it is, whatever it is
        if isinstance(value, Tensor):
            return self.tensor(value, name, how, depth)
        if kind in _SCALARS:
            return value
        if kind is FlatShard:
            return self.flat(value, name)
        if kind is Shard:
            return self.shard(value, name)
        if kind is numpy.ndarray and value.nbytes > SMALL_ARRAY and value.dtype.kind in "biufc":
            return self.tensor(from_numpy(value, name), name, how, depth)
        if kind in (Local, Replicated, Owned):
            return self.wrapped(value, name, how, depth)
        opens = opener(value)
        return value if opens is None else self.object(value, name, how, depth, opens)

    def container(self, value: Any, name: str, how: How, depth: int) -> Any:
        if depth > DEPTH_LIMIT:
            raise refuse(name, f"nested more than {DEPTH_LIMIT} deep, or containing itself")
        prefix = f"{name}/" if name else ""
        node = self.node
        if isinstance(value, dict):
            if MARK in value and self.saved is None and name not in self.out.opened:
                raise refuse(name, f"the key {MARK!r} is reserved for tensors that were taken apart")
            items = ((k, prefix + escape(str(k)), v) for k, v in value.items())
            return {k: node(v, n, how, depth) for k, n, v in items if not self.left_out(n)}
        for i in range(len(value)) if self.exclude else ():
            if matches(f"{prefix}{i}", self.exclude):
                raise refuse(f"{prefix}{i}", "a part of a list cannot be excluded", advice=f"exclude all of {name!r}")
        nodes = [node(v, f"{prefix}{i}", how, depth) for i, v in enumerate(value)]
        return nodes if type(value) is list else tuple(nodes)

    def left_out(self, name: str) -> bool:
        """Tell whether a name is excluded, and keep a record of it."""
        if not self.exclude or not matches(name, self.exclude):
            return False
        self.out.omitted[name] = EXCLUDED
        return True

    def wrapped(self, value: Any, name: str, how: How, depth: int) -> Any:
        if type(value) is Owned:
            return self.node(value.value, name, how.inside(name, None, How(owner=True)), depth)
        if type(value) is Replicated:
            if not 0 <= value.source < self.out.world:
                raise refuse(name, "the source of a replicated value is no rank", found=str(value.source))
            return self.node(value.value, name, how.inside(name, value.only, How(source=value.source)), depth + 1)
        if value.only is None:
            self.out.private.add(name)
        return self.node(value.value, name, how.inside(name, value.only, How(local=True)), depth + 1)

    def object(self, value: Any, name: str, how: How, depth: int, opens: Open) -> Any:
        """Open an object and walk the tree it gives."""
        opened = opens(value, Context(name, self.out.rank, self.out.world, self.named, self.saved))
        self.out.opened[name] = opened
        self.out.omitted.update((n, why) for n, why in opened.omitted.items() if not matches(n, self.exclude))
        if opened.private:
            self.out.private.add(name)
            how = how.inside(name, None, How(local=True))
        return self.node(opened.tree, name, how.as_role(opened.role), depth + 1)

    def named(self, parameters: Sequence[Any], place: str) -> Mapping[int, str]:
        """Return the names of an optimizer's parameters, found in the whole state when first asked."""
        if self.parameters is None:
            self.parameters = Parameters(self.state)
        return self.parameters.of(parameters, place)

    def tensor(self, t: Tensor, name: str, how: How, depth: int) -> Any:
        if isinstance(t, DTensor):
            return self.dtensor(t, name, how)
        if type(t) not in PLAIN and has_pieces(t):
            return self.object(t, name, how, depth, PiecesAdapter)
        how, shape = how.at(name), tuple(t.shape)
        whole = (Box((0,) * len(shape), shape),)
        if how.local:
            return self.add(t, name, Declared(LOCAL, _PRIVATE, None, whole, how.role))
        if WORLD not in self.out.meshes:
            self.out.meshes[WORLD] = world_mesh(self.out.world)
        if how.owner:
            alone = MeshLayout(WORLD, (), {"rank": self.out.rank})
            return self.add(t, name, Declared(f"rank:{self.out.rank}", alone, shape, whole, how.role))
        if how.source is None or not t.numel():
            return self.add(t, name, Declared(REPLICATED, _SHARED, shape, whole, how.role))
        held = whole if how.source == self.out.rank else ()
        text = f"rank:{how.source}:{'x'.join(map(str, shape)) or 'scalar'}"
        layout = BoxesLayout(((how.source, whole[0]),))
        return self.add(t, name, Declared(text, layout, shape, held, how.role), reads=whole)

    def dtensor(self, t: DTensor, name: str, how: How) -> TensorRef:
        p = placed(t, self.out.rank, name)
        self.out.meshes.setdefault(p.mesh_name, p.mesh)
        local = t.to_local().detach()
        role = "parameter" if isinstance(t, torch.nn.Parameter) else how.role
        return self.add(local, name, Declared(p.layout_name, p.layout, tuple(t.shape), p.boxes, role))

    def flat(self, f: FlatShard, name: str) -> TensorRef:
        if name in self.out.ties:
            raise refuse(name, "a slice of a flat buffer cannot be tied")
        mesh_name, mesh, layout, valid = flat(f, self.out.rank, self.out.world, name)
        self.out.meshes.setdefault(mesh_name, mesh)
        text = "+".join(map(str, layout.bounds)) if layout.bounds else str(layout.align)
        box = (Box((f.offset,), (valid,)),) if valid else ()
        self.out.groups.setdefault(f.group, []).append((name, f))
        padding = f.tensor.detach()[valid:] if valid < f.tensor.numel() else None
        declared = Declared(f"flat:{mesh_name}:{text}", layout, (f.numel,), box)
        return self.add(f.tensor.detach()[:valid], name, declared, padding=padding)

    def shard(self, s: Shard, name: str) -> TensorRef:
        boxes = tuple(Box(tuple(map(int, o)), tuple(map(int, n))) for o, n in s.boxes)
        for b in boxes:
            if len(b.offsets) != b.ndim or b.ndim != len(s.shape) or not contains(Box.whole(s.shape), b):
                found = f"{list(b.offsets)} + {list(b.sizes)}"
                raise refuse(name, "a box does not lie inside the tensor's shape", rank=self.out.rank,
                              expected=f"inside {list(s.shape)}", found=found)  # fmt: skip
        boxes = tuple(b for b in boxes if not b.empty)
        if sum(b.numel for b in boxes) != s.tensor.numel():
            raise refuse(name, "the boxes do not add up to the tensor", rank=self.out.rank,
                          expected=f"{s.tensor.numel()} elements", found=str(sum(b.numel for b in boxes)))  # fmt: skip
        layout = BoxesLayout(tuple((self.out.rank, b) for b in boxes))
        place = resolve(layout, {})
        held = place.local_shape(s.shape, self.out.rank) if boxes else tuple(s.tensor.shape)
        if held != tuple(s.tensor.shape):
            raise refuse(name, "the boxes put together are not the tensor", rank=self.out.rank,
                          expected=f"shape {list(s.tensor.shape)}", found=f"{held}")  # fmt: skip
        return self.add(s.tensor, name, Declared(f"boxes:{name}", layout, tuple(map(int, s.shape)), boxes))

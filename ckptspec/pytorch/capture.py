"""Owns the walk from a state tree to what a rank declares and holds; refuses what cannot be saved, naming the key."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ckptspec.errors import StateError, Where
from ckptspec.format import objects
from ckptspec.format.box import Box, contains
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import BoxesLayout, Layout, LocalLayout, Mesh, MeshLayout
from ckptspec.format.manifest import TensorEntry
from ckptspec.format.names import escape
from ckptspec.format.objects import DeviceValue, DTypeValue, SizeValue, TensorRef
from ckptspec.format.pause import collector_paused
from ckptspec.format.placement import resolve
from ckptspec.pytorch.dtensors import placed
from ckptspec.pytorch.holding import TorchHolding
from ckptspec.pytorch.layouts import WORLD, flat, world_mesh
from ckptspec.pytorch.wrappers import FlatShard, Local, Shard

_DICTS = (dict, OrderedDict, defaultdict)
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
DEPTH_LIMIT = 64
SMALL_ARRAY = 64 << 10  # a numpy array above this many bytes is a tensor, not a value of the state
REPLICATED, LOCAL, HELD = "replicated", "local", "held"
_SHARED, _PRIVATE = MeshLayout(WORLD), LocalLayout()


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state as this rank holds it: what it declares, the boxes held, and the local torch tensor."""

    entry: TensorEntry
    boxes: tuple[Box, ...]
    tensor: Tensor
    padding: Tensor | None = None

    @property
    def holding(self) -> TorchHolding:
        """The bytes of the boxes."""
        return TorchHolding(self.tensor, self.boxes)


@dataclass
class Capture:
    """A walked state: the tree with references for tensors, every leaf by name, and the declared tables."""

    rank: int
    world: int
    plain: str
    tree: Any = None
    leaves: dict[str, Leaf] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    meshes: dict[str, Mesh] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    groups: dict[str, list[tuple[str, FlatShard]]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    ties: Mapping[str, str] = field(default_factory=dict)
    walked: set[str] = field(default_factory=set)


def encode_value(value: Any) -> objects.Special | None:
    """Return the core's value for a torch.dtype, torch.Size or torch.device, else None."""
    if type(value) is torch.dtype:
        return DTypeValue(str(value).removeprefix("torch."))
    if type(value) is torch.Size:
        return SizeValue(tuple(value))
    if type(value) is torch.device:
        return DeviceValue(str(value))
    return None


def decode_value(value: objects.Special) -> Any:
    """Return torch's value for what `encode_value` gave; references stay as they are."""
    if isinstance(value, DTypeValue):
        return getattr(torch, value.name)
    if isinstance(value, SizeValue):
        return torch.Size(value.dims)
    if isinstance(value, DeviceValue):
        return torch.device(value.name)
    return value


def capture(
    state: Any,
    *,
    rank: int,
    world: int,
    plain: str = REPLICATED,
    tie: bool = True,
    ties: Mapping[str, str] | None = None,
) -> Capture:
    """Return what a rank holds of `state`; raises StateError [P-STATE] naming the key of what cannot be saved.

    With `tie`, tensors that are the same memory become one payload and aliases; `ties` says which names, here or on
    other ranks, are further names of a tensor.
    """
    if plain not in (REPLICATED, LOCAL, HELD):
        raise ValueError(f"plain must be {REPLICATED!r}, {HELD!r} or {LOCAL!r}, not {plain!r}")
    if chained := next((target for target in (ties or {}).values() if target in (ties or {})), None):
        raise ValueError(f"ties must lead to a tensor, and {chained!r} is tied itself")
    if type(state) not in (*_DICTS, list, tuple):
        raise StateError("a state is a dict, list or tuple", rule="P-STATE", found=type(state).__name__)
    walk = _Walk(Capture(rank, world, plain, ties=ties or {}), tie)
    with collector_paused():
        walk.out.tree = walk.node(state, "", plain == LOCAL, 0)
    return walk.out


class _Walk:
    """One walk over a state tree."""

    def __init__(self, out: Capture, tie: bool) -> None:
        self.out = out
        self.tie = tie
        self.seen: dict[tuple[Any, ...], str] = {}

    def node(self, value: Any, name: str, local: bool, depth: int) -> Any:
        kind = type(value)
        if kind in _DICTS or kind is list or kind is tuple:
            return self.container(value, name, local, depth + 1)
        if isinstance(value, Tensor):
            return self.tensor(value, name, local)
        if kind is Local:
            self.out.private.add(name)
            return self.node(value.value, name, True, depth + 1)
        if kind is FlatShard:
            return self.flat(value, name)
        if kind is Shard:
            return self.shard(value, name)
        if kind is numpy.ndarray and value.nbytes > SMALL_ARRAY and value.dtype.kind in "biufc":
            return self.tensor(_from_numpy(value, name), name, local)
        return value

    def container(self, value: Any, name: str, local: bool, depth: int) -> Any:
        if depth > DEPTH_LIMIT:
            raise refuse(name, f"nested more than {DEPTH_LIMIT} deep, or containing itself")
        prefix = f"{name}/" if name else ""
        node = self.node
        if isinstance(value, dict):
            return {k: node(v, prefix + escape(str(k)), local, depth) for k, v in value.items()}
        items = [node(v, f"{prefix}{i}", local, depth) for i, v in enumerate(value)]
        return items if type(value) is list else tuple(items)

    def tensor(self, t: Tensor, name: str, local: bool) -> TensorRef:
        if isinstance(t, DTensor):
            return self.dtensor(t, name)
        shape = tuple(t.shape)
        whole = (Box((0,) * len(shape), shape),)
        if local:
            return self.add(t, name, LOCAL, _PRIVATE, None, whole)
        if WORLD not in self.out.meshes:
            self.out.meshes[WORLD] = world_mesh(self.out.world)
        return self.add(t, name, REPLICATED, _SHARED, shape, whole)

    def dtensor(self, t: DTensor, name: str) -> TensorRef:
        p = placed(t, self.out.rank, name)
        self.out.meshes.setdefault(p.mesh_name, p.mesh)
        local = t.to_local().detach()
        return self.add(local, name, p.layout_name, p.layout, tuple(t.shape), p.boxes, parameter=_is_parameter(t))

    def flat(self, f: FlatShard, name: str) -> TensorRef:
        if name in self.out.ties:
            raise refuse(name, "a slice of a flat buffer cannot be tied")
        mesh_name, mesh, layout, valid = flat(f, self.out.rank, self.out.world, name)
        self.out.meshes.setdefault(mesh_name, mesh)
        text = "+".join(map(str, layout.bounds)) if layout.bounds else str(layout.align)
        box = (Box((f.offset,), (valid,)),) if valid else ()
        self.out.groups.setdefault(f.group, []).append((name, f))
        padding = f.tensor.detach()[valid:] if valid < f.tensor.numel() else None
        return self.add(
            f.tensor.detach()[:valid], name, f"flat:{mesh_name}:{text}", layout, (f.numel,), box, padding=padding
        )

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
        return self.add(s.tensor, name, f"boxes:{name}", layout, tuple(map(int, s.shape)), boxes)

    def add(
        self,
        t: Tensor,
        name: str,
        layout_name: str,
        layout: Layout,
        shape: tuple[int, ...] | None,
        boxes: tuple[Box, ...],
        *,
        padding: Tensor | None = None,
        parameter: bool = False,
    ) -> TensorRef:
        """Record one tensor and return its reference: to itself, or to the tensor whose memory or tie it shares."""
        dtype = _dtype(t, name)
        if name in self.out.walked:
            raise refuse(name, "two keys have one name", rule="P-NAME")
        self.out.walked.add(name)
        place = self.out.ties.get(name, name)
        if self.tie and t.numel():
            key = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg(), layout_name, shape)
            first = self.seen.setdefault(key, place)
            if first != place and place != name:
                advice = f"tie {first!r} as well"
                raise refuse(name, f"it is the memory of {first!r}, but tied to {place!r}", advice=advice)
            place = first
        if place != name:
            self.out.aliases[name] = place
        entry = TensorEntry(dtype, shape, layout_name, _role(place, t, layout_name, parameter))
        leaf = Leaf(entry, boxes, t, padding)
        if place in self.out.leaves:
            self.same(name, leaf, place)
        else:
            self.out.layouts.setdefault(layout_name, layout)
            self.out.leaves[place] = leaf
        return TensorRef(place)

    def same(self, name: str, leaf: Leaf, place: str) -> None:
        """Refuse a tensor that is not the very one under whose name it would be stored."""
        known = self.out.leaves[place]
        if known.tensor is leaf.tensor or known.tensor.data_ptr() == leaf.tensor.data_ptr():
            return
        alike = replace(known.entry, role=leaf.entry.role) == leaf.entry and known.boxes == leaf.boxes
        if not alike or not torch.equal(_raw(known.tensor), _raw(leaf.tensor)):
            raise refuse(name, f"it is tied to {place!r} but differs from it", rank=self.out.rank,
                          expected=f"the bytes of {place!r}", found="other bytes" if alike else f"{leaf.entry}")  # fmt: skip


def _raw(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def refuse(name: str, message: str, *, rank: int | None = None, rule: str = "P-STATE", **details: Any) -> StateError:
    """Return the error that names the key of what cannot be saved, and why."""
    return StateError(message, rule=rule, where=Where(tensor=name, rank=rank), **details)


def _from_numpy(array: Any, name: str) -> Tensor:
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as e:
        raise refuse(name, f"torch cannot hold this numpy array: {e}") from None


_DTYPE_NAMES = {getattr(torch, n): n for n in DTYPES if hasattr(torch, n)}


def _dtype(t: Tensor, name: str) -> str:
    """Return the dtype's name; raises StateError for a tensor that is not plain strided memory of a known dtype."""
    if type(t) not in _PLAIN:
        raise refuse(name, "a tensor subclass has no plain bytes", found=type(t).__name__)
    if t.layout is not torch.strided or t.is_meta or t.is_quantized or t.is_nested:
        kind = "a meta tensor" if t.is_meta else f"a {t.layout} tensor"
        raise refuse(name, f"{kind} holds no bytes that can be stored")
    dtype = _DTYPE_NAMES.get(t.dtype)
    if dtype is None:
        raise refuse(name, "this dtype cannot be stored", rule="T-DTYPE", found=str(t.dtype))
    return dtype


def _is_parameter(t: Tensor) -> bool:
    return isinstance(t, torch.nn.Parameter)


def _role(name: str, t: Tensor, layout: str, parameter: bool) -> str:
    """Return what a tensor is for, by its type and the first key of its path; nothing is decided by it."""
    top = name.split("/", 1)[0]
    if parameter or isinstance(t, torch.nn.Parameter):
        return "parameter"
    if top in ("model", "module", "params"):
        return "parameter" if t.is_floating_point() else "buffer"
    if layout.startswith("flat:") or top in ("optimizer", "optim"):
        return "optimizer"
    return "rng" if top == "rng" else "other"

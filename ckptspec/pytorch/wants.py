"""Owns what a load asks of the checkpoint for each tensor of a state, and the memory it goes to; moves nothing."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ckptspec.engine.holding import Holding
from ckptspec.format.box import Box
from ckptspec.format.dtypes import dtype
from ckptspec.planner.routes import Route
from ckptspec.planner.transfers import Need
from ckptspec.planner.views import View
from ckptspec.pytorch.holding import TorchHolding
from ckptspec.pytorch.record import Leaf

Want = tuple[Need, Holding]


def wants(route: Route, leaf: Leaf, rank: int, *, local: bool) -> Iterator[Want]:
    """Yield the needs that fill one tensor, each with its memory; `local` says that each rank stored its own."""
    stored = getattr(torch, dtype(route.dtype).name)
    boxes = leaf.boxes if leaf.reads is None else leaf.reads
    whole = TorchHolding(leaf.tensor, boxes, stored)
    if local:
        yield Need(route.sources[0], Box.whole(leaf.tensor.shape), rank), whole
        return
    for box in boxes:
        for ask in route.asks(box):
            yield ask.need, whole if ask.land is None else _run(leaf.tensor, box, ask.land, stored)


def _run(tensor: torch.Tensor, box: Box, land: View, stored: torch.dtype) -> Holding:
    """Return the memory of a run of a flat tensor, of which this rank has `box`, as the box that the run is."""
    start = land.start - box.offsets[0]
    part = tensor[start : start + land.box.numel].view(land.box.sizes)
    return TorchHolding(part, (land.box,), stored)


def clear_padding(route: Route, leaf: Leaf) -> None:
    """Zero what no member of a flat tensor holds: padding is not state."""
    for box in leaf.boxes if route.lands else ():
        for start, stop in route.padding(box.offsets[0], box.stops[0]):
            leaf.tensor[start - box.offsets[0] : stop - box.offsets[0]].zero_()

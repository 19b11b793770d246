"""Owns the way between torch tensors and bytes: in place where memory allows it, one copy where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ckptspec.format.box import Box, contains


def _starts(spans: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return where each of the ordered, distinct spans of one dimension begins in the local tensor."""
    distinct = list(dict.fromkeys(spans))
    return dict(zip(distinct, accumulate((size for _, size in distinct), initial=0), strict=False))


class TorchHolding:
    """The boxes a rank holds of one tensor, in order, as one local tensor (any strides, any device)."""

    __slots__ = ("_boxes", "_stored", "_tensor")

    def __init__(self, tensor: Tensor, boxes: Sequence[Box], stored: torch.dtype | None = None) -> None:
        """`stored` is the dtype of the bytes, when it is not the tensor's: `scatter` then casts."""
        self._tensor = tensor.detach()
        self._boxes = tuple(boxes)
        self._stored = stored or tensor.dtype

    @property
    def tensor(self) -> Tensor:
        """The local tensor."""
        return self._tensor

    def _origin(self, box: Box) -> tuple[int, ...]:
        """Return the index in the local tensor of the first element of `box`."""
        for held in self._boxes:
            if contains(held, box):
                break
        else:
            raise ValueError(f"{box} is not held")
        if len(self._boxes) == 1:
            return tuple(o - h for o, h in zip(box.offsets, held.offsets, strict=True))
        origin = []
        for d in range(held.ndim):
            starts = _starts([(b.offsets[d], b.sizes[d]) for b in self._boxes])
            origin.append(starts[held.offsets[d], held.sizes[d]] + box.offsets[d] - held.offsets[d])
        return tuple(origin)

    def part(self, box: Box) -> Tensor:
        """Return the view of the local tensor that is `box`."""
        if len(self._boxes) == 1 and box.sizes == self._tensor.shape and box.offsets == self._boxes[0].offsets:
            return self._tensor
        part = self._tensor
        for d, (start, size) in enumerate(zip(self._origin(box), box.sizes, strict=True)):
            part = part.narrow(d, start, size)
        return part

    def view(self, box: Box) -> memoryview | None:
        """Return the box's bytes in place, or None for a part that is strided, lazily negated, or not on the CPU."""
        part = self.part(box)
        if (
            part.dtype != self._stored
            or part.device.type != "cpu"
            or not part.is_contiguous()
            or part.is_conj()
            or part.is_neg()
        ):
            return None
        return part.reshape(-1).view(torch.uint8).numpy().data

    def fill(self, box: Box, out: memoryview) -> None:
        """Copy the box's row-major bytes into `out`."""
        raw = torch.frombuffer(out, dtype=torch.uint8)
        raw.view(self._tensor.dtype).view(box.sizes).copy_(self.part(box))

    def scatter(self, box: Box, data: memoryview, strides: Sequence[int]) -> None:
        """Copy into the box from strided `data` (strides in elements)."""
        itemsize = self._stored.itemsize
        data = data[: len(data) // itemsize * itemsize]
        flat = torch.frombuffer(data, dtype=torch.uint8).view(self._stored)
        self.part(box).copy_(flat.as_strided(box.sizes, tuple(strides)))

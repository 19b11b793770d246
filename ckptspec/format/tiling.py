"""Owns whether boxes tile a box exactly, in time linear in the boxes, and finds two that overlap."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache

from ckptspec.format.box import Box, intersect

PRIME = 2**127 - 1
PAIRS = 100_000  # comparisons spent on finding two boxes that overlap


def tiled(whole: Box, boxes: Sequence[Box]) -> bool:
    """Tell whether non-empty boxes hold every element of `whole` once, in time linear in the boxes.

    A box is the product over dimensions of (steps up at its offset) - (steps up at its stop). A sum of such products
    equals that of `whole` exactly when the boxes tile it. Every step becomes a 127-bit number derived from a hash of
    all the boxes, which turns the comparison into one of two numbers: wrong with a chance below 2**-100.
    """
    seed = hashlib.sha256(repr(whole.sizes).encode())
    for box in boxes:
        seed.update(repr((box.offsets, box.sizes)).encode())

    @cache
    def step(dim: int, place: int) -> int:
        keyed = seed.copy()
        keyed.update(b"%d:%d" % (dim, place))
        return int.from_bytes(keyed.digest(), "big") % PRIME

    def value(box: Box) -> int:
        total = 1
        for dim, (start, stop) in enumerate(zip(box.offsets, box.stops, strict=True)):
            total = total * (step(dim, start) - step(dim, stop)) % PRIME
        return total

    return (sum(map(value, boxes)) - value(whole)) % PRIME == 0


def overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share elements, if a bounded sweep along the first dimension comes upon them."""
    left = PAIRS
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets):
        open_boxes = [other for other in open_boxes if not other.sizes or other.stops[0] > box.offsets[0]]
        for other in open_boxes:
            if intersect(other, box) is not None:
                return other, box
        left -= len(open_boxes) + 1
        if left < 0:
            return None
        open_boxes.append(box)
    return None

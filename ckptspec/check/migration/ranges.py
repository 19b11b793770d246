"""Owns which elements of which parameters a piece of a stored tensor is, as values and as text; refuses nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from ckptspec.format.box import Box
from ckptspec.format.manifest import FlatGroup, Manifest
from ckptspec.format.report import Range

FEW = 4  # ranges in one line


def group_of(m: Manifest, name: str) -> FlatGroup | None:
    """Return the flat group that a tensor is of, if its members are known."""
    return next((g for g in m.flat_groups.values() if g.members and name in g.tensors.values()), None)


def joined(boxes: Iterable[Box]) -> Iterator[Box]:
    """Yield boxes in order; one-dimensional ones that touch come as one."""
    last: Box | None = None
    for box in sorted(boxes, key=lambda b: b.offsets):
        if last is not None and box.ndim == 1 and last.stops == box.offsets:
            last = Box(last.offsets, (last.sizes[0] + box.sizes[0],))
            continue
        if last is not None:
            yield last
        last = box
    if last is not None:
        yield last


def ranges(m: Manifest, name: str, boxes: Iterable[Box]) -> Iterator[Range]:
    """Yield what boxes of the stored tensor `name` are: of a flat one, what of its members; padding is left out."""
    group = group_of(m, name)
    for box in joined(boxes):
        if group is None:
            yield Range(name, box.offsets, box.sizes)
        else:
            yield from _of_members(group, box.offsets[0], box.stops[0])


def _of_members(group: FlatGroup, start: int, stop: int) -> Iterator[Range]:
    first = max(0, bisect_right([member.offset for member in group.members], start) - 1)
    for member in islice(group.members, first, None):
        if member.offset >= stop:
            return
        n = Box.whole(member.shape).numel
        low, high = max(start - member.offset, 0), min(stop - member.offset, n)
        if member.name is not None and low < high:
            offsets = member.of_offsets or (0,) * len(member.shape)
            yield Range(member.name, offsets, member.shape, None if (low, high) == (0, n) else (low, high))


def text(m: Manifest, found: Sequence[Range], more: int = 0) -> str:
    """Return ranges in words, the first few and how many more there are."""
    shown = ", ".join(_one(m, r) for r in found[:FEW])
    rest = len(found) - FEW + more if len(found) > FEW else more
    return f"{shown} and {rest:,} more" if rest > 0 else shown


def _one(m: Manifest, r: Range) -> str:
    """Return a range as a slice: of the elements in row-major order, of dimensions, or the name alone for all of it."""
    entry = m.tensors.get(m.aliases.get(r.tensor, r.tensor))
    shape = r.sizes if entry is None or entry.shape is None else entry.shape
    whole = len(shape) != len(r.sizes) or (r.sizes == shape and not any(r.offsets))
    inside = "" if whole else f"[{_slices(r, shape)}]"
    if r.elements is None:
        return r.tensor + inside
    run = f"[{r.elements[0]}:{r.elements[1]}]"
    return f"{r.tensor}{run}" if whole else f"{r.tensor}{inside} elements {run}"


def _slices(r: Range, shape: Sequence[int]) -> str:
    each = zip(r.offsets, r.sizes, shape, strict=True)
    return ", ".join(":" if (o, n) == (0, full) else f"{o}:{o + n}" for o, n, full in each)

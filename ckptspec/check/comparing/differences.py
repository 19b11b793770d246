"""Owns what two checkpoints differ in: the values `diff` gives and their JSON form; compares nothing itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any

from ckptspec.errors import Where

# kind of a difference -> what it says in words
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "only_a": "only in A",
        "only_b": "only in B",
        "kind": "kinds differ",
        "dtype": "dtypes differ",
        "shape": "shapes differ",
        "members": "members of the flat group differ",
        "values": "values differ",
        "object": "objects differ",
    }
)


@dataclass(frozen=True)
class Fact:
    """Something about the two saves that differs and is no difference of state; A's and B's word for it, if any."""

    what: str
    a: Any = None
    b: Any = None


@dataclass(frozen=True)
class Distance:
    """How far apart the differing elements of a tensor are, as numbers.

    `absolute` is the maximum of |a - b|, an exact int for integers and bools; `relative` that of |a - b| / max(|a|,
    |b|), 0 where both are zero. Where one is infinite both are. NaNs are left out of both and counted: against a
    number, and against a NaN of other bits. `numbers` counts the elements that are numbers on both sides.
    """

    absolute: int | float
    relative: float
    numbers: int
    nan_against_number: int = 0
    nan_of_other_bits: int = 0

    def document(self) -> dict[str, Any]:
        """Return the JSON form; JSON has no infinity, so that is the text `inf`."""
        return {k: v if isinstance(v, int) or isfinite(v) else str(v) for k, v in vars(self).items()}


@dataclass(frozen=True)
class Difference:
    """One thing in which two checkpoints differ.

    `kind` is one of KINDS; `rank` is whose, for what is private to each rank; `a` and `b` say in few words what each
    side has there. Of values: `count` of `total` elements differ, `index` is the first of them by row-major order, and
    `places` say where each side stores it. Of objects: `count` leaves differ, the first of them at `path`. `also` are
    the other names of the same pair of tensors.
    """

    kind: str
    name: str
    rank: int | None = None
    a: str | None = None
    b: str | None = None
    also: tuple[str, ...] = ()
    path: str | None = None
    count: int | None = None
    total: int | None = None
    index: tuple[int, ...] | None = None
    places: tuple[Where, Where] | None = None
    distance: Distance | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON form, without the fields that say nothing."""
        fields: dict[str, Any] = {k: v for k, v in vars(self).items() if v is not None and v != ()}
        if self.index is not None:
            fields["index"] = list(self.index)
        if self.places is not None:
            fields["places"] = {side: _place(where) for side, where in zip("ab", self.places, strict=True)}
        if self.distance is not None:
            fields["distance"] = self.distance.document()
        if self.also:
            fields["also"] = list(self.also)
        return fields


def _place(where: Where) -> dict[str, Any]:
    extent = list(where.range) if where.range is not None else None
    return {"file": where.file, "rank": where.rank, "tensor": where.tensor, "range": extent}


@dataclass(frozen=True)
class Comparison:
    """What `diff` found in checkpoint folders `a` and `b`: differences in the order of A's manifest, then of B's.

    `facts` and `notes` are no differences. `tensors` and `objects` were compared by value, `left_out` names were not
    asked for. Of each side's tensor bytes `by_digest` were found equal by block digests alone, `by_bytes` were read.
    """

    a: str
    b: str
    differences: tuple[Difference, ...] = ()
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    tensors: int = 0
    objects: int = 0
    left_out: int = 0
    by_digest: int = 0
    by_bytes: int = 0

    @property
    def equal(self) -> bool:
        """True when nothing that was compared differs."""
        return not self.differences

    @property
    def counts(self) -> dict[str, int]:
        """How many differences there are of each kind that occurs, in the order of KINDS."""
        found = [d.kind for d in self.differences]
        return {kind: found.count(kind) for kind in KINDS if kind in found}

    @property
    def first(self) -> Difference | None:
        """The first tensor whose values differ, or None."""
        return next((d for d in self.differences if d.kind == "values"), None)

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "format": "ckptspec-diff",
            "equal": self.equal,
            "a": self.a,
            "b": self.b,
            "counts": self.counts,
            "differences": [d.document() for d in self.differences],
            "facts": [dict(vars(f)) for f in self.facts],
            "notes": list(self.notes),
            "compared": {
                "tensors": self.tensors,
                "objects": self.objects,
                "left_out": self.left_out,
                "bytes_by_digest": self.by_digest,
                "bytes_read": self.by_bytes,
            },
        }

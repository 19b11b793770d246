"""Owns how plain tensors below a place in the state are held: alike by all, by each its own, or kept of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptspec.pytorch.select import matches


@dataclass(frozen=True)
class How:
    """What was said last on the way down to a tensor.

    `local`: each rank its own. `source`: the bytes of that rank are stored, all read them. `owner`: this rank alone
    holds it. None of them: equal on all ranks. `role` is that of tensors which do not tell themselves. `only` limits
    this to names below `prefix`, `outer` holds for the others.
    """

    local: bool = False
    source: int | None = None
    owner: bool = False
    role: str | None = None
    prefix: str = ""
    only: tuple[str, ...] | None = None
    outer: How | None = None

    def inside(self, name: str, only: Sequence[str] | None, change: How) -> How:
        """Return how things are below `name`, where a wrapper says `change` about the names in `only`, or about all."""
        if only is None:
            return replace(change, role=self.role)
        return replace(change, role=self.role, prefix=name, only=tuple(only), outer=self)

    def as_role(self, role: str | None) -> How:
        """Return the same with another role."""
        return self if role is None else replace(self, role=role, outer=self.outer and self.outer.as_role(role))

    def at(self, name: str) -> How:
        """Return what holds for the tensor called `name`."""
        how = self
        while how.only is not None and how.outer is not None:
            below = name[len(how.prefix) + 1 :] if how.prefix else name
            if matches(below, how.only):
                break
            how = how.outer
        return how

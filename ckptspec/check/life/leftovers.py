"""Owns what may go of all that lies beside a run's checkpoints; refuses what lives, is young, or may be needed."""

from __future__ import annotations

from dataclasses import dataclass

# Seconds without a sign of life after which a holder counts as dead, where no lock tells: forty missed heartbeats.
EXPIRY = 600.0


@dataclass(frozen=True)
class Leftover:
    """A folder or file that is no checkpoint of its run: `kind` is staging, trash, superseded, abandoned or lease.

    `age` is in seconds since anything in it changed. `live` says who is at it; `dead` that its holder surely is no
    more. `only` says what would be lost with it.
    """

    name: str
    kind: str
    age: float
    live: str | None = None
    dead: bool = False
    only: str | None = None


@dataclass(frozen=True)
class Ruling:
    """Whether a leftover goes, and why or why not."""

    goes: bool
    reason: str


_WHAT = {
    "staging": "a save that never committed",
    "trash": "was being deleted",
    "superseded": "replaced by another save of its step, which is good",
    "abandoned": "set aside by a roll-back",
    "lease": "its holder is gone",
}


def rule(leftover: Leftover, min_age: float, *, abandoned: bool = False) -> Ruling:
    """Return what becomes of a leftover [P-CLEAN]; `min_age` in seconds, `abandoned` lets those go too.

    A save that has left no word of itself is taken for dead only after EXPIRY, however small `min_age` is.
    """
    if leftover.live is not None:
        return Ruling(False, f"in use: {leftover.live}")
    if leftover.kind == "abandoned" and not abandoned:
        return Ruling(False, "set aside by a roll-back: goes only with --abandoned")
    if leftover.only is not None:
        return Ruling(False, leftover.only)
    patience = max(min_age, 0.0 if leftover.dead or leftover.kind not in ("staging", "lease") else EXPIRY)
    if leftover.age < patience:
        return Ruling(False, f"changed {max(0.0, leftover.age):.0f} s ago, goes after {patience:.0f} s")
    return Ruling(True, _WHAT[leftover.kind])

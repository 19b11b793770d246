"""Owns what becomes of each part of a state on a target, with what each rank reads for it; from layouts alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptspec.check.paths import listed
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import FlatLayout
from ckptspec.format.names import split
from ckptspec.format.placement import resolve
from ckptspec.format.report import Verdict
from ckptspec.planner.destination import Destination
from ckptspec.planner.fates import APPROXIMATE, LOSSLESS, LOST, Found, impossible
from ckptspec.planner.members import kinds, state_name
from ckptspec.planner.plans import BUFFERS

SHOWN = 20  # names of one kind that get a verdict of their own
RANKS = 64  # ranks whose bytes are added up; of more, so many evenly spread
WORK = 100_000  # boxes that are looked at for it

MODEL, FLAT, OPTIMIZER, OTHER = "model", "flat groups", "optimizer state", "other tensors"
RANDOM, LOADER, OWN = "random number state of each rank", "data loader state of each rank", "other state of each rank"
VALUES = "values that all ranks share"
_LOADER = ("loader", "sampler", "dataset")


@dataclass(frozen=True)
class Reads:
    """The payload bytes that ranks get: the least, the most, and about how many all ranks together."""

    least: int
    most: int
    total: int


def verdicts(found: Found) -> tuple[Verdict, ...]:
    """Return what becomes of each part of the state: what is impossible first, then what is lost, then the rest."""
    d = found.destination
    unwanted = [n for n in d.routes.leftover(d.objects) if n not in d.manifest.aliases]
    return (
        *impossible(found),
        *_unwanted(unwanted),
        *_private(d),
        *_shared(found),
        *_values(d),
    )


def reads(found: Found, names: Iterable[str] | None = None) -> Reads:
    """Return the bytes that ranks of the target get of some tensors, all by default; of many ranks some are asked."""
    d = found.destination
    wanted = found.routes if names is None else names
    counts = Counter((d.tensors[n].layout, d.tensors[n].shape or (), found.routes[n].dtype) for n in wanted)
    ranks = looked_at(d.world_size, len(counts))
    sums = dict.fromkeys(ranks, 0)
    for (layout, shape, dtype), count in counts.items():
        place = resolve(d.layouts[layout], d.meshes)
        for rank in ranks:
            sums[rank] += sum(box.numel for box in place.boxes(shape, rank)) * DTYPES[dtype].itemsize * count
    got = list(sums.values())
    return Reads(min(got), max(got), sum(got) * d.world_size // len(got))


def looked_at(world_size: int, kinds: int) -> Sequence[int]:
    """Return the ranks whose bytes are added up, the first and the last among them."""
    count = min(world_size, RANKS, max(2, WORK // max(1, kinds)))
    return sorted({i * (world_size - 1) // max(1, count - 1) for i in range(count)})


def _unwanted(names: Sequence[str]) -> Iterator[Verdict]:
    for name in names[:SHOWN]:
        yield Verdict(f"stored {name}", LOST, "the target does not ask for it")
    if len(names) > SHOWN:
        yield Verdict(f"{len(names) - SHOWN} more that are stored", LOST, "as those before")


# ---- what is each rank's own -----------------------------------------------------------------------------------------


def owned(d: Destination) -> dict[str, list[str]]:
    """Return the names of what is private to each rank, by what it is for."""
    tensors = d.manifest.tensors
    random = {name.rpartition("/")[0] for name, t in tensors.items() if t.role == "rng"}
    out: dict[str, list[str]] = {}
    for name in d.private():
        if name in tensors or name in d.manifest.objects:
            out.setdefault(_purpose(name, random), []).append(name)
    return {part: out[part] for part in (RANDOM, LOADER, OWN) if part in out}


def _purpose(name: str, random: Container[str]) -> str:
    """Return what state of a rank's own is for, by its name; `random` are places where generators are kept."""
    tokens = [token.lower() for token in split(name)]
    if name.rpartition("/")[0] in random or any("rng" in re.split(r"[_.\-]", token) for token in tokens):
        return RANDOM
    return LOADER if any(word in token for token in tokens for word in _LOADER) else OWN


def _private(d: Destination) -> Iterator[Verdict]:
    """Yield what becomes of what is each rank's own: it maps only where ranks do."""
    old, new = d.manifest.world_size, d.world_size
    for part, names in owned(d).items():
        if old == new:
            yield Verdict(part, LOSSLESS, f"each rank gets its own: {listed(names)}")
        elif new > old:
            has = f"rank r gets that of rank r; {ranks(old, new)} had none: {listed(names)}"
            yield Verdict(part, APPROXIMATE, has)
        else:
            has = f"rank r gets that of rank r; that of {ranks(new, old)} goes nowhere: {listed(names)}"
            yield Verdict(part, APPROXIMATE if part == RANDOM else LOST, has)


def ranks(start: int, stop: int) -> str:
    """Return the ranks from `start` to `stop` (not included) in words."""
    return f"rank {start}" if stop == start + 1 else f"ranks {start} to {stop - 1}"


# ---- what ranks share ------------------------------------------------------------------------------------------------


def _shared(found: Found) -> Iterator[Verdict]:
    """Yield that what has a way is whole, for each part of the state, and what ranks read of it."""
    groups = found.destination.manifest.flat_groups.values()
    parameters = {flat for g in groups for kind, flat in kinds(g).items() if kind == "parameter"}
    by_part: dict[str, list[str]] = {}
    for name in found.routes:
        by_part.setdefault(_part(found, name, parameters), []).append(name)
    for part in (MODEL, FLAT, OPTIMIZER, OTHER):
        if names := by_part.get(part, []):
            got = reads(found, names)
            reason = (_flat if part == FLAT else _plain)(found, names)
            yield Verdict(part, LOSSLESS, reason, (got.least, got.most), got.most + min(got.most, BUFFERS))


def _part(found: Found, name: str, parameters: Container[str]) -> str:
    """Return what a tensor is for; `parameters` are the flat tensors that hold parameters."""
    d = found.destination
    if isinstance(d.layouts[d.tensors[name].layout], FlatLayout):
        return FLAT
    source = next(iter(found.routes[name].sources), name)
    entry = d.manifest.tensors.get(name, d.manifest.tensors.get(source))
    if state_name(name) is not None or (entry is not None and entry.role in ("optimizer", "master")):
        return OPTIMIZER
    model = entry is not None and entry.role in ("parameter", "buffer")
    return MODEL if model or source in parameters else OTHER


def _plain(found: Found, names: Sequence[str]) -> str:
    d = found.destination
    count = "its tensor" if len(names) == 1 else f"each of its {len(names):,} tensors"
    flat = [n for n in names if any(_is_flat(found, source) for source in found.routes[n].sources)]
    said = f"{count} is the same bit for bit on {_many(d.world_size)}"
    if flat:
        said += f"; {len(flat):,} are read out of flat groups"
    return said


def _is_flat(found: Found, source: str) -> bool:
    m = found.destination.manifest
    return isinstance(m.layouts[m.tensors[source].layout], FlatLayout)


def _flat(found: Found, names: Sequence[str]) -> str:
    d = found.destination
    count = "its tensor" if len(names) == 1 else f"its {len(names):,} tensors"
    if not all(_is_flat(found, source) for name in names for source in found.routes[name].sources):
        return f"{count} are put together from named tensors for {_many(d.world_size)}, bit for bit"
    if d.same_world:
        return f"{count} come back as they were cut for {_many(d.world_size)}; padding is no state"
    was = d.manifest.world_size
    return f"ZeRO is cut anew, {was} ranks to {d.world_size}: the elements of {count} are the same, padding is no state"


def _many(n: int) -> str:
    return "1 rank" if n == 1 else f"{n:,} ranks"


def _values(d: Destination) -> Iterator[Verdict]:
    same = [n for n, kind in d.objects.items() if kind == "same" and d.manifest.objects.get(n) == "same"]
    if same:
        yield Verdict(VALUES, LOSSLESS, f"any copy serves: {listed(same)}")

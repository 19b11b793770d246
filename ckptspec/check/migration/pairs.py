"""Owns which missing name is which surplus one under another name: wrappers, whole prefixes, then the nearest.

Nothing is renamed by it: it proposes, and takes only pairs that could not be meant otherwise.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptspec.check.migration.nearness import Nearness

WRAPPERS = frozenset(("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
TOP = "model"  # what a state dict is often kept under
SWAPS = 16  # exchanges of one prefix for another that are looked for
CROWD = 8  # candidates with one ending, above which it tells nothing
LOOKED = 50  # names for which the nearest one is looked for


@dataclass(frozen=True)
class Pair:
    """A wanted name and the stored one it seems to be; `wanted_part` stands where the stored name has `stored_part`.

    `kind` is `prefix` where many names differ alike or a wrapper's name is known, else `near`.
    """

    wanted: str
    stored: str
    kind: str
    wanted_part: str = ""
    stored_part: str = ""


def pairs(missing: Iterable[str], surplus: Iterable[str], fits: Callable[[str, str], bool]) -> list[Pair]:
    """Return the pairs among names that only one side has; `fits(wanted, stored)` tells whether dtype and shape agree.

    Each name is in one pair at most. Names that fit badly are paired by prefix all the same, and never as near ones.
    """
    work = _Pairing(list(dict.fromkeys(missing)), list(dict.fromkeys(surplus)), fits)
    work.take(work.wrapped())
    for _ in range(SWAPS):
        if not work.take(work.swapped()):
            break
    work.take(work.near())
    return work.found


class _Pairing:
    def __init__(self, missing: Sequence[str], surplus: Sequence[str], fits: Callable[[str, str], bool]) -> None:
        self.missing, self.surplus, self.fits = missing, surplus, fits
        self.found: list[Pair] = []

    def take(self, pairs: Iterable[Pair]) -> bool:
        """Keep pairs and look at their names no more; tell whether there were any."""
        new = list(pairs)
        wanted, stored = {p.wanted for p in new}, {p.stored for p in new}
        self.missing = [n for n in self.missing if n not in wanted]
        self.surplus = [n for n in self.surplus if n not in stored]
        self.found += new
        return bool(new)

    def wrapped(self) -> Iterator[Pair]:
        """Yield the pairs that differ by the names of wrappers alone, or by the place of the whole state dict."""
        for wanted, stored in _single(_by(bare, self.missing), _by(bare, self.surplus)):
            yield Pair(wanted, stored, "prefix", *_wrappings(wanted, stored))

    def swapped(self) -> Iterator[Pair]:
        """Yield the pairs of the one exchange of prefixes that most names agree on, two at least."""
        ends: dict[str, list[str]] = defaultdict(list)
        for name in self.surplus:
            for start in _starts(name):
                ends[name[start:]].append(name)
        votes: Counter[tuple[str, str]] = Counter()
        for name in self.missing:
            at = next((s for s in _starts(name) if name[s:] in ends), None)
            if at is not None and len(ends[name[at:]]) <= CROWD:
                votes.update((name[:at], other[: len(other) - len(name) + at]) for other in ends[name[at:]])
        if not votes:
            return
        (old, new), count = max(votes.items(), key=lambda item: (item[1], -len(item[0][0]), item[0]))
        if count < 2:
            return
        stored = set(self.surplus)
        for name in self.missing:
            other = new + name[len(old) :]
            if name.startswith(old) and other in stored:
                yield Pair(name, other, "prefix", old, new)

    def near(self) -> Iterator[Pair]:
        """Yield the pairs of which each is the nearest to the other, of one dtype and shape."""
        nearness = Nearness()
        for name in self.missing[:LOOKED]:
            if nearness.left <= 0:
                return
            others = [other for other in self.surplus if self.fits(name, other)]
            other = nearness.nearest(name, others)
            if other is not None:
                back = [n for n in self.missing if self.fits(n, other)]
                if nearness.nearest(other, back) == name:
                    yield Pair(name, other, "near")


def bare(name: str) -> str:
    """Return a name without what wrappers add, and without the place of the whole state dict before it."""
    tokens = [".".join(s for s in token.split(".") if s not in WRAPPERS) for token in name.split("/")]
    kept = [t for t in tokens if t]
    if len(kept) > 1 and kept[0] == TOP:
        kept = kept[1:]
    elif kept and kept[0].startswith(TOP + "."):
        kept[0] = kept[0][len(TOP) + 1 :]
    return "/".join(kept)


def _by(key: Callable[[str], str], names: Iterable[str]) -> Mapping[str, list[str]]:
    out: dict[str, list[str]] = defaultdict(list)
    for name in names:
        out[key(name)].append(name)
    return out


def _single(one: Mapping[str, list[str]], other: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    """Yield the names that have one key, and share it with no other of their side."""
    for key, names in one.items():
        if len(names) == 1 and len(other.get(key, ())) == 1:
            yield names[0], other[key][0]


def _wrappings(wanted: str, stored: str) -> tuple[str, str]:
    """Return what each of two names of one bare name has beside the other, as it would be written before a name."""
    parts = [Counter(_segments(name)) for name in (wanted, stored)]
    more = [parts[0] - parts[1], parts[1] - parts[0]]
    texts = ("".join(s + ("/" if f"{s}/" in name else ".") for s in _segments(name) if s in extra)
             for name, extra in zip((wanted, stored), more, strict=True))  # fmt: skip
    return next(texts), next(texts)


def _segments(name: str) -> list[str]:
    return [segment for token in name.split("/") for segment in token.split(".")]


def _starts(name: str) -> Iterator[int]:
    """Yield where the parts of a name begin, the whole first."""
    yield 0
    yield from (i + 1 for i, c in enumerate(name) if c in "/." and i + 1 < len(name))

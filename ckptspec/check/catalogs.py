"""Owns the rules that need all shards together: who stores what, and what all of them must hold alike."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from ckptspec.check.coverage import Piece, Place, judge
from ckptspec.check.registry import LIMIT, Rules, fault
from ckptspec.check.shards import Subject, check_subject
from ckptspec.check.verdicts import STEPS, boxes_a_rank
from ckptspec.errors import Where
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.manifest import Manifest
from ckptspec.format.report import Finding
from ckptspec.format.shard import Index


@dataclass
class Seen:
    """An object as the shards hold it: the digest of the first one's bytes, and the ranks whose bytes differ."""

    rank: int
    digest: bytes
    others: list[int] = field(default_factory=list)


class Gathered:
    """What the shards say together, gathered one by one so that no state is kept: indexes, and digests of objects."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.indexes: dict[int, Index] = {}
        self.objects: dict[str, Seen] = {}
        self.referenced: set[str] = set()
        self._names = {name: name for name in manifest.tensors}

    def add(self, rank: int, document: ShardDocument) -> Iterator[Finding]:
        """Yield what check_shard finds in the shard of `rank`, then keep what is needed of it."""
        subject = Subject(self.manifest, self.manifest.shard(rank), document)
        yield from check_subject(subject)
        self.indexes[rank] = document.index
        self.referenced.update(self._names[name] for name in subject.references.values() if name in self._names)
        for name, data in subject.objects():
            digest = hashlib.sha256(data).digest()
            seen = self.objects.setdefault(name, Seen(rank, digest))
            if seen.digest != digest:
                seen.others.append(rank)

    @property
    def complete(self) -> bool:
        """Whether every shard was readable: only then can anything be said to be nowhere."""
        return len(self.indexes) == self.manifest.world_size

    def where(self, rank: int | None, tensor: str | None = None) -> Where:
        """Return the shard of `rank`, or a tensor in it."""
        return Where(None if rank is None else self.manifest.shard(rank).path, None, tensor, rank)

    @cached_property
    def pieces(self) -> dict[str, list[Piece]]:
        """Every stored piece of every tensor that is not local, as the indexes have it: one pass over all rows."""
        found: dict[str, list[Piece]] = {}
        for rank, index in self.indexes.items():
            for chunk in index.chunks:
                found.setdefault(index.names[chunk.tensor], []).append((rank, chunk.box.offsets, chunk.box.sizes))
        return found

    def _worth_judging(self) -> Iterator[str]:
        """Yield the tensors that are judged: all, but where shards lack only as many as can be listed in short time.

        What the shards at hand store bounds the work for them; nothing bounds what a layout says of absent ones.
        """
        m, left = self.manifest, STEPS
        for name, tensor in m.tensors.items():
            left -= 0 if self.complete else m.world_size * boxes_a_rank(m.layouts[tensor.layout])
            if left < 0:
                return
            yield name

    @cached_property
    def misplaced(self) -> tuple[Place, ...]:
        """The first tensors whose pieces are not where the holder rule puts them: a file cannot make this endless."""
        judged = (judge(self.manifest, name, self.pieces.get(name, []), self.indexes) for name in self._worth_judging())
        return tuple(islice((place for place in judged if place is not None), LIMIT))


rule: Rules[Gathered] = Rules("catalog")


def _misplaced(g: Gathered, code: str, message: str) -> Iterator[Finding]:
    for place in g.misplaced:
        if place.code == code:
            yield fault(code, message, g.where(place.rank, place.tensor), place.expected, place.found)
    if len(g.misplaced) == LIMIT and code == g.misplaced[-1].code:
        yield fault(code, f"the first {LIMIT} tensors at fault are named, there may be more", g.where(None))


@rule("T-COVER")
def coverage(g: Gathered) -> Iterator[Finding]:
    """Every element of every tensor is stored as often as it must be, in as many ranks."""
    return _misplaced(g, "T-COVER", "not every element is stored as often as it must be")


@rule("T-HOLD")
def placement(g: Gathered) -> Iterator[Finding]:
    """Every piece is stored by the ranks, and cut in the way, that the holder rule says."""
    return _misplaced(g, "T-HOLD", "the pieces are not cut or placed by the holder rule")


@rule("O-KIND")
def objects(g: Gathered) -> Iterator[Finding]:
    """An object of kind `same` has equal bytes wherever it is; every object of the manifest is somewhere."""
    for name, kind in g.manifest.objects.items():
        seen = g.objects.get(name)
        if seen is None and g.complete:
            yield fault("O-KIND", f"no state holds object {name!r}", Where("manifest.json"))
        elif seen is not None and seen.others and kind == "same":
            message = f"object {name!r} differs from the one of rank {seen.rank}"
            found = f"other bytes in ranks {', '.join(map(str, seen.others[:8]))}"
            yield fault("O-KIND", message, g.where(seen.others[0]), "equal bytes in every shard", found)


@rule("S-REF")
def references(g: Gathered) -> Iterator[Finding]:
    """Every tensor of the manifest is in the state of some rank."""
    if g.complete:
        for name in g.manifest.tensors:
            if name not in g.referenced:
                yield fault("S-REF", "no state refers to the tensor", Where("manifest.json", tensor=name))


def finish(gathered: Gathered) -> Iterator[Finding]:
    """Yield every breach of a rule by all shards together, once each of them was added."""
    yield from rule.run(gathered)

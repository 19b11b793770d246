"""Owns the check that ranks which hold the same bytes do; refuses a save where they differ [P-REPLICA]."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ckptspec.engine.holding import Holding
from ckptspec.engine.pool import Task
from ckptspec.engine.saves.snapshot import Replica, Snapshot
from ckptspec.errors import SaveError, Where
from ckptspec.format.box import Box, pieces
from ckptspec.format.dtypes import dtype

BATCH = 8 << 20
OBJECTS = "objects:"  # and the key of the ranks that hold them
Digests = dict[str, bytes]


class Checks:
    """The digests of everything this rank holds together with others, by group of holders."""

    def __init__(
        self, snapshot: Snapshot, replicas: Sequence[Replica], holders: Mapping[str, str] | None = None
    ) -> None:
        """`holders` gives an object's name the key of the ranks that hold it, where not all do."""
        self._snapshot = snapshot
        self._replicas = replicas
        self._holders = holders or {}
        self._found: dict[str, Digests] = defaultdict(dict)

    def tasks(self) -> Iterator[Task]:
        """Yield pool tasks that hash every replicated box, small ones in batches."""
        batch: list[Replica] = []
        nbytes = 0
        for r in self._replicas:
            batch.append(r)
            nbytes += r.box.numel * self._itemsize(r)
            if nbytes >= BATCH:
                yield partial(self._hash, batch)
                batch, nbytes = [], 0
        if batch:
            yield partial(self._hash, batch)

    def _itemsize(self, r: Replica) -> int:
        return dtype(self._snapshot.declaration.tensors[r.name].dtype).itemsize

    def _hash(self, batch: Sequence[Replica], buffer: memoryview) -> None:
        for r in batch:
            digest = _digest(self._snapshot.holdings[r.name], r.box, self._itemsize(r), buffer)
            key = _group_key(r.group)
            self._found[key][f"{r.name}\0{list(r.box.offsets)}"] = digest  # one dict write: atomic under threads

    def _objects(self) -> dict[str, Digests]:
        """Return the digests of objects that are the same wherever they are, by group of holders."""
        kinds = self._snapshot.declaration.objects
        found: dict[str, Digests] = {}
        for name, data in self._snapshot.objects.items():
            if kinds[name] == "same":
                group = OBJECTS + self._holders.get(name, "")
                found.setdefault(group, {})[name] = hashlib.sha256(data).digest()[:16]
        return found

    def digests(self) -> Digests:
        """Return one digest over (name, digest) for each group of holders of tensors or objects; after the tasks."""
        return {key: _over(found) for key, found in (*self._found.items(), *self._objects().items())}

    def detail(self, groups: Iterable[str]) -> dict[str, Digests]:
        """Return the single digests of the groups that the coordinator asks about."""
        known = {**self._found, **self._objects()}
        return {group: dict(known.get(group, {})) for group in groups}


def _group_key(group: Sequence[int]) -> str:
    return hashlib.sha256(repr(tuple(group)).encode()).hexdigest()[:16]


def _over(found: Mapping[str, bytes]) -> bytes:
    h = hashlib.sha256()
    for name, digest in sorted(found.items()):
        h.update(name.encode() + b"\0" + digest)
    return h.digest()[:16]


def _digest(holding: Holding, box: Box, itemsize: int, buffer: memoryview) -> bytes:
    import xxhash

    view = holding.view(box)
    if view is not None:
        return xxhash.xxh3_128_digest(view)
    h = xxhash.xxh3_128()
    for piece in pieces(box, itemsize, len(buffer)):
        out = buffer[: piece.numel * itemsize]
        holding.fill(piece, out)
        h.update(out)
    return h.digest()


def disagreeing(hand_ins: Sequence[Mapping[str, bytes]]) -> list[str]:
    """Return the groups whose members handed in different digests."""
    seen: dict[str, set[bytes]] = defaultdict(set)
    for digests in hand_ins:
        for key, digest in digests.items():
            seen[key].add(digest)
    return sorted(key for key, digests in seen.items() if len(digests) > 1)


def disagreement(details: Sequence[Mapping[str, Mapping[str, bytes]]]) -> SaveError | None:
    """Return the error that names the first tensor or object that differs and the ranks that differ from the majority.

    None where every name is equal among those that hold it.
    """
    held: dict[tuple[str, str], dict[int, bytes]] = defaultdict(dict)
    for rank, groups in enumerate(details):
        for group, found in groups.items():
            for name, digest in found.items():
                held[group, name][rank] = digest
    for (group, name), by_rank in held.items():
        usual, _ = Counter(by_rank.values()).most_common(1)[0]
        odd = [rank for rank, digest in by_rank.items() if digest != usual]
        if odd:
            return _error(group, name, odd, len(by_rank))
    return None


def _error(group: str, name: str, odd: Sequence[int], holders: int) -> SaveError:
    what = "object" if group.startswith(OBJECTS) else "tensor"
    path = name if group.startswith(OBJECTS) else name.split("\0")[0]
    shown: Any = list(odd[:8])
    advice = "make the ranks equal before the save, or wrap it: ckptspec.Local(x) keeps every rank's own"
    if what == "tensor":
        advice += ", ckptspec.Replicated(x, source=0) keeps rank 0's for all (under DDP, BatchNorm statistics differ)"
    return SaveError(
        f"{what} {path!r} differs between ranks that should hold equal bytes",
        rank=odd[0],
        rule="P-REPLICA",
        where=Where(tensor=path, rank=odd[0]),
        expected=f"equal bytes on {holders} ranks",
        found=f"other bytes on ranks {shown}{' and more' if len(odd) > 8 else ''}",
        advice=advice,
    )

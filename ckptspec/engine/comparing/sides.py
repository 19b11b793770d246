"""Owns one side of a comparison: a checkpoint whose errors say which side they are of, and whose states are let go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ckptspec.engine.documents import load_manifest, open_shard
from ckptspec.engine.fetch import Opened
from ckptspec.errors import CkptspecError, ShardError, Where
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.manifest import Manifest
from ckptspec.format.objects import objects
from ckptspec.format.shard import Index


@dataclass
class Side(Opened):
    """One of two checkpoints, called `letter`, found at `path`.

    Of a shard that was opened the index is kept. Of its state only the packed objects called in `keep` are, those of
    kind `same` once, those of kind `rank` until they are taken.
    """

    letter: str = ""
    path: str = ""
    keep: frozenset[str] = frozenset()
    shared: dict[str, bytes] = field(default_factory=dict)
    private: dict[int, dict[str, bytes]] = field(default_factory=dict)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Have every ckptspec error raised within say that it is of this side, and in which file."""
        with _blamed(self.letter, self.path, self.manifest):
            yield

    def document(self, rank: int) -> ShardDocument:
        """Return the documents of the shard of `rank`, its state left out; raises as `Opened.document` does."""
        if rank not in self.documents:
            read = open_shard(self.folder, self.manifest.shard(rank), self.manifest, numpy=False)
            if self.keep:
                self._take(rank, read)
            self.documents[rank] = replace(read, state=None, state_bytes=b"")
        return self.documents[rank]

    def _take(self, rank: int, document: ShardDocument) -> None:
        try:
            found = objects(document.state, reading=True)
        except ShardError as e:
            e.where = replace(e.where, rank=rank)
            raise
        for name, packed in found.items():
            if name not in self.keep:
                continue
            if self.manifest.objects.get(name) == "same":
                self.shared.setdefault(name, packed)
            else:
                self.private.setdefault(rank, {})[name] = packed

    def index(self, rank: int) -> Index | None:
        """Return the index of the shard of `rank`, None where this side has no such rank."""
        return self.document(rank).index if rank < self.manifest.world_size else None

    def same(self, name: str) -> bytes:
        """Return the packed bytes of an object of kind `same`, out of the first shard that has it.

        Raises ShardError [O-KIND] where none has.
        """
        for entry in self.manifest.shards:
            if name in self.shared:
                break
            self.document(entry.rank)
        if name not in self.shared:
            message = f"no shard has the object {name!r} that the manifest lists"
            raise ShardError(message, rule="O-KIND", where=Where("manifest.json"))
        return self.shared[name]

    def taken(self, rank: int) -> dict[str, bytes]:
        """Return the packed objects of kind `rank` that the shard of `rank` has, and let them go."""
        if self.index(rank) is None:
            return {}
        return self.private.pop(rank, {})


@contextmanager
def _blamed(letter: str, path: str, manifest: Manifest | None = None) -> Iterator[None]:
    try:
        yield
    except CkptspecError as e:
        rank = e.where.rank
        if e.where.file is None and rank is not None and manifest is not None and rank < manifest.world_size:
            e.where = replace(e.where, file=manifest.shard(rank).path)
        e.message = f"in {letter} ({path}): {e.message}"
        raise


def open_side(letter: str, path: str) -> Side:
    """Return the side of the checkpoint that `path` means; raises as load_manifest does, in the side's name."""
    with _blamed(letter, path):
        folder, manifest = load_manifest(path)
    return Side(folder, manifest, letter=letter, path=path)

"""Owns getting what is needed out of a checkpoint: it opens the shards that hold it, plans the reads and runs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptspec.engine.documents import open_shard
from ckptspec.engine.execute import Source, Transfer, execute
from ckptspec.engine.holding import Holding
from ckptspec.engine.pool import Pool
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.manifest import Manifest
from ckptspec.format.shard import Index
from ckptspec.plan.transfers import Locator, Need, moves, needed, whole_chunks


@dataclass
class Opened:
    """A checkpoint folder whose shards are opened when first asked for, each once; counts what was opened."""

    folder: str
    manifest: Manifest
    documents: dict[int, ShardDocument] = field(default_factory=dict)

    def document(self, rank: int) -> ShardDocument:
        """Return the documents of the shard of `rank`; raises ShardError, IntegrityError or OSError."""
        if rank not in self.documents:
            self.documents[rank] = open_shard(self.folder, self.manifest.shard(rank), self.manifest)
        return self.documents[rank]

    def source(self, rank: int) -> Source:
        """Return the shard of `rank` as something to read from."""
        document = self.document(rank)
        name = self.manifest.shard(rank).path
        return Source(os.path.join(self.folder, name), name, rank, document.header, document.index)


def fetch(
    opened: Opened,
    wants: Sequence[tuple[Need, Holding]],
    pool: Pool,
    *,
    prefer: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Deliver every need into its holding, verified, and return the payload bytes delivered.

    Raises IntegrityError [B-DIGEST], ShardError, PlanError [T-COVER] or OSError; the holdings are then undefined.
    """
    work: dict[int, list[Transfer]] = {}
    near = whole_chunks(opened.document(prefer).index) if prefer is not None else {}
    far: list[tuple[Need, Holding]] = []
    for need, holding in wants:
        row = near.get((need.name, need.box))  # most needs of a same-layout restore are one chunk of the rank's own
        if row is None:
            far.append((need, holding))
        elif prefer is not None:
            work.setdefault(prefer, []).append(Transfer(row, need.box, holding))
    holdings = {id(need): holding for need, holding in far}
    locator = Locator(opened.manifest, prefer)
    for rank, parts in needed(locator, (need for need, _ in far)).items():
        for m in moves(rank, opened.document(rank).index, parts):
            work.setdefault(rank, []).append(Transfer(m.chunk, m.box, holdings[id(m.need)]))
    sources = [(opened.source(rank), transfers) for rank, transfers in sorted(work.items())]
    execute(sources, pool, progress)
    return sum(_nbytes(source.index, t) for source, transfers in sources for t in transfers)


def _nbytes(index: Index, t: Transfer) -> int:
    row = index.chunks[t.chunk]
    return row.nbytes if t.box is row.box else row.nbytes // row.box.numel * t.box.numel

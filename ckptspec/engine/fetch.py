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
from ckptspec.plan.transfers import Locator, Need, moves, needed


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
    holdings = {id(need): holding for need, holding in wants}
    locator = Locator(opened.manifest, prefer)
    work, nbytes = [], 0
    for rank, parts in sorted(needed(locator, (need for need, _ in wants)).items()):
        source = opened.source(rank)
        transfers = [Transfer(m.chunk, m.box, holdings[id(m.need)]) for m in moves(rank, source.index, parts)]
        work.append((source, transfers))
        nbytes += sum(t.box.numel * _itemsize(source, t.chunk) for t in transfers)
    execute(work, pool, progress)
    return nbytes


def _itemsize(source: Source, chunk: int) -> int:
    row = source.index.chunks[chunk]
    return row.nbytes // row.box.numel

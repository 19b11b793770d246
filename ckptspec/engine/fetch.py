"""Owns getting what is needed out of a checkpoint: it opens the shards that hold it, plans the reads and runs them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ckptspec.engine.documents import open_shard
from ckptspec.engine.execute import Source, Transfer, execute
from ckptspec.engine.holding import Holding
from ckptspec.engine.pool import Pool
from ckptspec.errors import CkptspecError, IntegrityError, PlanError, ShardError
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.manifest import Manifest
from ckptspec.format.shard import Index
from ckptspec.planner.transfers import Locator, Need, moves, needed, whole_chunks


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


Progress = Callable[[int], None]
TRIES = 64  # failures of single tensors of one shard, after which it is given up as a whole


def fetch(
    opened: Opened,
    wants: Sequence[tuple[Need, Holding]],
    pool: Pool,
    *,
    prefer: int | None = None,
    progress: Progress | None = None,
    recovered: list[str] | None = None,
    recover: bool = True,
) -> int:
    """Deliver every need into its holding, verified, and return the payload bytes delivered.

    What is damaged or gone is read from another shard where that stores a copy [Q-REPLICA], and said in `recovered`;
    without `recover` it is an error.
    Raises IntegrityError [B-DIGEST], ShardError, PlanError [T-COVER] or OSError; the holdings are then undefined.
    """
    without: frozenset[tuple[int, str | None]] = frozenset()
    first: CkptspecError | None = None
    while True:
        locator = Locator(opened.manifest, prefer, without)
        try:
            work = _work(opened, wants, locator)
            sources = [(opened.source(rank), transfers) for rank, transfers in sorted(work.items())]
            execute(sources, pool, progress)
        except (IntegrityError, ShardError) as e:
            more = _set_aside(opened.manifest, without, e) if recover else None
            if more is None:
                raise
            first = first or e
            without |= {more}
            if recovered is not None:
                recovered.append(str(e))
        except PlanError as e:
            if first is not None and e.rule == "Q-REPLICA":
                raise first from None  # what is damaged says more than that there is no other copy
            raise
        else:
            return sum(_nbytes(source.index, t) for source, transfers in sources for t in transfers)


def _set_aside(
    manifest: Manifest, without: frozenset[tuple[int, str | None]], error: IntegrityError | ShardError
) -> tuple[int, str | None] | None:
    """Return what of which rank's shard cannot be read, by an error; None where that does not let another be tried."""
    rank, tensor = error.where.rank, error.where.tensor
    if manifest.copies < 2 or rank is None or (rank, None) in without:
        return None
    known = sum(1 for r, _ in without if r == rank)
    place = (rank, None if known >= TRIES else tensor)
    return None if place in without else place


def _work(opened: Opened, wants: Sequence[tuple[Need, Holding]], locator: Locator) -> dict[int, list[Transfer]]:
    """Return the transfers by the rank whose shard they read."""
    own = locator.prefer if (locator.prefer, None) not in locator.without else None
    work: dict[int, list[Transfer]] = {}
    near = whole_chunks(opened.document(own).index) if own is not None else {}
    far: list[tuple[Need, Holding]] = []
    for need, holding in wants:
        # Most needs of a same-layout restore are one chunk of the rank's own.
        row = near.get((need.name, need.box)) if need.view is None and need.rank in (None, own) else None
        if row is None or own is None or (own, need.name) in locator.without:
            far.append((need, holding))
        else:
            work.setdefault(own, []).append(Transfer(row, need.box, holding))
    holdings: dict[int, list[Holding]] = {}  # one need may be given more than once
    for need, holding in far:
        holdings.setdefault(id(need), []).append(holding)
    for rank, parts in needed(locator, {id(need): need for need, _ in far}.values()).items():
        for m in moves(rank, opened.document(rank).index, parts):
            work.setdefault(rank, []).extend(Transfer(m.chunk, m.box, h, m.view) for h in holdings[id(m.need)])
    return work


def _nbytes(index: Index, t: Transfer) -> int:
    row = index.chunks[t.chunk]
    return row.nbytes if t.box is row.box else row.nbytes // row.box.numel * t.box.numel

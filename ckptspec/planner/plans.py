"""Owns making plans and their transfers, from documents alone; refuses a plan that does not hold when made again.

Working one out takes numpy, which is loaded with the modules that do it, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckptspec.errors import PlanError
from ckptspec.format import asked
from ckptspec.format.catalog import Catalog
from ckptspec.format.dtypes import dtype
from ckptspec.format.manifest import Manifest
from ckptspec.format.report import Verdict
from ckptspec.format.target import Target
from ckptspec.planner import fates
from ckptspec.planner.destination import Destination, destination
from ckptspec.planner.fates import Found
from ckptspec.planner.planned import Columns, Plan, Ranks, Source, Totals, from_document
from ckptspec.planner.renames import Renames

if TYPE_CHECKING:
    from ckptspec.planner.book import Book
    from ckptspec.planner.lanes import Transfers

SIZE_LIMIT = 512 << 20  # bytes of a plan document: a target, and four numbers a rank
BUFFERS = 256 << 20  # bytes in which a rank that loads holds what it reads, at most
KEPT = 1 << 17  # transfers that are kept, for other tensors of the same kind
Judge = Callable[[Found], Iterable[Verdict]]


def plan(
    source: Manifest | Catalog, target: Target, names: Renames | None = None, *, judge: Judge = fates.impossible
) -> Plan:
    """Return the plan that brings a sound checkpoint to `target`; `names` is a map of names.

    The manifest suffices: indexes only tell how many bytes are private to ranks. `judge` says what becomes of each
    part; what cannot be had has no transfers. Raises PlanError [R-TARGET] for a target at odds with itself.
    """
    from ckptspec.planner.book import Book
    from ckptspec.planner.tally import tally

    catalog = source if isinstance(source, Catalog) else Catalog(source)
    m = catalog.manifest
    settled = destination(m, target, names)
    found = fates.found(settled)
    sums = tally(Book(found))
    columns = (sums.delivered, sums.read, sums.shards, sums.transfers)
    ranks = Ranks(*(tuple(column.tolist()) for column in columns))
    totals = Totals(
        _payload(m),
        sum(ranks.bytes_delivered),
        sum(ranks.bytes_read),
        sums.read_once,
        sum(ranks.transfers),
        max(ranks.bytes_delivered) + min(max(ranks.bytes_read), BUFFERS),
        _private(catalog, found),
    )
    verdicts = tuple(judge(found))
    return Plan(Source.of(m), _target(settled), settled.names, verdicts, totals, ranks, sums.digest)


def _target(d: Destination) -> Target:
    """Return the target that leaves nothing open."""
    return Target(d.world_size, d.meshes, d.layouts, d.tensors, d.objects, d.flat_groups, d.aliases)


def _payload(manifest: Manifest) -> int:
    shared = (t for t in manifest.tensors.values() if t.shape is not None)
    return sum(prod(t.shape or ()) * dtype(t.dtype).itemsize for t in shared)


def _private(catalog: Catalog, found: Found) -> int | None:
    """Return the bytes of local tensors that go back to ranks of the same number; None where an index is missing."""
    local = set(found.private.values())
    ranks = range(min(catalog.manifest.world_size, found.destination.world_size))
    if not local or any(rank not in catalog.shards for rank in ranks):
        return None if local else 0
    indexes = (catalog.shards[rank].index for rank in ranks)
    return sum(chunk.nbytes for index in indexes for chunk in index.chunks if index.names[chunk.tensor] in local)


def needed(manifest: Manifest, target: Target, rank: int, names: Renames | None = None) -> tuple[int, ...]:
    """Return the ranks, ascending, whose shards destination rank `rank` must open: from layouts alone.

    Its own number is one of them where it has state that is private to a rank. Raises PlanError as `plan` does, and
    for a rank that the target has not [R-TARGET].
    """
    from ckptspec.planner.book import Book

    settled = destination(manifest, target, names)
    book = Book(fates.found(settled))
    opened = {rank} if book.found.own and rank < manifest.world_size else set()
    for leaf in book.leaves:
        for moved, _ in leaf.batches(_one(settled, rank), manifest.block_size):
            opened.update(moved.source.tolist())
    return tuple(sorted(opened))


def _one(d: Destination, rank: int) -> range:
    if not 0 <= rank < d.world_size:
        expected = f"0 to {d.world_size - 1}"
        raise PlanError("the target has no such rank", rule="R-TARGET", expected=expected, found=str(rank))
    return range(rank, rank + 1)


def transfers(
    manifest: Manifest, target: Target, names: Renames | None = None, *, rank: int | None = None
) -> Iterator[Columns]:
    """Return all transfers, or those to one destination rank, in canonical order, as an iterator over some at a time.

    Raises PlanError as `needed` does.
    """
    from ckptspec.planner.book import Book
    from ckptspec.planner.tally import blocks

    settled = destination(manifest, target, names)
    ranks = [*blocks(settled.world_size, manifest.world_size)] if rank is None else [_one(settled, rank)]
    return _each(Book(fates.found(settled)), ranks)


def _each(book: Book, several: Sequence[range]) -> Iterator[Columns]:
    kept: dict[int, list[Columns]] = {}
    room = KEPT
    for entry in book.entries:
        if entry.leaf in kept:
            yield from (replace(columns, tensor=entry.wanted, source=entry.source) for columns in kept[entry.leaf])
            continue
        made: list[Columns] = []
        for ranks in several:
            for found, _ in book.leaves[entry.leaf].batches(ranks, book.manifest.block_size):
                if len(found):
                    columns = _columns(entry.wanted, entry.source, found)
                    room -= len(found)
                    if room >= 0:
                        made.append(columns)
                    yield columns
        if room >= 0:
            kept[entry.leaf] = made


def _columns(wanted: str, source: str, found: Transfers) -> Columns:
    from ckptspec.planner.tally import rows_of

    rows = rows_of(found)
    ndim = found.offsets.shape[1]
    offsets, sizes = (tuple(map(tuple, part.tolist())) for part in (rows[:, 2 : 2 + ndim], rows[:, 2 + ndim : -1]))
    rank, source_rank, elements = (tuple(rows[:, i].tolist()) for i in (0, 1, -1))
    return Columns(wanted, source, rank, source_rank, offsets, sizes, elements)


def parse(data: bytes, *, file: str | None = None) -> Plan:
    """Return the Plan in a JSON file's bytes; raises PlanError [X-PLAN]."""
    document = asked.document(data, "plan", rule="X-PLAN", limit=SIZE_LIMIT, file=file)
    return from_document(document, file=file)


def verify(made: Plan, manifest: Manifest) -> None:
    """Make a plan again and compare: raises PlanError [X-PLAN] where it is of another checkpoint or says otherwise.

    Verdicts, the estimate of memory and what only indexes tell are not compared.
    """
    if (expected := Source.of(manifest)) != made.source:
        fault = next(key for key in vars(expected) if vars(expected)[key] != vars(made.source)[key])
        was, now = (f"{fault} {vars(source)[fault]}" for source in (made.source, expected))
        raise _other("the plan is of another checkpoint", now, was)
    again = plan(manifest, made.target, made.names)
    if again.target.document() != made.target.document():
        raise _other("the plan's target leaves something open", "all that a target can say")
    if again.transfers_digest != made.transfers_digest:
        raise _other("the plan's transfers are not those to its target", again.transfers_digest, made.transfers_digest)
    counted = [key for key in vars(made.totals) if key not in ("peak_memory", "private_bytes")]
    if again.ranks != made.ranks or any(vars(again.totals)[key] != vars(made.totals)[key] for key in counted):
        raise _other("the plan's figures are not those of its transfers")


def _other(message: str, expected: str | None = None, found: Any = None) -> PlanError:
    advice = "make the plan again with ckptspec plan"
    return PlanError(message, rule="X-PLAN", expected=expected, found=found, advice=advice)

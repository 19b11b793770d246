"""Owns which pieces of tensors lie in the bytes of a shard that findings are about; pure: an index says where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptspec.check.verdicts import Damage, Loss, losses
from ckptspec.format.manifest import Manifest
from ckptspec.format.report import Finding
from ckptspec.format.shard import ChunkRow, Index
from ckptspec.planner.views import View

CODES = ("B-DIGEST", "B-READ")


def loss_of(manifest: Manifest, findings: Iterable[Finding], indexes: Mapping[int, Index]) -> Loss | None:
    """Return what is lost by damaged bytes of shards that are there; None where no byte of a payload is damaged.

    Where a rank's state is hit, all of its shard is counted as gone: nothing else tells what the shard holds.
    """
    found: list[Damage] = []
    gone: set[int] = set()
    for finding in findings:
        rank, extent = finding.where.rank, finding.where.range
        index = indexes.get(-1 if rank is None else rank)
        if finding.code not in CODES or rank is None or index is None:
            continue
        if extent is None or (extent[0] < index.state.stop and index.state.start < extent[1]):
            gone.add(rank)
        else:
            found += _pieces(rank, index, extent)
    return losses(manifest, gone, found) if found or gone else None


def _pieces(rank: int, index: Index, extent: tuple[int, int]) -> Iterator[Damage]:
    for chunk in index.chunks:
        run = _elements(chunk, extent)
        if run is not None:
            for view in View(0, chunk.box).within(*run):
                yield Damage(rank, index.names[chunk.tensor], view.box)


def _elements(chunk: ChunkRow, extent: tuple[int, int]) -> tuple[int, int] | None:
    """Return the elements of a chunk, row-major, of which bytes lie in an extent of the file."""
    low, high = max(extent[0], chunk.start), min(extent[1], chunk.start + chunk.nbytes)
    if low >= high:
        return None
    itemsize = chunk.nbytes // chunk.box.numel
    return (low - chunk.start) // itemsize, -((chunk.start - high) // itemsize)

"""Owns the end of a reshard, which one process does: headers, states, indexes, trailers, and the result's manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

from ckptspec.engine.locate import is_run
from ckptspec.engine.pool import Pool, Task
from ckptspec.engine.resharding.blocks import Blocks
from ckptspec.engine.resharding.descriptors import Descriptors
from ckptspec.engine.resharding.outline import Form, Outline
from ckptspec.engine.saves import commit
from ckptspec.engine.saves.writer import ShardPlan
from ckptspec.errors import FormatError, PlanError, SaveError, Where
from ckptspec.format import manifest, shard
from ckptspec.format.digest import algorithm
from ckptspec.format.manifest import Manifest, ShardEntry
from ckptspec.format.names import step_folder
from ckptspec.format.target import Target
from ckptspec.planner.renames import Renames
from ckptspec.planner.strips import LARGEST, UNIT
from ckptspec.storage import local

NOTE = "io.ckptspec.reshard"  # the annotation that says where a checkpoint came from
VERSION = 1  # of how work is cut and laid out: a journal of another one is not gone on with


def key_of(target: Target, names: Renames, drop: Sequence[str], form: Form, digest: str, lost: Sequence[int]) -> str:
    """Return the digest of all that decides what a reshard writes and in which units."""
    said = {
        "version": [VERSION, version("ckptspec"), UNIT, LARGEST],
        "source": digest,
        "lost": list(lost),
        "target": target.document(),
        "names": [dict(names.exact), [list(p) for p in names.patterns]],
        "drop": list(drop),
        "form": [form.copies, form.block, form.block_size],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def refuse_place(out: str, source: str, step: int) -> None:
    """Raise SaveError [P-EXISTING] where the result would be written into a checkpoint, or over its source."""
    place, taken = (os.path.realpath(path) for path in (os.path.join(out, step_folder(step)), source))
    if place == taken:
        message = "the result would take the place of the checkpoint that it is made from"
    elif os.path.isdir(out) and not is_run(out):
        message = "this is a checkpoint's folder, and a run folder is wanted"
    elif place.startswith(os.path.join(taken, "")):
        message = "the result would lie inside the checkpoint that it is made from, and go with it"
    else:
        return
    advice = "write to another run folder"
    raise SaveError(message, rank=0, rule="P-EXISTING", where=Where(out), advice=advice)


class Ending:
    """Ends every shard of a result whose payloads are all written, and makes the manifest."""

    def __init__(self, outline: Outline, source: Manifest, staging: commit.Staging, blocks: Blocks) -> None:
        self._outline = outline
        self._source = source
        self._staging = staging
        self._blocks = blocks
        self._algorithm = algorithm(outline.form.block)

    def shards(self, files: Descriptors, pool: Pool, tick: Callable[[], None]) -> tuple[ShardEntry, ...]:
        """Write what is left of every shard, flush it, and return the manifest's entries for them."""
        entries: dict[int, ShardEntry] = {}

        def task(rank: int) -> Task:
            def end(buffer: memoryview) -> None:
                with files.at(rank) as fd:
                    self._read_back(rank, fd, buffer)
                    entries[rank] = self._end(rank, fd)
                    os.fsync(fd)
                tick()

            return end

        pool.run(map(task, range(self._outline.world_size)))
        return tuple(entries[rank] for rank in range(self._outline.world_size))

    def _read_back(self, rank: int, fd: int, buffer: memoryview) -> None:
        """Take the digest of blocks whose bytes did not come in a row, out of the file."""
        block_size, table = self._outline.form.block_size, self._outline.tables[rank]
        for block in list(self._blocks.unknown(rank)):
            chunk = table.chunk(table.row_of_block(block))
            at = (block - chunk.block) * block_size
            data = buffer[: min(block_size, chunk.nbytes - at)]
            local.read_at(fd, data, chunk.start + at)
            self._blocks.set(rank, block, self._algorithm.of(data))

    def _end(self, rank: int, fd: int) -> ShardEntry:
        plan = self._outline.plan(rank, self._staging.save_id)
        index = plan.index
        local.write_at(fd, plan.header_bytes, 0)
        before = index.chunks[-1].start + index.chunks[-1].nbytes if index.chunks else index.header_nbytes
        lead = shard.lead(before, index.state)
        local.write_at(fd, lead + plan.state, index.state.start - len(lead))
        index_bytes = self._index(plan, rank)
        sha = hashlib.sha256(index_bytes)
        trailer = shard.encode_trailer(shard.Trailer(index.end, len(index_bytes), sha.digest()))
        local.write_at(fd, index_bytes + trailer, index.end)
        name = commit.shard_name(self._staging.mode, rank, self._staging.save_id)
        notes = self._source.shard(rank).annotations if rank < self._source.world_size else {}
        return ShardEntry(rank, name, plan.nbytes, index.end, len(index_bytes), "sha256:" + sha.hexdigest(), notes)

    def _index(self, plan: ShardPlan, rank: int) -> bytes:
        block_size = self._outline.form.block_size
        state = memoryview(plan.state)
        own = b"".join(self._algorithm.of(state[i : i + block_size]) for i in range(0, len(state), block_size))
        digests = self._blocks.digests(rank) + own
        return plan.index_bytes[: -len(digests)] + digests

    def sealed(self, shards: tuple[ShardEntry, ...]) -> tuple[bytes, Manifest]:
        """Return the manifest's bytes and the manifest, which have passed what every reader will ask of them."""
        source = self._source
        origin = {"save_id": source.save_id, "manifest_digest": source.digest, "world_size": source.world_size}
        head: dict[str, Any] = {
            "save_id": self._staging.save_id,
            "parent": {"step": source.step, "save_id": source.save_id},
            "created_at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "producer": {"name": "ckptspec", "version": version("ckptspec")},
            "commit": self._staging.mode,
            "annotations": {**source.annotations, NOTE: origin},
        }
        m = self._outline.manifest(self._outline.objects, shards, **head)
        data = manifest.dump(m)
        try:
            manifest.parse(data)
        except FormatError as e:
            raise PlanError(f"the result would be no checkpoint: {e.message}", **e.details()) from None
        return data, replace(m, digest=manifest.digest_of(data))

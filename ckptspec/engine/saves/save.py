"""Owns one save from snapshot to commit: who declares, writes, hands in and decides, in which order."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import msgpack

from ckptspec.check.life.keeping import Keep
from ckptspec.engine.agree.channel import Attempt, Channel
from ckptspec.engine.life import preflight
from ckptspec.engine.life.lease import Lease
from ckptspec.engine.locate import committed, newest_manifest
from ckptspec.engine.pool import shared_pool
from ckptspec.engine.saves import commit, replicas
from ckptspec.engine.saves.declaring import Declaring
from ckptspec.engine.saves.receipt import receipt, received
from ckptspec.engine.saves.snapshot import Placed, Snapshot
from ckptspec.engine.saves.writer import Written, plan_shard, write_shard
from ckptspec.errors import CommitUncertainError, FormatError, SaveError, Where
from ckptspec.format import declaration, manifest, shard
from ckptspec.format.declaration import Declaration
from ckptspec.format.manifest import Manifest, ShardEntry
from ckptspec.format.names import shard_path
from ckptspec.format.settling import Settled


@dataclass(frozen=True)
class Request:
    """What the caller asks of a save; the same on every rank."""

    step: int
    run_id: str | None = None
    parent: Mapping[str, Any] | None = None
    copies: int = 1
    block: str = "xxh3-128"
    block_size: int = 1 << 20
    on_existing: str = "refuse"
    wall_clock_seconds: int | None = None
    producer: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = True  # refuse a rank that only lacks tensors which others have
    keep: Keep | None = None  # what retention will keep: it needs room as well [P-ROOM]
    known_save: str | None = None  # the save id this process last restored or committed in the run, of this step


@dataclass(frozen=True)
class Opening:
    """What the coordinator decides once for all ranks."""

    save_id: str
    step: int
    staging: str
    mode: str
    skip: str | None = None


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def _unheard() -> None:
    """Tell nobody that the shard is written."""


def save(
    run: str,
    take: Callable[[], Snapshot],
    request: Request,
    channel: Channel,
    memory: int,
    wrote: Callable[[], None] = _unheard,
) -> Manifest:
    """Write and commit one checkpoint, every rank calling this; returns the manifest once it is durable.

    `memory` (bytes) bounds what is used beyond the state. `take` gives this rank's snapshot; a state that cannot be
    saved fails the attempt on every rank. `wrote` is called once this rank's shard is durable.

    Raises SaveError on every rank, naming the rank that failed; CommitUncertainError where nobody saw the outcome.
    """
    attempt = channel.attempt("save", request.step)
    job = _Save(run, take, request, channel, memory, attempt)
    try:
        return job.run_to_commit(wrote)
    except BaseException as e:
        agreed = attempt.fail(e)
        if not isinstance(agreed, CommitUncertainError):
            job.abandon()
        if agreed is e or not isinstance(e, Exception):
            raise  # an interrupt stays one; the other ranks have been told
        raise agreed from e
    finally:
        job.close()


class _Save:
    """One rank's part in one save."""

    def __init__(
        self, run: str, take: Callable[[], Snapshot], request: Request, channel: Channel, memory: int, attempt: Attempt
    ) -> None:
        self.run = run
        self.take = take
        self.request = request
        self.rank, self.world = channel.rank, channel.world_size
        self.memory = memory
        self.attempt = attempt
        self.staging: commit.Staging | None = None
        self.lease: Lease | None = None
        self.run_id: str | None = None

    def run_to_commit(self, wrote: Callable[[], None]) -> Manifest:
        self.snapshot = self.take()
        opening = self._open()
        if opening.skip is not None:
            return self._skip(opening)
        settled = self._declare(opening)
        declared = settled.declaration
        name = commit.shard_name(opening.mode, self.rank, opening.save_id)
        placed = Placed(self.snapshot, declared, self.rank, self.request.copies)
        header = shard.Header(
            opening.save_id, opening.step, self.rank, self.world, self.request.block, self.request.block_size
        )
        plan = plan_shard(header, list(placed.stored()), self.snapshot.state)
        checks = replicas.Checks(self.snapshot, list(placed.replicas()) if self.world > 1 else [], settled.holders)
        path = os.path.join(self.run, opening.staging, name)
        preflight.refuse_file(path, plan.nbytes, self.rank)
        pool = shared_pool(self.memory, self.request.block_size)
        written = write_shard(path, plan, pool, self.attempt.progress, checks.tasks())
        commit.sync_staging(os.path.join(self.run, opening.staging))
        self.attempt.post("hand-in", _pack([name, *vars(written).values(), checks.digests()]))
        wrote()
        if self.rank != 0:
            self._detail(checks, self.attempt.await_("checked"))
            return received(self.attempt.outcome(), self.run)
        return self._commit(opening, declared, checks)

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _open(self) -> Opening:
        if self.rank == 0:
            opening = self._prepare()
            self.attempt.announce("open", _pack(list(vars(opening).values())))
            return opening
        return Opening(*msgpack.unpackb(self.attempt.await_("open")))

    def _prepare(self) -> Opening:
        r = self.request
        self._sealed(self._draft())
        existing = commit.existing(self.run, r.step)
        again = existing is not None and r.on_existing != "supersede" and existing.save_id == r.known_save is not None
        if existing is not None and existing.save_id and again and committed(existing.path)[1] is None:
            return Opening(existing.save_id, r.step, "", "", existing.path)
        if existing is not None and r.on_existing != "supersede":
            raise SaveError(
                f"step {r.step} is already saved",
                rank=0,
                rule="P-EXISTING",
                where=Where(existing.path),
                found=f"save {existing.save_id}",
                advice='save another step, or pass on_existing="supersede"',
            )
        preflight.refuse(preflight.preflight(self.run, 0, 0, step=r.step))  # what can be told before a folder is made
        save_id = secrets.token_hex(16)
        self.staging = commit.prepare(self.run, r.step, save_id)
        self.lease = Lease(self.run, "save", save_id)  # a staging folder this young is spared without one [P-CLEAN]
        return Opening(save_id, r.step, os.path.basename(self.staging.path), self.staging.mode)

    def _skip(self, opening: Opening) -> Manifest:
        assert opening.skip is not None
        data = commit.read_manifest(os.path.join(self.run, os.path.basename(opening.skip)))
        self.attempt.post("hand-in", b"")
        if self.rank == 0:
            self.attempt.collect("hand-in")
            self.attempt.done(b"")
        else:
            self.attempt.outcome()
        return manifest.parse(data)

    # ---- declaring ---------------------------------------------------------------------------------------------------

    def _declare(self, opening: Opening) -> Settled:
        """Return what all ranks declare together; every rank's step and folder are compared on the way [P-DECLARE]."""
        r = self.request
        terms = [r.step, r.copies, r.block, r.block_size, r.whole]
        declaring = Declaring(self.attempt, self.rank, self.world, whole=r.whole, judge=self._judge)
        settled = declaring.run(self.snapshot, terms, preflight.private_nbytes(self.snapshot))
        if self.world > 1:
            self._see_staging(opening)  # only now: a save that failed elsewhere before has taken the folder away
        return settled

    def _judge(self, declared: Declaration, private: int) -> None:
        """Coordinator: refuse a save that does not fit before any rank is told to write [P-ROOM]."""
        r = self.request
        nbytes = preflight.payload_nbytes(declared, r.copies, private)
        preflight.refuse(preflight.preflight(self.run, nbytes, self.world + 1, step=r.step, keep=r.keep))

    def _see_staging(self, opening: Opening) -> None:
        path = os.path.join(self.run, opening.staging)
        deadline = time.monotonic() + 10  # a network file system may show a new folder late
        while not os.path.isdir(path):
            if time.monotonic() > deadline:
                raise SaveError(
                    "this rank does not see the staging folder that rank 0 made",
                    rank=self.rank,
                    rule="P-FOLDER",
                    where=Where(path, rank=self.rank),
                    advice="give every rank the same run folder on a shared file system",
                )
            time.sleep(0.05)
            self.attempt.progress(0)

    # ---- committing --------------------------------------------------------------------------------------------------

    def _detail(self, checks: replicas.Checks, request: bytes) -> None:
        if request:
            self.attempt.post("detail", _pack(checks.detail(msgpack.unpackb(request))))

    def _check_replicas(self, hand_ins: list[list[Any]], checks: replicas.Checks) -> None:
        """Compare what replicas hold; where they disagree a second round names tensor and ranks [P-REPLICA]."""
        doubtful = replicas.disagreeing([h[-1] for h in hand_ins])
        self.attempt.announce("checked", _pack(doubtful) if doubtful else b"")
        if doubtful:
            self._detail(checks, _pack(doubtful))
            details = [msgpack.unpackb(d) for d in self.attempt.collect("detail")]
            if (error := replicas.disagreement(details)) is not None:
                raise error

    def _commit(self, opening: Opening, declared: Declaration, checks: replicas.Checks) -> Manifest:
        assert self.staging is not None
        hand_ins = [msgpack.unpackb(h) for h in self.attempt.collect("hand-in")]
        self._check_replicas(hand_ins, checks)
        shards = tuple(
            ShardEntry(rank, name, *vars(Written(*rest)).values()) for rank, (name, *rest, _) in enumerate(hand_ins)
        )
        m = self._manifest(opening, declared, shards)
        data = self._sealed(m)
        m = replace(m, digest=manifest.digest_of(data))
        folder = commit.publish(
            self.staging,
            data,
            {s.path: s.nbytes for s in shards},
            on_existing=self.request.on_existing,
            decide=self.attempt.decide_commit,
        )
        self.attempt.done(receipt(m, folder))
        return m

    def _manifest(self, opening: Opening, declared: Declaration, shards: tuple[ShardEntry, ...]) -> Manifest:
        r = self.request
        return Manifest(
            save_id=opening.save_id,
            step=opening.step,
            world_size=self.world,
            run_id=r.run_id or self._run_id(),
            parent=r.parent,
            created_at=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            wall_clock_seconds=r.wall_clock_seconds,
            producer=r.producer,
            commit=opening.mode,
            copies=r.copies,
            block=r.block,
            block_size=r.block_size,
            shards=shards,
            annotations=r.annotations,
            **declaration.tables(declared),
        )

    def _run_id(self) -> str:
        """Return the id of the run that is saved into: the newest checkpoint's, or a fresh one."""
        if self.run_id is None:
            newest = newest_manifest(self.run)
            self.run_id = newest.run_id if newest is not None else secrets.token_hex(16)
        return self.run_id

    def _draft(self) -> Manifest:
        """Return a manifest of nothing, as the request would have it: its faults are the request's."""
        extent = ShardEntry(0, shard_path(0), shard.TRAILER.size + 2, 1, 1, "sha256:" + "0" * 64)
        opening = Opening("0" * 32, self.request.step, "", "rename")
        return replace(self._manifest(opening, Declaration(), (extent,)), world_size=1)

    def _sealed(self, m: Manifest) -> bytes:
        """Return the manifest's bytes, once they have passed what every reader will ask of them [P-VERSION].

        Raises SaveError with the rule that a request, or a name of the state, breaks.
        """
        try:
            data = manifest.dump(m)
            manifest.parse(data)
        except FormatError as e:
            raise SaveError(f"what was asked for cannot be saved: {e.message}", rank=0, **e.details()) from None
        except (TypeError, ValueError, RecursionError) as e:  # not JSON at all
            message = f"run_id and annotations must be JSON: {e}"
            raise SaveError(message, rank=0, rule="M-NOTE", where=Where(manifest.NAME)) from None
        return data

    def abandon(self) -> None:
        """Remove what a failed attempt left in its staging folder; what cannot be removed waits for `clean`."""
        if self.staging is not None:
            commit.discard(self.staging)

    def close(self) -> None:
        """Say that nobody is at this save any more."""
        if self.lease is not None:
            self.lease.release()

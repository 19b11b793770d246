"""Owns one reshard from the source's manifest to the commit of the result: who opens, moves, hands in and decides.

Each process of a job moves a share of the units into the shard files that all of them write; one process begins and
ends them. What is finished is in a journal, and the same call goes on from there after a kill.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import msgpack

from ckptspec.engine.agree.channel import Attempt, Channel, LocalStore
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.resharding import journal
from ckptspec.engine.resharding.asking import DEFAULT_MEMORY, Outcome, Private, Request, Watcher
from ckptspec.engine.resharding.blocks import Blocks
from ckptspec.engine.resharding.descriptors import Descriptors
from ckptspec.engine.resharding.ending import Ending, key_of, refuse_place
from ckptspec.engine.resharding.fitting import Fitting, fitting
from ckptspec.engine.resharding.journal import Journal, Past
from ckptspec.engine.resharding.origin import Origin
from ckptspec.engine.resharding.outline import Form, Outline
from ckptspec.engine.resharding.sweep import Account, Budget, Recovered, Sweep
from ckptspec.engine.saves import commit, receipt
from ckptspec.errors import CommitUncertainError, FormatError, IntegrityError, PlanError, SaveError, Where
from ckptspec.format.manifest import Manifest
from ckptspec.format.target import Target
from ckptspec.planner.destination import destination
from ckptspec.planner.renames import renames
from ckptspec.planner.strips import Unit, share, units
from ckptspec.storage import local

SYNC_NBYTES = 1 << 30  # written, after which what is finished is made durable and noted
SYNC_SECONDS = 10.0


def reshard(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    target: Target | int,
    *,
    names: Mapping[str, str] | None = None,
    drop: Iterable[str] = (),
    copies: int | None = None,
    digest: str | None = None,
    block_size: int | None = None,
    memory: int = DEFAULT_MEMORY,
    on_existing: str = "refuse",
) -> Manifest:
    """Write the checkpoint at `path` for `target` (or so many ranks) to OUT/step-<8 digits>/ and return its manifest.

    One process calls this; torch is not needed. `names` maps wanted names to stored ones, `drop` are names, prefixes or
    globs of what is stored and may be left out; `copies`, `digest` and `block_size` are the source's unless given;
    `memory` (bytes) bounds what is held of tensors at a time. A call that was killed is gone on with by the same call.

    Raises PlanError [R-NAME] [R-DTYPE] [R-SHAPE] [R-TARGET] where the target cannot be met in full, SaveError
    [P-EXISTING], IntegrityError for bytes that have no good copy, ValueError for a `memory` that is too small.
    """
    wanted = Target(target) if isinstance(target, int) else target
    patterns = (drop,) if isinstance(drop, str) else tuple(drop)
    request = Request(
        os.fspath(path),
        os.fspath(out),
        wanted,
        renames(names),
        patterns,
        copies,
        digest,
        block_size,
        memory,
        on_existing,
    )
    return run(request).manifest


def run(request: Request, channel: Channel | None = None, watcher: Watcher | None = None) -> Outcome:
    """Run a reshard, every process of a job calling this with its channel, and return what it came to.

    Raises as `reshard` does; in a job the SaveError of whoever failed first, and CommitUncertainError where nobody saw
    the outcome.
    """
    channel = channel or Channel(LocalStore(), 0, 1)
    attempt = channel.attempt("save")
    job = _Reshard(request, channel, attempt, watcher or Watcher())
    try:
        return job.run()
    except BaseException as e:
        agreed = attempt.fail(e)
        if not isinstance(agreed, CommitUncertainError):
            job.abandon(e)
        if not isinstance(e, Exception) or (channel.world_size == 1 and not isinstance(agreed, CommitUncertainError)):
            raise
        if agreed is e:
            raise
        raise agreed from e
    finally:
        job.close()


class _Reshard:
    """One process's part in one reshard."""

    def __init__(self, request: Request, channel: Channel, attempt: Attempt, watcher: Watcher) -> None:
        self.request = request
        self.rank, self.world = channel.rank, channel.world_size
        self.attempt = attempt
        self.watcher = watcher
        self.started = time.monotonic()
        self.staging: commit.Staging | None = None
        self.past: Past | None = None
        self.journal: Journal | None = None
        self.files: Descriptors | None = None
        self.noted = False
        self._waiting: list[int] = []
        self._synced = 0, time.monotonic()

    def run(self) -> Outcome:
        self._plan()
        done = self._open()
        account = self._move(done)
        if self.rank != 0:
            return self._outcome(receipt.received(self.attempt.outcome(), self.request.out), account, len(done))
        account = self._collect(account)
        return self._outcome(self._commit(), account, len(done))

    # ---- planning ----------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Work out what the result will be; all processes come to the same."""
        r = self.request
        self.folder, self.source = load_manifest(r.path)
        m = self.source
        self.form = Form(r.copies or m.copies, r.block or m.block, r.block_size or m.block_size)
        self.budget = Budget.of(r.memory, m.block_size, self.form.block_size)
        refuse_place(r.out, self.folder, m.step)
        self.fitting: Fitting = fitting(destination(m, r.target, r.names), r.drop)
        self.origin = Origin(self.folder, m)
        self.origin.open(self._tick)
        for rank, error in self.origin.lost.items():
            self.watcher.say(f"the shard of rank {rank} cannot be read, other copies are taken: {error}")
        self.outline = Outline(self.fitting, self.origin, self.form)
        self.outline.lay_out(self._tick)
        self.units: list[Unit] = units(self.outline.strips())
        self.blocks = Blocks(self.outline.tables, self.form.block, self.form.block_size)
        self.key = key_of(r.target, r.names, r.drop, self.form, m.digest, sorted(self.origin.lost))

    def _tick(self) -> None:
        self.attempt.progress(1)

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _open(self) -> set[int]:
        """Agree on what is done and where, and return the units that an earlier call finished."""
        self.attempt.post("terms", self.key.encode())
        if self.rank == 0:
            self._compare(self.attempt.collect("terms"))
            self._prepare()
            assert self.staging is not None
            done = self.past.units if self.past is not None else set()
            s = self.staging
            self.attempt.announce("open", msgpack.packb([s.save_id, os.path.basename(s.path), s.mode, sorted(done)]))
        else:
            save_id, name, mode, listed = msgpack.unpackb(self.attempt.await_("open"))
            done = set(listed)
            path = os.path.join(self.request.out, name)
            self.staging = commit.Staging(self.request.out, self.source.step, save_id, path, mode)
            self._see(path)
        self.journal = Journal(self.staging.path, self.staging.save_id, self.key)
        self.files = Descriptors(lambda rank: os.open(self._path(rank), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        return done

    def _compare(self, terms: Sequence[bytes]) -> None:
        for rank, other in enumerate(terms):
            if other != terms[0]:
                message = f"rank {rank} was asked for another reshard than rank 0, or sees another checkpoint"
                raise SaveError(message, rank=rank, rule="P-AGREE")

    def _see(self, path: str) -> None:
        deadline = time.monotonic() + 10  # a network file system may show a new folder late
        while not os.path.isdir(path):
            if time.monotonic() > deadline:
                message = "this process does not see the staging folder that rank 0 made"
                raise SaveError(message, rank=self.rank, rule="P-FOLDER", where=Where(path, rank=self.rank))
            time.sleep(0.05)

    def _prepare(self) -> None:
        """Find the staging folder of an earlier call, or make one; every shard file is there afterwards."""
        r, step = self.request, self.source.step
        existing = commit.existing(r.out, step)
        if existing is not None and r.on_existing != "supersede":
            message, advice = f"step {step} is there already", "write to another folder, or supersede it"
            raise SaveError(message, rank=0, rule="P-EXISTING", where=Where(existing.path), advice=advice)
        self.past = journal.find(r.out, step, self.key)
        if self.past is None:
            self.staging = commit.prepare(r.out, step, secrets.token_hex(16))
        else:
            self.staging = self.past.staging
            if os.path.lexists(self.staging.manifest):  # its process died with all but the commit done
                local.remove_file(self.staging.manifest)
        missing = [rank for rank in range(self.outline.world_size) if not self._whole(rank)]
        if missing and self.past is not None:
            self.past.units.clear()
            self.past.digests.clear()
        for rank in missing:
            self._create(rank)
            self._tick()
        if self.past is not None:
            self.blocks.adopt(self.past.digests)
            self.watcher.say(f"going on with what an earlier call left in {self.staging.path}")

    def _path(self, rank: int) -> str:
        assert self.staging is not None
        name = commit.shard_name(self.staging.mode, rank, self.staging.save_id)
        return os.path.join(self.staging.path, name)

    def _whole(self, rank: int) -> bool:
        try:
            return self.past is not None and local.regular_size(self._path(rank)) == self.outline.sizes[rank]
        except FileNotFoundError:
            return False

    def _create(self, rank: int) -> None:
        path = self._path(rank)
        if self.past is not None and os.path.lexists(path):
            local.remove_file(path)
        try:
            os.close(local.create(path, self.outline.sizes[rank]))
        except OSError as e:
            raise OSError(e.errno, e.strerror, path) from e

    # ---- moving ------------------------------------------------------------------------------------------------------

    def _move(self, done: set[int]) -> Account:
        """Move this process's share of what is left, and hand in what it came to."""
        assert self.files is not None
        left = [(number, unit) for number, unit in enumerate(self.units) if number not in done]
        sizes = [sum(part.nbytes for part in unit) for _, unit in left]
        mine = share(sizes, self.world)[self.rank]
        self.watcher.begin(sum(sizes[i] for i in mine))
        self.sweep = Sweep(self.origin, self.outline, self.files, self.blocks, self.budget, self._moved)
        account = self.sweep.run([left[i] for i in mine], self._finished)
        self._sync()
        self.files.close()  # [P-FSYNC] with its result checked, before it is handed in
        account.nbytes_read += self.origin.nbytes_read
        found = [account.nbytes_read, account.nbytes_written, account.dropped_blocks]
        recovered = [[r.rank, r.tensor, r.reason] for r in account.recovered.values()]
        known = self.blocks.known() if self.rank else {}
        runs = [[rank, [list(run) for run in several]] for rank, several in known.items()]
        self.attempt.post("hand-in", msgpack.packb([found, recovered, runs]))
        return account

    def _moved(self, read: int, written: int) -> None:
        self.attempt.progress(read + written)
        self.watcher.progress(written)

    def _finished(self, numbers: list[int]) -> None:
        self._waiting += numbers
        nbytes, since = self._synced
        if self.sweep.nbytes_written - nbytes >= SYNC_NBYTES or time.monotonic() - since >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        """Make durable what is written, and note the units that are finished by it."""
        assert self.files is not None
        assert self.journal is not None
        files, dirty = self.files, sorted(self.sweep.dirty)
        self.sweep.dirty.clear()

        def flush(rank: int) -> Callable[[memoryview], None]:
            def task(buffer: memoryview) -> None:
                with files.at(rank) as fd:
                    os.fsync(fd)
                self._tick()

            return task

        self.sweep.pool.run(map(flush, dirty))
        if self._waiting:
            self.journal.add(self._waiting, self.blocks.fresh())
            self.noted = True
        self._waiting = []
        self._synced = self.sweep.nbytes_written, time.monotonic()

    # ---- committing --------------------------------------------------------------------------------------------------

    def _collect(self, own: Account) -> Account:
        """Take in what all processes handed in, and return what they moved together."""
        total = Account(recovered=dict(own.recovered))
        for data in self.attempt.collect("hand-in"):
            (read, written, dropped), recovered, runs = msgpack.unpackb(data, strict_map_key=False)
            total.nbytes_read += read
            total.nbytes_written += written
            total.dropped_blocks += dropped
            for rank, tensor, reason in recovered:
                total.recovered.setdefault((rank, tensor), Recovered(rank, tensor, reason))
            self.blocks.adopt({rank: [(first, data) for first, data in several] for rank, several in runs})
        for r in total.recovered.values():
            what = "its shard" if r.tensor is None else f"tensor {r.tensor!r}"
            self.watcher.say(f"recovered from another copy: rank {r.rank}, {what}: {r.reason}")
        return total

    def _commit(self) -> Manifest:
        assert self.files is not None
        assert self.staging is not None
        ending = Ending(self.outline, self.source, self.staging, self.blocks)
        shards = ending.shards(self.files, self.sweep.pool, self._tick)
        self.files.close()
        commit.sync_staging(self.staging.path)
        data, m = ending.sealed(shards)
        sizes = {s.path: s.nbytes for s in shards}
        on_existing = self.request.on_existing
        folder = commit.publish(self.staging, data, sizes, on_existing=on_existing, decide=self._decide)
        self.attempt.done(receipt.receipt(m, folder))
        return m

    def _decide(self) -> None:
        """Win the decision; the journals go right before it, so that whatever failed until now is gone on with."""
        assert self.staging is not None
        journal.remove(self.staging.path, self.staging.save_id)
        commit.sync_staging(self.staging.path)
        self.attempt.decide_commit()

    def _outcome(self, m: Manifest, account: Account, resumed: int) -> Outcome:
        assert self.staging is not None
        fit, routes = self.fitting, self.fitting.destination.routes
        seconds = time.monotonic() - self.started
        private = tuple(self._private())
        return Outcome(
            m, self.staging.final, self.source, account, private, fit.dropped, dict(routes.renamed), resumed, seconds
        )

    def _private(self) -> Iterable[Private]:
        """Yield what is private and was not carried from, or to, every rank."""
        world, new = range(self.source.world_size), range(self.outline.world_size)
        kinds, lost = self.source.objects, set(self.origin.lost)
        tables: list[tuple[str, str, Mapping[int, Container[str]]]] = [
            *((name, s, self.origin.local_shapes) for name, s in self.fitting.local.items()),
            *((name, s, self.origin.forest.private) for name, s in self.fitting.objects.items() if kinds[s] == "rank"),
        ]
        for name, stored, held in tables:
            gone = {rank for rank in world if stored in held.get(rank, ()) and rank not in new} | lost
            without = tuple(rank for rank in new if stored not in held.get(rank, ()))
            if gone or without:
                yield Private(name, tuple(sorted(gone)), without)

    # ---- ending ------------------------------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """Keep what a later call can go on from; remove the rest of a failed one."""
        if isinstance(error, KeyboardInterrupt) and self._waiting:
            self._sync()
        if self.staging is None or self.rank != 0:
            return
        hopeless = isinstance(error, (PlanError, FormatError, IntegrityError))
        begun = self.noted or self.world > 1 or (self.past is not None and bool(self.past.units))
        if begun and not hopeless and journal.paths(self.staging.path, self.staging.save_id):
            self.watcher.say(f"what is finished is kept in {self.staging.path}: the same call goes on from there")
        else:
            commit.discard(self.staging)

    def close(self) -> None:
        """Close what is open, whatever happened."""
        with contextlib.suppress(OSError):  # what counts was closed and checked before
            if self.files is not None:
                self.files.close()
        if self.journal is not None:
            self.journal.close()
        if self.past is not None:
            self.past.close()

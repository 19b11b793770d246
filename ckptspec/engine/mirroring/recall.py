"""Owns bringing a step back from a mirror, all of it or what is lost here; refuses to change a checkpoint in place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ckptspec.engine.documents import open_shard, read_shard
from ckptspec.engine.files import MEDIA, File, NotRegularError, opened
from ckptspec.engine.life.lease import Lease
from ckptspec.engine.locate import read_manifest
from ckptspec.engine.mirroring.mirror import folder_of, renamed, same_shards, sound, source_name
from ckptspec.engine.mirroring.throttle import Throttle
from ckptspec.engine.mirroring.uploaded import AREA, Lock
from ckptspec.engine.mirroring.verified import Passage
from ckptspec.engine.pool import shared_pool
from ckptspec.engine.saves import commit, probe
from ckptspec.errors import FormatError, IntegrityError, SaveError, Where
from ckptspec.format import names
from ckptspec.format.manifest import Manifest, ShardEntry
from ckptspec.storage import local
from ckptspec.storage.base import join
from ckptspec.storage.stores import open_store

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Recalled:
    """What was brought back: the checkpoint's folder, the ranks whose shards came, those that were good, the bytes."""

    path: str
    step: int
    save_id: str
    fetched: tuple[int, ...]
    kept: tuple[int, ...]
    nbytes: int
    seconds: float

    def line(self) -> str:
        """Return the one line that is logged."""
        rate = self.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"fetch step={self.step} nbytes={self.nbytes} seconds={self.seconds:.3f} GB/s={rate:.2f} "
            f"shards={len(self.fetched)} kept={len(self.kept)} save_id={self.save_id} path={self.path}"
        )


def fetch_back(
    run: str | os.PathLike[str],
    mirror: str | os.PathLike[str],
    step: int,
    *,
    rate: float | None = None,
    progress: Progress | None = None,
) -> Recalled:
    """Bring a step back from a mirror to the run, verified, and commit it there as a save is.

    Where the run has the step, its shards are read, and only what is missing or damaged comes; a checkpoint that is all
    good stays as it is. `rate` is in bytes a second. Raises NotCommittedError for no such step in the mirror,
    IntegrityError or ShardError where its bytes are damaged too, SaveError [P-EXISTING] where the run has another save
    of the step, OSError.
    """
    begun = time.monotonic()
    own = os.fspath(run)
    folder = folder_of(open_store(mirror).url, step)
    local.make_folders(own)
    lock = Lock(os.path.join(own, AREA, f"fetch-{names.step_folder(step)}.lock"))
    if not lock.take():
        message, advice = "another process is bringing this step back", "wait for it"
        raise SaveError(message, rule="P-EXISTING", where=Where(own), advice=advice)
    try:
        return _Recall(own, folder, Throttle(rate), progress).run(begun)
    finally:
        lock.release()


class _Recall:
    """One step on its way back."""

    def __init__(self, run: str, folder: str, throttle: Throttle, progress: Progress | None) -> None:
        self.run_folder = run
        self.folder = folder
        self.theirs = sound(read_manifest(folder))
        self.data = _source(folder, self.theirs)
        self.mine = sound(self.data)
        self.pool = shared_pool(block_size=self.theirs.block_size)
        self._throttle = throttle
        self._progress = progress

    def run(self, begun: float) -> Recalled:
        there = commit.existing(self.run_folder, self.mine.step)
        if there is not None and there.save_id not in (None, self.mine.save_id):
            raise self._exists(there)
        kept = self._good(there.path, self._known(there)) if there is not None else {}
        missing = [s for s in self.theirs.shards if s.rank not in kept]
        final = there.path if there is not None else ""
        if missing or there is None or there.save_id is None:
            final = self._commit(there, kept, missing)
        nbytes = sum(s.nbytes for s in missing)
        ranks = tuple(s.rank for s in missing)
        return Recalled(
            final, self.mine.step, self.mine.save_id, ranks, tuple(sorted(kept)), nbytes, time.monotonic() - begun
        )

    def _exists(self, there: commit.Existing) -> SaveError:
        return SaveError(
            f"the run has step {self.mine.step} already, of another save",
            rule="P-EXISTING",
            where=Where(there.path),
            expected=f"save {self.mine.save_id}",
            found=f"save {there.save_id}",
            advice="bring it back to another run folder",
        )

    def _known(self, there: commit.Existing) -> Manifest:
        """Return what the run's folder of the step should hold: by its own manifest, where that is whole."""
        with contextlib.suppress(FormatError, FileNotFoundError):
            found = sound(read_manifest(there.path))
            if same_shards(found, self.mine):
                return found
        return self.mine

    def _good(self, folder: str, manifest: Manifest) -> dict[int, str]:
        """Return the path of every shard in a folder that is good to the last byte, by rank."""
        found = {}
        for entry in manifest.shards:
            try:
                document = read_shard(folder, entry, manifest, numpy=False)
                with opened(os.path.join(folder, entry.path)) as file:
                    self.pool.run(Passage(entry, document).tasks(file, self.pool.buffer_nbytes, _drop, _drop_count))
            except (FormatError, IntegrityError, NotRegularError):
                continue  # it comes from the mirror, and the result says so
            except OSError as e:
                if e.errno not in MEDIA | {errno.ENOENT}:
                    raise
                continue
            found[entry.rank] = os.path.join(folder, entry.path)
        return found

    # ---- writing ---------------------------------------------------------------------------------------------------

    def _commit(self, there: commit.Existing | None, kept: dict[int, str], missing: list[ShardEntry]) -> str:
        """Put the checkpoint together beside its place, then give it its name [P-RENAME]."""
        means = probe.means(self.run_folder)
        last = means.mode == "manifest-last"
        tag = secrets.token_hex(16) if last else hashlib.sha256(f"fetch {self.mine.save_id}".encode()).hexdigest()[:32]
        name = names.step_folder(self.mine.step) if last else names.staging_folder(self.mine.step, tag)
        path = os.path.join(self.run_folder, name)
        staging = commit.Staging(
            self.run_folder, self.mine.step, self.mine.save_id, path, means.mode, means.exchange, means.link
        )
        with Lease(self.run_folder, "fetch", tag):
            data, paths = self._named(means.mode, tag)
            self._begin(staging, paths)
            for rank, source in kept.items():
                self._keep(source, os.path.join(path, paths[rank]), rank)
            for entry in missing:
                self._fetch(entry, os.path.join(path, paths[entry.rank]))
            sizes = {paths[s.rank]: s.nbytes for s in self.mine.shards}
            return commit.publish(staging, data, sizes, "supersede" if there is not None else "refuse")

    def _named(self, mode: str, tag: str) -> tuple[bytes, dict[int, str]]:
        """Return the manifest as the run shall have it, and its shards' names: as it was, where folders are renamed."""
        if mode != "manifest-last":
            return self.data, {s.rank: s.path for s in self.mine.shards}
        paths = {s.rank: commit.shard_name(mode, s.rank, tag) for s in self.mine.shards}
        return renamed(self.data, paths, mode), paths

    def _begin(self, staging: commit.Staging, paths: dict[int, str]) -> None:
        """Create the folder, or take the one that a killed process left: what it holds of value stays."""
        if not os.path.isdir(staging.path):
            local.make_folder(staging.path)
            local.fsync_folder(self.run_folder)
            return
        with contextlib.suppress(FileNotFoundError):
            local.remove_file(staging.manifest)
        for name in set(local.names(staging.path)) & set(paths.values()) if staging.mode != "manifest-last" else ():
            if not self._left(staging.path, name):
                local.remove_file(os.path.join(staging.path, name))

    def _left(self, folder: str, name: str) -> bool:
        """Tell whether a shard that a killed process left is good."""
        entries = tuple(s for s in self.mine.shards if s.path == name)
        return bool(self._good(folder, replace(self.mine, shards=entries)))

    def _keep(self, source: str, target: str, rank: int) -> None:
        """Give a good shard of the run its place in the new folder."""
        if os.path.lexists(target):
            return
        try:
            local.link(source, target)
        except OSError:  # no links here, or no more of them: the bytes are copied, verified once more
            folder, name = os.path.split(source)
            entry = replace(self.mine.shard(rank), path=name)
            with opened(source) as file:
                document = read_shard(folder, entry, self.mine, numpy=False)
                self._write(Passage(entry, document), file, target, _drop_count)

    def _fetch(self, entry: ShardEntry, target: str) -> None:
        if os.path.lexists(target):
            return
        document = open_shard(self.folder, entry, self.theirs, numpy=False)
        with opened(join(self.folder, entry.path)) as file:
            self._write(Passage(entry, document), file, target, self._allow)

    def _write(self, passage: Passage, file: File, target: str, allow: Callable[[int], None]) -> None:
        fd = local.create(target, passage.entry.nbytes)
        try:
            put = partial(_put, fd)
            self.pool.run(passage.tasks(file, self.pool.buffer_nbytes, put, allow))
        except BaseException:
            os.close(fd)
            raise
        with local.naming(target):
            local.finish(fd)

    def _allow(self, nbytes: int) -> None:
        self._throttle.take(nbytes)
        if self._progress is not None:
            self._progress(nbytes)


def _source(folder: str, theirs: Manifest) -> bytes:
    """Return the manifest's bytes as the run had them, which lie beside the mirror's own where those differ."""
    try:
        with opened(join(folder, source_name(theirs.save_id))) as file:
            data = file.read(0, file.nbytes)
    except FileNotFoundError:
        return read_manifest(folder)
    if not same_shards(sound(data), theirs):
        where = Where(join(folder, source_name(theirs.save_id)))
        raise IntegrityError("the manifest as it was is not of this save", rule="S-SAVE", where=where)
    return data


def _put(fd: int, data: memoryview, offset: int) -> None:
    local.write_at(fd, data, offset)
    local.start_writeback(fd, offset, len(data))


def _drop(data: memoryview, offset: int) -> None:
    """Do nothing with bytes that were only to be verified."""


def _drop_count(nbytes: int) -> None:
    """Let everything pass."""

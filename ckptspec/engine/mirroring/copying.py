"""Owns the copy of one step to a mirror: shards first, verified as they leave, the manifest last; replaces nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptspec.engine.documents import open_shard
from ckptspec.engine.files import opened, together
from ckptspec.engine.locate import faults_of_folder, newest, read_manifest
from ckptspec.engine.mirroring.mirror import (
    Mirror,
    folder_of,
    open_mirror,
    refuse_other,
    renamed,
    same_shards,
    set_aside,
    sound,
    source_name,
)
from ckptspec.engine.mirroring.throttle import Throttle
from ckptspec.engine.mirroring.uploaded import Lock, Records, Sent, Upload
from ckptspec.engine.mirroring.verified import Passage
from ckptspec.engine.saves.staging import MANIFEST, shard_name
from ckptspec.errors import FormatError, IntegrityError, SaveError, Where
from ckptspec.format import manifest as manifests
from ckptspec.format import names
from ckptspec.format.manifest import Manifest, ShardEntry
from ckptspec.storage.base import Stat, join

PART = 8 << 20  # bytes of a part of an upload, more where a shard would have too many
MOST_PARTS = 9000  # stores take 10,000
AT_ONCE = 4  # shards
NOTED_EVERY = 0.2  # seconds between two records of how far an upload is

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Copied:
    """What a copy came to: where it is, its bytes, how many of them were sent now, and in how many seconds."""

    step: int
    save_id: str
    path: str
    nbytes: int
    sent: int
    seconds: float

    def line(self) -> str:
        """Return the one line that is logged."""
        rate = self.sent / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"upload step={self.step} nbytes={self.nbytes} sent={self.sent} seconds={self.seconds:.3f} "
            f"GB/s={rate:.2f} save_id={self.save_id} path={self.path}"
        )


def copy(
    run: str | os.PathLike[str],
    step: int,
    mirror: str | os.PathLike[str],
    *,
    rate: float | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Copy one committed step of a run to a mirror, and return when it is there, verified, its manifest visible.

    What an earlier try has sent is not sent again. `rate` is in bytes a second. Raises NotCommittedError,
    IntegrityError or ShardError for a step that is not good, SaveError [P-EXISTING] where the mirror has another save
    of the step or another process is copying, [P-PROBE] for an unfit mirror, OSError.
    """
    folder = folder_of(os.fspath(run), step)
    place = open_mirror(mirror, run)
    records = Records(os.fspath(run), place.url)
    lock = Lock(os.path.join(records.folder, "lock"))
    if not lock.take():
        message, advice = "another process is copying to this mirror", "wait for it, or stop it"
        raise SaveError(message, rule="P-EXISTING", where=Where(place.url), advice=advice)
    throttle = Throttle(rate)
    try:
        set_aside(run, place)
        refuse_others(folder, place)
        return copy_folder(folder, place, records, throttle, progress)
    finally:
        throttle.stop()  # an interrupt: threads on their way end at the next part
        lock.release()


def refuse_others(folder: str, mirror: Mirror) -> None:
    """Raise SaveError [P-EXISTING] where a mirror holds another run than that of the checkpoint in a folder."""
    with contextlib.suppress(FileNotFoundError):
        found = newest(mirror.url).manifest
        if found is not None:
            refuse_other(sound(read_manifest(folder)).run_id, found, mirror.url)


def copy_folder(
    folder: str, mirror: Mirror, records: Records, throttle: Throttle, progress: Progress | None = None
) -> Copied:
    """Copy the checkpoint in a folder; as `copy`, for one who holds the lock. Raises Stopped too."""
    begun = time.monotonic()
    copying = _Copying(folder, mirror, records, throttle, progress)
    copying.run()
    m = copying.manifest
    path = join(mirror.url, copying.key)
    return Copied(m.step, m.save_id, path, m.nbytes, copying.sent, time.monotonic() - begun)


def part_size(nbytes: int) -> int:
    """Return the bytes of each part of a shard of `nbytes`: whole MiB, and not more parts than a store takes."""
    return max(PART, -(-nbytes // (MOST_PARTS << 20)) << 20)


class _Copying:
    """One step on its way to a mirror."""

    def __init__(
        self, folder: str, mirror: Mirror, records: Records, throttle: Throttle, progress: Progress | None
    ) -> None:
        self.folder = folder
        self.mirror = mirror
        self.data = read_manifest(folder)
        self.manifest = sound(self.data)
        for finding in faults_of_folder(folder, self.manifest):
            raise IntegrityError(
                finding.message, rule=finding.code, where=finding.where, expected=finding.expected, found=finding.found
            )
        self.key = names.step_folder(self.manifest.step)
        self.names = {s.rank: shard_name("manifest-last", s.rank, self.manifest.save_id) for s in self.manifest.shards}
        self.theirs = renamed(self.data, self.names, "manifest-last")
        self.sent = 0
        self._note = _Noting(folder, self.manifest, records)
        self._throttle = throttle
        self._progress = progress
        self._lock = threading.Lock()

    def run(self) -> None:
        visible = self._visible()
        there = self.mirror.store.list(self.key).files
        todo = [s for s in self.manifest.shards if not self._is_there(s, there.get(self.names[s.rank]), visible)]
        self._note.begin(self.manifest.nbytes - sum(s.nbytes for s in todo))
        try:
            together(self._send, todo, min(AT_ONCE, len(todo)))
            self._check()
            if not visible:
                self._show()
        except BaseException:
            self._note.pause()
            raise
        self._note.end()

    def _visible(self) -> bool:
        """Tell whether this save's manifest is there; raises SaveError [P-EXISTING] where another is."""
        data = self.mirror.read(join(self.key, MANIFEST))
        if data is None:
            return False
        try:
            found = manifests.parse(data)
        except FormatError as e:
            raise self._conflict(f"a manifest that breaks {e.rule}") from None
        if not same_shards(found, manifests.parse(self.theirs), paths=True):
            raise self._conflict(f"save {found.save_id}")
        return True

    def _conflict(self, found: str) -> SaveError:
        return SaveError(
            f"the mirror has step {self.manifest.step} already, of another save",
            rule="P-EXISTING",
            where=Where(join(self.mirror.url, self.key, MANIFEST)),
            expected=f"save {self.manifest.save_id}",
            found=found,
            advice="look at both; if the mirror's is not wanted any more, remove its manifest.json and copy again",
        )

    def _is_there(self, entry: ShardEntry, found: Stat | None, visible: bool) -> bool:
        """Tell whether a shard need not be sent: its size is right, and so is what the record knows of its bytes."""
        known = self._note.shards.get(self.names[entry.rank])
        if found is None or found.nbytes != entry.nbytes:
            return False
        if known is None:  # a manifest became visible only after all of its shards
            return visible
        return (known.nbytes, known.index) == (entry.nbytes, entry.index_digest) and found.tag == known.tag

    def _send(self, entry: ShardEntry) -> None:
        document = open_shard(self.folder, entry, self.manifest, numpy=False)
        key = join(self.key, self.names[entry.rank])
        size = part_size(entry.nbytes)
        with opened(os.path.join(self.folder, entry.path)) as file:
            parts = Passage(entry, document).read(file, size, self._allow)
            sent = self.mirror.store.put(key, parts, entry.nbytes, size)
        found = self.mirror.store.stat(key)
        if found.nbytes != entry.nbytes:
            message = f"{entry.nbytes} bytes were sent, and {found.nbytes} are there"
            raise OSError(errno.EIO, message, join(self.mirror.url, key))
        self._note.shard(self.names[entry.rank], Sent(entry.nbytes, entry.index_digest, sent.tag))

    def _allow(self, nbytes: int) -> None:
        self._throttle.take(nbytes)
        with self._lock:
            self.sent += nbytes
        if self._progress is not None:
            self._progress(nbytes)

    def _check(self) -> None:
        """Look once more at every shard, before anybody else does [P-ORDER]."""
        there = self.mirror.store.list(self.key).files
        for entry in self.manifest.shards:
            name = self.names[entry.rank]
            if name not in there or there[name].nbytes != entry.nbytes:
                found = f"{there[name].nbytes} bytes" if name in there else "none"
                message = f"a shard of {entry.nbytes} bytes was sent, and found is {found}"
                raise OSError(errno.EIO, message, join(self.mirror.url, self.key, name))

    def _show(self) -> None:
        if self.theirs != self.data:
            self.mirror.write(join(self.key, source_name(self.manifest.save_id)), self.data)
        try:
            self.mirror.store.put_if_absent(join(self.key, MANIFEST), self.theirs)
        except FileExistsError:  # another save's, or ours: the answer to a first try may have been lost
            self._visible()


class _Noting:
    """The record of a copy on its way."""

    def __init__(self, folder: str, manifest: Manifest, records: Records) -> None:
        self._records = records
        known = records.get(manifest.step, manifest.save_id)
        self.shards = dict(known.shards) if known is not None else {}
        self._upload = Upload(records.mirror, manifest.step, manifest.save_id, folder, manifest.nbytes)
        self._lock = threading.Lock()
        self._sent = 0
        self._noted = 0.0

    def begin(self, there: int) -> None:
        """Say that it has begun, with so many bytes there already."""
        self._sent = there
        self._write("sending")

    def shard(self, name: str, sent: Sent) -> None:
        """Say that a shard is there."""
        with self._lock:
            self.shards[name] = sent
            self._sent += sent.nbytes
            if time.monotonic() - self._noted >= NOTED_EVERY:
                self._write("sending")

    def pause(self) -> None:
        """Say how far it came."""
        with self._lock:
            self._write("sending")

    def end(self) -> None:
        """Say that the step is safe."""
        self._write("safe")

    def _write(self, state: str) -> None:
        self._noted = time.monotonic()
        sent = self._upload.nbytes if state == "safe" else self._sent
        self._records.put(replace(self._upload, state=state, sent=sent, shards=dict(self.shards)))

"""Owns what a run's mirror is, a folder or an object store, and where the nearest good copy lies; copies nothing.

In a mirror the shards of a step have names that hold its save's id, and the manifest lists those names; the manifest as
it was lies beside it. A reader sees a checkpoint there only when all of it is there [P-RENAME].
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ckptspec.check.manifests import check_manifest
from ckptspec.engine.locate import Newest, Skipped, candidates, committed, newest
from ckptspec.engine.mirroring.uploaded import Records
from ckptspec.engine.saves.staging import MANIFEST
from ckptspec.errors import NotCommittedError, SaveError, Where
from ckptspec.format import lexical, names
from ckptspec.format import manifest as manifests
from ckptspec.format.manifest import Manifest
from ckptspec.format.report import Finding
from ckptspec.storage.base import Store, is_url, join, plain
from ckptspec.storage.stores import open_store, prove

SMALL = 5 << 20  # bytes of a file that is written in one request


@dataclass(frozen=True)
class Mirror:
    """A place that was found fit to copy to."""

    store: Store

    @property
    def url(self) -> str:
        """The mirror's address or path."""
        return self.store.url

    def read(self, key: str) -> bytes | None:
        """Return a small file's bytes, None where it is not there."""
        try:
            data = bytearray(self.store.stat(key).nbytes)
        except FileNotFoundError:
            return None
        self.store.read_into(key, memoryview(data), 0)
        return bytes(data)

    def write(self, key: str, data: bytes) -> None:
        """Write a small file, whatever was there."""
        self.store.put(key, [memoryview(data)], len(data), max(SMALL, len(data)))


def open_mirror(place: str | os.PathLike[str], run: str | os.PathLike[str]) -> Mirror:
    """Return the mirror at a path or address, tried out with a small file that is put twice under one name.

    Raises SaveError [P-PROBE] for one that cannot commit, OSError.
    """
    store = open_store(place)
    if not is_url(store.url) and _inside(os.path.realpath(store.url), os.path.realpath(run)):
        message, advice = "a mirror in the run's own folder is no second place", "choose another disk or a store"
        raise SaveError(message, rule="P-PROBE", where=Where(store.url), advice=advice)
    prove(store)
    return Mirror(store)


def _inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def refuse_other(run_id: str, manifest: Manifest, mirror: str) -> None:
    """Raise SaveError [P-EXISTING] where a manifest found in a mirror is of another run than it should be."""
    if run_id and manifest.run_id and run_id != manifest.run_id:
        raise SaveError(
            "the mirror holds checkpoints of another run",
            rule="P-EXISTING",
            where=Where(mirror),
            expected=f"run {run_id}",
            found=f"run {manifest.run_id}",
            advice="give each run a mirror of its own",
        )


# ---- what a step is called there -------------------------------------------------------------------------------------


def source_name(save_id: str) -> str:
    """Return the file name in a mirror of the manifest as the run had it."""
    return f"source-{save_id}.json"


def aside_name(save_id: str) -> str:
    """Return the file name in a mirror of a manifest that a roll-back took out of it."""
    return f"abandoned-{save_id}.json"


def renamed(data: bytes, paths: Mapping[int, str], commit: str) -> bytes:
    """Return a manifest's bytes with other shard names, by rank, and another mode of commit; all else as it was."""
    document, _ = lexical.scan(data)
    fields = dict(document or {})
    shards = [{**s, "path": paths[s["rank"]]} for s in fields["shards"]]
    if fields["commit"] == commit and shards == fields["shards"]:
        return data
    return manifests.dump_document({**fields, "commit": commit, "shards": shards})


def sound(data: bytes) -> Manifest:
    """Return the manifest in these bytes; raises ManifestError where it breaks a rule of its own levels."""
    manifest = manifests.parse(data)
    for finding in check_manifest(manifest):
        if finding.severity == "error":
            manifests.raise_finding(finding)
    return manifest


def same_shards(a: Manifest, b: Manifest, *, paths: bool = False) -> bool:
    """Tell whether two manifests are of one save and list the same bytes, and under the same names."""

    def told(m: Manifest) -> list[tuple[object, ...]]:
        return sorted((s.rank, s.nbytes, s.index_digest, s.path if paths else "") for s in m.shards)

    return a.save_id == b.save_id and a.step == b.step and told(a) == told(b)


def folder_of(place: str, step: int) -> str:
    """Return the folder of a good checkpoint of this step in a run or a mirror.

    Raises NotCommittedError where there is none, OSError.
    """
    reason: Finding | None = None
    likely = os.path.join(place, names.step_folder(step))
    for path in (likely, *_others(place, step, likely)):
        manifest, finding = committed(path)
        if finding is None and manifest is not None and manifest.step == step:
            return path
        reason = reason or finding
    message = f"step {step} is no good checkpoint here" + (f": {reason.message}" if reason is not None else "")
    where = Where(likely) if reason is None else replace(reason.where, file=join(likely, reason.where.file or ""))
    raise NotCommittedError(message, rule=reason.code if reason is not None else "C-MANIFEST", where=where)


def _others(place: str, step: int, likely: str) -> list[str]:
    try:
        found = candidates(place)
    except FileNotFoundError:
        return []
    return [path for c in found if c.step == step and (path := os.path.join(place, c.name)) != likely]


# ---- after a roll-back -----------------------------------------------------------------------------------------------


def abandoned(run: str | os.PathLike[str]) -> dict[str, int]:
    """Return the steps that roll-backs took out of a run, by save id."""
    try:
        found = [names.parse_special(name) for name in os.listdir(os.fspath(run))]
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {s.id: s.step for s in found if s is not None and s.kind == "abandoned" and s.step is not None}


def set_aside(run: str | os.PathLike[str], mirror: Mirror) -> tuple[int, ...]:
    """Take what roll-backs took out of a run out of its mirror too, and return those steps [P-ROLLBACK].

    A manifest is put under another name before it goes; the shards stay.
    """
    done = []
    for save_id, step in sorted(abandoned(run).items(), key=lambda item: item[1]):
        key = names.step_folder(step)
        data = mirror.read(join(key, MANIFEST))
        document, _ = lexical.scan(data) if data is not None else (None, ())
        if data is not None and document and document.get("save_id") == save_id:
            mirror.write(join(key, aside_name(save_id)), data)
            mirror.store.delete(join(key, MANIFEST))
            done.append(step)
    return tuple(done)


# ---- the nearest good copy -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """The newest good step over a run and its mirror, and where; `place` is "local", "mirror", or None for no step.

    `skipped` are those passed over, and why. `unreachable` says why the mirror could not be asked, where the record in
    the run tells that it has nothing newer.
    """

    step: int | None
    path: str | None
    place: str | None
    manifest: Manifest | None
    skipped: tuple[Skipped, ...] = ()
    unreachable: str | None = None


def find(
    run: str | os.PathLike[str],
    mirror: str | os.PathLike[str],
    *,
    below: int | None = None,
    without: Collection[str] = (),
) -> Found:
    """Return the newest good step over a run and its mirror, the run's own copy where both have it [Q-NEWEST].

    `below` bounds the step, `without` are paths that proved to be bad though their sizes are right. What a roll-back
    took out of the run is not found in the mirror. Raises SaveError [P-EXISTING] where the mirror is another run's,
    OSError where it cannot be read and may have the newest.
    """
    own, far = plain(run), open_store(mirror).url
    here = _newest(own, below, without, {})
    try:
        there = _newest(far, below, without, abandoned(own))
    except OSError as e:
        if here.manifest is None or _newest_sent(own, far, below) > here.manifest.step:
            raise
        return Found(here.manifest.step, here.path, "local", here.manifest, here.skipped, str(e))
    skipped = here.skipped + there.skipped
    if here.manifest is not None and there.manifest is not None:
        refuse_other(here.manifest.run_id, there.manifest, far)
    if here.manifest is not None and (there.manifest is None or there.manifest.step <= here.manifest.step):
        return Found(here.manifest.step, here.path, "local", here.manifest, skipped)
    if there.manifest is not None:
        return Found(there.manifest.step, there.path, "mirror", there.manifest, skipped)
    return Found(None, None, None, None, skipped)


def _newest(place: str, below: int | None, without: Collection[str], gone: Mapping[str, int]) -> Newest:
    """Return the newest good step of one place that is neither in `without` nor, by save id, in `gone`."""
    skipped: tuple[Skipped, ...] = ()
    while True:
        try:
            found = newest(place, below=below)
        except FileNotFoundError:
            return Newest(None, None, skipped, 0)
        skipped += found.skipped
        m = found.manifest
        if m is None or (found.path not in without and m.save_id not in gone):
            return replace(found, skipped=skipped)
        below = m.step


def _newest_sent(run: str, mirror: str, below: int | None) -> int:
    """Return the newest step that the mirror may have, by the record of what was sent there; -1 for none."""
    steps = (u.step for u in Records(run, mirror).all() if below is None or u.step < below)
    return max(steps, default=-1)

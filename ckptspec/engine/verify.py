"""Owns the validator's walk through a checkpoint, level by level; it reports what is wrong and never raises for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptspec.check import catalogs
from ckptspec.check.advice import PASSED_OVER, OtherStep, Situation, advise
from ckptspec.check.manifests import check_manifest
from ckptspec.check.migration.damage import loss_of
from ckptspec.check.registry import capped, fault
from ckptspec.check.verdicts import Loss, losses, private_names, unlisted, verdicts
from ckptspec.engine.documents import read_shard
from ckptspec.engine.files import MEDIA, NotRegularError, entries, opened
from ckptspec.engine.locate import AllBadError, Located, Skipped, newest, read_manifest, resolve, step_finding
from ckptspec.engine.pool import DEFAULT_BUDGET, Pool
from ckptspec.engine.scan import Scan, buffer_size
from ckptspec.errors import CkptspecError, FormatError, IntegrityError, NotCommittedError, Where
from ckptspec.format import digest as digests
from ckptspec.format import names
from ckptspec.format.catalog import ShardDocument
from ckptspec.format.lexical import INT_LIMIT
from ckptspec.format.manifest import NAME, Manifest, decode
from ckptspec.format.report import Finding, Report, Verdict
from ckptspec.format.shard import TRAILER, Header
from ckptspec.format.signature import Signature
from ckptspec.format.signature import from_document as signature_of
from ckptspec.planner.renames import Renames, renames

if TYPE_CHECKING:
    from ckptspec.check.migration.asking import Aim, Answer

CHOICES = ("schema", "manifest", "shards", "bytes")


@dataclass
class _Walk:
    """What is known so far of one checkpoint on the way down the levels."""

    path: str
    asked: tuple[Any, ...] | None = None  # the fields of an Asking
    located: Located | None = None
    level: str = "lexical"
    findings: list[Finding] = field(default_factory=list)
    manifest: Manifest | None = None
    digest: str | None = None
    answer: Answer | None = None
    samples: int | None = None
    loss: Loss | None = None
    manifest_nbytes: int = 0
    hashed: int = 0
    headers: dict[int, Header] = field(default_factory=dict)

    def sound(self) -> bool:
        """Return True while no finding is an error: the gate to the next level [Q-GATES]."""
        return not any(f.severity == "error" for f in self.findings)


def validate(
    path: str | os.PathLike[str],
    *,
    target: Aim = None,
    level: str = "shards",
    exact: bool = False,
    expect_digest: str | None = None,
    names: Mapping[str, str] | Renames | None = None,
    signature: Signature | Mapping[str, Any] | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    words: Sequence[str] = (),
) -> Report:
    """Return the report on the checkpoint at `path`: its folder, its manifest.json, or a run with its newest good one.

    `level` is schema, manifest, shards or bytes; a level runs only if the one before has no error. `expect_digest` pins
    the manifest. With a `target` (or a function that makes one of the manifest) or a `signature` (what
    ckptspec.signature returns) the report says what loading would do, with `exact` on the same ranks and layouts only;
    `names` is a map of names as for load, `micro_batch` and `accumulation` are those of the job that was saved. `words`
    are command-line options that say the target again, for commands in advice.

    Never raises for a bad checkpoint; OSError for a path that is not there or may not be read, ValueError for `level`,
    PlanError [X-MAP] [X-SIGNATURE] for names or a signature that are none.
    """
    if level not in CHOICES:
        raise ValueError(f"level is one of {', '.join(CHOICES)}, not {level!r}")
    mapped = names if isinstance(names, Renames) else renames(names)
    described = signature_of(signature) if isinstance(signature, Mapping) else signature
    asked = (target, described, exact, mapped, micro_batch, accumulation, tuple(words))
    walk = _Walk(os.fspath(path), None if target is None and described is None else asked)
    try:
        walk.located = resolve(path)
    except AllBadError as e:
        walk.findings += [_moved(skipped) for skipped in e.skipped]
    except NotCommittedError as e:
        walk.findings.append(Finding.of_error(e))
    if walk.located is not None:
        walk.findings += [_warning(s) for s in walk.located.skipped if s.path != walk.located.folder]
        _descend(walk, walk.located.folder, level, expect_digest)
    return _report(walk)


def _moved(skipped: Skipped) -> Finding:
    """Return the finding with the folder's name before the file's: it is not about the checkpoint at hand."""
    where = skipped.finding.where
    file = os.path.join(os.path.basename(skipped.path), where.file or "")
    return replace(skipped.finding, where=replace(where, file=file))


def _warning(skipped: Skipped) -> Finding:
    moved = _moved(skipped)
    if moved.severity != "error":
        return moved
    message = f"this newer checkpoint was passed over: {moved.message}"
    return replace(moved, severity="warning", message=message, advice=(PASSED_OVER,))


def _descend(walk: _Walk, folder: str, level: str, expect_digest: str | None) -> None:
    wanted = CHOICES.index(level)
    _read_manifest(walk, folder, expect_digest)
    if walk.manifest is None or not walk.sound() or (wanted == 0 and walk.asked is None):
        return
    walk.level = "manifest"
    walk.findings += check_manifest(walk.manifest)
    if not walk.sound():
        missing = unlisted(walk.manifest)
        if missing and {f.code for f in walk.findings if f.severity == "error"} == {"W-COUNT"}:
            walk.loss = losses(walk.manifest, missing)
        return
    walk.answer = None if walk.asked is None else _answer(walk.asked, walk.manifest)
    if wanted >= 2:
        gathered = _check_shards(walk, folder, walk.manifest)
        if wanted == 3 and walk.sound():
            _check_bytes(walk, folder, walk.manifest, gathered)
    walk.findings += walk.answer.findings if walk.answer is not None else ()


def _answer(asked: tuple[Any, ...], manifest: Manifest) -> Answer:
    from ckptspec.check.migration.asking import Asking, answer  # the planner's modules: only who asks waits for them

    return answer(Asking(*asked), manifest)


def _read_manifest(walk: _Walk, folder: str, expect_digest: str | None) -> None:
    """Take the walk through the levels lexical and schema."""
    try:
        data = read_manifest(folder)
    except (NotCommittedError, FormatError) as e:
        walk.findings.append(Finding.of_error(e))
        return
    walk.manifest_nbytes = walk.hashed = len(data)
    decoded = decode(data)
    walk.level = decoded.level
    walk.findings += decoded.findings
    walk.manifest = decoded.manifest
    if walk.manifest is None:
        return
    walk.digest = walk.manifest.digest
    walk.findings += _about_name(folder, walk.manifest)
    if expect_digest is not None:
        walk.findings += _about_pin(walk.manifest, expect_digest)


def _about_name(folder: str, manifest: Manifest) -> Iterator[Finding]:
    name = os.path.basename(os.path.abspath(folder))
    step = names.parse_step_folder(name)
    if step is not None and step != manifest.step:
        yield step_finding(name, manifest.step)


def _about_pin(manifest: Manifest, expect_digest: str) -> Iterator[Finding]:
    wanted = expect_digest if expect_digest.startswith("sha256:") else "sha256:" + expect_digest
    if manifest.digest != wanted.lower():
        message = "this is not the manifest that was pinned"
        yield fault("D-EXPECT", message, Where(NAME, "/manifest_digest"), wanted, manifest.digest)
    elif manifest.block in digests.ALGORITHMS and not digests.algorithm(manifest.block).cryptographic:
        message = f"block digests are {manifest.block}, which finds accidents, not forgeries: the pin covers no payload"
        yield fault("D-PIN", message, Where(NAME, "/digest/block"), "sha256 or blake3", manifest.block)


def _check_shards(walk: _Walk, folder: str, manifest: Manifest) -> catalogs.Gathered:
    """Take the walk through the level `shards`: every header, index, trailer and state, one shard after another."""
    walk.level = "shards"
    gathered = catalogs.Gathered(manifest)
    found = list(capped(_each_shard(walk, folder, manifest, gathered)))
    bad = set(range(manifest.world_size)) - gathered.indexes.keys()
    if bad:
        walk.loss = losses(manifest, bad)
        first = next(i for i, f in enumerate(found) if f.where.rank in bad)
        found[first] = replace(found[first], message=f"{found[first].message}; {walk.loss.intact()}")
    if not any(f.severity == "error" and f.where.rank not in bad for f in found):
        found += catalogs.finish(gathered)
    walk.findings += found
    walk.findings += capped(_extra_shards(folder, manifest))
    return gathered


def _each_shard(walk: _Walk, folder: str, manifest: Manifest, gathered: catalogs.Gathered) -> Iterator[Finding]:
    for entry in manifest.shards:
        try:
            document = read_shard(folder, entry, manifest, numpy=False)
        except (FormatError, IntegrityError) as e:
            yield Finding.of_error(e)
            continue
        except OSError as e:
            if e.errno not in MEDIA:
                raise
            where = Where(entry.path, rank=entry.rank)
            yield fault("B-READ", "the shard cannot be read", where, None, e.strerror)
            continue
        if walk.answer is not None and not walk.headers:
            walk.samples = walk.answer.samples(document.state)
        yield from gathered.add(entry.rank, document)
        walk.hashed += _looked_at(document) + entry.index_nbytes
        walk.headers[entry.rank] = document.header


def _looked_at(document: ShardDocument) -> int:
    """Return the bytes that the level `shards` checks in a shard beside its index: header, state and trailer."""
    index = document.index
    return index.header_nbytes + index.state.nbytes + TRAILER.size


def _extra_shards(folder: str, manifest: Manifest) -> Iterator[Finding]:
    listed = {entry.path for entry in manifest.shards}
    for name in entries(folder):
        if name.endswith(".shard") and name not in listed:
            extra = fault("S-EXTRA", "a shard that the manifest does not list", Where(name), None, "an extra file")
            # Dead attempts leave such files where no folder is renamed; there they are no fault of this save.
            yield replace(extra, severity="warning") if manifest.commit == "manifest-last" else extra


def _check_bytes(walk: _Walk, folder: str, manifest: Manifest, gathered: catalogs.Gathered) -> None:
    """Take the walk through the level `bytes`: every block of every payload, and every byte between them."""
    walk.level = "bytes"
    nbytes = buffer_size(gathered.indexes.values(), manifest.block_size)
    pool = Pool(max(DEFAULT_BUDGET, nbytes), nbytes)
    found = list(_each_payload(walk, folder, manifest, gathered, pool))
    walk.loss = loss_of(manifest, found, gathered.indexes)
    walk.findings += capped(found)


def _each_payload(
    walk: _Walk, folder: str, manifest: Manifest, gathered: catalogs.Gathered, pool: Pool
) -> Iterator[Finding]:
    for entry in manifest.shards:
        try:
            with opened(os.path.join(folder, entry.path)) as file:
                index = gathered.indexes[entry.rank]
                yield from Scan(file, entry, walk.headers[entry.rank], index).run(pool)
                walk.hashed += index.end - index.header_nbytes - index.state.nbytes
        except (FileNotFoundError, NotRegularError) as e:
            yield fault(
                "B-READ", "the shard is gone since it was looked at", Where(entry.path, rank=entry.rank), None, e
            )


def _report(walk: _Walk) -> Report:
    manifest, answer = walk.manifest, walk.answer
    counsel = advise(walk.findings, _situation(walk))
    total = walk.manifest_nbytes + (manifest.nbytes if manifest is not None else 0)
    return Report(
        path=walk.path,
        level=walk.level,
        findings=counsel.findings,
        advice=counsel.advice,
        verdicts=tuple(_verdicts(walk)),
        decision=counsel.decision,
        save_id=manifest.save_id if manifest is not None else None,
        step=manifest.step if manifest is not None else None,
        manifest_digest=walk.digest,
        bytes_total=min(total, INT_LIMIT),
        bytes_hashed=min(walk.hashed, total, INT_LIMIT),
        names=answer.names if answer is not None else None,
    )


def _verdicts(walk: _Walk) -> Iterator[Verdict]:
    """Yield what becomes of each part: what is gone, and what a target would do with what is there."""
    loss = walk.loss
    if loss is not None and walk.manifest is not None:
        yield from verdicts(walk.manifest, loss)
    if walk.answer is not None and (loss is None or loss.mended):
        yield from walk.answer.verdicts


def _situation(walk: _Walk) -> Situation:
    manifest, answer = walk.manifest, walk.answer
    run = walk.located.run if walk.located is not None else walk.path
    folder = walk.located.folder if walk.located is not None else walk.path
    step = manifest.step if manifest is not None else _named_step(walk)
    good: tuple[OtherStep, ...] = ()
    if not walk.sound() and walk.located is not None and run is not None and step is not None:
        good = tuple(_older(run, step))
    return Situation(
        path=folder,
        run=run,
        world_size=manifest.world_size if manifest is not None else None,
        step=step,
        wall_clock_seconds=manifest.wall_clock_seconds if manifest is not None else None,
        good=good,
        newer=walk.located.skipped[0].path if walk.located is not None and walk.located.skipped else None,
        loss=walk.loss,
        private=private_names(manifest) if manifest is not None else (),
        prepared=answer.advice(folder, run, walk.samples) if answer is not None else {},
        words=answer.asking.words if answer is not None else (),
        target=answer.asking.target_words if answer is not None and answer.found is not None else (),
        proposed=len(answer.names.proposed) if answer is not None and answer.names is not None else 0,
    )


def _named_step(walk: _Walk) -> int | None:
    folder = walk.located.folder if walk.located is not None else walk.path
    return names.parse_step_folder(os.path.basename(os.path.abspath(folder)))


def _older(run: str, step: int) -> Iterator[OtherStep]:
    """Yield the newest good checkpoint before `step`: advice, so a run that cannot be read gives none."""
    try:
        found = newest(run, below=step)
    except (OSError, CkptspecError):
        return
    if found.path is not None and found.manifest is not None:
        m = found.manifest
        yield OtherStep(m.step, found.path, m.nbytes, m.wall_clock_seconds)

"""Owns what a path means: a checkpoint, its manifest, or a run with its newest good checkpoint; changes nothing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from ckptspec.check.manifests import check_manifest
from ckptspec.check.registry import fault
from ckptspec.engine.files import NotRegularError, each, entries, is_folder, is_there, opened, sizes
from ckptspec.errors import FormatError, ManifestError, NotCommittedError, Where
from ckptspec.format import lexical, names
from ckptspec.format.manifest import NAME, Manifest, decode
from ckptspec.format.report import Finding
from ckptspec.storage.base import is_url, plain

MANIFEST_LIMIT = 256 << 20  # [L-SIZE]
HEAD_NBYTES = 16 << 10
_OWN_FORM = b'{\n "format": "ckptspec",\n'
_STEP_LINE = re.compile(rb'\n "step": (0|[1-9][0-9]{0,14}),\n')  # one space: a field of the manifest itself
_UNDONE = {".tmp-": "a staging folder: its save never committed", ".trash-": "a folder that is being deleted"}


@dataclass(frozen=True)
class Skipped:
    """A folder of a run that was passed over, and why."""

    path: str
    finding: Finding


@dataclass(frozen=True)
class Located:
    """The checkpoint folder a path means, the run it was found in (None: a folder of its own), and what was skipped.

    `manifest` is there where finding the folder has read and checked it.
    """

    folder: str
    run: str | None = None
    skipped: tuple[Skipped, ...] = ()
    manifest: Manifest | None = None


@dataclass(frozen=True)
class Newest:
    """The newest good checkpoint of a run, or None; `candidates` tells an empty run from one where all are bad."""

    path: str | None
    manifest: Manifest | None
    skipped: tuple[Skipped, ...]
    candidates: int


@dataclass(frozen=True)
class Candidate:
    """A folder that looks like a checkpoint; `step` is its manifest's, or its name's where the manifest tells none."""

    step: int
    name: str
    superseded: bool = False

    @property
    def misnamed(self) -> bool:
        """Whether the folder's name is of another step [C-STEP]."""
        return not self.superseded and names.parse_step_folder(self.name) != self.step


@dataclass(frozen=True)
class RunScan:
    """The folders of a run by what their names say; `steps` newest first, by manifest.step [Q-NEWEST]."""

    steps: tuple[Candidate, ...]
    special: tuple[str, ...]
    others: tuple[str, ...]


def read_manifest(folder: str) -> bytes:
    """Return the bytes of the folder's manifest.json.

    Raises NotCommittedError [C-MANIFEST] where there is none, ManifestError [L-SIZE] above 256 MiB, or OSError.
    """
    where = Where(NAME)
    try:
        with opened(os.path.join(folder, NAME)) as file:
            if not 0 < file.nbytes <= MANIFEST_LIMIT:
                message = "the manifest has an impossible size"
                expected, found = f"1..{MANIFEST_LIMIT} bytes", f"{file.nbytes} bytes"
                raise ManifestError(message, rule="L-SIZE", where=where, expected=expected, found=found)
            return file.read(0, file.nbytes)
    except FileNotFoundError:
        message = "no manifest: nothing was committed here"
        raise NotCommittedError(message, rule="C-MANIFEST", where=where) from None
    except NotRegularError as e:
        raise NotCommittedError(
            "the manifest is not a regular file", rule="C-MANIFEST", where=where, expected=e.expected, found=e.found
        ) from None


def candidates(run: str, *, exact: bool = True) -> tuple[Candidate, ...]:
    """Return every folder that looks like a checkpoint, superseded ones too; each manifest is read for its step.

    Without `exact` the head of a manifest in this library's own form is trusted for the step.
    """
    found = each(run, partial(_named, run, exact), entries(run))
    return tuple(c for c in found if c is not None and c.step >= 0)


def _named(run: str, exact: bool, name: str) -> Candidate | None:
    parsed = names.parse_special(name)
    if parsed is not None and parsed.kind == "superseded":
        return _candidate(run, name, exact, superseded=True)
    if names.parse_step_folder(name) is not None and is_folder(os.path.join(run, name)):
        return _candidate(run, name, exact)
    return None


def scan_run(run: str, *, exact: bool = True) -> RunScan:
    """Return what lies in a run folder; reads each candidate's manifest for its step, which its name may hide."""
    found = candidates(run, exact=exact)
    final = {step for c in found if not c.superseded for step in (c.step, names.parse_step_folder(c.name))}
    # A reader that finds no final folder of a step takes a superseded one [Q-SUPERSEDED].
    steps = [c for c in found if not c.superseded or c.step not in final]
    # Of two folders with one step the rightly named one comes first, then the one whose name is lower.
    steps.sort(key=lambda c: (-c.step, c.superseded, c.misnamed, c.name))
    special = tuple(name for name in entries(run) if names.parse_special(name) is not None)
    known = {c.name for c in found} | set(special)
    return RunScan(tuple(steps), special, tuple(name for name in entries(run) if name not in known))


def _candidate(run: str, name: str, exact: bool, *, superseded: bool = False) -> Candidate:
    folder = os.path.join(run, name)
    step = None if exact else _step_in_head(folder)
    if step is None:
        step = _step_of(folder)
    if step is None:
        step = -1 if superseded else names.parse_step_folder(name)
    return Candidate(-1 if step is None else step, name, superseded)


def _step_in_head(folder: str) -> int | None:
    """Return the step that the head of a manifest in this library's own form shows, without parsing it all.

    It is a hint: whoever decodes the manifest later compares.
    """
    try:
        with opened(os.path.join(folder, NAME)) as file:
            start = file.read(0, min(file.nbytes, HEAD_NBYTES))
    except (OSError, NotRegularError):
        return None  # whoever takes the folder for a candidate is told why it is none
    line = _STEP_LINE.search(start) if start.startswith(_OWN_FORM) else None
    return int(line[1]) if line is not None else None


def _step_of(folder: str) -> int | None:
    try:
        document, findings = lexical.scan(read_manifest(folder))
    except (NotCommittedError, ManifestError):
        return None
    step = document.get("step") if isinstance(document, dict) else None
    sound = not any(f.severity == "error" for f in findings)
    return step if sound and type(step) is int and 0 <= step <= names.STEP_LIMIT else None


def faults_of_folder(folder: str, manifest: Manifest) -> Iterator[Finding]:
    """Yield why a folder with this manifest is no checkpoint: a shard that is missing, no file, or of another size."""
    size = sizes(folder)
    for entry in manifest.shards:
        where = Where(entry.path, rank=entry.rank)
        try:
            found = size(entry.path)
        except FileNotFoundError:
            yield fault("S-MISSING", "the shard is missing", where, f"{entry.nbytes} bytes", "no file")
        except NotRegularError as e:
            yield fault("S-FILE", e.message, where, e.expected, e.found)
        else:
            if found != entry.nbytes:
                message = "partial write or cut copy" if found < entry.nbytes else "the shard is too long"
                yield fault("S-NBYTES", message, where, f"{entry.nbytes} bytes", f"{found} bytes")


def committed(folder: str) -> tuple[Manifest | None, Finding | None]:
    """Return the manifest of a folder that counts as a checkpoint, else None and the first reason [Q-COMMITTED].

    Manifest rules and the sizes of shards are looked at, no shard is opened.
    """
    try:
        decoded = decode(read_manifest(folder))
    except (NotCommittedError, FormatError) as e:
        return None, Finding.of_error(e)
    manifest = decoded.manifest
    errors = (f for f in decoded.findings if f.severity == "error")
    if manifest is None:
        return None, next(errors)
    for finding in check_manifest(manifest):
        if finding.severity == "error":
            return None, finding
    return manifest, next(faults_of_folder(folder, manifest), None)


def newest(run: str, *, below: int | None = None) -> Newest:
    """Return the highest step (below `below`, if given) whose folder counts as a checkpoint, and what was skipped."""
    run = plain(run)
    found = _newest(run, scan_run(run, exact=False), below)
    return found if found is not None else _newest(run, scan_run(run), below) or Newest(None, None, (), 0)


def _newest(run: str, scan: RunScan, below: int | None) -> Newest | None:
    """Return the newest of a scan, or None where a manifest has another step than the scan took it for."""
    skipped: list[Skipped] = []
    for candidate in scan.steps:
        if below is not None and candidate.step >= below:
            continue
        path = os.path.join(run, candidate.name)
        manifest, finding = committed(path)
        if manifest is not None and manifest.step != candidate.step:
            return None
        if candidate.misnamed:
            skipped.append(Skipped(path, step_finding(candidate.name, candidate.step)))
        if finding is None:
            skipped += _twins(run, candidate, scan.steps)
            return Newest(path, manifest, tuple(skipped), len(scan.steps))
        skipped.append(Skipped(path, finding))
    return Newest(None, None, tuple(skipped), len(scan.steps))


def _twins(run: str, chosen: Candidate, steps: tuple[Candidate, ...]) -> Iterator[Skipped]:
    """Yield the other folders of the chosen one's step: the choice is by name, and worth a word [C-STEP]."""
    for other in steps:
        if other.step == chosen.step and other.name != chosen.name:
            message = f"a second folder of this step; {chosen.name!r} was taken"
            yield Skipped(
                os.path.join(run, other.name), fault("C-STEP", message, Where(NAME, "/step"), None, other.step)
            )


def step_finding(name: str, step: int) -> Finding:
    """Return the warning that a folder's name is of another step than its manifest [C-STEP]."""
    return fault("C-STEP", f"folder {name!r} is named for another step", Where(NAME, "/step"), name, step)


def latest(run: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest good checkpoint in a run folder, None where there is none or no such folder.

    Newest is the highest manifest.step whose manifest passes and whose shards are all there with the right sizes.
    """
    try:
        return newest(plain(run)).path
    except FileNotFoundError:
        return None


def newest_manifest(run: str | os.PathLike[str]) -> Manifest | None:
    """Return the manifest of a run's newest good checkpoint, None where there is none or no such folder."""
    try:
        return newest(plain(run)).manifest
    except FileNotFoundError:
        return None


def resolve(path: str | os.PathLike[str]) -> Located:
    """Return the checkpoint that a path means: a checkpoint folder, its manifest.json, or a run's newest good one.

    Raises FileNotFoundError for no such path, NotCommittedError [C-STAGING] [C-MANIFEST] for a folder without a commit
    and [C-EMPTY] for a run that has no checkpoint; for a run where all are bad it raises the newest one's fault.
    """
    text = plain(path)
    if not is_folder(text):
        _look(text)
        if os.path.basename(text) != NAME:
            message = "a file that is no manifest.json"
            raise NotCommittedError(message, rule="C-MANIFEST", where=Where(os.path.basename(text)))
        text = os.path.dirname(text) or "."
    if is_run(text):
        return _from_run(text)
    refuse_special(text)
    return Located(text, _run_of(text))


def _look(path: str) -> None:
    """Raise OSError where there is no such path, or no permission to look."""
    if not is_url(path):
        os.stat(path)
    elif not is_there(path):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def is_run(folder: str) -> bool:
    """Tell whether a folder is a run: not itself a checkpoint, finished or not."""
    if is_there(os.path.join(folder, NAME)):
        return False
    own = _own_name(folder)
    if own.startswith(tuple(_UNDONE)) or names.parse_special(own) or names.parse_step_folder(own) is not None:
        return False
    return not any(name.endswith(".shard") for name in entries(folder))


def refuse_special(folder: str) -> None:
    """Raise NotCommittedError [C-STAGING] for a folder whose name says that its save never finished, or was undone."""
    name = _own_name(folder)
    for lead, message in _UNDONE.items():
        if name.startswith(lead):
            raise NotCommittedError(message, rule="C-STAGING", where=Where(NAME))


def _own_name(folder: str) -> str:
    return os.path.basename(os.path.abspath(folder))


def _run_of(folder: str) -> str | None:
    """Return the run that a step folder lies in, as the caller would write it."""
    if names.parse_step_folder(_own_name(folder)) is None:
        return None
    stripped = folder.rstrip("/")
    if os.path.basename(stripped) == _own_name(folder):
        return os.path.dirname(stripped) or "."
    return os.path.dirname(os.path.abspath(folder))


def _from_run(run: str) -> Located:
    found = newest(run)
    if found.path is not None:
        return Located(found.path, run, found.skipped, found.manifest)
    if not found.candidates:
        message = "no checkpoint in this folder: nothing was ever committed here"
        raise NotCommittedError(message, rule="C-EMPTY", where=Where("."))
    raise AllBadError(found.skipped)


class AllBadError(NotCommittedError):
    """Every checkpoint of a run is bad; `skipped` says why, newest first."""

    def __init__(self, skipped: tuple[Skipped, ...]) -> None:
        first = next(s for s in skipped if s.finding.severity == "error")
        f = first.finding
        where = Where(os.path.join(os.path.basename(first.path), f.where.file or ""), f.where.pointer, f.where.tensor)
        message = f"no good checkpoint in this run; the newest: {f.message}"
        super().__init__(message, rule=f.code, where=where, expected=f.expected, found=f.found)
        self.skipped = skipped

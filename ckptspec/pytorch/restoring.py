"""Owns the way back into training: the newest good step for all ranks alike, an older one where that is damaged.

Rank 0 chooses and tells; every rank verifies what it reads. A state that does not fit is no reason to go further back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgpack

from ckptspec.engine.agree.notes import Notes
from ckptspec.engine.life import lease
from ckptspec.engine.life.rollback import rollback
from ckptspec.engine.locate import committed, newest
from ckptspec.engine.mirroring.mirror import find
from ckptspec.engine.mirroring.recall import fetch_back
from ckptspec.errors import FormatError, IntegrityError, LoadError, NotCommittedError, SaveError
from ckptspec.format import names
from ckptspec.pytorch.load import LoadResult
from ckptspec.storage.base import is_url

log = logging.getLogger("ckptspec")

_DAMAGE = ("IntegrityError", "ShardError", "ManifestError", "FormatError", "NotCommittedError", "OSError",
           "FileNotFoundError", "UnsupportedVersionError")  # fmt: skip


@dataclass(frozen=True)
class RestoreResult:
    """What a restore did: the step (None on a fresh start), its folder, what was skipped and why, and the load itself.

    `skipped` are (path, reason) pairs, newest first; `abandoned` the folders that a roll-back set aside.
    """

    step: int | None
    path: str | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    load: LoadResult | None = None
    abandoned: tuple[str, ...] = ()
    seconds: float = 0.0

    def line(self) -> str:
        """Return the one line that is logged."""
        if self.load is None:
            return f"restore step=None run is empty: a fresh start after {self.seconds:.3f}s"
        rate = self.load.nbytes / self.seconds / 1e9 if self.seconds else 0.0
        why = "; ".join(f"{os.path.basename(path)}: {reason}" for path, reason in self.skipped) or "none"
        return (
            f"restore step={self.step} nbytes={self.load.nbytes} ranks={self.load.world_size} "
            f"seconds={self.seconds:.3f} GB/s={rate:.2f} save_id={self.load.save_id} digest={self.load.digest} "
            f"path={self.path} skipped={why}"
        )


@dataclass(frozen=True)
class _Choice:
    """What rank 0 tells: `fresh`, a folder of the run to `load`, or why there is nothing (`none`); what it skipped."""

    kind: str
    name: str = ""
    skipped: tuple[tuple[str, str], ...] = ()
    step: int = 0
    save_id: str = ""

    def encode(self) -> bytes:
        return bytes(msgpack.packb([self.kind, self.name, self.skipped, self.step, self.save_id]))

    @classmethod
    def decode(cls, data: bytes) -> _Choice:
        return cls(*msgpack.unpackb(data, use_list=False))


Load = Callable[[str], LoadResult]


class Restoring:
    """One restore of one run; `load` fills the state from a path, on all ranks together."""

    def __init__(self, run: str, rank: int, notes: Notes, load: Load, mirror: str | None = None) -> None:
        self._run = run
        self._mirror = mirror
        self._rank = rank
        self._notes = notes
        self._load = load
        self._skipped: list[tuple[str, str]] = []

    def newest(self, *, fallback: bool) -> RestoreResult:
        """Load the newest good step; with `fallback` an older one where its bytes turn out to be damaged.

        Raises NotCommittedError where the run is not empty and has nothing that can be loaded, and what the load raises
        where the state does not fit or nothing else may be tried.
        """
        begun = time.monotonic()
        tried: dict[str, int] = {}
        while True:
            choice = self._agree(lambda: self._choose(tried))
            self._skipped += [s for s in choice.skipped if s not in self._skipped]
            if choice.kind == "fresh":
                return RestoreResult(None, seconds=time.monotonic() - begun)
            if choice.kind == "none":
                raise self._nothing()
            path = _path(self._run, choice.name)
            try:
                with self._held(path, choice.save_id):
                    result = self._load(path)
            except BaseException as e:  # all ranks fail together, whatever the error of one is: each of them asks
                if not self._try_older(e, fallback):
                    raise
                self._skipped.append((path, _first_line(e)))
                log.warning("%s cannot be loaded, going back to an older step: %s", path, _first_line(e))
                tried[path] = choice.step
                continue
            return RestoreResult(
                result.step, result.path, tuple(self._skipped), result, seconds=time.monotonic() - begun
            )

    def _choose(self, tried: Mapping[str, int]) -> _Choice:
        """Rank 0: return the newest good step that has not turned out to be damaged, of the run or its mirror."""
        if self._mirror is None:
            return _newest(self._run, min(tried.values(), default=None))
        found = find(self._run, self._mirror, without=tuple(tried))
        skipped = tuple((s.path, str(s.finding)) for s in found.skipped)
        if found.unreachable is not None:
            log.warning("the mirror cannot be asked, and by the record has nothing newer: %s", found.unreachable)
        if found.path is None or found.manifest is None:
            return _Choice("none" if tried or skipped else "fresh", "", skipped)
        name = os.path.basename(found.path) if found.place == "local" else found.path
        return _Choice("load", name, skipped, found.manifest.step, found.manifest.save_id)

    def exactly(self, step: int) -> RestoreResult:
        """Load `step`, then set every newer one aside, so that a restart goes on from here [P-ROLLBACK]."""
        begun = time.monotonic()
        choice = self._agree(lambda: self._one(step))
        if choice.kind != "load":
            raise NotCommittedError(choice.name, rule="C-MANIFEST")
        path = os.path.join(self._run, choice.name)
        with self._held(path, choice.save_id):
            result = self._load(path)
        told = self._agree(lambda: _set_aside(self._run, step))
        if told.kind == "none":
            raise NotCommittedError(told.name, rule="P-ROLLBACK")
        aside = tuple(path for path, _ in told.skipped)
        return RestoreResult(result.step, result.path, (), result, aside, time.monotonic() - begun)

    def _one(self, step: int) -> _Choice:
        """Rank 0: return a step by its number, brought back from the mirror where the run has lost it."""
        choice = _one(self._run, step)
        if choice.kind != "load" and self._mirror is not None:
            log.info("%s", fetch_back(self._run, self._mirror, step))
            choice = _one(self._run, step)
        return choice

    @contextlib.contextmanager
    def _held(self, path: str, save_id: str) -> Iterator[None]:
        """Let nobody remove a step while it is read, where this run can be written in; rank 0 does it for all."""
        with contextlib.ExitStack() as stack:
            if self._rank == 0 and not is_url(path):
                with contextlib.suppress(OSError, NotCommittedError):
                    stack.callback(lease.hold(path, "restore", save_id).release)
            yield

    def _agree(self, choose: Callable[[], _Choice]) -> _Choice:
        """Return what rank 0 chose; an error there is told to all as `none`."""
        if self._rank != 0:
            return _Choice.decode(self._notes.share("restore"))
        try:
            with self._notes.working():
                choice = choose()
        except Exception as e:
            self._notes.share("restore", _Choice("none", _first_line(e)).encode())
            raise
        return _Choice.decode(self._notes.share("restore", choice.encode()))

    def _try_older(self, error: BaseException, fallback: bool) -> bool:
        """Return whether all go on to an older step: rank 0 decides, for every rank has failed together."""
        lost = getattr(error, "rule", None) == "P-SILENCE" and getattr(error, "rank", None) == 0
        if not fallback or (lost and self._rank != 0):
            return False
        mine = b"1" if damage(error) else b"0"
        try:
            return self._notes.share("older", mine if self._rank == 0 else None) == b"1"
        except SaveError as e:  # nobody is left to decide: what the load failed of says more
            log.warning("no older step is tried: %s", e)
            return False

    def _nothing(self) -> NotCommittedError:
        first = "; ".join(f"{os.path.basename(path)}: {why}" for path, why in self._skipped[:3])
        return NotCommittedError(
            f"the run holds checkpoints, but none can be loaded: {first or 'see rank 0'}",
            rule="C-MANIFEST",
            advice="run `ckptspec validate` on them; to start anew all the same, use an empty run folder",
        )


def _path(run: str, name: str) -> str:
    """Return the path of a step: below the run, or where its mirror has it."""
    return name if is_url(name) else os.path.join(run, name)


def damage(error: BaseException) -> bool:
    """Tell whether an error is about the checkpoint's files or bytes, here or on another rank, not about the state."""
    if isinstance(error, LoadError):
        return error.cause in _DAMAGE
    return isinstance(error, (FormatError, IntegrityError, NotCommittedError, OSError))


def _newest(run: str, below: int | None) -> _Choice:
    if not os.path.isdir(run):
        return _Choice("fresh")
    found = newest(run, below=below)
    skipped = tuple((s.path, str(s.finding)) for s in found.skipped)
    if found.path is not None and found.manifest is not None:
        m = found.manifest
        return _Choice("load", os.path.basename(found.path), skipped, m.step, m.save_id)
    return _Choice("none" if found.candidates or below is not None else "fresh", "", skipped)


def _one(run: str, step: int) -> _Choice:
    name = names.step_folder(step)
    manifest, finding = committed(os.path.join(run, name))
    if manifest is None or finding is not None:
        return _Choice("none", f"step {step} is no good checkpoint of this run: {finding}")
    return _Choice("load", name, (), step, manifest.save_id)


def _set_aside(run: str, step: int) -> _Choice:
    done = rollback(run, step)
    return _Choice("load", os.path.basename(done.path), tuple((new, old) for old, new in done.abandoned))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:500]

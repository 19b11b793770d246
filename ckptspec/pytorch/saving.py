"""Owns the steps of a save of a torch state: terms checked, state captured, written and committed, remembered."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch

from ckptspec.check.life.keeping import Keep
from ckptspec.engine.agree.channel import Channel
from ckptspec.engine.pool import DEFAULT_BUDGET, shared_pool
from ckptspec.engine.saves import save as engine_save
from ckptspec.engine.saves.rehearsal import declared
from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.format.manifest import Manifest
from ckptspec.format.target import Target
from ckptspec.pytorch import group
from ckptspec.pytorch.capture import HELD, REPLICATED, capture
from ckptspec.pytorch.declare import snapshot
from ckptspec.pytorch.record import Capture
from ckptspec.pytorch.select import listed

_STARTED = time.monotonic()


@dataclass(frozen=True)
class SaveOptions:
    """How states are saved; `ckptspec.save` says what each means."""

    plain: str = REPLICATED
    ties: Mapping[str, str] | None = None
    scope: str = "full"
    exclude: Sequence[str] = ()
    copies: int = 1
    on_existing: str = "refuse"
    digest: str = "xxh3-128"
    block_size: int = 1 << 20
    run_id: str | None = None
    annotations: Mapping[str, Any] | None = None
    memory: int = DEFAULT_BUDGET
    silence: float = group.DEFAULT_SILENCE

    def check(self, step: object) -> None:
        """Raise ValueError for arguments that no save can have."""
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
            raise ValueError(f"step must be an integer from 0 to 2^53 - 1, not {step!r}")
        if self.on_existing not in ("refuse", "supersede"):
            raise ValueError(f'on_existing is "refuse" or "supersede", not {self.on_existing!r}')
        if self.scope not in ("full", "partial") or (self.scope == "partial") != bool(self.exclude):
            raise ValueError('scope is "full", or "partial" with the names to leave out in exclude=[...]')
        ties = self.ties
        if ties is not None and not (isinstance(ties, Mapping) and _texts([*ties, *ties.values()])):
            raise ValueError(f"ties is a mapping of names to names, not {ties!r}")
        check_names(exclude=self.exclude)
        check_memory(self.memory)

    def request(
        self, step: int, annotations: Mapping[str, Any] | None = None, keep: Keep | None = None
    ) -> engine_save.Request:
        """Return what the engine is asked for; `annotations` are added to the options' own, `keep` needs room too."""
        return engine_save.Request(
            step=step,
            run_id=self.run_id,
            copies=self.copies,
            block=self.digest,
            block_size=self.block_size,
            on_existing=self.on_existing,
            producer={"name": "ckptspec", "version": version("ckptspec"), "torch": torch.__version__},
            annotations={**(self.annotations or {}), **(annotations or {})},
            whole=self.plain != HELD,
            keep=keep,
        )

    def capture(self, state: Any) -> Capture:
        """Return what this rank holds of a state; raises StateError naming the key of what cannot be saved."""
        here = group.world()
        return capture(
            state, rank=here.rank, world=here.size, plain=self.plain, ties=self.ties, exclude=listed(self.exclude)
        )


def check_memory(memory: object) -> None:
    """Raise ValueError for what is no byte budget."""
    if not isinstance(memory, int) or isinstance(memory, bool):
        raise ValueError(f"memory is a whole number of bytes, not {memory!r}")
    shared_pool(memory)


def check_names(**patterns: object) -> None:
    """Raise ValueError for an argument that is neither a name nor names."""
    for argument, found in patterns.items():
        if not (found is None or _texts(found)):
            raise ValueError(f"{argument} is a name, or names, prefixes or globs, not {found!r}")


def _texts(found: object) -> bool:
    return isinstance(found, str) or (isinstance(found, Collection) and all(isinstance(text, str) for text in found))


# ---- what this process knows of a run -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """The checkpoint this process last restored from or committed to a run, and when, on the process's clock."""

    run_id: str
    save_id: str
    step: int
    wall_clock_seconds: int
    at: float = field(default_factory=time.monotonic)


_known: dict[str, Known] = {}


def remember(run: str, m: Manifest) -> None:
    """Remember what a run was last restored from, or what was committed to it."""
    _known[os.path.realpath(run)] = Known(m.run_id, m.save_id, m.step, m.wall_clock_seconds or 0)


def known(run: str) -> Known | None:
    """Return what this process last restored from, or committed to, a run."""
    return _known.get(os.path.realpath(run))


def _following(request: engine_save.Request, run: str) -> engine_save.Request:
    """Return the request with what this process knows of the run."""
    last = known(run)
    if last is None:
        return replace(request, wall_clock_seconds=int(time.monotonic() - _STARTED))
    return replace(
        request,
        run_id=request.run_id or last.run_id,
        parent={"step": last.step, "save_id": last.save_id},
        wall_clock_seconds=last.wall_clock_seconds + int(time.monotonic() - last.at),
        known_save=last.save_id if last.step == request.step else None,
    )


def commit(
    run: str,
    take: Callable[[], Snapshot],
    request: engine_save.Request,
    channel: Channel,
    memory: int,
    place: object | None = None,
    wrote: Callable[[], None] = lambda: None,
) -> Manifest:
    """Write and commit one checkpoint with all ranks, and remember it; `place` is where it stands in their line.

    `wrote` is called once this rank's shard is durable. Raises what the engine's `save` raises.
    """
    with channel.turn(place):
        manifest = engine_save.save(run, take, _following(request, run), channel, memory, wrote)
        remember(run, manifest)
    return manifest


def target(state: Any, *, plain: str = REPLICATED, silence: float = group.DEFAULT_SILENCE) -> Target:
    """Return how all ranks of this job hold `state`, as the target that `validate`, `plan` and `reshard` take.

    Every rank calls it; nothing is written. `json.dump(target.document(), file)` makes the file for `--target`. Raises
    SaveError on every rank for a state that could not be saved.
    """
    options = SaveOptions(plain=plain, silence=silence)
    channel = group.channel(silence)
    with channel.turn():
        return declared(lambda: snapshot(options.capture(state)), options.request(0), channel)

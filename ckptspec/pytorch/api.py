"""Owns the public verbs for torch states: save and load, and what this process remembers of a run between them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from ckptspec.engine import save as engine_save
from ckptspec.engine.pool import DEFAULT_BUDGET, shared_pool
from ckptspec.format.manifest import Manifest
from ckptspec.format.pause import collector_paused
from ckptspec.pytorch import group
from ckptspec.pytorch.capture import HELD, REPLICATED, capture
from ckptspec.pytorch.compare import Cast
from ckptspec.pytorch.declare import snapshot
from ckptspec.pytorch.load import LoadResult, Options
from ckptspec.pytorch.load import load as run_load
from ckptspec.pytorch.materialize import Materialize
from ckptspec.pytorch.select import listed

_STARTED = time.monotonic()


@dataclass(frozen=True)
class _Known:
    """The checkpoint this process last restored from or committed to a run, and when, on the process's clock."""

    run_id: str
    save_id: str
    step: int
    wall_clock_seconds: int
    at: float


_known: dict[str, _Known] = {}


def _remember(run: str, m: Manifest) -> None:
    _known[os.path.realpath(run)] = _Known(m.run_id, m.save_id, m.step, m.wall_clock_seconds or 0, time.monotonic())


def _elapsed(known: _Known | None) -> int:
    """Return the run's seconds of wall clock: what the last known checkpoint had, and the time since."""
    if known is None:
        return int(time.monotonic() - _STARTED)
    return known.wall_clock_seconds + int(time.monotonic() - known.at)


def _check(step: object, on_existing: str, scope: str, exclude: Sequence[str], memory: int) -> None:
    """Raise ValueError for arguments that no save can have."""
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise ValueError(f"step must be an integer from 0 to 2^53 - 1, not {step!r}")
    if on_existing not in ("refuse", "supersede"):
        raise ValueError(f'on_existing is "refuse" or "supersede", not {on_existing!r}')
    if scope not in ("full", "partial") or (scope == "partial") != bool(exclude):
        raise ValueError('scope is "full", or "partial" with the names to leave out in exclude=[...]')
    shared_pool(memory)


def save(
    run: str | os.PathLike[str],
    state: Any,
    *,
    step: int,
    plain: str = REPLICATED,
    ties: Mapping[str, str] | None = None,
    scope: str = "full",
    exclude: Sequence[str] = (),
    copies: int = 1,
    on_existing: str = "refuse",
    digest: str = "xxh3-128",
    block_size: int = 1 << 20,
    run_id: str | None = None,
    annotations: Mapping[str, Any] | None = None,
    memory: int = DEFAULT_BUDGET,
    silence: float = group.DEFAULT_SILENCE,
) -> Manifest:
    """Write `state` durably to RUN/step-<8 digits>/, every rank calling this, and return its manifest.

    `state` is a nested dict, list or tuple of tensors, typed Python values and objects: modules, optimizers, and
    whatever has state_dict and load_state_dict. Plain tensors and values must be equal on all ranks that hold them
    (checked) unless wrapped in Local or Replicated, or saved with plain="local". Ranks may hold different ones, as
    pipeline stages and experts do; a rank that only lacks some is refused unless plain="held". `ties` gives names to
    tensors of other names, on any rank: {"stage1/head": "stage0/wte"} is stored once, and compared. With
    scope="partial" what `exclude` names (names, prefixes or globs) is left out and recorded as omitted. `copies` is how
    many ranks store each replicated element; `memory` (bytes) bounds what this rank uses beyond the state; `silence`
    (seconds) is how long a rank may show no sign of life. Raises StateError naming the key of what cannot be saved,
    SaveError on every rank naming the rank that failed, CommitUncertainError where nobody saw the outcome (SPEC section
    Commit).
    """
    check = partial(_check, step, on_existing, scope, exclude, memory)
    here = group.world()
    if here.size == 1:
        check()
    folder = os.fspath(run)
    known = _known.get(os.path.realpath(folder))
    request = engine_save.Request(
        step=step,
        run_id=run_id or (known.run_id if known else None),
        parent={"step": known.step, "save_id": known.save_id} if known else None,
        copies=copies,
        block=digest,
        block_size=block_size,
        on_existing=on_existing,
        wall_clock_seconds=_elapsed(known),
        producer={"name": "ckptspec", "version": version("ckptspec"), "torch": torch.__version__},
        annotations=annotations or {},
        whole=plain != HELD,
        known_save=known.save_id if known and known.step == step else None,
    )
    channel = group.channel(silence)

    def take() -> Any:
        check()  # inside the attempt: what only one rank gets wrong must not leave the others waiting
        return snapshot(
            capture(state, rank=here.rank, world=here.size, plain=plain, ties=ties, exclude=listed(exclude))
        )

    with collector_paused():
        manifest = engine_save.save(folder, take, request, channel, memory)
    _remember(folder, manifest)
    return manifest


def load(
    path: str | os.PathLike[str],
    into: Any,
    *,
    exact: bool = False,
    only: Sequence[str] | None = None,
    skip: Sequence[str] | None = None,
    missing: str = "error",
    unexpected: str = "error",
    cast: Cast | None = None,
    materialize: Materialize | None = None,
    memory: int = DEFAULT_BUDGET,
    silence: float = group.DEFAULT_SILENCE,
) -> LoadResult:
    """Fill `into` in place from the checkpoint at `path` (a folder, its manifest.json, or a run: its newest), verified.

    Every rank calls it; one rank's failure raises on all, and `into` is then undefined. Tensors keep their memory,
    Python values are replaced in their containers, objects get theirs by load_state_dict, last. A fresh optimizer gets
    its state without a step. Meta tensors are refused unless `materialize` gives them memory: a device, or a function
    that makes a real tensor of a meta one. Names, dtypes and shapes must agree, unless `only` / `skip` (names,
    prefixes or globs), missing="keep", unexpected="ignore" or `cast` (True, or names) say otherwise; every deviation is
    in the result. Raises PlanError for what does not fit, IntegrityError naming file, tensor and byte range for damaged
    bytes, NotCommittedError where there is no checkpoint.
    """
    options = Options(exact, only, skip, missing, unexpected, cast, materialize, memory)
    with collector_paused():
        result, manifest = run_load(path, into, options, silence)
    _remember(os.path.dirname(os.path.abspath(result.path)), manifest)
    return result

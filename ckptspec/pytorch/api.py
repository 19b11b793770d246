"""Owns the public verbs for torch states: save and load."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ckptspec.engine.pool import DEFAULT_BUDGET
from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.format.manifest import Manifest
from ckptspec.format.pause import collector_paused
from ckptspec.planner.renames import renames
from ckptspec.pytorch import group
from ckptspec.pytorch.capture import REPLICATED
from ckptspec.pytorch.compare import Cast
from ckptspec.pytorch.declare import snapshot
from ckptspec.pytorch.load import LoadResult, Options
from ckptspec.pytorch.load import load as run_load
from ckptspec.pytorch.match import KEPT, MAPPED, REFUSED
from ckptspec.pytorch.materialize import Materialize
from ckptspec.pytorch.progress import Tell
from ckptspec.pytorch.saving import SaveOptions, check_memory, check_names, commit, remember


def _check_load(o: Options) -> None:
    """Raise ValueError for arguments that no load can have."""
    if o.missing not in ("error", "keep") or o.unexpected not in ("error", "ignore"):
        raise ValueError('missing is "error" or "keep", unexpected is "error" or "ignore"')
    check_names(only=o.only, skip=o.skip, cast=None if isinstance(o.cast, bool) else o.cast)
    if not (o.materialize is None or callable(o.materialize) or isinstance(o.materialize, (str, torch.device))):
        raise ValueError(f"materialize is a device, or a function that makes a real tensor, not {o.materialize!r}")
    check_memory(o.memory)


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
    options = SaveOptions(
        plain, ties, scope, exclude, copies, on_existing, digest, block_size, run_id, annotations, memory, silence
    )
    if group.world().size == 1:
        options.check(step)
    channel = group.channel(silence)

    def take() -> Snapshot:
        options.check(step)  # inside the attempt: what only one rank gets wrong must not leave the others waiting
        return snapshot(options.capture(state))

    with collector_paused():
        return commit(os.fspath(run), take, options.request(step), channel, memory)


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
    names: Mapping[str, str] | None = None,
    private: str = MAPPED,
    process_group: dist.ProcessGroup | None = None,
    memory: int = DEFAULT_BUDGET,
    silence: float = group.DEFAULT_SILENCE,
    progress: Tell | None = None,
) -> LoadResult:
    """Fill `into` in place from the checkpoint at `path` (a folder, its manifest.json, or a run: its newest), verified.

    Every rank calls it, on as many ranks and in whatever layout it likes; one rank's failure raises on all, and `into`
    is then undefined. Tensors keep their memory, Python values are replaced in their containers, objects get theirs by
    load_state_dict, last. A fresh optimizer gets its state without a step. Meta tensors are refused unless
    `materialize` gives them memory: a device, or a function that makes a real tensor of a meta one. Names, dtypes and
    shapes must agree, unless `only` / `skip` (names, prefixes or globs), missing="keep", unexpected="ignore", `cast`
    (True, or names) or `names` ({"name here": "name in the checkpoint"}, each with at most one `*`) say otherwise;
    every deviation is in the result. ZeRO's flat groups and optimizer state by parameter are read one as the other.
    `exact` refuses another number of ranks and another layout. On another number of ranks, what is private to each rank
    has no exact counterpart: private="map" takes that of the rank of the same number where there is one, "keep" leaves
    it as it is, "error" refuses. With a `process_group` of all ranks that moves CPU tensors (gloo), each block is
    read and verified by one rank alone, which sends the others what they need. Threads tell `progress` the bytes this
    rank has read, and those in all. Raises PlanError for what does not fit, IntegrityError naming file, tensor and byte
    range for damaged bytes, NotCommittedError where there is no checkpoint.
    """
    if private not in (MAPPED, KEPT, REFUSED):
        raise ValueError(f'private is "map", "keep" or "error", not {private!r}')
    options = Options(
        exact,
        only,
        skip,
        missing,
        unexpected,
        cast,
        materialize,
        renames(names),
        private,
        process_group,
        memory,
        progress,
    )
    _check_load(options)
    with collector_paused():
        result, manifest = run_load(path, into, options, silence)
    remember(os.path.dirname(os.path.abspath(result.path)), manifest)
    return result

"""Owns the one moment a save becomes visible, and what an uncertain one came to.

Refuses to change a checkpoint in place, and to call an outcome failed that nobody saw.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from ckptspec.engine.agree.verdict import NotVisibleError
from ckptspec.engine.saves.staging import (
    MANIFEST,
    POINTS,
    Existing,
    Staging,
    Trace,
    discard,
    existing,
    prepare,
    read_manifest,
    saved,
    shard_name,
    sync_staging,
    to_trash,
    unlinked,
    untraced,
)
from ckptspec.errors import CommitUncertainError, SaveError, Where
from ckptspec.format import lexical, names
from ckptspec.storage import local

__all__ = [
    "MANIFEST",
    "POINTS",
    "Existing",
    "Staging",
    "discard",
    "existing",
    "prepare",
    "publish",
    "read_manifest",
    "saved",
    "settle",
    "shard_name",
    "sync_staging",
]

_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
_DEFINITE = _TAKEN | {errno.ENOENT}  # a refusal that leaves everything as it was


def _agreed() -> None:
    """Decide nothing: there is nobody to agree with."""


# ---- the commit ------------------------------------------------------------------------------------------------------


def publish(
    staging: Staging,
    manifest_bytes: bytes,
    sizes: Mapping[str, int],
    on_existing: str = "refuse",
    *,
    decide: Callable[[], None] = _agreed,
    trace: Trace = untraced,
) -> str:
    """Make the save visible and durable, and return its folder; `decide` is called right before it becomes visible.

    `sizes` are the bytes of every shard by file name. `on_existing` is `refuse` or `supersede`. Raises before the
    decision SaveError or OSError; after it NotVisibleError where certainly nothing became visible, otherwise
    CommitUncertainError [P-OUTCOME].
    """
    _check_sizes(staging, sizes)
    trace("checked")
    if on_existing != "supersede":
        _refuse_existing(staging)
    local.write_file(staging.manifest, manifest_bytes)  # [P-ORDER] after every hand-in was checked
    trace("manifest")
    local.fsync_folder(staging.path)
    trace("ready")
    decide()
    trace("decided")
    try:
        replaced = _show(staging, on_existing == "supersede", trace)
        trace("visible")
        local.fsync_folder(staging.path if staging.mode == "manifest-last" else staging.run)
    except OSError as e:
        raise _uncertain(staging, e) from e
    trace("durable")
    # [P-ACK] Only now may anything old go. Its removal failing does not undo the commit.
    with contextlib.suppress(OSError):
        _remove_replaced(staging, replaced, sizes)
    trace("cleaned")
    return staging.final


def _check_sizes(staging: Staging, sizes: Mapping[str, int]) -> None:
    for name, nbytes in sizes.items():
        path = os.path.join(staging.path, name)
        try:
            found = local.regular_size(path)
            if found != nbytes:
                found = _size_now(path)  # a network file system may have shown an old size
        except FileNotFoundError:
            raise SaveError(
                "a shard that was handed in is not in the staging folder",
                rule="P-ORDER",
                where=Where(path),
                expected=f"{nbytes} bytes",
                found="no such file",
                advice="give every rank the same run folder on a shared file system",
            ) from None
        if found != nbytes:
            found_text = "not a regular file" if found is None else f"{found} bytes"
            expected = f"a regular file of {nbytes} bytes"
            raise SaveError(
                "a shard is not what was handed in",
                rule="P-ORDER",
                where=Where(path),
                expected=expected,
                found=found_text,
            )


def _size_now(path: str) -> int | None:
    """Return the size of a regular file as its server knows it: opening asks there."""
    if local.regular_size(path) is None:
        return None
    fd = local.open_read(path)
    try:
        return os.fstat(fd).st_size
    finally:
        os.close(fd)


def _refuse_existing(staging: Staging) -> None:
    found = existing(staging.run, staging.step)
    if found is not None:
        raise _exists(SaveError, staging.step, found)


def _exists(kind: type[SaveError], step: int, found: Existing) -> SaveError:
    return kind(
        f"step {step} exists already",
        rule="P-EXISTING",
        where=Where(found.path),
        found=f"save {found.save_id}" if found.save_id else "something that is no checkpoint",
        advice='save another step, or pass on_existing="supersede"',
    )


def _uncertain(staging: Staging, error: OSError) -> CommitUncertainError:
    return CommitUncertainError(
        f"the commit was under way when the file system reported: {error.strerror or error}",
        rule="P-OUTCOME",
        where=Where(error.filename2 or error.filename or staging.final),
        advice=f"read {staging.final}: a manifest there with save id {staging.save_id} means it was committed",
    )


def _show(staging: Staging, supersede: bool, trace: Trace) -> str | None:
    """Give the save its final name and return where what it replaced lies now [P-RENAME].

    Raises NotVisibleError where the refusal is certain; any other OSError leaves it open.
    """
    if staging.mode == "manifest-last":
        _show_manifest(staging, supersede)
        return None
    old = _aside(staging, trace) if supersede and os.path.lexists(staging.final) else None
    if old == staging.path:
        return old  # exchanged: one step, never without a checkpoint
    try:
        _rename(staging)
    except OSError as e:
        if e.errno not in _DEFINITE:
            raise
        if saved(staging.final) != staging.save_id:  # a network file system may answer a second time, about the first
            _refused(staging, old, e)
    return old


def _rename(staging: Staging) -> None:
    if staging.mode == "rename":
        local.rename_noreplace(staging.path, staging.final)
    elif os.path.lexists(staging.final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), staging.final)
    else:
        local.rename(staging.path, staging.final)


def _refused(staging: Staging, old: str | None, error: OSError) -> NoReturn:
    """Raise that nothing became visible, the old checkpoint back in its place."""
    if old is not None:
        local.rename(old, staging.final)
    if error.errno in _TAKEN:
        raise _exists(NotVisibleError, staging.step, Existing(staging.final, saved(staging.final))) from error
    raise NotVisibleError(
        "what was to become visible is gone: another process gave this save up",
        rule="P-RENAME",
        where=Where(staging.path),
        found=error.strerror,
    ) from error


def _aside(staging: Staging, trace: Trace) -> str:
    """Put an existing checkpoint out of the way and return where it lies: `staging.path` where the two were swapped."""
    if staging.exchange:
        try:
            local.exchange(staging.path, staging.final)
            return staging.path
        except FileNotFoundError as e:
            if saved(staging.final) != staging.save_id:
                _refused(staging, None, e)
            return staging.path
    old = saved(staging.final) or secrets.token_hex(16)
    path = os.path.join(staging.run, names.superseded_folder(old))
    if os.path.lexists(path):
        path = os.path.join(staging.run, names.superseded_folder(secrets.token_hex(16)))
    local.rename(staging.final, path)
    trace("aside")
    return path


def _show_manifest(staging: Staging, supersede: bool) -> None:
    target = os.path.join(staging.path, MANIFEST)
    try:
        if supersede and os.path.lexists(target):
            local.rename(staging.manifest, target)  # a file's rename: readers see the old one or the new one
        elif staging.link:
            local.link(staging.manifest, target)
        else:
            local.write_file(target, local.read_file(staging.manifest, lexical.SIZE_LIMIT))
    except OSError as e:
        if e.errno not in _DEFINITE:
            raise
        if saved(staging.path) != staging.save_id:
            _refused(staging, None, e)


def _remove_replaced(staging: Staging, replaced: str | None, kept: Iterable[str]) -> None:
    if replaced is not None:
        to_trash(staging.run, replaced)
    if staging.mode != "manifest-last":
        return
    # The second name of the manifest; shards of the save it replaced, or of one that never got its manifest.
    for name in set(local.names(staging.path)) - {MANIFEST, *kept}:
        if name.endswith(".shard") or name == unlinked(staging.mode, staging.save_id):
            local.remove_file(os.path.join(staging.path, name))


# ---- after an uncertain outcome --------------------------------------------------------------------------------------


def settle(run: str, step: int, save_id: str) -> bool:
    """Decide an uncertain save by reading, for good: True when it is committed, and then durable [Q-UNCERTAIN].

    Otherwise its staging folder is taken away first, so that a coordinator that was only stopped can no longer make it
    visible. Any process may ask, several at a time. Raises OSError where the file system still gives no answer.
    """
    final = os.path.join(run, names.step_folder(step))
    if saved(final) != save_id and _fence(run, step, save_id) and saved(final) != save_id:
        return False
    local.fsync_folder(final)
    local.fsync_folder(run)
    return True


def _fence(run: str, step: int, save_id: str) -> bool:
    """Take a save's staging away from whoever still holds it; False when that showed it to be visible by now."""
    with contextlib.suppress(FileNotFoundError):  # nothing staged in a folder of its own
        staging = os.path.join(run, names.staging_folder(step, save_id))
        trash = os.path.join(run, names.trash_folder(secrets.token_hex(16)))
        local.rename(staging, trash)
        if saved(trash) not in (None, save_id):  # swapped just now: this is the checkpoint it superseded
            local.rename(trash, staging)
            return False
        local.fsync_folder(run)
        local.remove_tree(trash)
    with contextlib.suppress(FileNotFoundError):
        local.remove_file(os.path.join(run, names.step_folder(step), unlinked("manifest-last", save_id)))
    return True

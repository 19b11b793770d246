"""Owns the folder a save is written in, and what has its final name already; refuses to touch another save's files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from ckptspec.engine.saves import probe
from ckptspec.errors import SaveError, Where
from ckptspec.format import lexical, names
from ckptspec.storage import local
from ckptspec.storage.base import is_url

MANIFEST = "manifest.json"

# The places where a process may die, in order: what a test is told, and may act on.
POINTS = (
    "folder",  # the run folder is there, durably
    "probed",  # the commit mode is known
    "staging",  # the staging folder is there
    "checked",  # every shard has its size
    "manifest",  # the manifest is written and durable
    "ready",  # the staging folder is durable: everything is, but not visible
    "decided",  # the decision is won
    "aside",  # superseding without exchange: the old checkpoint is out of the way
    "visible",  # the new checkpoint has its name
    "durable",  # and keeps it when the power fails
    "cleaned",  # what it replaced is gone
)

Trace = Callable[[str], None]

_SAVE_ID = re.compile(r"[0-9a-f]{32}\Z")
# What opening or reading says of something that is there but no file we take for a manifest.
_NO_FILE = frozenset({errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENXIO})


def untraced(point: str) -> None:
    """Do nothing at any point: what a save does when nobody watches."""


@dataclass(frozen=True)
class Staging:
    """Where a save is written before its commit: the folder, and how it will become visible."""

    run: str
    step: int
    save_id: str
    path: str
    mode: str
    exchange: bool = False
    link: bool = False

    @property
    def final(self) -> str:
        """The folder of the checkpoint once committed."""
        return os.path.join(self.run, names.step_folder(self.step))

    @property
    def manifest(self) -> str:
        """The manifest before it is visible."""
        return os.path.join(self.path, unlinked(self.mode, self.save_id))


@dataclass(frozen=True)
class Existing:
    """What has a step's name already; `save_id` is None when its manifest does not verify."""

    path: str
    save_id: str | None


def shard_name(mode: str, rank: int, save_id: str) -> str:
    """Return the file name of a rank's shard; in `manifest-last` shards of several saves may lie in one folder."""
    name = names.shard_path(rank)
    return name if mode != "manifest-last" else name.replace(".shard", f"-{save_id}.shard")


def unlinked(mode: str, save_id: str) -> str:
    """Return the file name of a manifest that is written but not visible."""
    return MANIFEST if mode != "manifest-last" else f".manifest-{save_id}.json"


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_manifest(folder: str) -> bytes:
    """Return the bytes of a folder's manifest; raises OSError where it is absent, no regular file, or too large."""
    return local.read_file(os.path.join(folder, MANIFEST), lexical.SIZE_LIMIT)


def saved(folder: str) -> str | None:
    """Return the save id in a folder's manifest, None when none there verifies; OSError when that is unknown."""
    try:
        data = read_manifest(folder)
    except (FileNotFoundError, NotADirectoryError, local.ShortReadError):
        return None
    except OSError as e:
        if e.errno in _NO_FILE:
            return None
        raise
    document, _ = lexical.scan(data)
    found = document.get("save_id") if document else None
    return found if isinstance(found, str) and _SAVE_ID.match(found) else None


def existing(run: str, step: int) -> Existing | None:
    """Return what has the name of this step in the run, None when the name is free."""
    path = os.path.join(run, names.step_folder(step))
    if not os.path.lexists(path) or _unborn(run, path):
        return None
    return Existing(path, saved(path))


def _unborn(run: str, path: str) -> bool:
    """Whether this is where a save died before its manifest appeared: it needs a folder of the final name to appear in.

    Without links the manifest is written in its place, so there a cut one has never been whole.
    """
    means = probe.means(run)
    if means.mode != "manifest-last" or not os.path.isdir(path):
        return False
    return not os.path.lexists(os.path.join(path, MANIFEST)) or not (means.link or saved(path))


# ---- before the commit -----------------------------------------------------------------------------------------------


def prepare(run: str, step: int, save_id: str, *, trace: Trace = untraced) -> Staging:
    """Create the run folder if need be, and the staging folder of a save in it; the coordinator's first act.

    What a killed save left beside it is not touched. Raises SaveError [P-PROBE], or [P-EXISTING] for a run of a name
    that readers take for a checkpoint's; OSError.
    """
    if is_url(run):
        message = "a save is written to a file system, and from there copied to a store"
        advice = "give a folder as the run, and this address as its mirror"
        raise SaveError(message, rule="P-PROBE", where=Where(run), advice=advice)
    own = os.path.basename(os.path.abspath(run))
    if names.parse_step_folder(own) is not None or names.parse_special(own):
        message, advice = "a run of this name would be taken for a checkpoint's folder", "name the folder that holds it"
        raise SaveError(message, rule="P-EXISTING", where=Where(run), advice=advice)
    local.make_folders(run)
    trace("folder")
    means = probe.means(run)
    trace("probed")
    last = means.mode == "manifest-last"
    name = names.step_folder(step) if last else names.staging_folder(step, save_id)
    staging = Staging(run, step, save_id, os.path.join(run, name), means.mode, means.exchange, means.link)
    if last and os.path.isdir(staging.path):
        if _unborn(run, staging.path):
            _clear(staging.path)
    else:
        local.make_folder(staging.path)
        local.fsync_folder(run)
    trace("staging")
    return staging


def _clear(folder: str) -> None:
    """Remove the files of saves that never got their manifest, from a folder they would share with a new one."""
    for name in local.names(folder):
        if name.endswith((".shard", ".json")) and local.regular_size(os.path.join(folder, name)) is not None:
            local.remove_file(os.path.join(folder, name))


def sync_staging(path: str) -> None:
    """Make the names of the shards in a staging folder durable: each rank's last act before its hand-in [P-FSYNC]."""
    local.fsync_folder(path)


def discard(staging: Staging) -> None:
    """Remove what a failed save wrote, never what another one did; what cannot be removed now waits for cleaning."""
    with contextlib.suppress(OSError):  # the save failed for another reason, and that one is to be told
        found = saved(staging.path)
        if staging.mode == "manifest-last":
            if found != staging.save_id:
                _discard_files(staging)
        elif found in (None, staging.save_id):
            to_trash(staging.run, staging.path)


def _discard_files(staging: Staging) -> None:
    for name in local.names(staging.path):
        if staging.save_id in name:
            local.remove_file(os.path.join(staging.path, name))
    os.rmdir(staging.path)


def to_trash(run: str, path: str) -> None:
    """Take a folder out of sight, then delete it [P-CLEAN]."""
    trash = os.path.join(run, names.trash_folder(secrets.token_hex(16)))
    local.rename(path, trash)
    local.remove_tree(trash)

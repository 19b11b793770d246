"""Owns the look before the first byte: does a save fit where it is to go; refuses, with numbers, one that cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from math import prod

from ckptspec.check.life.keeping import Keep
from ckptspec.check.life.room import RULE, Ask, Room, Space, room, shared_nbytes
from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.engine.saves.staging import shard_name, unlinked
from ckptspec.errors import SaveError, Where
from ckptspec.format import names
from ckptspec.format.declaration import Declaration
from ckptspec.format.dtypes import DTYPES
from ckptspec.storage import space

_ID = "0" * 32
_ADVICE: Mapping[str, str] = {
    "bytes": "free some space, keep fewer checkpoints, or save to another file system",
    "files": "remove files, or save to another file system",
}


def preflight(run: str, nbytes: int, files: int, *, step: int = 0, keep: Keep | None = None) -> Room:
    """Return what a save of `nbytes` in `files` files needs in a run folder, and what is there [P-ROOM].

    `nbytes` is the payload alone, so what is refused certainly does not fit; what little frames and indexes add is
    reserved by every rank before its first byte. With `keep`, what retention lets lie beside each other counts. Changes
    nothing; the run folder need not be there yet. Raises OSError where the file system cannot be asked.
    """
    folder = space.nearest(run)
    longest = [shard_name("manifest-last", 10**6, _ID), unlinked("manifest-last", _ID), names.staging_folder(step, _ID)]
    names_nbytes = [len(name) for name in longest]
    path = len(os.fsencode(run)) + 1 + names_nbytes[2] + 1 + max(names_nbytes[:2])
    saves = keep.saves if keep is not None else 1
    ask = Ask(nbytes, files, path, max(names_nbytes), saves, _present(run) if saves > 1 else 0)
    return room(run, ask, _space(folder))


def _space(folder: str) -> Space:
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
    left = space.left(folder)
    may = space.writable(folder)
    return Space(left.nbytes, left.files, space.path_limit(folder), space.name_limit(folder), may, left.by)


def _present(run: str) -> int:
    """Return how many checkpoints a run has, by their names."""
    try:
        return sum(names.parse_step_folder(name) is not None for name in os.listdir(run))
    except FileNotFoundError:
        return 0


def payload_nbytes(declared: Declaration, copies: int, private: int) -> int:
    """Return the payload of a whole save: what ranks declare together, and what is `private` to them, summed."""
    return shared_nbytes(declared, copies) + private


def private_nbytes(snapshot: Snapshot) -> int:
    """Return the bytes of a shard that no declaration tells: a rank's own tensors, and its packed state."""
    tensors = snapshot.declaration.tensors
    own = (prod(shape) * DTYPES[tensors[name].dtype].itemsize for name, shape in snapshot.local_shapes.items())
    return sum(own) + len(snapshot.state)


def refuse(found: Room) -> None:
    """Raise SaveError [P-ROOM] where the save does not fit."""
    if found.fault is not None:
        f = found.fault
        advice = next((text for what, text in _ADVICE.items() if f.found and f" {what} " in f.found), None)
        details = {"where": f.where, "expected": f.expected, "found": f.found, "advice": advice}
        raise SaveError(f.message, rank=0, rule=RULE, **details)


def refuse_file(path: str, nbytes: int, rank: int) -> None:
    """Raise SaveError [P-ROOM] where this process may not write a file so large: a limit that no other rank knows."""
    limit = space.file_limit()
    if limit is not None and nbytes > limit:
        cause = OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        raise SaveError(
            f"{cause.strerror}: the limit of this process (ulimit -f) is below the shard of rank {rank}",
            rank=rank,
            rule=RULE,
            where=Where(path, rank=rank),
            expected=f"{nbytes:,} bytes",
            found=f"at most {limit:,} bytes a file",
            advice="raise the limit (ulimit -f unlimited) where the job is started",
        ) from cause

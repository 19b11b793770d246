"""Owns the journal of a reshard: which units are written for good, so that a later call goes on from there.

It lies in the staging folder, one file for each process that worked there, and is locked while its process lives. It is
gone before the commit.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptspec.engine.saves import probe
from ckptspec.engine.saves.staging import Staging
from ckptspec.errors import SaveError, Where
from ckptspec.format import names
from ckptspec.storage import local

FORMAT = "ckptspec-reshard-journal"
LIMIT = 1 << 30  # bytes of a journal that are read
_NAME = re.compile(r"\.journal-([0-9a-f]{32})-[0-9a-f]{8}\Z")
_UNLOCKABLE = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})

Digests = Mapping[int, Sequence[tuple[int, bytes]]]


class Journal:
    """This process's journal, open and locked."""

    def __init__(self, folder: str, save_id: str, key: str) -> None:
        """Create the journal durably; `key` says what is being done. Raises OSError."""
        self.path = os.path.join(folder, f".journal-{save_id}-{secrets.token_hex(4)}")
        self._fd = local.create(self.path)
        self._at = 0
        lock(self._fd, wait=True)
        self._write({"format": FORMAT, "key": key})
        local.fsync_folder(folder)

    def add(self, units: Sequence[int], digests: Digests) -> None:
        """Note that these units are durable, and the digests of blocks that became known; durable on return."""
        blocks = {str(rank): [[first, data.hex()] for first, data in runs] for rank, runs in digests.items()}
        self._write({"units": list(units), "digests": blocks})

    def _write(self, line: Mapping[str, object]) -> None:
        data = json.dumps(line).encode() + b"\n"
        local.write_at(self._fd, data, self._at)
        os.fsync(self._fd)
        self._at += len(data)

    def close(self) -> None:
        """Close and unlock it; what it says stays."""
        os.close(self._fd)


@dataclass
class Past:
    """What earlier calls finished in a staging folder, whose journals stay locked until `close`."""

    staging: Staging
    units: set[int] = field(default_factory=set)
    digests: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    fds: list[int] = field(default_factory=list)

    def close(self) -> None:
        """Unlock the journals."""
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def lock(fd: int, *, wait: bool = False) -> bool | None:
    """Lock a file for this process; False where another process holds it, None where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as e:
        if e.errno not in _UNLOCKABLE:
            raise
        return None
    return True


def find(run: str, step: int, key: str) -> Past | None:
    """Return what an earlier call of the same reshard left in a run, None where there is nothing to go on from.

    Raises SaveError [P-EXISTING] where the process of such a call still lives, OSError.
    """
    for staging in _stagings(run, step):
        past = Past(staging)
        joined = False
        try:
            joined = _read(past, key)
        finally:
            if not joined:
                past.close()
        if joined:
            return past
    return None


def _stagings(run: str, step: int) -> Iterator[Staging]:
    """Yield the staging folders of a step that hold a journal."""
    if not os.path.isdir(run):
        return
    found = [name for name in local.names(run) if _may_stage(name, step)]
    means = probe.means(run) if found else None
    for name in found:
        path = os.path.join(run, name)
        for save_id in dict.fromkeys(match[1] for match in map(_NAME.match, local.names(path)) if match):
            assert means is not None
            mode = "manifest-last" if not name.startswith(".") else means.mode
            if (mode == "manifest-last") == (means.mode == "manifest-last"):
                yield Staging(run, step, save_id, path, means.mode, means.exchange, means.link)


def _may_stage(name: str, step: int) -> bool:
    special = names.parse_special(name)
    return name == names.step_folder(step) or (special is not None and (special.kind, special.step) == ("tmp", step))


def paths(folder: str, save_id: str) -> list[str]:
    """Return the journals of a save in its staging folder."""
    found = ((name, _NAME.match(name)) for name in local.names(folder))
    return [os.path.join(folder, name) for name, match in found if match and match[1] == save_id]


def remove(folder: str, save_id: str) -> None:
    """Remove the journals of a save: it is about to be committed."""
    for path in paths(folder, save_id):
        local.remove_file(path)


def _read(past: Past, key: str) -> bool:
    """Take in and lock all journals of a staging folder; False where they are of another reshard, or say nothing."""
    begun = False
    for path in paths(past.staging.path, past.staging.save_id):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        past.fds.append(fd)
        free = lock(fd)
        lines = list(_lines(local.read_file(path, LIMIT)))
        if lines and (lines[0].get("format"), lines[0].get("key")) != (FORMAT, key):
            return False
        if free is False and lines:
            message = "another process is at this very reshard"
            advice = "wait for it, or write to another folder"
            raise SaveError(message, rule="P-EXISTING", where=Where(past.staging.path), advice=advice)
        if not free:
            return False  # nobody can tell whether its process lives
        begun = begun or bool(lines)
        _take(past, lines[1:])
    return begun


def _lines(data: bytes) -> Iterator[dict[str, object]]:
    """Yield the whole lines of a journal; a kill may have cut the last one."""
    for line in data.split(b"\n")[:-1]:
        try:
            found = json.loads(line)
        except ValueError:
            return
        if not isinstance(found, dict):
            return
        yield found


def _take(past: Past, lines: Iterable[Mapping[str, object]]) -> None:
    for line in lines:
        units, digests = line.get("units"), line.get("digests")
        if not isinstance(units, list) or not isinstance(digests, dict):
            return
        past.units.update(units)
        for rank, runs in digests.items():
            past.digests.setdefault(int(rank), []).extend((first, bytes.fromhex(data)) for first, data in runs)

"""Owns the rehearsal of a save: ranks declare and look for room as they would, and nothing is written but a probe."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import msgpack

from ckptspec.check.life.room import Room
from ckptspec.engine.agree.attempt import Attempt
from ckptspec.engine.agree.channel import Channel
from ckptspec.engine.life import preflight
from ckptspec.engine.saves.declaring import Declaring
from ckptspec.engine.saves.save import Request
from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.errors import SaveError, Where
from ckptspec.format.declaration import Declaration
from ckptspec.format.target import TABLES, Target, from_document
from ckptspec.storage import local, space

T = TypeVar("T")

LATE = 10.0  # seconds in which a network file system shows a new file


def rehearse(run: str, take: Callable[[], Snapshot], request: Request, channel: Channel) -> Room:
    """Return what a save of this state would need, and what there is; every rank calls it, none writes.

    Raises SaveError on every rank for what would fail the save: a state that cannot be stored, ranks that disagree or
    see another folder [P-FOLDER], too little room on any rank's side [P-ROOM].
    """
    return _together(channel, lambda attempt: _Rehearsal(run, request, channel, attempt).play(take()))


def declared(take: Callable[[], Snapshot], request: Request, channel: Channel) -> Target:
    """Return how all ranks together hold their states, as the target they are; every rank calls it, none writes.

    Raises SaveError on every rank for a state that cannot be stored, and for ranks that disagree.
    """
    return _together(channel, lambda attempt: _declared(take(), request, channel, attempt))


def _together(channel: Channel, play: Callable[[Attempt], T]) -> T:
    """Return what this rank's part gives, once all ranks have played theirs; the failure of one is that of all."""
    attempt = channel.attempt("rehearsal")
    try:
        found = play(attempt)
        attempt.post("rehearsed", b"")
        if channel.rank == 0:
            attempt.collect("rehearsed")
            attempt.done(b"")
        else:
            attempt.outcome()
    except BaseException as e:
        agreed = attempt.fail(e)
        if agreed is e or not isinstance(e, Exception):
            raise
        raise agreed from e
    return found


def _declared(snapshot: Snapshot, r: Request, channel: Channel, attempt: Attempt) -> Target:
    heard: list[Declaration] = []
    declaring = Declaring(attempt, channel.rank, channel.world_size, whole=r.whole, judge=lambda d, _: heard.append(d))
    declaring.run(snapshot, [r.step, r.copies, r.block, r.block_size, r.whole])
    if channel.rank == 0:
        target = Target(channel.world_size, **{table: getattr(heard[0], table) for table in TABLES})
        attempt.announce("target", zlib.compress(json.dumps(target.document()).encode()))
        return target
    return from_document(json.loads(zlib.decompress(attempt.await_("target"))))


@dataclass
class _Rehearsal:
    """One rank's part."""

    run: str
    request: Request
    channel: Channel
    attempt: Attempt
    _nbytes: int = field(default=0)

    def play(self, snapshot: Snapshot) -> Room:
        r, c = self.request, self.channel
        terms = [r.step, r.copies, r.block, r.block_size, r.whole]
        declaring = Declaring(self.attempt, c.rank, c.world_size, whole=r.whole, judge=self._judge)
        declaring.run(snapshot, terms, preflight.private_nbytes(snapshot))
        probe = os.path.join(space.nearest(self.run), f".probe-{secrets.token_hex(16)}")
        try:
            if c.rank == 0:
                local.write_file(probe, b"")
                self.attempt.announce("room", msgpack.packb([self._nbytes, os.path.basename(probe)]))
            else:
                self._nbytes, name = msgpack.unpackb(self.attempt.await_("room"))
                self._see(os.path.join(space.nearest(self.run), name))
            room = preflight.preflight(self.run, self._nbytes, c.world_size + 1, step=r.step, keep=r.keep)
            preflight.refuse(room)
            self.attempt.post("seen", b"")
            if c.rank == 0:
                self.attempt.collect("seen")
        finally:
            if c.rank == 0:
                with contextlib.suppress(FileNotFoundError):
                    local.remove_file(probe)
        return room

    def _judge(self, declared: Declaration, private: int) -> None:
        self._nbytes = preflight.payload_nbytes(declared, self.request.copies, private)

    def _see(self, probe: str) -> None:
        deadline = time.monotonic() + LATE
        while not os.path.exists(probe):
            if time.monotonic() > deadline:
                raise SaveError(
                    "this rank does not see what rank 0 put beside the run",
                    rank=self.channel.rank,
                    rule="P-FOLDER",
                    where=Where(os.path.dirname(probe), rank=self.channel.rank),
                    advice="give every rank the same run folder on a shared file system",
                )
            time.sleep(0.05)
            self.attempt.progress(0)

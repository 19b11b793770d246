"""Owns the round in which ranks say what they hold and hear who else does; refuses ranks that ask for other saves.

A body is posted once however many ranks have it, a piece of it once however many bodies have it, and every rank hears
of its own tensors alone: what is sent grows with the tensors and the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgpack

from ckptspec.engine.agree.attempt import Attempt
from ckptspec.engine.saves.snapshot import Snapshot
from ckptspec.errors import SaveError, Where
from ckptspec.format import declaration
from ckptspec.format.declaration import Body, Declaration
from ckptspec.format.merging import Group, Merger
from ckptspec.format.settling import Settled, answer_of, settle

Terms = Sequence[Any]  # what all ranks must ask for alike: step, copies and so on
Judge = Callable[[Declaration, int], None]


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def _unjudged(declared: Declaration, private: int) -> None:
    """Let everything pass."""


def _key(digest: str, boxes: bytes) -> str:
    return f"declared/{hashlib.sha256(digest.encode() + boxes).hexdigest()[:32]}"


class Declaring:
    """One rank's part in the round; `whole` refuses a rank that only lacks tensors of another.

    On the coordinator `judge` sees what all declare, and the bytes that they hold beyond it, before anybody is told.
    """

    def __init__(self, attempt: Attempt, rank: int, world: int, *, whole: bool, judge: Judge = _unjudged) -> None:
        self._attempt = attempt
        self._rank, self._world = rank, world
        self._whole = whole
        self._judge = judge

    def run(self, snapshot: Snapshot, terms: Terms, private: int = 0) -> Settled:
        """Return what all ranks declare together, as far as this rank needs it; `private` bytes are this rank's alone.

        Raises SaveError [P-DECLARE] where ranks ask for different saves or declare what does not fit together.
        """
        own = snapshot.declaration
        body = declaration.body(own, self._rank)
        ties = sorted(snapshot.ties.items())
        if self._world == 1:
            if body.boxes:
                return self._alone(own, body, private)
            self._judge(own, private)
            return Settled(own)
        first = self._attempt.body(body.digest, b"")
        boxes_data = _pack(declaration.pack_boxes(body.boxes))
        listing = b"".join(body.digests) if first else b""
        self._attempt.post("declare", _pack([body.digest, listing, boxes_data, snapshot.tied, private, [*terms, ties]]))
        if self._rank == 0:
            posts = [msgpack.unpackb(payload) for payload in self._attempt.collect("declare")]
            self._compare(posts)
            _check_ties(ties, {name for post in posts for name in post[3]})
            return self._coordinate(own, body, posts, sum(post[4] for post in posts))
        if first:
            self._deliver(body)
        answer = self._attempt.await_(_key(body.digest, boxes_data))
        return settle(body, self._world, answer_of(msgpack.unpackb(answer))) if answer else Settled(own)

    def _alone(self, own: Declaration, body: Body, private: int) -> Settled:
        group = Group(body.digest, body.digests, (0,), {0: body.boxes})
        return self._merge(own, [group], dict(zip(body.digests, body.pieces, strict=True)), private)

    def _deliver(self, body: Body) -> None:
        """Send the pieces that the coordinator asks for: of all ranks with this body, this one came first."""
        wanted = set(msgpack.unpackb(self._attempt.await_(f"wanted/{body.digest}")))
        if wanted:
            pairs = zip(body.digests, body.encoded, strict=True)
            self._attempt.post("pieces", _pack([data for digest, data in pairs if digest in wanted]))

    # ---- the coordinator ---------------------------------------------------------------------------------------------

    def _coordinate(self, own: Declaration, body: Body, posts: Sequence[Any], private: int) -> Settled:
        ranks: dict[str, list[int]] = {}
        speakers: dict[str, int] = {}
        for rank, (digest, listing, *_) in enumerate(posts):
            ranks.setdefault(digest, []).append(rank)
            if listing:
                speakers[digest] = rank
        listings = {digest: _listing(posts[rank][1]) for digest, rank in speakers.items()}
        pieces = self._fetch(body, speakers, listings)
        if len(ranks) == 1 and not body.boxes:
            self._judge(own, private)
            self._attempt.announce(_key(body.digest, _pack([])), b"")
            return Settled(own)
        listings[body.digest] = body.digests
        boxes = [declaration.unpack_boxes(msgpack.unpackb(post[2])) for post in posts]
        groups = [Group(d, listings[d], tuple(found), {r: boxes[r] for r in found}) for d, found in ranks.items()]
        return self._merge(own, groups, pieces, private)

    def _compare(self, posts: Sequence[Any]) -> None:
        ours = posts[0][-1]
        for rank, (*_, theirs) in enumerate(posts):
            if theirs != ours:
                raise SaveError(
                    "ranks ask for different saves",
                    rank=rank,
                    rule="P-DECLARE",
                    where=Where(rank=rank),
                    expected=f"step, copies, digest, block size, whole and ties {ours} as rank 0",
                    found=str(theirs),
                )

    def _fetch(
        self, body: Body, speakers: Mapping[str, int], listings: Mapping[str, Sequence[bytes]]
    ) -> dict[bytes, Declaration]:
        """Return all pieces that are listed: this rank's own, and each other one from one rank that has it."""
        pieces = dict(zip(body.digests, body.pieces, strict=True))
        known = set(pieces)
        senders = []
        for digest, rank in speakers.items():
            asked = [piece for piece in listings[digest] if piece not in known]
            known.update(asked)
            if rank != 0:
                self._attempt.announce(f"wanted/{digest}", _pack(asked))
            if asked:
                senders.append(rank)
        for payload in self._attempt.collect("pieces", senders) if senders else ():
            for data in msgpack.unpackb(payload):
                pieces[declaration.digest(data)] = declaration.decode(data)
        return pieces

    def _merge(
        self, own: Declaration, groups: Sequence[Group], pieces: Mapping[bytes, Declaration], private: int
    ) -> Settled:
        merger = Merger(groups, pieces, self._world)
        if self._whole:
            merger.check_whole()
        merged = merger.settled(own)
        self._judge(merged.declaration, private)
        for group in groups if self._world > 1 else ():
            for boxes, answer in merger.answers(group):
                key = _key(group.digest, _pack(declaration.pack_boxes(boxes)))
                self._attempt.announce(key, _pack(answer.plain()))
        return merged


def _check_ties(ties: Sequence[tuple[str, str]], found: AbstractSet[str]) -> None:
    for pair in ties:
        for name in pair:
            if name not in found:
                raise SaveError(
                    f"a tie names {name!r}, and no rank has such a tensor",
                    rule="P-DECLARE",
                    where=Where(tensor=name),
                    expected="ties={another name: the name of a tensor}, both in the state of some rank",
                    found=str(pair),
                )


def _listing(data: bytes) -> tuple[bytes, ...]:
    return tuple(data[i : i + 32] for i in range(0, len(data), 32))

"""Owns the question what of a checkpoint no rank of a job asked for; each rank alone sees its own part only."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence

from ckptspec.engine.agree.channel import Attempt


def everyone(attempt: Attempt, rank: int, world: int, question: str, answer: bool) -> bool:
    """Return whether all ranks answer a question with yes."""
    if world == 1:
        return answer
    attempt.post(question, b"1" if answer else b"0")
    if rank == 0:
        agreed = all(found == b"1" for found in attempt.collect(question))
        attempt.announce(f"all {question}", b"1" if agreed else b"0")
    return attempt.await_(f"all {question}") == b"1"


def unused_by_all(attempt: Attempt, rank: int, world: int, unused: Iterable[bool]) -> Sequence[bool]:
    """Return which of a list of things every rank left; `unused` are those this rank left, in the same order.

    Equal answers are sent once, however many ranks give them.
    """
    mine = bytes(unused)
    if world == 1:
        return [*map(bool, mine)]
    body = zlib.compress(mine)
    digest = hashlib.sha256(body).hexdigest()
    attempt.body(digest, body)
    attempt.post("unused", digest.encode())
    if rank == 0:
        digests = dict.fromkeys(d.decode() for d in attempt.collect("unused"))
        answers = (zlib.decompress(b) for b in attempt.bodies(digests).values())
        attempt.announce("left", zlib.compress(bytes(map(all, zip(*answers, strict=True)))))
    return [*map(bool, zlib.decompress(attempt.await_("left")))]

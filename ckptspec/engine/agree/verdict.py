"""Owns the way from an error on one rank to the same error on all; refuses to run anything that the store holds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ckptspec.engine.agree.agreement import COMMIT, Commit, Failure, Outcome, Stage, Verdict
from ckptspec.errors import CkptspecError, CommitUncertainError, LoadError, SaveError, StateError, Where

TEXT_LIMIT = 2000  # characters of one text: a message may hold anything, and every rank reads it
SHOWN_RANKS = 8

_TYPES: Mapping[str, type[SaveError]] = {"StateError": StateError}
_PLACES = ("file", "pointer", "tensor")
_TEXTS = ("rule", "expected", "found", "advice")
_SETTLE = "read the run folder: a manifest with this save's id there means it was committed"


class NotVisibleError(SaveError):
    """The commit was decided, and then refused for a reason that leaves nothing visible: a failure for certain."""


# ---- an error, as a failure ------------------------------------------------------------------------------------------


def failure_of(error: BaseException, rank: int) -> Failure:
    """Return what to tell the other ranks of an error raised on `rank`."""
    details: dict[str, Any] = {"type": type(error).__name__}
    if isinstance(error, CkptspecError):
        details |= {key: getattr(error, key) for key in _TEXTS} | {key: getattr(error.where, key) for key in _PLACES}
        details["range"] = error.where.range
        # Of another error the rank is a place, such as whose shard is damaged: the one that cannot go on is this one.
        blamed = error.rank if isinstance(error, (SaveError, LoadError)) else None
        return _failure(error.message, rank if blamed is None else blamed, details, isinstance(error, NotVisibleError))
    if isinstance(error, OSError) and error.errno is not None:
        details |= {"errno": error.errno, "file": _path(error.filename)}
        return _failure(error.strerror or str(error), rank, details)
    return _failure(f"{type(error).__name__}: {error}", rank, details)


def _failure(message: str, rank: int, details: Mapping[str, Any], certain: bool = False) -> Failure:
    kept = {key: _short(value) for key, value in details.items() if value is not None}
    return Failure(str(_short(message)), rank, "error", certain, kept)


def _short(value: Any) -> Any:
    return value[:TEXT_LIMIT] if isinstance(value, str) else value


def _path(name: Any) -> str | None:
    return name.decode(errors="replace") if isinstance(name, bytes) else None if name is None else str(name)


def silence(ranks: Sequence[int], what: str) -> Failure:
    """Return the failure of ranks that this one gave up on [P-SILENCE]; `what` says what it saw of the first."""
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    who = ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks[:SHOWN_RANKS])) + more
    advice = "look at that process and its node; `silence=` sets how long ranks wait for a sign of life"
    details = {"type": "SaveError", "rule": "P-SILENCE", "advice": advice}
    return Failure(f"{who} {what}", ranks[0], "silent", details=details)


def lost(message: str, host: int | None) -> Failure:
    """Return the failure of a store that cannot be reached; `host` is the rank that serves it, where that is known."""
    who = "the launcher or rank 0" if host is None else f"rank {host}"
    text = f"the store the ranks agree over is lost, and with it perhaps {who} that serves it: {_short(message)}"
    return Failure(text, host, "store", details={"type": "SaveError", "rule": "P-AGREE"})


# ---- a failure, as an error ------------------------------------------------------------------------------------------


def error_of(failure: Failure, stage: Stage, *, alone: bool = False) -> SaveError:
    """Return the error every rank raises: SaveError (or StateError) when failed, CommitUncertainError when uncertain.

    Its cause is the OSError of the failing rank, where there was one. `alone` leaves the rank out of what it says.
    """
    d = failure.details
    rank = None if alone else failure.rank
    where = Where(d.get("file"), d.get("pointer"), d.get("tensor"), rank, _range(d.get("range")))
    named = alone or failure.kind != "error" or re.match(rf"ranks? {failure.rank}\b", failure.message)
    message = failure.message if named else f"rank {failure.rank}: {failure.message}"
    kind: type[SaveError] = _TYPES.get(str(d.get("type")), SaveError)
    texts = {key: d.get(key) for key in _TEXTS}
    if stage is Stage.UNCERTAIN:
        kind = CommitUncertainError
        if d.get("type") != kind.__name__:
            message = f"nobody saw whether this save was committed: {message}"
        texts |= {"rule": "P-OUTCOME", "advice": _SETTLE}
    error = kind(message, rank=failure.rank, where=where, **texts)
    error.cause = str(d.get("type"))
    if isinstance(d.get("errno"), int):
        error.__cause__ = OSError(d["errno"], failure.message, d.get("file"))
    return error


def _range(value: Any) -> tuple[int, int] | None:
    return (int(value[0]), int(value[1])) if isinstance(value, (list, tuple)) and len(value) == 2 else None


# ---- both, as bytes in the store -------------------------------------------------------------------------------------


def encode_failure(failure: Failure) -> bytes:
    """Return a failure as ASCII JSON."""
    return json.dumps({**vars(failure), "details": dict(failure.details)}).encode("ascii")


def decode_failure(data: bytes) -> Failure:
    """Return the failure in `data`; bytes that are none become a failure that says so, since the attempt is lost."""
    try:
        found = json.loads(data)
        rank, step, details = found["rank"], found["step"], found["details"]
        if not (isinstance(rank, (int, type(None))) and isinstance(step, (int, type(None)))):
            raise TypeError("rank or step of another type")
        return Failure(str(found["message"]), rank, str(found["kind"]), found["certain"] is True, dict(details), step)
    except (ValueError, TypeError, KeyError) as e:
        return Failure(f"the store holds a verdict that cannot be read ({e}): {data[:80]!r}", kind="store")


def encode_verdict(verdict: Verdict) -> bytes:
    """Return a verdict as it is stored: `commit`, or a failure."""
    return b"commit" if isinstance(verdict, Commit) else encode_failure(verdict)


def decode_verdict(data: bytes) -> Verdict:
    """Return the verdict in `data`."""
    return COMMIT if data == b"commit" else decode_failure(data)


def encode_outcome(outcome: Outcome) -> bytes:
    """Return an outcome as it is stored: the stage's name, a line feed, the payload or the failure."""
    body = outcome.payload if outcome.failure is None else encode_failure(outcome.failure)
    return outcome.stage.value.encode() + b"\n" + body


def decode_outcome(data: bytes) -> Outcome:
    """Return the outcome in `data`; bytes that are none leave it uncertain."""
    word, _, body = data.partition(b"\n")
    if word == b"committed":
        return Outcome(Stage.COMMITTED, payload=body)
    return Outcome(Stage.FAILED if word == b"failed" else Stage.UNCERTAIN, decode_failure(body))

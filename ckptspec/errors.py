"""The errors ckptspec raises, split by blame: the file, the bytes, the request, or a rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptspec.format.report import Report


@dataclass(frozen=True)
class Where:
    """The place a fault was found: a file, a JSON pointer in it, a tensor, a rank, a byte range [start, stop)."""

    file: str | None = None
    pointer: str | None = None
    tensor: str | None = None
    rank: int | None = None
    range: tuple[int, int] | None = None

    def __str__(self) -> str:
        parts = [self.file] if self.file else []
        if self.pointer is not None:
            parts.append(f"at {self.pointer or '/'}")
        if self.rank is not None and not self.file:
            parts.append(f"rank {self.rank}")
        if self.tensor is not None:
            parts.append(f"tensor {self.tensor!r}")
        if self.range is not None:
            parts.append(f"bytes {self.range[0]}..{self.range[1]}")
        return ", ".join(parts)


class CkptspecError(Exception):
    """Base of every error ckptspec raises on purpose; carries the rule id, where, expected, found and advice."""

    def __init__(
        self,
        message: str,
        *,
        rule: str | None = None,
        where: Where | None = None,
        expected: str | None = None,
        found: str | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rule = rule
        self.where = where or Where()
        self.expected = expected
        self.found = found
        self.advice = advice

    def __str__(self) -> str:
        told = re.search(rf"(^|: )ranks? {self.where.rank}\b", self.message)  # one that the message begins with
        place = str(replace(self.where, rank=None) if told else self.where)
        text = f"{place}: {self.message}" if place else self.message
        if self.expected is not None:
            text += f", expected {self.expected}"
        if self.found is not None:
            text += f", found {self.found}"
        if self.rule is not None:
            text += f"  [{self.rule}]"
        if self.advice is not None:
            text += f"\nadvice: {self.advice}"
        return text

    def details(self) -> Mapping[str, Any]:
        """Return the keyword arguments that build the same error again, for re-raising as another type or place."""
        return {
            "rule": self.rule,
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "advice": self.advice,
        }


class FormatError(CkptspecError):
    """The file breaks the specification; `rule` names which."""


class ManifestError(FormatError):
    """manifest.json breaks the specification."""


class ShardError(FormatError):
    """A shard breaks the specification."""


class UnsupportedVersionError(FormatError):
    """The file is of a major version, or needs a feature, that this library does not know."""


class IntegrityError(CkptspecError):
    """Bytes differ from their digest, or are gone."""


class NotCommittedError(CkptspecError, FileNotFoundError):
    """The path holds no committed checkpoint."""


class PlanError(CkptspecError):
    """The request cannot be met with this checkpoint."""


class LoadError(CkptspecError):
    """A load failed on another rank, `rank`; the destination is undefined where the message says so.

    `cause` names the type of the error there.
    """

    def __init__(self, message: str, *, rank: int | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.rank = rank
        self.cause = ""


class SaveError(CkptspecError):
    """A save failed and left nothing visible; `rank` names who failed, `cause` the type of the error there."""

    def __init__(self, message: str, *, rank: int | None = None, **details: Any) -> None:
        super().__init__(message, **details)
        self.rank = rank
        self.cause = ""


class StateError(SaveError):
    """The state holds something that cannot be saved; `where.tensor` is the path of the key. Nothing was written."""


class CommitUncertainError(SaveError):
    """Nobody saw whether the save became durable; read the run folder to know."""


class ValidationFailed(CkptspecError):  # noqa: N818 (the contract's name)
    """A checkpoint was refused by the validator; carries the Report."""

    def __init__(self, report: Report) -> None:
        errors = [f for f in report.findings if f.severity == "error"]
        super().__init__("; ".join(str(f) for f in errors[:3]) or "validation failed")
        self.report = report

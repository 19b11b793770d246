"""Owns the validator's values: finding, advice, verdict, report, and their JSON form (report.schema.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptspec.errors import CkptspecError, Where

SEVERITIES = ("error", "warning", "info")
LEVELS = ("lexical", "schema", "manifest", "shards", "bytes")


@dataclass(frozen=True)
class Finding:
    """One thing the validator found; `code` is the rule id, `advice` names entries of the report's advice by id."""

    code: str
    severity: str
    message: str
    where: Where = field(default_factory=Where)
    expected: str | None = None
    found: str | None = None
    advice: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = str(self.where)
        text = f"{place}: {self.message}" if place else self.message
        if self.expected is not None:
            text += f", expected {self.expected}"
        if self.found is not None:
            text += f", found {self.found}"
        return f"{text}  [{self.code}]"

    def advised(self, *ids: str) -> Finding:
        """Return this finding with the advice ids added."""
        return replace(self, advice=tuple(dict.fromkeys((*self.advice, *ids))))

    @classmethod
    def of_error(cls, error: CkptspecError, *, file: str | None = None) -> Finding:
        """Return the error finding that says what `error` says; `file` serves where the error has none."""
        where = error.where if error.where.file or not file else replace(error.where, file=file)
        return cls(error.rule or "INTERNAL", "error", error.message, where, error.expected, error.found)

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        w = self.where
        return {
            "code": self.code,
            "severity": self.severity,
            "message": self.message,
            "where": {
                "file": w.file,
                "pointer": w.pointer,
                "tensor": w.tensor,
                "rank": w.rank,
                "range": list(w.range) if w.range else None,
            },
            "expected": self.expected,
            "found": self.found,
            "advice": list(self.advice),
        }


@dataclass(frozen=True)
class Cost:
    """What following an advice costs: bytes read, peak memory in bytes, steps and seconds lost (None: unknown)."""

    bytes_read: int = 0
    peak_memory: int = 0
    steps_lost: int = 0
    seconds_lost: int | None = None


@dataclass(frozen=True)
class Advice:
    """What to do next: `argv` is the command (nothing in it comes from a checkpoint), `loses` what it gives up."""

    id: str
    code: str
    text: str
    params: Mapping[str, Any] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    loses: str = "nothing"
    cost: Cost = field(default_factory=Cost)

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "id": self.id,
            "code": self.code,
            "text": self.text,
            "params": dict(self.params),
            "argv": list(self.argv),
            "loses": self.loses,
            "cost": dict(vars(self.cost)),
        }


@dataclass(frozen=True)
class Range:
    """Elements of a tensor: the box of these offsets and sizes, or of its elements, row-major, those from a to b."""

    tensor: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    elements: tuple[int, int] | None = None

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Range:
        """Return the range of a schema-valid JSON form."""
        elements = document["elements"]
        run = None if elements is None else (elements[0], elements[1])
        return cls(document["tensor"], tuple(document["offsets"]), tuple(document["sizes"]), run)

    def document(self) -> dict[str, Any]:
        """Return the JSON form."""
        elements = None if self.elements is None else list(self.elements)
        return {"tensor": self.tensor, "offsets": list(self.offsets), "sizes": list(self.sizes), "elements": elements}


@dataclass(frozen=True)
class Verdict:
    """What happens to one part of the state: lossless, approximate, lost or impossible, and why.

    On a target `bytes_read` is the least and the most payload that a rank of it reads for the part, and `peak_memory`
    the most bytes that the part takes in one rank while it is loaded. `gone` says which elements are lost.
    """

    part: str
    verdict: str
    reason: str
    bytes_read: tuple[int, int] | None = None
    peak_memory: int | None = None
    gone: tuple[Range, ...] = ()

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Verdict:
        """Return the verdict of a schema-valid JSON form."""
        read, gone = document.get("bytes_read"), document.get("gone", ())
        return cls(
            document["part"],
            document["verdict"],
            document["reason"],
            None if read is None else (read[0], read[1]),
            document.get("peak_memory"),
            tuple(Range.from_document(r) for r in gone),
        )

    def document(self) -> dict[str, Any]:
        """Return the JSON form; what is not known is left out."""
        made: dict[str, Any] = {"part": self.part, "verdict": self.verdict, "reason": self.reason}
        if self.bytes_read is not None:
            made["bytes_read"] = list(self.bytes_read)
        if self.peak_memory is not None:
            made["peak_memory"] = self.peak_memory
        if self.gone:
            made["gone"] = [r.document() for r in self.gone]
        return made


@dataclass(frozen=True)
class Names:
    """What a map of names did, {wanted: stored}, and the pairs that one could have beside."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    proposed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What the validator says of one checkpoint; `level` is the deepest level that ran.

    `names` is there where names were compared.
    """

    path: str
    level: str
    findings: tuple[Finding, ...] = ()
    advice: tuple[Advice, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    decision: str = "load"
    save_id: str | None = None
    step: int | None = None
    manifest_digest: str | None = None
    bytes_total: int = 0
    bytes_hashed: int = 0
    names: Names | None = None

    @property
    def ok(self) -> bool:
        """True when no finding is an error."""
        return not any(f.severity == "error" for f in self.findings)

    @property
    def exit_code(self) -> int:
        """0 when clean (warnings allowed), 1 with an error finding, 4 for a run folder with no checkpoint at all."""
        if any(f.code == "C-EMPTY" for f in self.findings):
            return 4
        return 0 if self.ok else 1

    @property
    def outcome(self) -> str:
        """`error`, `warning` or `ok`: the gravest finding."""
        if not self.ok:
            return "error"
        return "warning" if any(f.severity == "warning" for f in self.findings) else "ok"

    def document(self) -> dict[str, Any]:
        """Return the JSON form, which obeys report.schema.json."""
        document: dict[str, Any] = {
            "format": "ckptspec-report",
            "schema_version": "1.0",
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "path": self.path,
            "save_id": self.save_id,
            "step": self.step,
            "manifest_digest": self.manifest_digest,
            "level": self.level,
            "coverage": {"bytes_total": self.bytes_total, "bytes_hashed": self.bytes_hashed},
            "decision": self.decision,
            "findings": [f.document() for f in self.findings],
            "advice": [a.document() for a in self.advice],
            "verdicts": [v.document() for v in self.verdicts],
        }
        if self.names is not None:
            document["names"] = {key: dict(pairs) for key, pairs in vars(self.names).items()}
        return document

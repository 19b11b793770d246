"""Owns the text of a report: findings, advice, verdicts, one line that sums up; and its JSON form for any path."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from ckptspec.cli.output import plain_path
from ckptspec.format.report import Advice, Finding, Report


def report_document(report: Report) -> dict[str, Any]:
    """Return the report's JSON form; a path that is no UTF-8 is written out."""
    document = report.document()
    document["path"] = plain_path(report.path)
    for advice in document["advice"]:
        advice["text"] = plain_path(advice["text"])
        advice["argv"] = [plain_path(word) for word in advice["argv"]]
    for finding in document["findings"]:
        if finding["where"]["file"] is not None:
            finding["where"]["file"] = plain_path(finding["where"]["file"])
    return document


def report_lines(report: Report) -> Iterator[str]:
    """Yield the lines of a report for people: what was found, what to do, what becomes of each part, the sum."""
    for finding in report.findings:
        yield finding_line(finding)
    for advice in report.advice:
        yield from advice_lines(advice)
    for verdict in report.verdicts:
        yield f"{verdict.verdict}: {verdict.part}: {verdict.reason}"
    yield summary(report)


def finding_line(finding: Finding) -> str:
    """Return `where: what, expected X, found Y  [RULE-ID]`, and the severity where it is no error."""
    return str(finding) if finding.severity == "error" else f"{finding} ({finding.severity})"


def advice_lines(advice: Advice) -> Iterator[str]:
    """Yield the advice, what it costs, and the command as it can be typed."""
    cost = "" if advice.loses == "nothing" else f" (loses {advice.loses})"
    yield f"advice: {advice.text}{cost}"
    if advice.argv:
        yield f"advice: run  {shlex.join(advice.argv)}"


def summary(report: Report) -> str:
    """Return the last line: which checkpoint, how deep it was looked at, and how it ended."""
    errors = sum(f.severity == "error" for f in report.findings)
    warnings = sum(f.severity == "warning" for f in report.findings)
    known = "" if report.step is None else f" step {report.step}, save {report.save_id},"
    looked = f"{report.bytes_hashed:,} of {report.bytes_total:,} bytes verified"
    if report.ok:
        end = "ok" if not warnings else f"ok with {count(warnings, 'warning')}"
        return f"{report.path}:{known} {looked}, level {report.level}: {end}"
    also = f" and {count(warnings, 'warning')}" if warnings else ""
    return f"{report.path}:{known} {count(errors, 'error')}{also} at level {report.level}; decision: {report.decision}"


def count(n: int, word: str) -> str:
    """Return a number and its word, in the plural where it must be."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"

"""Owns the text of a report: findings, advice, verdicts, one line that sums up; and its JSON form for any path."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from ckptspec.cli.output import plain_path
from ckptspec.format.report import Advice, Finding, Names, Report, Verdict

SHOWN = 20  # renamed names that are written out; JSON has them all


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
        yield verdict_line(verdict)
    if report.names is not None:
        yield from _renamed(report.names)
    yield summary(report)


def _renamed(names: Names) -> Iterator[str]:
    """Yield which names an explicit map led to others."""
    for i, (wanted, stored) in enumerate(names.renamed.items()):
        if i == SHOWN:
            yield f"renamed: and {len(names.renamed) - SHOWN} more by the map"
            return
        yield f"renamed: {wanted!r} is {stored!r} in the checkpoint, by the map"


def verdict_line(verdict: Verdict) -> str:
    """Return what becomes of a part, why, and what each rank reads for it."""
    line = f"{verdict.verdict}: {verdict.part}: {verdict.reason}"
    if verdict.bytes_read is not None:
        least, most = map(size, verdict.bytes_read)
        line += f"; each rank reads {least}" if least == most else f"; a rank reads {least} to {most}"
    return line if verdict.peak_memory is None else f"{line}, peak memory {size(verdict.peak_memory)}"


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
        end += f"; decision: {report.decision}" if report.decision != "load" else ""
        return f"{report.path}:{known} {looked}, level {report.level}: {end}"
    also = f" and {count(warnings, 'warning')}" if warnings else ""
    return f"{report.path}:{known} {count(errors, 'error')}{also} at level {report.level}; decision: {report.decision}"


def size(nbytes: int) -> str:
    """Return bytes as people read them, exact below 10 KB."""
    if nbytes < 10_000:
        return f"{nbytes} B"
    power = min(5, (len(str(nbytes)) - 1) // 3)
    return f"{nbytes / 1000**power:.4g} {('kB', 'MB', 'GB', 'TB', 'PB')[power - 1]}"


def count(n: int, word: str) -> str:
    """Return a number and its word, in the plural where it must be."""
    return f"{n} {word}" if n == 1 else f"{n} {word}s"

"""Owns how a rule's code becomes a finding and how the rules of one subject are run; knows no rule itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from ckptspec.errors import Where
from ckptspec.format import schemas
from ckptspec.format.report import Finding

Subject = TypeVar("Subject")
LIMIT = 100  # findings of one rule that are shown; one more says how many there are


def fault(code: str, message: str, where: Where, expected: Any = None, found: Any = None) -> Finding:
    """Return the finding of rule `code`, its severity from rules.json; expected and found are shown as text."""
    return Finding(code, schemas.rules()[code].severity, message, where, _text(expected), _text(found))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 200 else text[:197] + "..."


def capped(findings: Iterable[Finding], limit: int = LIMIT) -> Iterator[Finding]:
    """Yield at most `limit` findings of each code, then one more that counts the rest: a report stays readable."""
    seen: dict[str, int] = {}
    last: dict[str, Finding] = {}
    for finding in findings:
        seen[finding.code] = seen.get(finding.code, 0) + 1
        if seen[finding.code] <= limit:
            yield finding
        else:
            last[finding.code] = finding
    for code, finding in last.items():
        yield Finding(code, finding.severity, f"and {seen[code] - limit} more like this", Where(finding.where.file))


class Rules(Generic[Subject]):
    """The rules of one subject: each a small generator of findings under its rule's id, in order of registration."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rules: dict[str, Callable[[Subject], Iterator[Finding]]] = {}

    def __call__(
        self, code: str
    ) -> Callable[[Callable[[Subject], Iterator[Finding]]], Callable[[Subject], Iterator[Finding]]]:
        """Register the decorated generator as the one that finds breaches of rule `code`."""

        def register(function: Callable[[Subject], Iterator[Finding]]) -> Callable[[Subject], Iterator[Finding]]:
            if code in self._rules:
                raise ValueError(f"two generators of {self.name} for rule {code}")
            self._rules[code] = function
            return function

        return register

    @property
    def codes(self) -> tuple[str, ...]:
        """The ids of the rules, in the order they run."""
        return tuple(self._rules)

    def run(self, subject: Subject, limit: int = LIMIT) -> Iterator[Finding]:
        """Yield what every rule finds, capped rule by rule."""
        for function in self._rules.values():
            yield from capped(function(subject), limit)

"""Owns the reading of the documents people hand in: target, plan, signature; refuses JSON that readers differ on."""

from __future__ import annotations

from typing import Any

from ckptspec.errors import PlanError, Where
from ckptspec.format import lexical


def document(data: bytes, what: str, *, rule: str, limit: int, file: str | None = None) -> dict[str, Any]:
    """Return the JSON object in a document's bytes, held to the lexical rules of a manifest but for its end.

    Raises PlanError [`rule`] where it has more than `limit` bytes, or a number or name that readers may differ on.
    """
    if len(data) > limit:
        found = f"longer than {limit} bytes"
        raise PlanError(f"the {what} is not JSON", rule=rule, where=Where(file), found=found)
    read, findings = lexical.scan(data, sealed=False, file=file or what)
    if read is None:
        first = findings[0]
        message = f"the {what} is not JSON that all read alike: {first.message}"
        raise PlanError(message, rule=rule, where=first.where, expected=first.expected, found=first.found)
    return read

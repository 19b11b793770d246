"""Owns the standard's schemas and rules, and asks a schema about a document; has no rule of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import islice
from types import MappingProxyType
from typing import Any

from ckptspec.errors import FormatError, Where
from ckptspec.format.refusal import UNKNOWN_FIELD, Place, refusals
from ckptspec.format.report import Finding

LIMIT = 50  # findings of one document that are shown; one more says how many there are
_LARGE = (
    20_000  # values; the validator library lists all faults of a document at once, so a larger one is asked in parts
)
_SUFFIX = ".schema.json"
_FILES = {"manifest": "manifest.json"}  # the only document whose file name the format fixes
_FIELD = "M-FIELD"


@dataclass(frozen=True)
class Rule:
    """One MUST of SPEC.md: whom it binds, how grave a breach is, which level checks it, what to do, its test."""

    id: str
    subject: str
    severity: str
    level: str | None
    title: str
    advice: str
    test: str | None = None


@cache
def _read(name: str) -> str:
    return (resources.files("ckptspec_schema") / "v1" / name).read_text(encoding="utf-8")


@cache
def names() -> tuple[str, ...]:
    """Return the names of all schemas, sorted: those that `text`, `load` and `check` take."""
    entries = (resources.files("ckptspec_schema") / "v1").iterdir()
    return tuple(sorted(e.name[: -len(_SUFFIX)] for e in entries if e.name.endswith(_SUFFIX)))


def text(name: str) -> str:
    """Return the schema called `name` as it is written; raises FormatError for a name outside `names()`."""
    if name not in names():
        raise FormatError("no such schema", expected="one of " + ", ".join(names()), found=repr(name))
    return _read(name + _SUFFIX)


def load(name: str) -> dict[str, Any]:
    """Return the schema called `name` as a new document; raises FormatError for a name outside `names()`."""
    schema: dict[str, Any] = json.loads(text(name))
    return schema


@cache
def rules() -> Mapping[str, Rule]:
    """Return every rule of the standard by its id, in the order of rules.json."""
    return MappingProxyType({key: Rule(key, **fields) for key, fields in json.loads(_read("rules.json")).items()})


def check(name: str, document: Any, *, minor: int = 0) -> Iterator[Finding]:
    """Yield what the schema called `name` finds in a document; the code is the rule id of the part that failed.

    `minor` is how many minor versions the document is ahead of ours: unknown fields are then warnings [Q-MINOR].
    At most LIMIT findings are yielded, then one that counts the rest; of a large document one a top-level field.
    Never raises for a document; raises FormatError for a name outside `names()`.
    """
    file = _FILES.get(name)
    findings = _all(name, document, minor)
    try:
        yield from islice(findings, LIMIT)
        hidden = list(findings)
    except (ValueError, RecursionError) as e:  # what the lexical rules do not let through
        code = "L-UTF8" if isinstance(e, UnicodeError) else "L-DEPTH"
        yield Finding(code, "error", "not a document that JSON can hold", Where(file), None, type(e).__name__)
        return
    if hidden:
        graver = min(hidden, key=lambda f: f.severity != "error")
        yield replace(graver, message=f"and {len(hidden)} more, this one of them: {graver.message}")


def _all(name: str, document: Any, minor: int) -> Iterator[Finding]:
    if minor <= 0:
        yield from _findings(name, document, strict=True)
        return
    # Errors are sought without the closed field lists: a warning may never stand in for an error of the same part.
    yield from _findings(name, document, strict=False)
    for finding in _findings(name, document, strict=True):
        if finding.code == _FIELD and finding.message == UNKNOWN_FIELD:
            yield replace(finding, severity="warning")


def _findings(name: str, document: Any, strict: bool) -> Iterator[Finding]:
    schema = _schema(name, strict)
    if not _validator(name, strict, None).is_valid(document):
        for part, place, error in _errors(name, strict, document):
            base = {**schema["properties"][part], "$defs": schema.get("$defs", {})} if part else schema
            yield from refusals(base, document, place, error, _FILES.get(name))


@cache
def _schema(name: str, strict: bool) -> dict[str, Any]:
    schema = load(name)
    opened: dict[str, Any] = schema if strict else _opened(schema)
    return opened


def _opened(schema: Any) -> Any:
    """Return the schema with every closed list of fields [M-FIELD] opened."""
    if isinstance(schema, list):
        return [_opened(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    closed = schema.get("$comment") == _FIELD and schema.get("additionalProperties") is False
    return {k: _opened(v) for k, v in schema.items() if not (closed and k == "additionalProperties")}


@cache
def _validator(name: str, strict: bool, part: str | None) -> Any:
    """Return the compiled schema: all of it, that of one top-level field, or ("") that of the list of fields alone."""
    import jsonschema_rs  # compiled code: only who checks a document pays for loading it

    schema = _schema(name, strict)
    if part:
        schema = {**schema["properties"][part], "$defs": schema.get("$defs", {})}
    elif part == "":
        schema = {**schema, "properties": dict.fromkeys(schema["properties"], True)}
    return jsonschema_rs.Draft202012Validator(schema)


def _errors(name: str, strict: bool, document: Any) -> Iterator[tuple[str, Place, Any]]:
    """Yield (top-level field or "", steps to it, error of the validator library) for an invalid document."""
    if not isinstance(document, dict) or not _large(document):
        yield from (("", (), error) for error in _validator(name, strict, None).iter_errors(document))
        return
    yield from (("", (), error) for error in _validator(name, strict, "").iter_errors(dict.fromkeys(document)))
    for part in filter(document.__contains__, _schema(name, strict)["properties"]):
        error = _first(_validator(name, strict, part).validate, document[part])
        if error is not None:
            yield part, (part,), error


def _first(validate: Callable[[Any], None], document: Any) -> Any:
    import jsonschema_rs

    try:
        validate(document)
    except jsonschema_rs.ValidationError as error:
        return error
    return None


def _large(document: Any) -> bool:
    """Tell whether a document has more than _LARGE values; never recurses."""
    count, stack = 0, [document]
    while stack:
        value = stack.pop()
        if isinstance(value, (dict, list)):
            count += len(value)
            if count > _LARGE:
                return True
            stack.extend(value.values() if isinstance(value, dict) else value)
    return False

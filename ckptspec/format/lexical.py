"""Owns the rules on a document's bytes before any schema; refuses what two JSON parsers could read differently."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ckptspec.errors import Where
from ckptspec.format.pause import collector_paused
from ckptspec.format.report import Finding

SIZE_LIMIT = 256 << 20
DEPTH_LIMIT = 32
INT_LIMIT = (1 << 53) - 1
TAIL_LEAD = b'"manifest_digest": "sha256:'
TAIL_END = b'"\n}\n'
DIGITS = 64
TAIL_SIZE = len(TAIL_LEAD) + DIGITS + len(TAIL_END)

_SHOWN = 3  # findings per rule: enough to see a pattern, never a flood
_LOCATE_LIMIT = 8 << 20  # finding the place of a fault is slow Python: beyond this size it is not looked for
_PIECE = 1 << 20
_BOM = b"\xef\xbb\xbf"
_TAIL = re.compile(re.escape(TAIL_LEAD) + rb"[0-9a-f]{64}" + re.escape(TAIL_END) + rb"\Z")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}:,]|[^\s"\[\]{}:,]+', re.DOTALL)
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))


def _finding(code: str, message: str, file: str, extent: tuple[int, int] | None, expected: str, found: str) -> Finding:
    return Finding(code, "error", message, Where(file=file, range=extent), expected, found)


def seal(body: bytes) -> bytes:
    """Return `body` with the manifest_digest line and the closing brace after it [L-TAIL] [L-DIGEST].

    `body` is the document up to where its last member begins: it ends with a comma and white space, or with `{`.
    """
    hashed = body + TAIL_LEAD
    return hashed + hashlib.sha256(hashed).hexdigest().encode() + TAIL_END


def unseal(data: bytes) -> bytes:
    """Return the body that `seal` was given; raises ValueError when `data` has no such end."""
    if not _TAIL.match(data, max(0, len(data) - TAIL_SIZE)):
        raise ValueError("not a sealed document")
    return data[:-TAIL_SIZE]


def _seal_findings(data: bytes, file: str) -> Iterator[Finding]:
    """Yield what is wrong with the end of `data` [L-TAIL], or with its own digest [L-DIGEST]."""
    start = max(0, len(data) - TAIL_SIZE)
    if not _TAIL.match(data, start):
        message = "the end is not that of a complete manifest: cut short, or changed after it was written"
        yield _finding("L-TAIL", message, file, (start, len(data)), _tail_text(b"<64 hex digits>"), _text(data[start:]))
        return
    covered = len(data) - DIGITS - len(TAIL_END)
    found = data[covered : covered + DIGITS].decode()
    expected = hashlib.sha256(memoryview(data)[:covered]).hexdigest()
    if found != expected:
        message = "the bytes are not those that were sealed: damaged, or changed after they were written"
        yield _finding("L-DIGEST", message, file, (0, covered), f"sha256:{expected}", f"sha256:{found}")


def _tail_text(digits: bytes) -> str:
    return _text(TAIL_LEAD + digits + TAIL_END)


def _text(data: bytes, limit: int = 120) -> str:
    return ascii(data[-limit:])[1:]


def _utf8_findings(data: bytes, file: str) -> Iterator[Finding]:
    """Yield the first place that is not strict UTF-8 text of whole characters [L-UTF8]."""
    if data.startswith(_BOM):
        yield _finding("L-UTF8", "a byte order mark", file, (0, 3), "UTF-8 without BOM", "EF BB BF")
        return
    try:
        data.decode()
    except UnicodeDecodeError as e:
        found = data[e.start : e.end].hex(" ").upper()
        yield _finding("L-UTF8", f"not UTF-8 ({e.reason})", file, (e.start, e.end), "strict UTF-8", found)
        return
    if b"\\u" not in data:
        return
    # Blanking keeps offsets: first escaped backslashes, so that an escape is an escape, then whole surrogate pairs.
    blank = _PAIR.sub(b" " * 12, data.replace(b"\\\\", b"  "))
    if half := _HALF.search(blank):
        message = "an escape makes half a surrogate pair, which no UTF-8 can hold"
        yield _finding("L-UTF8", message, file, half.span(), "whole characters", half[0].decode())


def _outside_strings(marks: bytes) -> bytes:
    """Return what has an even number of quotes before it; a piece at a time, so memory stays bounded."""
    kept, inside = [], 0
    for start in range(0, len(marks), _PIECE):
        parts = marks[start : start + _PIECE].split(b'"')
        kept.append(b"".join(parts[inside::2]))
        inside ^= (len(parts) - 1) & 1
    return b"".join(kept)


def too_deep(data: bytes, limit: int = DEPTH_LIMIT) -> bool:
    """Return whether brackets outside strings nest more than `limit` deep [L-DEPTH], in time linear in len(data).

    Exact for JSON. For other bytes False still means that no parser goes more than 2 * `limit` deep before it stops.
    """
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Whether a bracket is inside a string depends on the number of quotes before it being odd, so dropping two
    # neighbouring quotes changes nothing; what is left after that are the strings that hold brackets.
    marks = data.translate(_BRACKETS, _NOT_STRUCTURE).replace(b'""', b"")
    if b'"' in marks:
        marks = _outside_strings(marks)
    opened = b"[" * (limit + 1)
    for _ in range(limit):  # each round takes off the innermost level
        if opened in marks:
            return True
        shorter = marks.replace(b"[]", b"")
        if len(shorter) == len(marks):
            return False
        marks = shorter
    return b"[]" in marks or opened in marks


class _Hooks:
    """What the JSON parser calls: it builds the document and records the faults that parsing alone would let pass."""

    def __init__(self) -> None:
        self.numbers: list[str] = []
        self.names: list[str] = []

    def integer(self, text: str) -> int:
        """Return the integer, or 0 for one that is out of range or a negative zero [L-NUMBER]."""
        if len(text) <= 17 and -INT_LIMIT <= (value := int(text)) <= INT_LIMIT and text != "-0":
            return value
        return int(self.fraction(text))

    def fraction(self, text: str) -> float:
        """Record a number that is not allowed [L-NUMBER]."""
        self.numbers.append(text)
        return 0.0

    def object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return the object, recording names given twice [L-DUPLICATE]."""
        out = dict(pairs)
        if len(out) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            self.names += [name for name, count in counts.items() if count > 1]
        return out

    def parse(self, text: str) -> Any:
        """Return the JSON value in `text`; raises ValueError for anything RFC 8259 does not allow [L-JSON]."""
        return json.loads(
            text,
            object_pairs_hook=self.object,
            parse_int=self.integer,
            parse_float=self.fraction,
            parse_constant=_no_constant,
        )


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _json_finding(error: ValueError, data: bytes, text: str, file: str) -> Finding:
    """Return the finding for a parser's refusal, with the byte offset where the parser says one."""
    extent = None
    if isinstance(error, json.JSONDecodeError):
        start = len(text[: error.pos].encode())
        extent = (start, min(start + 1, len(data)))
    message = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    start = extent[0] if extent else 0
    found = _text(data[start : start + 40])
    return _finding("L-JSON", f"not JSON: {message}", file, extent, "JSON of RFC 8259", found)


def _places(data: bytes) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield (rule id, text, byte range) of every refused number and repeated name in valid JSON."""
    stack: list[set[str] | None] = []
    for token in _TOKEN.finditer(data):
        first = token[0][:1]
        if first in b"[{":
            stack.append(set() if first == b"{" else None)
        elif first in b"]}":
            stack.pop()
        elif first == b'"' and stack and stack[-1] is not None and _is_name(data, token.end()):
            name = json.loads(token[0])
            if name in stack[-1]:
                yield "L-DUPLICATE", name, token.span()
            stack[-1].add(name)
        elif first in b"-0123456789" and not _allowed(token[0]):
            yield "L-NUMBER", token[0].decode(), token.span()


def _is_name(data: bytes, end: int) -> bool:
    return data[end : end + 64].lstrip(b" \t\r\n")[:1] == b":"


def _allowed(number: bytes) -> bool:
    return number.lstrip(b"-").isdigit() and number != b"-0" and len(number) <= 17 and abs(int(number)) <= INT_LIMIT


def _content_findings(hooks: _Hooks, data: bytes, file: str) -> Iterator[Finding]:
    """Yield the first few refused numbers [L-NUMBER] and repeated names [L-DUPLICATE], with their places."""
    places = list(_places(data)) if len(data) <= _LOCATE_LIMIT else []
    number, name = "a number that JSON parsers may read differently", "a name given twice in one object"
    for code, message, expected, texts in (
        ("L-NUMBER", number, "an integer of at most 2^53-1 in magnitude, not -0", hooks.numbers),
        ("L-DUPLICATE", name, "each name once", hooks.names),
    ):
        known: list[tuple[str, tuple[int, int] | None]] = [(t, extent) for rule, t, extent in places if rule == code]
        for text, extent in islice(known or [(text, None) for text in texts], _SHOWN):
            yield _finding(code, message, file, extent, expected, ascii(text)[:80])


def scan(
    data: bytes, *, sealed: bool = True, file: str = "manifest.json"
) -> tuple[dict[str, Any] | None, tuple[Finding, ...]]:
    """Return the document in `data`, None unless every lexical rule holds, and the findings; bad bytes raise nothing.

    The rules are gates in this order: L-SIZE, L-TAIL, L-DIGEST, L-UTF8, L-DEPTH, L-JSON, then L-NUMBER and L-DUPLICATE
    together. The end and the digest come first because they tell damage from a writer's mistake. sealed=False skips
    those two: other documents than the manifest have no seal.
    """
    if not 0 < len(data) <= SIZE_LIMIT:
        expected = f"1 to {SIZE_LIMIT} bytes"
        return None, (_finding("L-SIZE", "size out of range", file, None, expected, f"{len(data)} bytes"),)
    findings = [*_seal_findings(data, file)] if sealed else []
    findings = findings or [*_utf8_findings(data, file)]
    if not findings and too_deep(data):
        expected = f"at most {DEPTH_LIMIT} levels"
        findings = [_finding("L-DEPTH", "nested too deep", file, None, expected, f"more than {DEPTH_LIMIT}")]
    if findings:
        return None, tuple(findings)
    with collector_paused():
        return _parse(data, file)


def _parse(data: bytes, file: str) -> tuple[dict[str, Any] | None, tuple[Finding, ...]]:
    hooks, text = _Hooks(), data.decode()
    try:
        document = hooks.parse(text)
    except ValueError as e:
        return None, (_json_finding(e, data, text, file),)
    if not isinstance(document, dict):
        found = type(document).__name__
        return None, (_finding("L-JSON", "not one JSON object", file, None, "an object", found),)
    if hooks.numbers or hooks.names:
        return None, tuple(_content_findings(hooks, data, file))
    return document, ()

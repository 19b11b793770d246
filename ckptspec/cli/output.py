"""Owns what reaches the terminal: escaped text on the right stream, whatever its encoding and whoever reads it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from typing import Any, TextIO

from ckptspec.errors import CkptspecError, Where

MANIFEST = "manifest.json"

# Controls, and the marks that reorder or hide text: a name from a checkpoint must not speak to the terminal.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff\ufff9-\ufffb]"
)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a path that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def clean(text: str) -> str:
    """Return one line of text with control characters, reordering marks and undecodable bytes written out."""
    return _UNSAFE.sub(_escaped, text)


def say(*lines: str) -> None:
    """Write lines of results, each cleaned, to standard output."""
    _write(sys.stdout, "".join(clean(line) + "\n" for line in lines))


def tell(*lines: str) -> None:
    """Write lines of progress, warnings and faults, each cleaned, to standard error."""
    _write(sys.stderr, "".join(clean(line) + "\n" for line in lines))


def say_raw(text: str) -> None:
    """Write text that is ours, or JSON, to standard output as it is."""
    _write(sys.stdout, text)


def say_path(path: str) -> None:
    """Write a path, byte for byte, and a line feed to standard output: something else will use it."""
    _write_bytes(sys.stdout, os.fsencode(path) + b"\n")


def say_json(document: Any) -> None:
    """Write a document as JSON, ASCII only, so that no character of it can act on a terminal."""
    say_raw(json.dumps(document, indent=1) + "\n")


def write_json(file: str, document: Any) -> None:
    """Write a document to a file, whole or not at all; refuse the files that make a checkpoint.

    Raises CkptspecError for such a file, OSError.
    """
    name = os.path.basename(file)
    if name == MANIFEST or name.endswith(".shard"):
        advice = "write it beside the checkpoint"
        raise CkptspecError("a file of this name belongs to a checkpoint", where=Where(file), advice=advice)
    beside = f"{file}.{os.getpid()}.new"
    try:
        with open(beside, "w", encoding="utf-8") as f:
            f.write(json.dumps(document, indent=1) + "\n")
        os.replace(beside, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)
        raise


def plain_path(path: str) -> str:
    """Return a path as text that JSON can hold: bytes that are no UTF-8 are written out."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        _write_bytes(stream, text.encode(stream.encoding or "utf-8", "backslashreplace"))


def _write_bytes(stream: TextIO | None, data: bytes) -> None:
    if stream is None:
        return  # the caller closed it (`>&-`): nobody wants to know, and the exit code stays what it is
    try:
        stream.flush()
        stream.buffer.write(data)
        stream.buffer.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`). What is still to come goes nowhere, and the exit code stays what it is.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)

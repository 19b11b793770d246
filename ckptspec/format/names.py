"""Owns the names of tensors, objects, shard files and run folders; refuses text that is not one of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

NAME_LIMIT = 4096
STEP_LIMIT = (1 << 53) - 1

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_BAD_ESCAPE = re.compile("~(?![01])")
_SHARD_PATH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")
_STEP = re.compile(r"step-([0-9]{8,16})\Z")
_SPECIAL = re.compile(r"\.(?:(tmp|abandoned)-([0-9]{8,16})-|(trash|superseded)-)([0-9a-f]{32})\Z")


def escape(token: str) -> str:
    """Return one token of a name: `~` is written `~0` and `/` is written `~1` [N-NAME]."""
    return token.replace("~", "~0").replace("/", "~1")


def join(tokens: Iterable[str]) -> str:
    """Return the name of a path: its tokens as a JSON pointer (RFC 6901) without the leading slash.

    Any text is joined, valid as a name or not: `name_fault` judges the result.
    """
    return "/".join([escape(token) for token in tokens])


def split(name: str) -> tuple[str, ...]:
    """Return the tokens of a valid name: the inverse of `join`, which takes one token or more."""
    if "~" not in name:
        return tuple(name.split("/"))
    return tuple(token.replace("~1", "/").replace("~0", "~") for token in name.split("/"))


def name_fault(name: str) -> str | None:
    """Return why `name` cannot name a tensor or an object [N-NAME], or None when it can."""
    if not name:
        return "a name has at least one byte"
    try:
        size = len(name) if name.isascii() else len(name.encode())
    except UnicodeEncodeError:
        return "a name holds no lone surrogate"
    if size > NAME_LIMIT:
        return f"a name has at most {NAME_LIMIT} UTF-8 bytes, this one has {size}"
    if not name.isprintable() and (control := _CONTROL.search(name)):
        return f"a name holds no control character, this one holds U+{ord(control[0]):04X}"
    if "~" in name and _BAD_ESCAPE.search(name):
        return "in a name `~` is followed by 0 or 1"
    return None


def shard_path_fault(path: str) -> str | None:
    """Return why `path` cannot be the file name of a shard [W-PATH], or None when it can."""
    if not _SHARD_PATH.match(path):
        return "a shard path is 1 to 255 letters, digits, `.`, `_`, `-`, the first of them a letter or digit"
    if not path.endswith(".shard"):
        return "a shard path ends in .shard"
    return None


def shard_path(rank: int) -> str:
    """Return the file name this library gives the shard of `rank`."""
    return f"rank-{rank:05d}.shard"


def step_folder(step: int) -> str:
    """Return the folder name of a committed step: at least 8 digits, so names sort as steps do up to 10^8."""
    return f"step-{step:08d}"


def _step(digits: str) -> int | None:
    """Return the step that `digits` write in the one way `%08d` would, else None."""
    step = int(digits)
    return step if f"{step:08d}" == digits and step <= STEP_LIMIT else None


def parse_step_folder(name: str) -> int | None:
    """Return the step a folder name stands for, or None when it is not exactly what `step_folder` gives."""
    match = _STEP.match(name)
    return _step(match[1]) if match else None


@dataclass(frozen=True)
class SpecialFolder:
    """A folder of a run that is no checkpoint: `kind` is tmp, trash, superseded or abandoned; `id` is 32 hex digits."""

    kind: str
    id: str
    step: int | None = None


def staging_folder(step: int, save_id: str) -> str:
    """Return the folder name a save is written under until its commit."""
    return f".tmp-{step:08d}-{save_id}"


def abandoned_folder(step: int, save_id: str) -> str:
    """Return the folder name of a checkpoint that a roll-back took out of the run."""
    return f".abandoned-{step:08d}-{save_id}"


def superseded_folder(save_id: str) -> str:
    """Return the folder name of a checkpoint that another save of the same step replaced."""
    return f".superseded-{save_id}"


def trash_folder(save_id: str) -> str:
    """Return the folder name of what is about to be deleted."""
    return f".trash-{save_id}"


def parse_special(name: str) -> SpecialFolder | None:
    """Return what a special folder's name says, or None when no function above gives that name."""
    match = _SPECIAL.match(name)
    if match is None:
        return None
    if match[3]:
        return SpecialFolder(match[3], match[4])
    step = _step(match[2])
    return None if step is None else SpecialFolder(match[1], match[4], step)

"""Writes the checkpoints that tools/fixtures/build.py makes in memory into folders, for tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from fixtures import build as builder

Files = dict[str, bytes]


def files(world: int = 2, **changes: Any) -> Files:
    """Return the sample checkpoint in memory; `changes` are fields of its manifest."""
    return builder.build(builder.sample(world, **changes))


def write(folder: Path, contents: Mapping[str, bytes]) -> Path:
    """Write files into a new folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


def checkpoint(folder: Path, world: int = 2, **changes: Any) -> Path:
    """Write the sample checkpoint into `folder` and return it."""
    return write(folder, files(world, **changes))

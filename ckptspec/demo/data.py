"""Owns the demo's text: source files of the Python standard library, sampled by step and rank and nothing else."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

FILES = 60


def corpus() -> torch.Tensor:
    """Return the bytes of the first files of the standard library, in order of their names: uint8, 1-D."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    text = b"".join(path.read_bytes() for path in paths)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, rank: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rows` windows of the text and the same windows one byte later: int64, (rows, length) each."""
    generator = torch.Generator().manual_seed(step * 1_000_003 + rank)
    starts = torch.randint(0, text.numel() - length, (rows, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]

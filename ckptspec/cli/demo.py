"""Owns `ckptspec demo`: it hands the folder to the demonstration, which says itself when torch is not there."""

from __future__ import annotations

from pathlib import Path

import click

from ckptspec.demo.main import run


@click.command("demo")
@click.argument("directory", required=False, type=click.Path(file_okay=False, path_type=Path))
def command(directory: Path | None) -> int:
    """Train a small ZeRO job on 4 ranks, kill it mid-save, resume byte-equal; DIRECTORY keeps what it wrote."""
    return run(directory)

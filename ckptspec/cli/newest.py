"""Owns `ckptspec latest`: the newest good checkpoint of a run on stdout, what was passed over on stderr."""

from __future__ import annotations

import os

import click

from ckptspec.cli.output import plain_path, say_json, say_path, tell
from ckptspec.engine.locate import Newest, newest

EMPTY, ALL_BAD = 4, 1


@click.command("latest")
@click.argument("run", type=click.Path(readable=False))
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(run: str, form: str) -> int:
    """Print the path of the newest good checkpoint in RUN, alone on standard output.

    Steps that were passed over, and why, go to standard error. Exit code 4: RUN holds no checkpoint at all; 1: it holds
    some, and every one of them is bad.
    """
    found = newest(run)
    for skipped in found.skipped:
        tell(f"skipped {os.path.basename(skipped.path)}: {skipped.finding}")
    if form == "json":
        say_json(_document(run, found))
    elif found.path is not None:
        say_path(found.path)
    if found.path is not None:
        return 0
    if found.candidates:
        tell(f"every checkpoint in {run} is bad: {found.candidates} were looked at")
        return ALL_BAD
    tell(f"no checkpoint in {run}")
    return EMPTY


def _document(run: str, found: Newest) -> dict[str, object]:
    return {
        "run": plain_path(run),
        "path": None if found.path is None else plain_path(found.path),
        "step": None if found.manifest is None else found.manifest.step,
        "save_id": None if found.manifest is None else found.manifest.save_id,
        "candidates": found.candidates,
        "skipped": [{"path": plain_path(s.path), "finding": s.finding.document()} for s in found.skipped],
    }

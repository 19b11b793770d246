"""Owns `ckptspec rollback`: sets newer checkpoints aside so that a run resumes from an older one."""

from __future__ import annotations

import os

import click

from ckptspec.cli.output import plain_path, say_json, say_path, tell
from ckptspec.engine.life.rollback import rollback


@click.command("rollback")
@click.argument("run", type=click.Path(readable=False))
@click.option("--to", "step", type=click.IntRange(min=0), required=True, help="The step to go back to.")
@click.option("--dry-run", is_flag=True, help="Say what would be set aside, and change nothing.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(run: str, step: int, dry_run: bool, form: str) -> int:
    """Go back to step STEP of RUN: every newer checkpoint is renamed to .abandoned-, none is deleted.

    The path a job now resumes from goes to standard output, what was set aside to standard error. To undo it, rename a
    folder back. Exit code 1: STEP is no good checkpoint of RUN; nothing was changed.
    """
    done = rollback(run, step, dry_run=dry_run)
    for old, new in done.abandoned:
        tell(f"{'would set' if dry_run else 'set'} {os.path.basename(old)} aside as {os.path.basename(new)}")
    if form == "json":
        abandoned = [{"from": plain_path(old), "to": plain_path(new)} for old, new in done.abandoned]
        say_json({"path": plain_path(done.path), "dry_run": dry_run, "abandoned": abandoned})
    else:
        say_path(done.path)
    return 0

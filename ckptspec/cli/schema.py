"""Owns `ckptspec schema`: the schemas of the standard, as they are written."""

from __future__ import annotations

import click

from ckptspec.cli.output import say, say_raw
from ckptspec.format import schemas


@click.command("schema")
@click.argument("name", required=False)
@click.option("--list", "listed", is_flag=True, help="Print the names of all schemas.")
def command(name: str | None, listed: bool) -> int:
    """Print the schema called NAME: manifest, shard-header, shard-index, target, signature, report or plan."""
    if listed or name is None:
        say(*schemas.names())
        return 0
    if name not in schemas.names():
        raise click.BadParameter(f"no schema {name!r}; there are: {', '.join(schemas.names())}", param_hint="NAME")
    say_raw(schemas.text(name))
    return 0

"""Owns `ckptspec inspect`: it finds the checkpoint and hands its manifest to the tables."""

from __future__ import annotations

import click

from ckptspec.cli.output import plain_path, say_json, say_raw
from ckptspec.engine.documents import load_manifest
from ckptspec.format.manifest import document


@click.command("inspect")
@click.argument("path", type=click.Path(readable=False))
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(path: str, form: str) -> int:
    """Show what is inside the checkpoint at PATH: run, meshes, layouts, tensors, shards, objects, flat groups."""
    folder, manifest = load_manifest(path)
    if form == "json":
        say_json({"path": plain_path(folder), "nbytes": manifest.nbytes, "manifest": document(manifest)})
        return 0
    from ckptspec.cli.tables import inspection  # rich takes longer to import than all else together

    say_raw(inspection(folder, manifest))
    return 0

"""Owns `ckptspec inspect`: it finds the checkpoint, hands its manifest to the tables, and says how its run saves."""

from __future__ import annotations

import os

import click

from ckptspec.check.life.cadence import Pace, expected_loss, overhead, pace, suggest_interval
from ckptspec.cli.output import plain_path, say, say_json, say_raw
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.life.history import points
from ckptspec.engine.locate import is_run
from ckptspec.format.manifest import document


@click.command("inspect")
@click.argument("path", type=click.Path(readable=False))
@click.option("--mtbf", "hours", type=click.FloatRange(min=0, min_open=True), help="Hours between failures of the job.")
@click.option(
    "--save-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="How long a save keeps the training from working, where its checkpoints do not tell.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(path: str, hours: float | None, save_seconds: float | None, form: str) -> int:
    """Show what is inside the checkpoint at PATH: run, meshes, layouts, tensors, shards, objects, flat groups.

    Of a run it says too how much work lies between its saves, what a failure loses, and with --mtbf how often to save.
    """
    folder, manifest = load_manifest(path)
    found = _pace(path)
    told = _cadence(found, None if hours is None else hours * 3600, save_seconds)
    if form == "json":
        shown = {"path": plain_path(folder), "nbytes": manifest.nbytes, "manifest": document(manifest)}
        say_json({**shown, "cadence": told} if told else shown)
        return 0
    from ckptspec.cli.tables import inspection  # rich takes longer to import than all else together

    say_raw(inspection(folder, manifest))
    if told:
        say(f"cadence: {_line(told)}")
    return 0


def _pace(path: str) -> Pace | None:
    return pace(points(path)) if os.path.isdir(path) and is_run(path) else None


def _cadence(found: Pace | None, mtbf: float | None, save_seconds: float | None) -> dict[str, float | None]:
    """Return what is known of a run's saves, in seconds; nothing where no two of its checkpoints tell."""
    took = save_seconds if save_seconds is not None or found is None else found.save_seconds
    told: dict[str, float | None] = {}
    if found is not None:
        told |= {"gaps": found.gaps, "interval": found.interval, "expected_loss": expected_loss(found.interval)}
    if mtbf is not None:
        told |= {"mtbf": mtbf, "save_seconds": took, "suggested": None}
    if mtbf is not None and took is not None:
        best = suggest_interval(mtbf, took)
        told |= {"suggested": best, "suggested_overhead": overhead(best, mtbf, took)}
        if found is not None:
            told["overhead"] = overhead(found.interval, mtbf, took)
    return told


def _line(told: dict[str, float | None]) -> str:
    said = ["too few checkpoints tell how often this run saves"]
    if told.get("interval") is not None:
        gaps = "one gap" if told["gaps"] == 1 else f"the median of the last {told['gaps']:g} gaps"
        said = [f"{told['interval']:,.0f} s of work between saves ({gaps})"]
        said.append(f"a failure loses {told['expected_loss']:,.0f} s on average")
    if "mtbf" in told and told["suggested"] is None:
        said.append("how long a save takes is not known: give --save-seconds")
    elif "mtbf" in told:
        said.append(
            f"with {(told['mtbf'] or 0) / 3600:g} h between failures and {told['save_seconds']:g} s a save, "
            f"save every {told['suggested']:,.0f} s (adds {told['suggested_overhead']:.2%} to the work)"
        )
        if told.get("overhead") is not None:
            said[-1] = f"{said[-1][:-1]}, now {told['overhead']:.2%})"
    return "; ".join(said)

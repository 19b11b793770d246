"""Owns `ckptspec clean`: what goes from a run folder on standard output, what was spared and why on standard error."""

from __future__ import annotations

from typing import Any

import click

from ckptspec.check.life.cadence import seconds
from ckptspec.check.life.keeping import Keep
from ckptspec.cli.output import plain_path, say, say_json, tell
from ckptspec.cli.render import count
from ckptspec.engine.life.cleaning import Cleaned, Item, clean

FAILED = 3


def _span(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Return the seconds of a time such as 90s, 10min or 1h."""
    try:
        return seconds(value)
    except ValueError as e:
        raise click.BadParameter(str(e), ctx, param) from None


def _best(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, str, int] | None:
    """Return metric, min or max, and number out of a text such as loss:min:3."""
    name, mode, n = value.rsplit(":", 2) if value is not None and value.count(":") >= 2 else (value or "", "", "")
    if value is not None and (not name or mode not in ("min", "max") or not n.isdecimal() or int(n) < 1):
        message = "it is a metric's name, min or max, and how many, such as loss:min:3"
        raise click.BadParameter(message, ctx, param)
    return None if value is None else (name, mode, int(n))


@click.command("clean")
@click.argument("run", type=click.Path(readable=False))
@click.option("--keep-last", type=click.IntRange(min=1), help="Keep the N newest good checkpoints.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Keep those whose step is a multiple of N.")
@click.option("--keep-best", metavar="METRIC:MODE:N", callback=_best, help="Keep the N best, such as loss:min:3.")
@click.option("--protect", type=click.IntRange(min=0), multiple=True, help="Keep this step too; any number of times.")
@click.option(
    "--min-age", metavar="TIME", callback=_span, default="1h", show_default=True, help="Spare younger leftovers."
)
@click.option("--abandoned", is_flag=True, help="Remove what a roll-back set aside, too.")
@click.option("--dry-run", is_flag=True, help="Say what would go, and change nothing.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    run: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[str, str, int] | None,
    protect: tuple[int, ...],
    min_age: float,
    abandoned: bool,
    dry_run: bool,
    form: str,
) -> int:
    """Remove from RUN what dead saves and removals left, and with a --keep option the checkpoints nobody asks to keep.

    Never goes: the newest good checkpoint, a damaged one, one of another run, one that is in use or has a file called
    `protected` in its folder, and what a living save is at. Exit code 3: something could not be removed.
    """
    keep = Keep(keep_last, keep_every, keep_best, protect)
    found = clean(run, keep if keep.removes else None, min_age=min_age, abandoned=abandoned, dry_run=dry_run)
    if form == "json":
        say_json(_document(run, found, dry_run))
    else:
        verb = "would remove" if dry_run else "removed"
        say(*(f"{verb} {item.name} ({item.nbytes:,} bytes): {item.reason}" for item in found.removed))
    tell(*(f"kept {item.name}: {item.reason}" for item in found.spared if item.error is None))
    tell(*(f"could not remove {item.name}: {item.error}" for item in found.failed))
    amount = f"{count(len(found.removed), 'entry').replace('entrys', 'entries')}, {found.nbytes:,} bytes"
    tell(f"{'would remove' if dry_run else 'removed'} {amount}")
    return FAILED if found.failed else 0


def _document(run: str, found: Cleaned, dry_run: bool) -> dict[str, Any]:
    def entry(item: Item) -> dict[str, Any]:
        shown: dict[str, Any] = {"name": plain_path(item.name), "kind": item.kind, "nbytes": item.nbytes}
        shown["reason"] = item.reason
        return {**shown, "error": plain_path(item.error)} if item.error is not None else shown

    lists = {"removed": [entry(i) for i in found.removed], "spared": [entry(i) for i in found.spared]}
    return {"run": plain_path(run), "dry_run": dry_run, "nbytes": found.nbytes, **lists}

"""Owns `ckptspec validate`: options in, a report out; what is good and what is not is the engine's to say."""

from __future__ import annotations

import re

import click

from ckptspec.cli.output import say, say_json
from ckptspec.cli.render import report_document, report_lines
from ckptspec.engine.verify import CHOICES, resized_target, validate
from ckptspec.errors import CkptspecError, PlanError
from ckptspec.format import target as targets
from ckptspec.format.report import Finding, Report
from ckptspec.format.target import Target

WORLD_LIMIT = 1 << 24
_DIGEST = re.compile(r"(sha256:)?[0-9a-fA-F]{64}\Z")
_AXIS = re.compile(r"([A-Za-z0-9_][A-Za-z0-9._:/+-]*)=([0-9]{1,8})\Z")


@click.command("validate")
@click.argument("path", type=click.Path(readable=False))
@click.option("--level", type=click.Choice(CHOICES), default="shards", show_default=True, help="How deep to look.")
@click.option(
    "--target", "file", type=click.Path(readable=False), metavar="FILE", help="Would it load on this target document?"
)
@click.option("--world-size", type=click.IntRange(1, WORLD_LIMIT), metavar="N", help="Would it load on N ranks?")
@click.option("--mesh", metavar="AXIS=N,..", help="Would it load with its own axes at these sizes?")
@click.option("--exact", is_flag=True, help="Any difference of world size or layout is an error.")
@click.option("--expect-digest", metavar="DIGEST", help="The manifest's digest that was pinned.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    path: str,
    level: str,
    file: str | None,
    world_size: int | None,
    mesh: str | None,
    exact: bool,
    expect_digest: str | None,
    form: str,
) -> int:
    """Say whether the checkpoint at PATH is good: its folder, its manifest.json, or a run (then its newest good one).

    Levels are gates: schema, manifest, shards (every header, index, trailer and state) and bytes (every byte).
    """
    if sum(option is not None for option in (file, world_size, mesh)) > 1:
        raise click.UsageError("give one of --target, --world-size and --mesh")
    if expect_digest is not None and not _DIGEST.match(expect_digest):
        raise click.BadParameter("64 hex digits, with or without sha256: before them", param_hint="--expect-digest")
    try:
        target = _target(path, file, world_size, mesh)
    except CkptspecError as e:
        report = Report(path, "lexical", (Finding.of_error(e, file=file),), decision="stop")
    else:
        report = validate(path, target=target, level=level, exact=exact, expect_digest=expect_digest)
    if form == "json":
        say_json(report_document(report))
    else:
        say(*report_lines(report))
    return report.exit_code


def _target(path: str, file: str | None, world_size: int | None, mesh: str | None) -> Target | None:
    if world_size is not None:
        return Target(world_size)
    if mesh is not None:
        try:
            return resized_target(path, _sizes(mesh))
        except PlanError as e:
            expected = f", expected {e.expected}" if e.expected else ""
            raise click.BadParameter(f"{e.message}: {e.found}{expected}", param_hint="--mesh") from None
    if file is None:
        return None
    with open(file, "rb") as f:
        return targets.parse(f.read(targets.SIZE_LIMIT + 1), file=file)


def _sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.match(part.strip())
        if match is None or match[1] in sizes or not 1 <= int(match[2]) <= WORLD_LIMIT:
            raise click.BadParameter(f"{text!r} is not AXIS=N,AXIS=N with each axis once", param_hint="--mesh")
        sizes[match[1]] = int(match[2])
    return sizes

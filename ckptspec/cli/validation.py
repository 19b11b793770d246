"""Owns `ckptspec validate`: options in, a report out; what is good and what is not is the engine's to say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from ckptspec.cli import targets
from ckptspec.cli.output import say, say_json, tell, write_json
from ckptspec.cli.render import count, report_document, report_lines
from ckptspec.engine.verify import CHOICES, validate
from ckptspec.errors import CkptspecError
from ckptspec.format import signature as signatures
from ckptspec.format.manifest import Manifest
from ckptspec.format.report import Finding, Report
from ckptspec.format.signature import Signature
from ckptspec.format.target import Target
from ckptspec.planner import renames
from ckptspec.planner.renames import Renames

_DIGEST = re.compile(r"(sha256:)?[0-9a-fA-F]{64}\Z")
_MOST = 1 << 40
_file = click.Path(readable=False)
_number = click.IntRange(1, _MOST)


@click.command("validate")
@click.argument("path", type=_file)
@click.option("--level", type=click.Choice(CHOICES), default="shards", show_default=True, help="How deep to look.")
@targets.options()
@click.option("--signature", type=_file, metavar="FILE", help="Would it load into a model of this signature?")
@click.option(
    "--map", "mapping", type=_file, metavar="FILE", help='{"wanted name": "name in the checkpoint"}, as JSON.'
)
@click.option("--write-map", type=_file, metavar="FILE", help="Write the map that the names seem to need.")
@click.option("--micro-batch", type=_number, metavar="B", help="Samples a rank took at a time, to keep the batch.")
@click.option("--accumulation", type=_number, metavar="A", help="And how many times a step (default 1).")
@click.option("--exact", is_flag=True, help="Any difference of world size or layout is an error.")
@click.option("--expect-digest", metavar="DIGEST", help="The manifest's digest that was pinned.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(path: str, form: str, **options: Any) -> int:
    """Say whether the checkpoint at PATH is good: its folder, its manifest.json, or a run (then its newest good one).

    Levels are gates: schema, manifest, shards (every header, index, trailer and state) and bytes (every byte).
    """
    asked = _asked(**options)
    try:
        report = validate(path, **asked.arguments())
    except CkptspecError as e:  # of a file that was given beside the checkpoint
        report = Report(path, "lexical", (Finding.of_error(e),), decision="stop")
    if asked.write_map is not None:
        _write_map(asked.write_map, report)
    if form == "json":
        say_json(report_document(report))
    else:
        say(*report_lines(report))
    return report.exit_code


@dataclass(frozen=True)
class _Asked:
    """What the options said, their files not yet read."""

    wanted: targets.Wanted
    level: str
    exact: bool
    expect_digest: str | None
    signature: str | None
    mapping: str | None
    write_map: str | None
    micro_batch: int | None
    accumulation: int | None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `validate`; raises PlanError for a file that is not what it should be, OSError."""
        return {
            "target": _target(self.wanted),
            "level": self.level,
            "exact": self.exact,
            "expect_digest": self.expect_digest,
            "names": None if self.mapping is None else read_map(self.mapping),
            "signature": None if self.signature is None else _signature(self.signature),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "words": tuple(self.words()),
        }

    def words(self) -> Iterator[str]:
        """Yield the options that say target, signature and map again."""
        yield from words(self.wanted)
        if self.signature is not None:
            yield from ("--signature", self.signature)
        if self.mapping is not None:
            yield from ("--map", self.mapping)


def _asked(file: str | None, world_size: int | None, mesh: str | None, accumulation: int | None, **rest: Any) -> _Asked:
    digest, signature = rest["expect_digest"], rest["signature"]
    if digest is not None and not _DIGEST.match(digest):
        raise click.BadParameter("64 hex digits, with or without sha256: before them", param_hint="--expect-digest")
    if rest["write_map"] is not None and signature is None and file is None:
        raise click.UsageError("--write-map compares names: give --signature or --target")
    return _Asked(targets.wanted(file, world_size, mesh), accumulation=accumulation, **rest)


def words(wanted: targets.Wanted) -> Iterator[str]:
    """Yield the options that say again what is wanted."""
    if wanted.file is not None:
        yield from ("--target", wanted.file)
    elif wanted.world_size is not None:
        yield from ("--world-size", str(wanted.world_size))
    elif wanted.sizes is not None:
        yield from ("--mesh", ",".join(f"{axis}={n}" for axis, n in wanted.sizes.items()))


def _target(wanted: targets.Wanted) -> Target | Callable[[Manifest], Target | None] | None:
    """Return the target, or for sizes of axes what makes it of a manifest."""
    if wanted.sizes is not None:
        return wanted.target
    if wanted.world_size is not None:
        return Target(wanted.world_size)
    return None if wanted.file is None else targets.read_target(wanted.file)


def _signature(file: str) -> Signature:
    with open(file, "rb") as f:
        return signatures.parse(f.read(signatures.SIZE_LIMIT + 1), file=file)


def read_map(file: str) -> Renames:
    """Return the map of names in a file; raises PlanError [X-MAP], OSError."""
    with open(file, "rb") as f:
        return renames.parse(f.read(renames.SIZE_LIMIT + 1), file=file)


def _write_map(file: str, report: Report) -> None:
    """Write the names that a map leads to others, and those it should, as a map of its own; say so."""
    names = {} if report.names is None else {**report.names.renamed, **report.names.proposed}
    write_json(file, names)
    tell(f"{file}: {count(len(names), 'name')} written; read them before you load with them")

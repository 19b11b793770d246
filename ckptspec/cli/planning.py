"""Owns `ckptspec plan`: options in, a plan or its transfers out, in lines or JSON; works nothing out itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import click

from ckptspec.check.migration.asking import Answer, Asking, answer
from ckptspec.cli import targets
from ckptspec.cli.output import plain_path, say, say_json, say_raw, tell, write_json
from ckptspec.cli.render import advice_lines, count, size, verdict_line
from ckptspec.cli.validation import read_map, words
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.planning import judged
from ckptspec.planner.planned import Columns, Plan
from ckptspec.planner.plans import transfers
from ckptspec.planner.renames import Renames

_file = click.Path(readable=False)
HEADER = ("tensor", "source", "rank", "source rank", "offsets", "sizes", "elements")


@click.command("plan")
@click.argument("path", type=_file)
@targets.options(
    target="Plan for this target document.",
    world_size="Plan for N ranks.",
    mesh="Plan for its own axes at these sizes.",
)
@click.option(
    "--map", "mapping", type=_file, metavar="FILE", help='{"wanted name": "name in the checkpoint"}, as JSON.'
)
@click.option("--transfers", "moves", is_flag=True, help="Print every transfer, and nothing else.")
@click.option("--rank", type=click.IntRange(0), metavar="N", help="With --transfers: those to rank N.")
@click.option("--micro-batch", type=click.IntRange(1), metavar="B", help="Samples a data-parallel rank takes at once.")
@click.option("--accumulation", type=click.IntRange(1), metavar="A", help="Micro-batches a step; 1 where not given.")
@click.option("--output", type=_file, metavar="FILE", help="Write the plan, as JSON, for reshard --plan.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    path: str,
    file: str | None,
    world_size: int | None,
    mesh: str | None,
    mapping: str | None,
    moves: bool,
    rank: int | None,
    micro_batch: int | None,
    accumulation: int | None,
    output: str | None,
    form: str,
) -> int:
    """Say what it takes to load the checkpoint at PATH on other ranks or layouts: what is lost, read and opened.

    Exit code 0: all that the target asks for can be had; 1: not all. Transfers are tab-separated columns or, as JSON,
    one object of columns a line.
    """
    wanted = targets.wanted(file, world_size, mesh)
    if not wanted:
        raise click.UsageError("give one of --target, --world-size and --mesh")
    if rank is not None and not moves:
        raise click.UsageError("--rank is of --transfers")
    if moves and output is not None:
        raise click.UsageError("--output is of the plan, not of its transfers")
    folder, manifest = load_manifest(path)
    target, names = wanted.target(manifest), Renames() if mapping is None else read_map(mapping)
    assert target is not None
    if moves:
        for text in _printed(transfers(manifest, target, names, rank=rank), form):
            say_raw(text)
        return 0
    made = judged(manifest, target, names)
    if output is not None:
        write_json(output, made.document())
    if form == "json":
        say_json(made.document())
    else:
        said = (*words(wanted), *(() if mapping is None else ("--map", mapping)))
        asked = Asking(target, names=names, micro=micro_batch, accumulation=accumulation, words=tuple(said))
        say(*lines(plain_path(folder), made))
        found = answer(asking=asked, manifest=manifest)
        say(*advised(found, folder))
        tell(*(str(f) for f in found.findings if f.code == "X-MAP"))
    return 0 if made.possible else 1


def _printed(found: Iterator[Columns], form: str) -> Iterator[str]:
    """Yield transfers as text, some at a time."""
    if form == "json":
        for columns in found:
            yield json.dumps(dict(vars(columns))) + "\n"
        return
    yield "\t".join(HEADER) + "\n"
    for columns in found:
        names = "\t".join(json.dumps(name, ensure_ascii=False)[1:-1] for name in (columns.tensor, columns.source))
        rows = zip(columns.rank, columns.source_rank, columns.offsets, columns.sizes, columns.elements, strict=True)
        for rank, source, offsets, sizes, elements in rows:
            boxes = "\t".join(",".join(map(str, box)) for box in (offsets, sizes))
            yield f"{names}\t{rank}\t{source}\t{boxes}\t{elements}\n"


def advised(found: Answer, folder: str) -> Iterator[str]:
    """Yield what to do about other ranks or another layout, in lines for people."""
    known = {advice.id: advice for several in found.advice(folder, None).values() for advice in several}
    for advice in known.values():
        yield from advice_lines(advice)


def lines(folder: str, made: Plan) -> Iterator[str]:
    """Yield the lines of a plan for people."""
    source, totals, ranks = made.source, made.totals, made.ranks
    yield f"{folder}: step {source.step}, {count(source.world_size, 'rank')} to {made.target.world_size}"
    for verdict in made.verdicts:
        yield verdict_line(verdict)
    stored = f"{size(totals.payload_bytes)} that ranks share are stored"
    without = f"{size(totals.bytes_read)} are read, {totals.read_amplification:.3g} times as many"
    exchanged = f"{size(totals.bytes_read_once)} with exchange ({totals.read_amplification_with_exchange:.3g})"
    yield f"bytes: {stored}; {without}; {exchanged}"
    yield f"each rank gets {_range(ranks.bytes_delivered, size)} and reads {_range(ranks.bytes_read, size)}"
    yield f"shards that each rank opens: {_range(ranks.shards_opened)}; transfers to it: {_range(ranks.transfers)}"
    yield f"peak memory: about {size(totals.peak_memory)} in the fullest rank"
    yield f"transfers: {totals.transfers:,}, {made.transfers_digest}"


def _range(column: Sequence[int], text: Callable[[int], str] = "{:,}".format) -> str:
    least, most = text(min(column)), text(max(column))
    return least if least == most else f"{least} to {most}"

"""Owns `ckptspec diff`: options in, what two checkpoints differ in out, in lines or JSON; compares nothing itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ckptspec.check.comparing.differences import KINDS, Comparison, Difference, Distance
from ckptspec.cli.output import plain_path, say, say_json
from ckptspec.cli.render import count
from ckptspec.engine.comparing.diff import LEAST_MEMORY, diff
from ckptspec.engine.pool import DEFAULT_BUDGET
from ckptspec.errors import Where

_SUMS = {
    "only_a": "only in A",
    "only_b": "only in B",
    "kind": "in kind",
    "dtype": "in dtype",
    "shape": "in shape",
    "members": "in the members of a flat group",
    "values": "in values",
    "object": "in an object",
}
SHOWN = 20  # lines of one kind; JSON has them all
_SIZE = re.compile(r"([0-9]{1,15}) ?([KMGT]i?B|B)?\Z", re.IGNORECASE)
_POWERS = {"": 1, "b": 1} | {
    f"{letter}{unit}": base**i for i, letter in enumerate("kmgt", 1) for unit, base in (("ib", 1024), ("b", 1000))
}


def _nbytes(ctx: click.Context, param: click.Parameter, text: str) -> int:
    match = _SIZE.match(text)
    nbytes = 0 if match is None else int(match[1]) * _POWERS[(match[2] or "").lower()]
    if nbytes < LEAST_MEMORY:
        raise click.BadParameter(f"{text!r} is not a size of at least {LEAST_MEMORY >> 20}MiB, such as 512MiB or 2GiB")
    return nbytes


@click.command("diff")
@click.argument("a", type=click.Path(readable=False))
@click.argument("b", type=click.Path(readable=False))
@click.option("--only", multiple=True, metavar="PATTERN", help="Compare only names, prefixes or globs such as this.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="Leave out names, prefixes or globs such as this.")
@click.option("--stats", is_flag=True, help="Say how far apart the elements of each differing tensor are.")
@click.option(
    "--memory", default=f"{DEFAULT_BUDGET >> 20}MiB", show_default=True, callback=_nbytes, metavar="SIZE",
    help="Most memory for tensor bytes.",
)  # fmt: skip
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(a: str, b: str, only: tuple[str, ...], skip: tuple[str, ...], stats: bool, memory: int, form: str) -> int:
    """Say what the state in checkpoint A and that in B differ in, whatever their layouts and world sizes.

    Names, dtypes, shapes and values are compared, bit by bit; who saved it, when and on how many ranks is not. Exit
    code 0: equal; 1: different, or a checkpoint is damaged.
    """
    with _progress() as progress:
        found = diff(a, b, only=only or None, skip=skip, stats=stats, memory=memory, progress=progress)
    if form == "json":
        say_json({**found.document(), "a": plain_path(found.a), "b": plain_path(found.b)})
    else:
        say(*comparison_lines(found))
    return 0 if found.equal else 1


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None] | None]:
    """Give what shows progress on standard error, where that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # takes longer to import than all else together
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("comparing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def comparison_lines(c: Comparison) -> Iterator[str]:
    """Yield the lines of a comparison for people: what is not counted, every kind of difference, notes, the sum."""
    yield f"A: {c.a}"
    yield f"B: {c.b}"
    yield from _several("not counted: ", [_fact(f.what, f.a, f.b) for f in c.facts])
    for kind in c.counts:
        lines = [_line(d) for d in c.differences if d.kind == kind]
        if kind == "values" and c.first is not None and c.first.places is not None:
            lines[0] = "\n".join((lines[0], *map(_place, "AB", c.first.places)))
        for text in _several(f"{KINDS[kind]}: ", lines):
            yield from text.split("\n")
    yield from _several("note: ", list(c.notes))
    yield _summary(c)


def _several(lead: str, lines: list[str]) -> Iterator[str]:
    for line in lines[:SHOWN]:
        yield lead + line
    if len(lines) > SHOWN:
        yield f"{lead}and {len(lines) - SHOWN} more (--format json has them all)"


def _fact(what: str, a: Any, b: Any) -> str:
    words = what.replace("_", " ")
    return words if a is None and b is None else f"{words}: A {_or_none(a)}, B {_or_none(b)}"


def _or_none(value: Any) -> str:
    return "none" if value is None else str(value)


def _line(d: Difference) -> str:
    name = repr(d.name) + (f" of rank {d.rank}" if d.rank is not None else "")
    if d.also:
        name += f" (also {', '.join(map(repr, d.also[:3]))}{', ...' if len(d.also) > 3 else ''})"
    if d.kind in ("only_a", "only_b"):
        return f"{name}: {d.b if d.a is None else d.a}"
    sides = f"A {d.a}, B {d.b}"
    if d.kind == "values":
        first = f"first at {list(d.index or ())}: {sides}"
        return f"{name}: {d.count:,} of {count(d.total or 0, 'element')}, {first}{_distance(d.distance)}"
    if d.kind == "object":
        more = f", and {count(d.count - 1, 'more place')}" if d.count is not None and d.count > 1 else ""
        return f"{name} at {d.path!r}: {sides}{more}"
    return f"{name}: {sides}"


def _distance(distance: Distance | None) -> str:
    if distance is None:
        return ""
    text = f"; at most {distance.absolute:.9g} apart, relatively {distance.relative:.3g}"
    if isinstance(distance.absolute, int):
        text = f"; at most {distance.absolute} apart, relatively {distance.relative:.3g}"
    if not distance.numbers:
        text = ""
    if distance.nan_against_number:
        text += f"; {count(distance.nan_against_number, 'NaN')} against a number"
    if distance.nan_of_other_bits:
        text += f"; {count(distance.nan_of_other_bits, 'NaN')} of other bits"
    return text


def _place(side: str, where: Where) -> str:
    low, high = where.range or (0, 0)
    return f"  {side}: rank {where.rank}, {where.file}, tensor {where.tensor!r}, bytes {low}..{high}"


def _summary(c: Comparison) -> str:
    left = f"; {count(c.left_out, 'name')} left out" if c.left_out else ""
    if c.equal:
        read = f"{c.by_digest:,} bytes by their digests, {c.by_bytes:,} read"
        return f"equal: {count(c.tensors, 'tensor')} and {count(c.objects, 'object')} compared, {read}{left}"
    return f"different: {', '.join(f'{n:,} {_SUMS[kind]}' for kind, n in c.counts.items())}{left}"

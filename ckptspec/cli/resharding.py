"""Owns `ckptspec reshard`: options in, a new checkpoint out, and words about what was moved; moves nothing itself."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

from ckptspec.cli import targets
from ckptspec.cli.output import plain_path, say, say_json, tell
from ckptspec.cli.tables import size
from ckptspec.engine.agree.channel import Channel
from ckptspec.engine.documents import load_manifest
from ckptspec.engine.resharding.asking import Outcome, Request, Watcher
from ckptspec.engine.resharding.reshard import run
from ckptspec.errors import PlanError
from ckptspec.format.digest import ALGORITHMS
from ckptspec.format.manifest import Manifest
from ckptspec.format.target import Target
from ckptspec.planner import renames
from ckptspec.planner.renames import Renames

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SIZE = re.compile(r"([0-9]{1,18}) ?(B|KiB|MiB|GiB|TiB)?\Z")
_UNITS = {None: 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def _nbytes(text: str) -> int:
    """Return the bytes that `512MiB`, `1GiB` or digits alone say; raises click's usage error for anything else."""
    match = _SIZE.match(text)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{text!r} is no size such as 512MiB, 1GiB or 1048576")
    return int(match[1]) * _UNITS[match[2]]


@click.command("reshard")
@click.argument("path", type=click.Path(readable=False))
@click.argument("out", type=click.Path(readable=False))
@targets.options(
    target="Write it for this target document.",
    world_size="Write it for N ranks: data axes are resized, flat groups cut anew.",
    mesh="Write it with its own axes at these sizes.",
)
@click.option("--plan", "plan", type=click.Path(readable=False), metavar="FILE", help="Do what this plan says.")
@click.option("--map", "names", type=click.Path(readable=False), metavar="FILE", help="Names that differ, as JSON.")
@click.option("--drop", multiple=True, metavar="NAME", help="Leave out what the target does not ask for (repeatable).")
@click.option("--copies", type=click.IntRange(1, 64), metavar="N", help="Copies of each element [the source's].")
@click.option("--digest", type=click.Choice(ALGORITHMS), help="Digest of blocks [the source's].")
@click.option("--block-size", type=_nbytes, metavar="SIZE", help="Bytes of a block [the source's].")
@click.option(
    "--memory", type=_nbytes, metavar="SIZE", default="1GiB", show_default=True, help="Bytes of tensors held at a time."
)
@click.option("--on-existing", type=click.Choice(["refuse", "supersede"]), default="refuse", show_default=True)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    path: str,
    out: str,
    file: str | None,
    world_size: int | None,
    mesh: str | None,
    plan: str | None,
    names: str | None,
    drop: tuple[str, ...],
    copies: int | None,
    digest: str | None,
    block_size: int | None,
    memory: int,
    on_existing: str,
    form: str,
) -> int:
    """Write the checkpoint at PATH for other ranks or layouts, as OUT/step-<8 digits>/, without torch.

    A call that was killed is gone on with by the same call. Under torchrun the work is divided over the processes.
    """
    wanted = targets.wanted(file, world_size, mesh)
    if bool(wanted) == (plan is not None) or (plan is not None and names is not None):
        raise click.UsageError("give one of --target, --world-size, --mesh and --plan; a plan has its own --map")
    folder, manifest = load_manifest(path)
    target, renamed = _planned(plan, manifest) if plan is not None else _wanted(wanted, names, manifest)
    request = Request(folder, out, target, renamed, drop, copies, digest, block_size, memory, on_existing)
    channel = _channel()
    first = channel is None or channel.rank == 0
    with _Bar() if first and sys.stderr is not None and sys.stderr.isatty() else _Words(first) as watcher:
        try:
            outcome = run(request, channel, watcher)
        except ValueError as e:
            raise click.UsageError(str(e)) from None
    if first:
        say_json(document(outcome)) if form == "json" else say(*lines(outcome))
    return 0


def _wanted(wanted: targets.Wanted, names: str | None, manifest: Manifest) -> tuple[Target, Renames]:
    target = wanted.target(manifest)
    assert target is not None
    if names is None:
        return target, Renames()
    with open(names, "rb") as f:
        return target, renames.parse(f.read(renames.SIZE_LIMIT + 1), file=names)


def _planned(file: str, manifest: Manifest) -> tuple[Target, Renames]:
    """Return what a plan is for; raises PlanError [X-PLAN] where it is none, or none of this checkpoint."""
    from ckptspec.planner import plans  # loads numpy where a plan is worked out

    with open(file, "rb") as f:
        made = plans.parse(f.read(plans.SIZE_LIMIT + 1), file=file)
    plans.verify(made, manifest)
    target, names = made.target, made.names
    assert isinstance(target, Target)
    return target, names if isinstance(names, Renames) else renames.renames(names)


def _channel() -> Channel | None:
    """Return what the processes of a job agree over; None for one alone."""
    if not os.environ.get("WORLD_SIZE", "1").isdecimal() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    try:
        from ckptspec.pytorch import group
    except ModuleNotFoundError:
        advice = "install ckptspec[torch], or call it without torchrun"
        raise PlanError("WORLD_SIZE is above 1, and the processes agree over torch", advice=advice) from None
    found: Channel = group.channel()
    return found


# ---- while it runs ---------------------------------------------------------------------------------------------------


class _Words(Watcher, AbstractContextManager["_Words"]):
    """Tells people what they should know, from one process of a job."""

    def __init__(self, aloud: bool) -> None:
        self._aloud = aloud

    def say(self, line: str) -> None:
        if self._aloud:
            tell(line)

    def __exit__(self, *args: object) -> None:
        """End."""


class _Bar(Watcher, AbstractContextManager["_Bar"]):
    """A progress bar on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress: Progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: TaskID | None = None

    def __exit__(self, *args: object) -> None:
        self._progress.stop()

    def begin(self, nbytes: int) -> None:
        self._task = self._progress.add_task("", total=max(1, nbytes))
        self._progress.start()

    def progress(self, nbytes: int) -> None:
        if self._task is not None and nbytes:
            self._progress.advance(self._task, nbytes)

    def say(self, line: str) -> None:
        self._progress.stop()
        tell(line)
        if self._task is not None:
            self._progress.start()


# ---- what it came to -------------------------------------------------------------------------------------------------


def lines(outcome: Outcome) -> Iterator[str]:
    """Yield what a reshard came to, for people."""
    m, source, account = outcome.manifest, outcome.source, outcome.account
    ranks = f"{m.world_size} {'rank' if m.world_size == 1 else 'ranks'}"
    yield f"{outcome.folder}: {len(m.tensors)} tensors for {ranks}, from {source.world_size}"
    ratio = account.nbytes_read / max(1, source.nbytes)
    moved = f"read {size(account.nbytes_read)} ({ratio:.2f} of the checkpoint), wrote {size(account.nbytes_written)}"
    yield f"{moved} in {outcome.seconds:.1f} s"
    if outcome.resumed:
        yield f"went on after {outcome.resumed} units that an earlier call had finished"
    for private in outcome.private:
        if private.gone:
            yield f"private: {private.name}: not carried is that of {_ranks(private.gone)}"
        if private.without:
            begin = "begins" if len(private.without) == 1 else "begin"
            yield f"private: {private.name}: {_ranks(private.without)} {begin} without"
    for r in account.recovered.values():
        what = "its shard" if r.tensor is None else r.tensor
        yield f"recovered from another copy: {what} of rank {r.rank}: {r.reason}"
    yield from (f"left out: {name}" for name in outcome.dropped)
    yield from (f"renamed: {name} was {stored}" for name, stored in sorted(outcome.renamed.items()))


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def document(outcome: Outcome) -> dict[str, Any]:
    """Return what a reshard came to, as data."""
    m, source, account = outcome.manifest, outcome.source, outcome.account
    return {
        "path": plain_path(outcome.folder),
        "step": m.step,
        "save_id": m.save_id,
        "manifest_digest": m.digest,
        "world_size": m.world_size,
        "source": {"save_id": source.save_id, "manifest_digest": source.digest, "world_size": source.world_size},
        "bytes": {
            "source": source.nbytes,
            "result": m.nbytes,
            "read": account.nbytes_read,
            "written": account.nbytes_written,
        },
        "blocks_not_kept": account.dropped_blocks,
        "units_resumed": outcome.resumed,
        "seconds": round(outcome.seconds, 3),
        "private": [{"name": p.name, "gone": list(p.gone), "without": list(p.without)} for p in outcome.private],
        "recovered": [dict(vars(r)) for r in account.recovered.values()],
        "dropped": list(outcome.dropped),
        "renamed": dict(outcome.renamed),
    }

"""Owns the tables of `ckptspec inspect`: a manifest in words and columns; nothing of it is markup."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ckptspec.cli.output import clean
from ckptspec.cli.render import count
from ckptspec.cli.render import size as size
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.layout import BoxesLayout, FlatLayout, Layout, Mesh, MeshLayout, RankMap
from ckptspec.format.manifest import Manifest, TensorEntry

ROWS = 1000  # rows of one table; JSON has them all
WIDE = 400  # columns where nobody's terminal sets a limit
LONG = 96  # characters of one cell

Row = Sequence[str]


def _table(title: str, columns: Sequence[str], rows: Iterable[Row], right: Sequence[int] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.show_header = any(columns)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    seen = 0
    for row in rows:
        seen += 1
        if seen <= ROWS:
            table.add_row(*(Text(_cell(text)) for text in row))
    if seen > ROWS:
        table.add_row(Text(f"and {seen - ROWS} more rows (--format json has them all)"))
    return table


def _cell(text: str) -> str:
    shown = clean(text)
    return shown if len(shown) <= LONG else f"{shown[: LONG // 2 - 1]}...{shown[2 - LONG // 2 :]}"


def _head(folder: str, m: Manifest) -> Iterator[tuple[str, str]]:
    yield "path", folder
    yield "run", m.run_id
    yield "save", m.save_id
    parent = "none" if m.parent is None else f"step {m.parent['step']}, save {m.parent['save_id']}"
    yield "step", f"{m.step} (parent: {parent})"
    wall = "" if m.wall_clock_seconds is None else f", after {m.wall_clock_seconds:,} seconds of work"
    yield "created", m.created_at + wall
    yield "producer", ", ".join(f"{key} {value}" for key, value in m.producer.items())
    yield "world size", f"{count(m.world_size, 'rank')}, copies {m.copies}, commit {m.commit}"
    yield "digest", f"{m.block} over blocks of {m.block_size:,} bytes"
    yield "size", f"{size(m.nbytes)} in {count(len(m.shards), 'shard')}"
    yield "manifest", m.digest


def _mesh_row(name: str, mesh: Mesh) -> Row:
    axes = " x ".join(f"{a.name}={a.size} ({a.kind})" for a in mesh.axes)
    if isinstance(mesh.ranks, RankMap):
        ranks = f"{mesh.ranks.offset} + strides {list(mesh.ranks.strides)}"
    else:
        ranks = "row-major" if mesh.ranks is None else ", ".join(map(str, mesh.ranks))
    return name, axes, ranks


def _layout_text(layout: Layout) -> str:
    if isinstance(layout, MeshLayout):
        dims = ", ".join("x".join(axes) or "-" for axes in layout.dims) or "replicated"
        blocks = f", blocks {dict(layout.blocks)}" if layout.blocks else ""
        return f"mesh {layout.mesh}: [{dims}]{_pins(layout.at)}{blocks}"
    if isinstance(layout, FlatLayout):
        parts = f"align {layout.align}" if layout.bounds is None else f"bounds {list(layout.bounds)}"
        return f"flat over {' x '.join(layout.axes)} of mesh {layout.mesh}{_pins(layout.at)}, {parts}"
    if isinstance(layout, BoxesLayout):
        return f"{len(layout.boxes)} boxes listed"
    return "private to each rank"


def _pins(at: object) -> str:
    return f" at {at}" if at else ""


def _tensor_nbytes(t: TensorEntry) -> str:
    return "" if t.shape is None else size(prod(t.shape) * DTYPES[t.dtype].itemsize)


def _tables(folder: str, m: Manifest) -> Iterator[Table]:
    yield _table("Checkpoint", ("", ""), _head(folder, m))
    yield _table("Meshes", ("name", "axes", "ranks"), (_mesh_row(n, x) for n, x in m.meshes.items()))
    yield _table("Layouts", ("name", "how ranks hold it"), ((n, _layout_text(x)) for n, x in m.layouts.items()))
    tensors = (
        (n, t.dtype, "local" if t.shape is None else str(list(t.shape)), t.layout, t.role, _tensor_nbytes(t))
        for n, t in m.tensors.items()
    )
    yield _table(f"Tensors ({len(m.tensors)})", ("name", "dtype", "shape", "layout", "role", "bytes"), tensors, (5,))
    shards = ((str(s.rank), s.path, size(s.nbytes), size(s.index_nbytes)) for s in m.shards)
    yield _table(f"Shards ({len(m.shards)})", ("rank", "file", "size", "index"), shards, (0, 2, 3))
    others: dict[str, Iterable[Row]] = {
        "Objects": m.objects.items(),
        "Aliases": m.aliases.items(),
        "Omitted": m.omitted.items(),
    }
    for title, rows in others.items():
        if getattr(m, title.lower()):
            yield _table(title, ("name", {"Objects": "kind", "Aliases": "tensor", "Omitted": "why"}[title]), rows)
    if m.flat_groups:
        groups = (
            (n, f"{g.numel:,}", str(len(g.members)), ", ".join(f"{k}: {t}" for k, t in g.tensors.items()))
            for n, g in m.flat_groups.items()
        )
        yield _table("Flat groups", ("name", "elements", "members", "tensors"), groups, (1, 2))


def inspection(folder: str, manifest: Manifest) -> str:
    """Return a checkpoint's manifest as text tables, as wide as the terminal or, where there is none, as they need."""
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else WIDE
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, markup=False, highlight=False)
    for table in _tables(folder, manifest):
        if table.row_count:
            console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"

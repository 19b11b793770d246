"""Slices of DeviceMeshes: all ranks see one mesh whatever slice they hold; layouts of fewer ranks than a mesh has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptspec.format.faults import mesh_faults
from ckptspec.format.layout import Axis, FlatLayout, Mesh, MeshLayout, RankMap, coordinate, members
from ckptspec.format.narrow import HoldersError, grid, narrow, tag
from ckptspec.format.settling import pack_ranks, unpack_ranks
from ckptspec.pytorch.grids import device_mesh


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be this rank of a job whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def cube() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("pp", "dp", "tp"))


def joined() -> DeviceMesh:
    return cube()["pp", "dp"]._flatten("all_dp")


def joined_apart() -> DeviceMesh:
    return cube()["pp", "tp"]._flatten("edge")


NO_ORDER = [[11, 3], [7, 5]]
SLICES: dict[str, tuple[Callable[[], Any], str, list[str]]] = {
    "whole": (cube, "pp=2,dp=3,tp=2", ["pp", "dp", "tp"]),
    "one axis": (lambda: cube()["dp"], "pp=2,dp=3,tp=2", ["dp"]),
    "last axis": (lambda: cube()["tp"], "pp=2,dp=3,tp=2", ["tp"]),
    "two axes": (lambda: cube()["dp", "tp"], "pp=2,dp=3,tp=2", ["dp", "tp"]),
    "a slice of a slice": (lambda: cube()["dp", "tp"]["tp"], "pp=2,dp=3,tp=2", ["tp"]),
    "axes joined": (joined, "tp=2,all_dp=6@", ["all_dp"]),
    "axes apart joined": (joined_apart, "dp=3,edge=4@", ["edge"]),
    "ranks in no order": (lambda: DeviceMesh("cpu", NO_ORDER, mesh_dim_names=("a", "b")), "a=2,b=2@", ["a", "b"]),
    "without names": (lambda: init_device_mesh("cpu", (12,)), "dim0=12", ["dim0"]),
    "an axis of one rank": (
        lambda: init_device_mesh("cpu", (12, 1), mesh_dim_names=("dp", "one"))["one"], "dp=12,one=1", [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLICES)
def test_every_rank_sees_the_same_mesh_with_its_slice_in_it(name: str) -> None:
    make, text, axes = SLICES[name]
    seen = set()
    for rank in range(12):
        with as_rank(rank, 12):
            mesh = make()
            found = device_mesh(mesh)
            ranks = mesh.mesh
        assert not [*mesh_faults(found.mesh, 12)]
        assert found.name.startswith(text)
        assert [found.mesh.axes[a].name for a in found.axes if a is not None] == axes
        seen.add((found.name, found.mesh))
        if rank not in ranks:
            continue
        for at in (ranks == rank).nonzero().tolist():  # where torch has this rank along each axis of the slice
            coord = coordinate(found.mesh, rank)
            assert coord is not None
            assert [coord[a] if a is not None else 0 for a in found.axes] == at
    assert len(seen) == 1


def test_names_of_ranks_say_which() -> None:
    assert [tag(r) for r in ((3,), (0, 1, 2), (1, 3, 5, 7))] == ["3", "0-2", "1-7:2"]
    assert tag((0, 1, 3)).startswith("0.")
    assert tag((0, 1, 3)) != tag((0, 1, 4))


DEEP = tuple(a + 8 * b + 32 * c for c in range(3) for b in range(2) for a in range(4))


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        ((5,), (1,)),
        ((0, 1, 2, 3), (4,)),
        ((2, 3, 6, 7), (2, 2)),
        ((0, 1, 3), (3,)),
        ((0, 1, 4, 5, 8), (5,)),
        (DEEP, (3, 2, 4)),
    ],
)
def test_ranks_that_are_runs_within_runs_are_told_by_sizes_and_strides(
    ranks: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert grid(ranks) == sizes
    assert unpack_ranks(pack_ranks(ranks)) == ranks


MESH = Mesh((Axis("pp", 3, "pipeline"), Axis("dp", 2, "data"), Axis("tp", 2, "tensor")))


def test_holders_pin_an_axis_or_get_a_mesh_of_their_own_or_are_refused() -> None:
    layout = MeshLayout("m", (("tp",),))
    assert narrow("x", layout, MESH, tuple(range(12))).layout is layout
    stage = narrow("x", layout, MESH, (4, 5, 6, 7))
    assert (stage.name, stage.layout.at, stage.mesh) == ("x@pp=1", {"pp": 1}, MESH)
    cell = narrow("x", layout, MESH, (10, 11))
    assert cell.layout.at == {"pp": 2, "dp": 1}
    ends = narrow("x", layout, MESH, (0, 1, 2, 3, 8, 9, 10, 11))
    assert (ends.layout.at, ends.layout.dims) == ({}, (("tp",),))
    assert [a.name for a in ends.mesh.axes] == ["held", "tp"]
    assert list(members(ends.mesh)) == [0, 1, 2, 3, 8, 9, 10, 11]
    with pytest.raises(HoldersError) as e:
        narrow("x", layout, MESH, (4, 5, 6))
    assert (e.value.rank, e.value.holds) == (7, False)
    with pytest.raises(HoldersError) as e:
        narrow("x", layout, MESH, (12, 13))
    assert (e.value.rank, e.value.holds) == (12, True)


def test_a_flat_layout_and_a_line_of_ranks_are_narrowed_too() -> None:
    line = Mesh((Axis("rank", 8, "data"),))
    some = narrow("replicated", MeshLayout("world"), line, (1, 3, 5, 7))
    assert (some.name, some.layout.mesh) == ("replicated@1-7:2", "world@1-7:2")
    assert some.mesh == Mesh((Axis("rank", 4, "data"),), RankMap(1, (2,)))
    blocks = narrow("replicated", MeshLayout("world"), line, (0, 1, 4, 5))
    assert blocks.mesh == Mesh((Axis("rank0", 2, "data"), Axis("rank1", 2, "data")), RankMap(0, (4, 1)))
    with pytest.raises(HoldersError):
        narrow("flat", FlatLayout("world", ("rank",)), line, (0, 1))

"""Ranks that hold different tensors: stages, experts, ties, pieces of plain tensors; and what is refused, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forks import run_phases
from holder_cases import REFUSED, STATES, whole

import ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.format.layout import BoxesLayout, FlatLayout, MeshLayout, RankMap
from ckptspec.format.manifest import Manifest
from ckptspec.format.placement import resolve


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("holders")
    run_phases("holder_cases", [("save", 4), ("load", 4), ("refuse", 4)], folder)  # compared there
    return folder


def manifest_of(saved: Path, name: str) -> Manifest:
    return load_manifest(saved / name)[1]


def holders(m: Manifest, name: str) -> tuple[int, ...]:
    layout = m.layouts[m.tensors[name].layout]
    return resolve(layout, m.meshes).ranks()


@pytest.mark.parametrize("name", STATES)
def test_what_ranks_hold_comes_back_in_new_processes_and_every_byte_is_sound(name: str, saved: Path) -> None:
    report = ckptspec.validate(saved / name, level="bytes")  # the load itself is compared in the ranks
    assert report.ok, report.findings
    assert not report.findings


def test_stages_hold_their_own_on_meshes_of_their_own(saved: Path) -> None:
    m = manifest_of(saved, "stages")
    for stage, ranks in enumerate(((0, 1), (2, 3))):
        for key in ("norm", "big", "weight", "bias"):
            assert holders(m, f"model/layers.{stage}.{key}") == ranks
        weight = m.layouts[m.tensors[f"model/layers.{stage}.weight"].layout]
        assert isinstance(weight, MeshLayout)
        assert (weight.at, weight.dims) == ({"pp": stage}, (("dp",),))
        assert isinstance(m.layouts[m.tensors[f"zero/stage{stage}/master"].layout], FlatLayout)
        assert holders(m, f"zero/stage{stage}/master") == ranks
    assert holders(m, "model/scale") == (0, 1, 2, 3)
    assert set(m.objects.values()) == {"same"}
    found = ckptspec.read(saved / "stages")
    assert found["model/layers.1.weight"].tobytes() == whole("weight1", 7, 5).numpy().tobytes()
    assert found["zero/stage1/master"].tobytes() == whole("zero1", 15).numpy().tobytes()
    assert ckptspec.read(saved / "stages", ["stage1"])["stage1"] == {"layers": [1], "lr": 0.2}


def test_experts_are_held_along_any_axis(saved: Path) -> None:
    m = manifest_of(saved, "experts")
    assert [holders(m, f"row.{i}.up") for i in range(2)] == [(0, 1), (2, 3)]
    assert [holders(m, f"column.{i}.down") for i in range(2)] == [(0, 2), (1, 3)]
    assert [holders(m, f"own.{i}.up") for i in range(4)] == [(i,) for i in range(4)]
    assert [holders(m, f"cut.{i}") for i in range(2)] == [(0, 1), (2, 3)]
    assert holders(m, "router") == holders(m, "replica") == (0, 1, 2, 3)
    kinds = {n: type(m.layouts[t.layout]) for n, t in m.tensors.items()}
    assert {n for n, kind in kinds.items() if kind is BoxesLayout} == {"stacked"}
    assert set(kinds.values()) == {MeshLayout, BoxesLayout}
    assert ckptspec.read(saved / "experts")["stacked"].tobytes() == whole("stacked", 4, 3, 2).numpy().tobytes()


def test_a_tie_across_stages_is_stored_once_and_both_stages_hold_it(saved: Path) -> None:
    m = manifest_of(saved, "tied")
    assert m.aliases == {"stage1/head": "stage0/wte", "stage1/again": "stage0/wte", "stage1/cut": "stage0/cut"}
    assert holders(m, "stage0/wte") == holders(m, "stage0/cut") == (0, 1, 2, 3)
    cut = m.layouts[m.tensors["stage0/cut"].layout]
    assert isinstance(cut, MeshLayout)
    assert (cut.at, cut.dims) == ({}, (("dp",),))
    found = ckptspec.read(saved / "tied")
    assert found["stage1/head"].tobytes() == found["stage0/wte"].tobytes() == whole("wte", 6, 4).numpy().tobytes()


def test_pieces_of_one_shape_share_a_layout_and_read_as_wholes(saved: Path) -> None:
    m = manifest_of(saved, "pieces")
    columns = {m.tensors[f"layers.{i}.column"].layout for i in range(3)}
    assert len(columns) == 1
    assert len(m.layouts) == 5  # columns, rows, QKV, the odd one, and the plain tensor
    found = ckptspec.read(saved / "pieces")
    assert found["layers.2.column"].tobytes() == (whole("column", 6, 3) + 2).numpy().tobytes()
    for name, shape in (("row", (3, 6)), ("qkv", (12, 2)), ("odd", (5, 5))):
        assert found[name].tobytes() == whole(name, *shape).numpy().tobytes(), name


def test_holders_in_no_order_get_a_mesh_of_exactly_those_ranks(saved: Path) -> None:
    m = manifest_of(saved, "uneven")
    assert {n: holders(m, n) for n in m.tensors} == {
        "all": (0, 1, 2, 3), "a/t": (0, 1, 3), "b/t": (0, 3), "c/t": (1,), "d/t": (1, 2, 3),
    }  # fmt: skip
    assert m.meshes["world@0-3:3"].ranks == RankMap(0, (3,))
    assert m.meshes["world@1-3"].ranks == RankMap(1, (1,))
    assert sum(isinstance(mesh.ranks, tuple) for mesh in m.meshes.values()) == 1  # 0, 1, 3 follow no rule
    assert ckptspec.read(saved / "uneven", ["b/n"])["b/n"] == 2
    assert torch.equal(torch.from_numpy(ckptspec.read(saved / "uneven")["d/t"]), whole("d", 3, 3))


def test_what_does_not_fit_together_is_refused_by_name_on_every_rank(saved: Path) -> None:
    for name in REFUSED:  # texts and ranks are compared in the ranks
        assert not list((saved / name).glob("step-*")), name

"""DTensors on any mesh: the boxes are what ranks hold, they come back in new processes, and reading joins them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from forks import run_phases
from mesh_cases import Case, cases

import ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.format.layout import MeshLayout


class Names:
    """Stands in for a DeviceMesh where only the cases' shapes are wanted."""

    def __init__(self, dp: int, tp: int) -> None:
        self.shape = (dp, tp)


def expected(dp: int, tp: int, sizes: list[int]) -> dict[str, Case]:
    return dict(cases(Names(dp, tp), sizes))  # type: ignore[arg-type]


def round_trip(dp: int, tp: int, sizes: list[int], folder: Path) -> None:
    found = expected(dp, tp, sizes)
    run_phases("mesh_cases", [("save", dp * tp), ("load", dp * tp)], folder, dp, tp, sizes)
    report = ckptspec.validate(folder, level="bytes")
    assert report.ok, report.findings
    tensors = ckptspec.read(folder)
    _, manifest = load_manifest(folder)
    for name, case in found.items():
        key = "t/" + name.replace("/", "~1")
        whole = case.whole(name)
        array = tensors[key]
        assert array.shape == case.shape, name
        assert array.tobytes() == whole.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name
        layout = manifest.layouts[manifest.tensors[key].layout]
        assert isinstance(layout, MeshLayout), (name, layout)
        assert layout.dims == case.dims, (name, layout)
        assert bool(layout.blocks) == name.startswith("lone"), (name, layout)


def test_every_placement_on_a_mesh_of_3_x_2(tmp_path: Path) -> None:
    round_trip(3, 2, [0, 1, 4, 5, 7, 13], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3)])
def test_every_placement_and_size(dp: int, tp: int, tmp_path: Path) -> None:
    round_trip(dp, tp, list(range(14)), tmp_path)

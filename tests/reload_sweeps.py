"""What each rank does in the long part of tests/test_reload.py: every placement of one mesh loaded on another."""

from __future__ import annotations

from pathlib import Path

import mesh_cases
import torch
import torch.distributed as dist
from reload_cases import compare

import ckptspec


def save(rank: int, world: int, folder: Path, dp: int, tp: int, sizes: list[int], meshes: list[list[int]]) -> None:
    _, state = mesh_cases.build(dp, tp, sizes, fill=True)
    ckptspec.save(folder, {"t": state}, step=1)


def load(rank: int, world: int, folder: Path, dp: int, tp: int, sizes: list[int], meshes: list[list[int]]) -> None:
    """Load on every mesh of so many ranks, by itself and by exchange; the shapes of a few cases depend on the mesh."""
    arrays = ckptspec.read(folder)
    for here in meshes:
        if here[0] * here[1] != world:
            continue
        mesh_cases._made.clear()
        _, state = mesh_cases.build(here[0], here[1], sizes, fill=False)
        names = {n: "t/" + n.replace("/", "~1") for n in state}
        state = {n: t for n, t in state.items() if arrays[names[n]].shape == tuple(t.shape)}
        for group in (None, dist.group.WORLD):
            result = ckptspec.load(folder, into={"t": state}, unexpected="ignore", process_group=group)
            assert not result.missing
            assert set(result.unexpected) == {"t/" + n for n in arrays_of(arrays) - state_of(state)}
            compare({"t": state}, arrays, rank, world)
            for t in state.values():
                with torch.no_grad():
                    getattr(t, "_local_tensor", t).zero_()


def arrays_of(arrays: dict[str, object]) -> set[str]:
    return {n.removeprefix("t/") for n in arrays}


def state_of(state: dict[str, torch.Tensor]) -> set[str]:
    return {n.replace("/", "~1") for n in state}


load_1 = load_2 = load_3 = load_4 = load_5 = load_6 = load

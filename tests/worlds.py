"""Random meshes, layouts and shapes, and what they mean by the slow way: index arrays cut with numpy, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st

from ckptspec.format.box import Box
from ckptspec.format.layout import Axis, FlatLayout, Mesh, MeshLayout, RankMap

NAMES = ("dp", "tp", "pp", "ep")
MOST = 40  # ranks in a random mesh


@dataclass(frozen=True)
class World:
    """A mesh with the ranks it means as an array, `size` ranks in all."""

    mesh: Mesh
    grid: np.ndarray
    size: int

    @property
    def meshes(self) -> dict[str, Mesh]:
        return {"main": self.mesh}


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A mesh of 1 to 4 axes of sizes 1 to 5, its ranks in order, listed in any order, or computed by strides."""
    sizes: list[int] = []
    for size in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        sizes.append(size if np.prod(sizes, initial=size) <= MOST else 1)
    axes = tuple(Axis(name, size) for name, size in zip(NAMES, sizes, strict=False))
    count = int(np.prod(sizes))
    how = draw(st.sampled_from(["plain", "list", "map"]))
    if how == "plain":
        return World(Mesh(axes), np.arange(count).reshape(sizes), count + draw(st.integers(0, 2)))
    if how == "list":
        size = count + draw(st.integers(0, 5))
        ranks = draw(st.permutations(range(size)))[:count]
        return World(Mesh(axes, tuple(ranks)), np.array(ranks).reshape(sizes), size)
    offset, reach, strides = draw(st.integers(0, 5)), 0, [0] * len(sizes)
    for i in draw(st.permutations(range(len(sizes)))):
        strides[i] = reach + 1 + draw(st.integers(0, 2))
        reach += strides[i] * (sizes[i] - 1)
    grid = offset + sum((np.indices(sizes)[i] * stride for i, stride in enumerate(strides)), np.zeros(sizes, int))
    return World(Mesh(axes, RankMap(offset, tuple(strides))), grid, offset + reach + 1)


def view(array: np.ndarray, box: Box) -> np.ndarray:
    """The elements of `array`, a whole tensor, that the box names, as a view of them even in 0-d."""
    return array[(*(slice(a, b) for a, b in zip(box.offsets, box.stops, strict=True)), ...)]


def pins(draw: st.DrawFn, world: World, names: list[str]) -> dict[str, int]:
    """Some of the axes called `names`, each pinned at an index it has."""
    chosen = [name for name in names if draw(st.integers(0, 3)) == 0]
    return {name: draw(st.integers(0, world.mesh.axis(name).size - 1)) for name in chosen}


@st.composite
def mesh_cases(draw: st.DrawFn) -> tuple[World, MeshLayout, tuple[int, ...]]:
    """A world, a mesh layout on it, and a shape it fits; dims may be shorter than the shape."""
    world = draw(worlds())
    ndim = draw(st.sampled_from([2, 1, 3, 0]))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim)))
    names = draw(st.permutations([axis.name for axis in world.mesh.axes]))
    dims: list[list[str]] = [[] for _ in shape]
    free = []
    for name in names:
        dim = draw(st.integers(-1, ndim - 1))
        (dims[dim] if dim >= 0 else free).append(name)
    blocks = {}
    for dim, cut in enumerate(dims):
        if cut and draw(st.integers(0, 2)) == 0:
            stops = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2)))
            blocks[dim] = tuple(int(n) for n in np.diff([0, *stops, shape[dim]]))
    while dims and not dims[-1] and draw(st.booleans()):
        dims.pop()
    return world, MeshLayout("main", tuple(map(tuple, dims)), pins(draw, world, free), blocks), shape


@st.composite
def flat_cases(draw: st.DrawFn) -> tuple[World, FlatLayout, tuple[int, ...]]:
    """A world, a flat layout on it, aligned or at bounds, and a shape it fits."""
    world = draw(worlds())
    names = draw(st.permutations([axis.name for axis in world.mesh.axes]))
    count = draw(st.integers(0, len(names)))
    axes, at = tuple(names[:count]), pins(draw, world, list(names[count:]))
    numel = draw(st.integers(0, 60))
    if draw(st.booleans()):
        return world, FlatLayout("main", axes, at, draw(st.integers(1, 8))), (numel,)
    parts = int(np.prod([world.mesh.axis(name).size for name in axes]))
    inner = sorted(draw(st.lists(st.integers(0, numel), min_size=parts - 1, max_size=parts - 1)))
    return world, FlatLayout("main", axes, at, bounds=(0, *inner, numel)), (numel,)


def chunk(indices: np.ndarray, k: int) -> list[np.ndarray]:
    """The k pieces of `indices`, each but the trailing ones ceil(n/k) long: torch.chunk, with empty ones kept."""
    step = -(-len(indices) // k)
    return [indices[i * step : (i + 1) * step] for i in range(k)]


def held(world: World, layout: MeshLayout | FlatLayout, shape: tuple[int, ...], rank: int) -> list[np.ndarray] | None:
    """The indices of each dimension that `rank` holds, in the order of its own tensor; None when it takes no part."""
    places = np.argwhere(world.grid == rank)
    if len(places) == 0:
        return None
    at = {axis.name: int(i) for axis, i in zip(world.mesh.axes, places[0], strict=True)}
    if any(at[name] != i for name, i in layout.at.items()):
        return None
    size = {axis.name: axis.size for axis in world.mesh.axes}
    if isinstance(layout, FlatLayout):
        return [flat_part(layout, shape[0], [(at[name], size[name]) for name in layout.axes])]
    found = []
    for dim, n in enumerate(shape):
        own = []
        for block in np.split(np.arange(n), np.cumsum(layout.blocks.get(dim, (n,)))[:-1]):
            for name in layout.dims[dim] if dim < len(layout.dims) else ():
                block = chunk(block, size[name])[at[name]]
            own.append(block)
        found.append(np.concatenate(own))
    return found


def flat_part(layout: FlatLayout, numel: int, places: list[tuple[int, int]]) -> np.ndarray:
    """The part of a flat tensor at `places` (index, size), by writing down all coordinates in order."""
    coords = list(product(*(range(size) for _, size in places)))
    i, k = coords.index(tuple(index for index, _ in places)), len(coords)
    if layout.bounds is not None:
        return np.arange(layout.bounds[i], layout.bounds[i + 1])
    padded = numel
    while padded % k or padded // k % layout.align:
        padded += 1
    part = np.arange(padded).reshape(k, padded // k)[i]
    return part[part < numel]

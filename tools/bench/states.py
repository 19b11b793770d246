"""Owns the states that are timed: a transformer of a wanted size, and very many small tensors; also their digests."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, dict[str, torch.Tensor]]

# One layer: the shapes of its tensors in units of the width; an empty second number is a vector.
LAYER = {
    "norm1.weight": (1, 0),
    "norm1.bias": (1, 0),
    "qkv.weight": (3, 1),
    "qkv.bias": (3, 0),
    "out.weight": (1, 1),
    "out.bias": (1, 0),
    "norm2.weight": (1, 0),
    "norm2.bias": (1, 0),
    "up.weight": (4, 1),
    "up.bias": (4, 0),
    "gate.weight": (4, 1),
    "down.weight": (1, 4),
    "down.bias": (1, 0),
}


def transformer(nbytes: int, tensors: int) -> State:
    """Return about `nbytes` in about `tensors` tensors: every other layer bfloat16, the rest float32."""
    layers = max(1, tensors // len(LAYER))
    area = sum(a * b for a, b in LAYER.values())
    width = max(8, math.isqrt(nbytes // (layers * area * 3)))  # 3: the mean of 2 and 4 bytes
    model = {}
    for layer in range(layers):
        dtype = torch.float32 if layer % 2 else torch.bfloat16
        for name, (rows, columns) in LAYER.items():
            shape = (rows * width, columns * width) if columns else (rows * width,)
            model[f"layers.{layer}.{name}"] = torch.empty(shape, dtype=dtype)
    return {"model": model}


def crumbs(count: int) -> State:
    """Return `count` float32 vectors of 64 to 1,024 elements."""
    return {"model": {f"part.{n}": torch.empty(64 * (1 + n % 16)) for n in range(count)}}


def fill(state: State, seed: int) -> None:
    """Give every element this rank holds a value that is its own."""
    torch.manual_seed(seed)
    for tensor in locals_of(state).values():
        tensor.normal_()


def zero(state: State) -> None:
    """Forget every value: a load that leaves out a byte cannot go unnoticed."""
    for tensor in locals_of(state).values():
        tensor.zero_()


def spread(state: State) -> State:
    """Return the same state as DTensors whose rows are divided among all ranks; their local parts are not filled."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    rank, world = dist.get_rank(), dist.get_world_size()

    def part(tensor: torch.Tensor) -> torch.Tensor:
        pieces = tensor.chunk(world)
        local = torch.empty_like(pieces[rank]) if rank < len(pieces) else tensor[:0].clone()
        return DTensor.from_local(local, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())

    return {group: {name: part(tensor) for name, tensor in members.items()} for group, members in state.items()}


def locals_of(state: State) -> dict[str, torch.Tensor]:
    """Return this rank's plain tensors by name: the tensors themselves, or the local parts of DTensors."""
    return {
        f"{group}.{name}": tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for group, members in state.items()
        for name, tensor in members.items()
    }


def nbytes(state: State) -> int:
    """Return the bytes this rank holds."""
    return sum(tensor.nbytes for tensor in locals_of(state).values())


def digest(state: State) -> str:
    """Return one digest of all bytes this rank holds."""
    whole = xxhash.xxh3_128()
    for name, tensor in locals_of(state).items():
        whole.update(name.encode())
        whole.update(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
    return whole.hexdigest()

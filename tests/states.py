"""The states that save and load tests share: one builder, the same values on every rank unless they are private."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

import ckptspec

FLAT = 1003  # elements of the ZeRO buffer: no world size from 2 to 8 divides it


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(name: str, rank: int, world: int, *, fill: bool, align: int = 4) -> ckptspec.FlatShard:
    """This rank's slice of a flat buffer of FLAT elements; with `fill`, of values the name decides; else zeros."""
    whole = torch.randn(FLAT, generator=generator(len(name)))
    part = -(-FLAT // (world * align)) * align
    mine = torch.zeros(part)
    if fill:
        piece = whole[rank * part : (rank + 1) * part]
        mine[: len(piece)] = piece
    members = [
        {"name": "model/bf16", "offset": 0, "shape": [33, 30]},
        {"name": None, "offset": 990, "shape": [13]},
    ]
    return ckptspec.FlatShard(mine, group="optimizer/zero", offset=rank * part, numel=FLAT, members=members)


def build(rank: int, world: int, *, fill: bool = True) -> dict[str, Any]:
    """A state with every kind of thing; `fill=False` gives the same shapes with nothing in them."""

    def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        t = torch.randn(shape, generator=generator(seed)).to(dtype)
        return t if fill else torch.zeros_like(t)

    tied = values(1, (33, 30), torch.bfloat16)
    big = values(7, (1 << 20, 2), torch.float32)  # 8 MiB: cut among up to 8 holders
    wide = values(2, (40, 50), torch.float32)
    return {
        "model": OrderedDict(
            bf16=tied,
            fp16=values(3, (17, 5), torch.float16),
            fp32=values(4, (129,), torch.float32),
            scalar=values(5, (), torch.float32),
            empty=torch.empty(0, 4),
            transposed=values(6, (40, 30), torch.float32).t(),
            sliced=wide[3:20, 5:45:2],
            tied=tied,
            big=big,
        ),
        "optimizer": {
            "master": flat("master", rank, world, fill=fill),
            "exp_avg": flat("exp_avg", rank, world, fill=fill),
            "groups": [{"lr": 1e-3 if fill else 0.0, "betas": (0.9, 0.95), "params": [0, 1]}],
        },
        "rng": ckptspec.Local(torch.arange(16 + rank, dtype=torch.uint8) if fill else torch.zeros(16 + rank).byte()),
        "seen": ckptspec.Local({"rank": rank if fill else -1, 7: (1, 1.0, True)}),
        "list": [torch.tensor([2]) * int(fill), (torch.tensor([3]) * int(fill), "x" if fill else "y"), [], {}],
        "step": 12 if fill else 0,
        3: None,
        "empty": {},
        "dtype": torch.bfloat16 if fill else None,
    }


def leaves(state: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by path, tensors as (dtype, shape, bytes), so that == is bit equality and type equality."""
    if isinstance(state, ckptspec.Local):
        return leaves(state.value, path)
    if isinstance(state, ckptspec.FlatShard):
        return leaves(state.tensor, path)
    if isinstance(state, dict):
        inner = {k: v for key, item in state.items() for k, v in leaves(item, f"{path}/{key!r}").items()}
        return inner or {path: "{}"}
    if isinstance(state, (list, tuple)):
        inner = {k: v for i, item in enumerate(state) for k, v in leaves(item, f"{path}/{i}").items()}
        return {**inner, f"{path}:type": type(state).__name__}
    if isinstance(state, torch.Tensor):
        raw = state.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {path: (str(state.dtype), tuple(state.shape), raw)}
    return {path: (type(state).__name__, repr(state))}

"""Owns what a single leaf of a state is to the format: its value, dtype and role; refuses what has no plain bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ckptspec.errors import StateError, Where
from ckptspec.format import objects
from ckptspec.format.dtypes import DTYPES
from ckptspec.format.objects import DeviceValue, DTypeValue, SizeValue

PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
SMALL_ARRAY = 64 << 10  # a numpy array above this many bytes is a tensor, not a value of the state
_DTYPE_NAMES = {getattr(torch, n): n for n in DTYPES if hasattr(torch, n)}


def encode_value(value: Any) -> objects.Special | None:
    """Return the core's value for a torch.dtype, torch.Size or torch.device, else None."""
    if type(value) is torch.dtype:
        return DTypeValue(str(value).removeprefix("torch."))
    if type(value) is torch.Size:
        return SizeValue(tuple(value))
    if type(value) is torch.device:
        return DeviceValue(str(value))
    return None


def decode_value(value: objects.Special) -> Any:
    """Return torch's value for what `encode_value` gave; references stay as they are."""
    if isinstance(value, DTypeValue):
        return getattr(torch, value.name)
    if isinstance(value, SizeValue):
        return torch.Size(value.dims)
    if isinstance(value, DeviceValue):
        return torch.device(value.name)
    return value


def refuse(name: str, message: str, *, rank: int | None = None, rule: str = "P-STATE", **details: Any) -> StateError:
    """Return the error that names the key of what cannot be saved, and why."""
    return StateError(message, rule=rule, where=Where(tensor=name, rank=rank), **details)


def from_numpy(array: Any, name: str) -> Tensor:
    """Return a numpy array as a tensor of the same memory; raises StateError where torch cannot hold it."""
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as e:
        raise refuse(name, f"torch cannot hold this numpy array: {e}") from None


def dtype_name(t: Tensor, name: str) -> str:
    """Return the dtype's name; raises StateError for a tensor that is not plain strided memory of a known dtype."""
    if type(t) not in PLAIN:
        advice = "give the class __ckptspec_pieces__, see ckptspec.register_pieces"
        raise refuse(name, "a tensor subclass has no plain bytes", found=type(t).__name__, advice=advice)
    if t.layout is not torch.strided or t.is_meta or t.is_quantized or t.is_nested:
        kind = "a meta tensor" if t.is_meta else f"a {t.layout} tensor"
        raise refuse(name, f"{kind} holds no bytes that can be stored")
    dtype = _DTYPE_NAMES.get(t.dtype)
    if dtype is None:
        raise refuse(name, "this dtype cannot be stored", rule="T-DTYPE", found=str(t.dtype))
    return dtype


def role_of(name: str, t: Tensor, layout: str, role: str | None) -> str:
    """Return what a tensor is for: by its type, by the object that holds it, or by the first key of its path.

    Nothing is decided by it.
    """
    top = name.split("/", 1)[0]
    if isinstance(t, torch.nn.Parameter):
        return "parameter"
    if role is not None:
        return role
    if top in ("model", "module", "params"):
        return "parameter" if t.is_floating_point() else "buffer"
    if layout.startswith("flat:") or top in ("optimizer", "optim"):
        return "optimizer"
    return "rng" if top == "rng" else "other"

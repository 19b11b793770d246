"""Owns what each of torch's optimizers keeps of a parameter; knows nothing of optimizers that are not torch's."""

from __future__ import annotations

import torch

SCALARS = frozenset(("step", "mu_product", "eta", "mu"))  # numbers, whatever the parameter's shape
_ADAM = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_KEYS = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adafactor": ("step", "row_var", "col_var", "variance"),
    "Adagrad": ("step", "sum"),
    "Adam": _ADAM,
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "Muon": ("momentum_buffer",),
    "NAdam": (*_ADAM, "mu_product"),
    "RAdam": _ADAM,
    "RMSprop": ("step", "square_avg", "momentum_buffer", "grad_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SGD": ("momentum_buffer",),
    "SparseAdam": ("step", "exp_avg", "exp_avg_sq"),
}
_OF = {getattr(torch.optim, name): frozenset(keys) for name, keys in _KEYS.items() if hasattr(torch.optim, name)}


def keys_of(kind: type) -> frozenset[str] | None:
    """Return the keys that an optimizer of a class, or of one derived from torch's, keeps; None for any other class.

    One that has `step` among them fails at the next step without it.
    """
    return next((_OF[c] for c in kind.__mro__ if c in _OF), None)

"""Arguments that no save or load can have are refused before anything is written or waited for, each by its name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptspec

BOTH: list[dict[str, Any]] = [
    *({"silence": bad} for bad in (0, -1, math.nan, math.inf, True, "1", None)),
    *({"memory": bad} for bad in (0, -1, 1000, "1", 1e9, True)),
]
SAVE: list[dict[str, Any]] = [
    *({"step": bad} for bad in (-1, 1.5, True, 1 << 60, "1", None)),
    {"on_existing": "replace"},
    {"scope": "some"},
    {"scope": "partial"},
    {"exclude": ["a"]},
    {"exclude": [5], "scope": "partial"},
    {"ties": ["a"]},
    {"ties": {"a": 1}},
]
LOAD: list[dict[str, Any]] = [
    {"missing": "ignore"},
    {"unexpected": "keep"},
    *({name: bad} for name in ("only", "skip", "cast") for bad in (5, [5], iter(["a"]))),
    {"materialize": 5},
    {"private": "drop"},
]


def shown(bad: dict[str, Any]) -> str:
    return "-".join(f"{name}={value!r:.12}" for name, value in bad.items())


@pytest.mark.parametrize("bad", [*BOTH, *SAVE], ids=shown)
def test_a_save_that_no_run_can_want_is_refused(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(bad)) if bad != {"exclude": ["a"]} else "scope"):
        ckptspec.save(tmp_path, {"a": torch.ones(3)}, **{"step": 1, **bad})
    assert list(tmp_path.iterdir()) == []
    ckptspec.save(tmp_path, {"a": torch.ones(3)}, step=1)


@pytest.mark.parametrize("bad", [*BOTH, *LOAD], ids=shown)
def test_a_load_that_nobody_can_mean_is_refused(bad: dict[str, Any], tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"a": torch.ones(3)}, step=1)
    into = {"a": torch.zeros(3)}
    with pytest.raises(ValueError, match=next(iter(bad))):
        ckptspec.load(tmp_path, into=into, **bad)
    assert into["a"].eq(0).all()
    ckptspec.load(tmp_path, into=into)
    assert into["a"].eq(1).all()

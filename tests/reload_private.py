"""What is private to ranks, and names that only some have, on other numbers of ranks; for tests/test_reload.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from states import leaves
from torch import Tensor

import ckptspec
from ckptspec.errors import CkptspecError

SILENCE = 30
IGNORE: dict[str, Any] = {"unexpected": "ignore", "silence": SILENCE}
PRIVATE = {"seen", "part", "loader", "rng/python", "rng/numpy", "rng/torch"}
OLD = 3  # ranks of the checkpoints
State = dict[str, Any]


def whole(name: str, *shape: int) -> Tensor:
    """Values that name and shape decide."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))


@contextmanager
def refused(rank: int, culprit: int | None, rule: str, *texts: str) -> Iterator[None]:
    """Check that all ranks are refused by a rule: the culprit by its own error, the others are told; None: any."""
    with pytest.raises(CkptspecError) as caught:
        yield
    error = caught.value
    assert error.rule == rule, error
    assert all(text in str(error) for text in texts), error
    told = isinstance(error, ckptspec.LoadError)
    assert culprit is None or told == (culprit != rank), (rank, error)
    assert culprit is None or not told or error.rank == culprit, (rank, error)


class Loader:
    """An object whose state is a rank's own, and holds more once it has begun."""

    def __init__(self, n: int) -> None:
        self.state: State = {"at": n} if n < 0 else {"at": n, "order": torch.full((2 + n,), n)}

    def state_dict(self) -> State:
        return self.state

    def load_state_dict(self, state: State) -> None:
        self.state = state


def own(n: int, length: int) -> State:
    """A state with everything that can be private to a rank, of the values of rank `n`; -1 for nothing yet."""
    return {
        "w": whole("w", 5) if n >= 0 else torch.zeros(5),
        "seen": ckptspec.Local({"n": n, "at": (n, "x")}),
        "part": ckptspec.Local(torch.full((length,), float(n))),
        "loader": ckptspec.Local(Loader(n)),
        "rng": ckptspec.RNG(),
        "step": 7 if n >= 0 else 0,
    }


def seed(rank: int) -> None:
    torch.manual_seed(rank)
    random.seed(rank)


def drawn(rank: int) -> tuple[float, float]:
    """What generators give that were seeded for a rank."""
    with torch.random.fork_rng():
        torch.manual_seed(rank)
        return torch.rand(1).item(), random.Random(rank).random()


def save(rank: int, world: int, folder: Path) -> None:
    seed(rank)
    some = {"extra": whole("extra", 2), "stage1": {"n": 11}} if rank == 1 else {}
    ckptspec.save(folder / "own", {**own(rank, 3 + rank), **some}, step=1, plain="held", silence=SILENCE)


def load(rank: int, world: int, folder: Path) -> None:
    run = folder / "own"
    map_or_keep(rank, run)
    refuse(rank, run)
    names_of_some(rank, run)


def fresh(rank: int) -> State:
    """A state to load into: what is private has the shape that it had on this rank, if there was one."""
    return own(-1, 3 + rank if rank < OLD else 3)


def map_or_keep(rank: int, run: Path) -> None:
    """What the rank of the same number had is taken where there is one, or left as it is."""
    for private in ("map", "keep"):
        n, said = (rank, "mapped") if private == "map" and rank < OLD else (-1, "kept")
        seed(99)
        state = fresh(rank)
        result = ckptspec.load(run, into=state, private=private, **IGNORE)
        assert (torch.rand(1).item(), random.random()) == drawn(n if n >= 0 else 99)
        assert state["seen"].value == {"n": n, "at": (n, "x")}, state["seen"]
        assert state["part"].value.tolist() == [float(n)] * len(state["part"].value)
        assert leaves(state["loader"].value.state) == leaves(Loader(n).state)
        assert torch.equal(state["w"], whole("w", 5))
        assert state["step"] == 7
        found = {
            name if name.startswith("rng/") else name.partition("/")[0]: how for name, how in result.private.items()
        }
        assert found == dict.fromkeys(PRIVATE, said)
        assert result.unexpected == ("extra", "stage1")


def refuse(rank: int, run: Path) -> None:
    with refused(rank, None, "R-WORLD", "seen", f"expected {OLD} ranks", 'private="keep"'):
        ckptspec.load(run, into=fresh(rank), private="error", **IGNORE)
    with refused(rank, None, "R-WORLD", f"expected {OLD} ranks"):
        ckptspec.load(run, into=fresh(rank), exact=True, **IGNORE)
    skip = ["seen", "part", "loader", "rng"]
    state = fresh(rank)
    result = ckptspec.load(run, into=state, private="error", skip=skip, **IGNORE)
    assert not result.private
    assert set(skip) <= {n.partition("/")[0] for n in result.skipped}
    assert state["seen"].value["n"] == -1


def names_of_some(rank: int, run: Path) -> None:
    """What one rank alone had, what nobody wants, what one rank alone misses, and maps."""
    state = {**fresh(rank), "extra": torch.zeros(2), "stage1": None}
    ckptspec.load(run, into=state, silence=SILENCE)
    assert torch.equal(state["extra"], whole("extra", 2))
    assert state["stage1"] == {"n": 11}
    with refused(rank, None, "R-NAME", "unexpected in it: extra, stage1"):
        ckptspec.load(run, into=fresh(rank), silence=SILENCE)
    state = fresh(rank)
    del state["seen"]
    with refused(rank, None, "R-NAME", "unexpected in it: extra, seen, stage1"):
        ckptspec.load(run, into=state, silence=SILENCE)
    state = {**fresh(rank), **({"absent": torch.zeros(1)} if rank == 1 else {})}
    with refused(rank, 1, "R-NAME", "missing in the checkpoint: absent"):
        ckptspec.load(run, into=state, **IGNORE)
    result = ckptspec.load(run, into=state, missing="keep", **IGNORE)
    assert result.missing == (("absent",) if rank == 1 else ())
    with refused(rank, 0, "R-NAME", "leads to nothing", "nowhere"):
        ckptspec.load(run, into=fresh(rank), names={"w": "nowhere"} if rank == 0 else {}, **IGNORE)
    state = {"v": torch.zeros(5), "count": 0}
    result = ckptspec.load(run, into=state, names={"v": "w", "co*": "st*", "count": "step"}, **IGNORE)
    assert torch.equal(state["v"], whole("w", 5))
    assert state["count"] == 7
    assert dict(result.renamed) == {"v": "w", "count": "step"}

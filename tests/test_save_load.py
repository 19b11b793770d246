"""Save and load through the public API, alone and on real ranks: bit-equal, in place, refused where it does not fit."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forks import run_phases
from states import build, leaves

import ckptspec
from ckptspec.engine.saves import save as save_module


def round_trip(rank: int, world: int, folder: Path) -> None:
    """What each rank does: save a state, load it into one that holds nothing, and compare."""
    state = build(rank, world)
    manifest = ckptspec.save(folder, state, step=12)
    assert (manifest.world_size, len(manifest.shards)) == (world, world)
    fresh = build(rank, world, fill=False)
    assert leaves(fresh) != leaves(state)
    memory = fresh["model"]["bf16"].data_ptr()
    result = ckptspec.load(folder, into=fresh)
    assert (result.step, result.missing, result.unexpected) == (12, (), ())
    assert fresh["model"]["bf16"].data_ptr() == memory
    assert leaves(fresh) == leaves(state)
    assert list(fresh) == list(state)
    print("equal", rank)


Run = Callable[[int], tuple[Path, list[str]]]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run folder that this many ranks saved and loaded, for reading alone, and what each of them printed."""

    @cache
    def run(world: int) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp(f"ranks-{world}")
        return folder, run_phases("test_save_load", [("round_trip", world)], folder)["round_trip"]

    return run


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_ranks_save_and_load_bit_equal(world: int, run_of: Run) -> None:
    run, printed = run_of(world)
    assert [text.split()[-2:] for text in printed] == [["equal", str(rank)] for rank in range(world)]
    for level in ("shards", "bytes"):
        report = ckptspec.validate(run, level=level)
        assert report.ok, report.findings
        assert report.findings == ()


def test_one_rank_saves_and_loads_bit_equal(tmp_path: Path) -> None:
    state, fresh = build(0, 1), build(0, 1, fill=False)
    ckptspec.save(tmp_path, state, step=12)
    ckptspec.load(tmp_path, into=fresh)
    assert leaves(fresh) == leaves(state)
    assert ckptspec.validate(tmp_path, level="bytes").ok


def test_a_replicated_tensor_is_stored_once(run_of: Run) -> None:
    folder = Path(str(ckptspec.latest(run_of(3)[0])))
    payload = sum(f.stat().st_size for f in folder.glob("*.shard"))
    big = 8 << 20
    assert big < payload < big + 200_000
    sizes = sorted(f.stat().st_size for f in folder.glob("*.shard"))
    assert sizes[0] > big // 4  # cut among its holders, not stored whole by one


def test_every_dtype_and_memory_form_comes_back(tmp_path: Path) -> None:
    from ckptspec.format.dtypes import DTYPES

    state: dict[str, Any] = {}
    for name, kind in DTYPES.items():
        dtype = getattr(torch, name)
        raw = torch.arange(6 * 4 * kind.itemsize, dtype=torch.int64).remainder(2 if name == "bool" else 251)
        t = raw.to(torch.uint8).view(dtype).reshape(6, 4)
        state[name] = {"plain": t, "transposed": t.t(), "part": t[1:5, 1:3], "scalar": t[0, 0], "empty": t[:0]}
    state["expanded"] = torch.tensor([1.5]).expand(3, 4)
    state["conj"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    ckptspec.save(tmp_path, state, step=0)
    fresh = {
        k: {p: torch.empty(t.shape, dtype=t.dtype) for p, t in v.items()}
        if isinstance(v, dict)
        else torch.zeros_like(v)
        for k, v in state.items()
    }
    fresh["expanded"] = torch.zeros(3, 4)
    fresh["conj"] = torch.zeros(2, dtype=torch.complex64)
    ckptspec.load(tmp_path, into=fresh)
    state["conj"] = state["conj"].resolve_conj()
    assert leaves(fresh) == leaves(state)


def test_strided_destinations_are_filled_in_place(tmp_path: Path) -> None:
    source = torch.randn(700, 900)
    ckptspec.save(tmp_path, {"t": source}, step=0)
    base = torch.zeros(900, 700)
    ckptspec.load(tmp_path, into={"t": base.t()})
    assert torch.equal(base.t(), source)


def test_a_slice_stores_the_slice_alone(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"t": torch.zeros(1 << 22)[5:15]}, step=0)
    assert sum(f.stat().st_size for f in tmp_path.rglob("*.shard")) < 2000


def test_tied_weights_are_one_payload_and_untied_ones_are_two(tmp_path: Path) -> None:
    w = torch.randn(1000, 100)
    manifest = ckptspec.save(tmp_path / "tied", {"a": w, "b": {"c": w}}, step=0)
    assert manifest.aliases == {"b/c": "a"}
    assert manifest.nbytes < 500_000
    fresh = {"a": torch.zeros(1000, 100), "b": {"c": torch.zeros(1000, 100)}}
    ckptspec.load(tmp_path / "tied", into=fresh)
    assert torch.equal(fresh["a"], w)
    assert torch.equal(fresh["b"]["c"], w)
    ckptspec.save(tmp_path / "two", {"a": w, "b": {"c": w + 1}}, step=0)
    with pytest.raises(ckptspec.PlanError, match="share memory"):
        ckptspec.load(tmp_path / "two", into={"a": w, "b": {"c": w}})


def test_small_blocks_and_other_digests(tmp_path: Path) -> None:
    state = {"t": torch.randn(300_001), "s": torch.randn(3)}
    for digest in ("xxh3-128", "crc32c", "blake3", "sha256"):
        ckptspec.save(tmp_path / digest, state, step=0, digest=digest, block_size=65536)
        fresh = {"t": torch.zeros(300_001), "s": torch.zeros(3)}
        ckptspec.load(tmp_path / digest, into=fresh)
        assert leaves(fresh) == leaves(state)
        assert ckptspec.validate(tmp_path / digest, level="bytes").ok


# ---- refusals --------------------------------------------------------------------------------------------------------


def unsavable() -> list[tuple[Any, str]]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return [
        ({"a": {"b": {1, 2}}}, "a/b"),
        ({"a": [lambda: 0]}, "a/0"),
        ({"m": torch.empty(3, device="meta")}, "m"),
        ({"s": torch.eye(3).to_sparse()}, "s"),
        ({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, "q"),
        ({"t": {1: torch.ones(2), "1": torch.ones(2)}}, "t/1"),
        ({"t": {(1, 2): torch.ones(2)}}, "t"),
        ({"c": cycle, "t": torch.ones(1)}, "c"),
        ({"o": object()}, "o"),
        ({"a\nb": torch.ones(1)}, "a\nb"),
    ]


@pytest.mark.parametrize(("state", "path"), unsavable(), ids=[p.replace("\n", "") for _, p in unsavable()])
def test_what_cannot_be_saved_is_refused_by_its_path_before_anything_is_written(
    state: Any, path: str, tmp_path: Path
) -> None:
    with pytest.raises(ckptspec.SaveError) as e:
        ckptspec.save(tmp_path / "run", state, step=1)
    assert (e.value.where.tensor or "").startswith(path)
    assert not list(tmp_path.rglob("*.shard"))
    assert ckptspec.latest(tmp_path / "run") is None if (tmp_path / "run").exists() else True


def test_names_dtypes_and_shapes_must_agree(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"a": torch.ones(3), "b": torch.ones(4), "n": 1}, step=1)

    def refused(into: Any, *texts: str, **options: Any) -> None:
        with pytest.raises(ckptspec.PlanError) as e:
            ckptspec.load(tmp_path, into=into, **options)
        for text in texts:
            assert text in str(e.value)

    refused({"a": torch.zeros(3), "x": torch.zeros(4), "n": 0}, "missing in the checkpoint: x", "unexpected in it: b")
    refused({"a": torch.zeros(3), "b": torch.zeros(5), "n": 0}, "shapes differ", "b", "[4]", "[5]")
    refused({"a": torch.zeros(3), "b": torch.zeros(4).half(), "n": 0}, "dtypes differ", "float32", "float16")
    refused({"a": torch.zeros(3), "b": 5, "n": 0}, "different kinds", "b")
    refused({"a": torch.zeros(3), "b": ckptspec.Local(torch.zeros(4)), "n": 0}, "layouts differ")
    refused({"a": torch.zeros(1).expand(3), "b": torch.zeros(4), "n": 0}, "expanded")


def test_deviations_asked_for_are_made_and_listed(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"m": {"a": torch.ones(3), "b": torch.ones(4)}, "n": 1}, step=1)
    into = {"m": {"a": torch.zeros(3).double(), "x": torch.zeros(2)}, "n": 0}
    result = ckptspec.load(tmp_path, into=into, missing="keep", unexpected="ignore", cast=["m/a"])
    assert (result.missing, result.unexpected) == (("m/x",), ("m/b",))
    assert result.cast == {"m/a": ("float32", "float64")}
    assert torch.equal(into["m"]["a"], torch.ones(3).double())
    assert torch.equal(into["m"]["x"], torch.zeros(2))
    assert into["n"] == 1
    into = {"m": {"a": torch.zeros(3)}, "n": 0}
    result = ckptspec.load(tmp_path, into=into, only=["m"], skip=["m/b"])
    assert result.skipped == ("n", "m/b")
    assert into["n"] == 0


def test_another_world_size_is_refused_with_advice_when_exactness_is_asked_for(run_of: Run) -> None:
    with pytest.raises(ckptspec.PlanError, match="2 ranks") as e:
        ckptspec.load(run_of(2)[0], into=build(0, 1), exact=True)
    assert e.value.rule == "R-WORLD"
    assert e.value.advice


def test_a_step_is_saved_once_unless_it_is_the_same_save_or_supersedes(tmp_path: Path) -> None:
    first = ckptspec.save(tmp_path, {"a": torch.ones(1)}, step=5)
    assert ckptspec.save(tmp_path, {"a": torch.zeros(1)}, step=5).save_id == first.save_id
    into = {"a": torch.zeros(1)}
    ckptspec.load(tmp_path, into=into)
    assert into["a"].item() == 1
    ckptspec.save(tmp_path, {"a": torch.zeros(1)}, step=6)
    with pytest.raises(ckptspec.SaveError, match="already saved"):
        ckptspec.save(tmp_path, {"a": torch.zeros(1)}, step=5)
    second = ckptspec.save(tmp_path, {"a": torch.full((1,), 2.0)}, step=5, on_existing="supersede")
    assert second.save_id != first.save_id
    ckptspec.load(tmp_path / "step-00000005", into=into)
    assert into["a"].item() == 2


def tamper(which: str, state: dict[str, Any]) -> None:
    """Change what one rank saves."""
    change = {
        "tensor": {"b": torch.tensor([1.0, 5.0, 1.0])},
        "big": {"a": torch.cat([state["a"][:-1], torch.ones(1)])},
        "object": {"n": 1.0},
        "shape": {"b": torch.ones(4)},
        "bad": {"b": object()},
    }
    state.update(change.get(which, {}))
    if which == "missing":
        del state["b"]


# What rank 2 does otherwise, and what every rank is told.
DIFFERENCES = {
    "tensor": "'b' differs between ranks",
    "big": "'a' differs between ranks",
    "object": "'n' differs between ranks",
    "missing": "'b'",
    "shape": "'b'",
    "step": "ranks ask for different saves",
    "bad": "b",
    "folder": "does not see the staging folder",
}


# Nobody waits ten seconds for a folder that never comes.
QUICK = SimpleNamespace(monotonic=lambda: 20 * time.monotonic(), sleep=time.sleep)


def differ(rank: int, world: int, folder: Path) -> None:
    """What each rank does: the same save as the others, but rank 2 in each case asks for something else."""
    for which, text in DIFFERENCES.items():
        state = {"a": torch.arange(600_000.0), "b": torch.ones(3), "n": 1}
        run, step = folder / which, 1
        if rank == 2:
            tamper(which, state)
            run, step = (folder / "other" if which == "folder" else run), (2 if which == "step" else 1)
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(save_module, "time", QUICK)
                ckptspec.save(run, state, step=step, silence=20)
        except ckptspec.SaveError as error:
            print(which, error.rank, text in str(error) or repr(str(error)))
        else:
            print(which, "saved")


def test_ranks_that_disagree_are_named_on_every_rank_and_nothing_is_visible(tmp_path: Path) -> None:
    printed = run_phases("test_save_load", [("differ", 3)], tmp_path)["differ"]
    for rank, text in enumerate(printed):
        assert text.splitlines() == [f"{which} 2 True" for which in DIFFERENCES], (rank, text)
    for which in DIFFERENCES:
        assert ckptspec.latest(tmp_path / which) is None, which


def test_read_gives_full_tensors_without_a_template(run_of: Run) -> None:
    run, _ = run_of(3)
    state = build(0, 3)
    found = ckptspec.read(run)
    assert found["model/bf16"].dtype.name == "bfloat16"
    assert found["model/big"].tobytes() == state["model"]["big"].numpy().tobytes()
    assert found["model/tied"].tobytes() == found["model/bf16"].tobytes()
    assert found["optimizer/master"].shape == (1003,)
    assert [len(found["rng"][rank]) for rank in range(3)] == [16, 17, 18]
    part = ckptspec.read(run, ["model/big", "seen", "step"], slices={"model/big": [slice(100, 900_000)]})
    assert part["model/big"].tobytes() == state["model"]["big"][100:900_000].numpy().tobytes()
    assert part["step"] == 12
    assert part["seen"][2] == {"rank": 2, 7: (1, 1.0, True)}
    with pytest.raises(ckptspec.PlanError, match="model/bf16"):
        ckptspec.read(run, ["model/bf61"])


def test_damage_is_named_and_never_delivered_silently(tmp_path: Path) -> None:
    state = {"a": torch.randn(500_000), "b": torch.randn(1000)}
    ckptspec.save(tmp_path, state, step=1)
    (shard,) = tmp_path.rglob("*.shard")
    data = bytearray(shard.read_bytes())
    at = data.index(state["a"].numpy().tobytes()[1_500_000:1_500_016])
    data[at] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ckptspec.IntegrityError) as e:
        ckptspec.load(tmp_path, into={"a": torch.zeros(500_000), "b": torch.zeros(1000)})
    where = e.value.where
    assert (where.file, where.tensor) == (shard.name, "a")
    assert where.range is not None
    assert where.range[0] <= at < where.range[1]


def test_memory_budget_and_permissions_are_errors_not_tracebacks_of_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="budget"):
        ckptspec.save(tmp_path, {"a": torch.ones(1)}, step=1, memory=1000)
    for step in (-1, 1.5, True, 1 << 60):
        with pytest.raises(ValueError, match="step"):
            ckptspec.save(tmp_path, {"a": torch.ones(1)}, step=step)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("x")
    with pytest.raises((OSError, ckptspec.SaveError)):
        ckptspec.save(tmp_path / "file", {"a": torch.ones(1)}, step=1)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    "bad",
    [
        {"copies": 0},
        {"copies": "x"},
        {"block_size": 1},
        {"block_size": 0},
        {"digest": "md5"},
        {"run_id": "a\n"},
        {"annotations": {"org.x": 1.5}},
        {"annotations": {"org.x": float("nan")}},
        {"annotations": {"x": 1}},
        {"annotations": {"org.x": object()}},
        {"annotations": {"org.x": "\ud800"}},
    ],
    ids=lambda bad: f"{next(iter(bad))}-{type(next(iter(bad.values()))).__name__}",
)
def test_what_no_reader_would_accept_is_refused_before_anything_is_written(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((ckptspec.SaveError, ValueError)):
        ckptspec.save(tmp_path, {"a": torch.ones(3)}, step=1, **bad)
    assert list(tmp_path.iterdir()) == []


def test_supersede_writes_even_what_this_process_just_saved(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"a": torch.zeros(1)}, step=1)
    ckptspec.save(tmp_path, {"a": torch.ones(1)}, step=1, on_existing="supersede")
    into = {"a": torch.zeros(1)}
    ckptspec.load(tmp_path, into=into)
    assert into["a"].item() == 1


def test_a_damaged_save_is_not_taken_for_done(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"a": torch.zeros(1)}, step=1)
    (shard,) = tmp_path.rglob("*.shard")
    shard.write_bytes(shard.read_bytes()[:50])
    with pytest.raises(ckptspec.SaveError, match="already saved"):
        ckptspec.save(tmp_path, {"a": torch.zeros(1)}, step=1)
    ckptspec.save(tmp_path, {"a": torch.zeros(1)}, step=1, on_existing="supersede")
    assert ckptspec.validate(tmp_path, level="bytes").ok


def test_overlapping_destinations_are_refused_and_interleaved_ones_are_not(tmp_path: Path) -> None:
    a, b = torch.arange(18.0).reshape(3, 6), torch.full((2, 6), 7.0)
    ckptspec.save(tmp_path / "rows", {"a": a, "b": b}, step=1)
    base = torch.zeros(5, 6)
    for parts in ({"a": base[:3], "b": base[2:4]}, {"a": base[:3], "b": base[:2]}):
        with pytest.raises(ckptspec.PlanError, match="memory"):
            ckptspec.load(tmp_path / "rows", into=parts)
    ckptspec.load(tmp_path / "rows", into={"a": base[:3], "b": base[3:]})
    assert torch.equal(base, torch.cat([a, b]))
    ckptspec.save(tmp_path / "columns", {"a": a[:, :4], "b": a[:, 4:]}, step=1)
    wide = torch.zeros(3, 6)
    with pytest.raises(ckptspec.PlanError, match="memory"):
        ckptspec.load(tmp_path / "columns", into={"a": wide[:, :4], "b": wide[:, 3:5]})
    ckptspec.load(tmp_path / "columns", into={"a": wide[:, :4], "b": wide[:, 4:]})
    assert torch.equal(wide, a)


def test_values_of_a_tuple_at_the_root_cannot_be_replaced_and_that_is_said(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, (torch.ones(1), 2, [3]), step=1)
    with pytest.raises(ckptspec.PlanError, match="tuple"):
        ckptspec.load(tmp_path, into=(torch.zeros(1), 0, [0]))
    into = [torch.zeros(1), 0, [0]]
    ckptspec.load(tmp_path, into=into)
    assert into == [torch.ones(1), 2, [3]]


def test_aliases_are_read_once(tmp_path: Path) -> None:
    w = torch.ones(5)
    ckptspec.save(tmp_path, {"a": w, "b": w}, step=1)
    found = ckptspec.read(tmp_path)
    assert found["a"] is found["b"]

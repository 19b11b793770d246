"""Jobs go on with other numbers of ranks and in other layouts: every tensor bit by bit, and then the losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from forks import run_phases
from hypothesis import given
from hypothesis import strategies as st
from reload_cases import PARAMETERS, RELOADS, SAVED, Reload
from simulated import Ranks
from states import leaves
from torch import Tensor, nn

import ckptspec
from ckptspec.planner.renames import renames

WORLDS = sorted({world for world, _ in SAVED.values()})
# In the default run; the others are as good, and with the marker `long`.
SHORT = {
    "fsdp -> fsdp 2", "fsdp -> meta 3", "hsdp -> fsdp 3", "tensor -> fsdp 4", "tensor -> single 1", "ddp -> fsdp 2",
    "fsdp -> ddp 3", "ddp -> fsdp 3", "pipeline -> single 1", "experts -> experts 2", "zero -> zero 3",
    "zero -> single 1", "redundant -> redundant 2", "single -> fsdp 2", "single -> aligned 4",
}  # fmt: skip


ODD = [("odd_save", 3), ("odd_load_2", 2), ("odd_load_5", 5)]
Said = dict[str, list[str]]


def run(cases: list[Reload], folder: Path, more: Sequence[tuple[str, int]] = ()) -> Said:
    """Train and save every job the cases are about, then load them; what is compared is in reload_cases.reload."""
    sources = {case.source for case in cases}
    saves = sorted({SAVED[source][0] for source in sources}, reverse=True)
    loads = sorted({case.world for case in cases})
    phases = [*((f"save_{n}", n) for n in saves), *((f"load_{n}", n) for n in loads), *more]
    said = run_phases("reload_odds", phases, folder, [*sources], [case.name for case in cases], timeout=220)
    for n in loads:
        for text in said[f"load_{n}"]:
            assert [line for line in text.splitlines() if "->" in line] == [c.name for c in cases if c.world == n]
    return said


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """The folder of the runs, and what every rank printed."""
    folder = tmp_path_factory.mktemp("reload")
    return folder, run([case for case in RELOADS if case.name in SHORT], folder, ODD)


def test_jobs_go_on_in_other_layouts_and_numbers_of_ranks(ran: tuple[Path, Said]) -> None:
    wholes = {source: ckptspec.read(ran[0] / source) for source in SAVED if (ran[0] / source).exists()}
    for source, arrays in wholes.items():  # whoever trained it, and however it was cut, it is the same model
        for name in PARAMETERS if source != "experts" else ():
            numpy.testing.assert_allclose(
                arrays[f"model/{name}"], wholes["single"][f"model/{name}"], rtol=1e-3, atol=1e-6, err_msg=source
            )
        assert ckptspec.validate(ran[0] / source, level="bytes").ok


def test_deviations_refusals_damage_and_odd_shapes_on_fewer_and_more_ranks(ran: tuple[Path, Said]) -> None:
    for phase, world in ODD[1:]:  # what is compared is in reload_private and reload_odds
        assert [text.splitlines()[-1] for text in ran[1][phase]] == ["damaged"] * world


@pytest.mark.long
def test_jobs_go_on_in_more_of_them(tmp_path: Path) -> None:
    assert {case.name for case in RELOADS} >= SHORT
    run(list(RELOADS), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("dp", "tp"), [(3, 2), (2, 3)])
def test_every_placement_on_a_mesh_is_loaded_on_any_other(dp: int, tp: int, tmp_path: Path) -> None:
    meshes = [[1, 1], [2, 1], [1, 2], [3, 1], [2, 2], [4, 1], [5, 1], [1, 5], [2, 3], [3, 2]]
    phases = [("save", 6), *((f"load_{n}", n) for n in range(1, 7))]
    run_phases("reload_sweeps", phases, tmp_path, dp, tp, [0, 1, 4, 5, 7, 13], meshes, timeout=400)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def stages(rank: int, world: int, n: int) -> dict[str, Any]:
    """Eight pipeline stages, each with tensors and values of its own; every stage is on some ranks of any number."""
    stage = rank * 8 // world
    tensors = {f"{i}": torch.full((64,), float(n * (8 * i + stage))) for i in range(6)}
    return {f"stage{stage}": {"w": tensors, "count": n * stage, "notes": {"at": n}}, "norm": torch.full((3,), float(n))}


def test_values_of_other_ranks_are_looked_for_where_their_tensors_are(tmp_path: Path) -> None:
    def load(rank: int) -> None:
        into = stages(rank, 24, 0)
        ckptspec.load(tmp_path, into=into)
        assert leaves(into) == leaves(stages(rank, 24, 1))

    with pytest.MonkeyPatch.context() as patch:
        Ranks(64, patch).run(lambda rank: ckptspec.save(tmp_path, stages(rank, 64, 1), step=1) and None)
    with pytest.MonkeyPatch.context() as patch:
        found = Ranks(24, patch).run(load)
    # The nearest shard, one of the stage for its values, and those that store the tensors of a stage and of all.
    assert found["index_reads_of_a_rank"] <= 1 + 1 + 6 + 1


# ---- flat buffers and named tensors, in one process ------------------------------------------------------------------


def net(seed: int = 0, features: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, features), nn.Tanh(), nn.Linear(features, 1))


def buffers(model: nn.Module, seed: int, keys: tuple[str, ...]) -> dict[str, ckptspec.FlatShard]:
    """Flat buffers with a member for each parameter."""
    members, at = [], 0
    for name, p in model.named_parameters():
        members.append({"name": f"model/{name}", "offset": at, "shape": tuple(p.shape)})
        at += p.numel()
    g = torch.Generator().manual_seed(seed)
    return {
        k: ckptspec.FlatShard(torch.rand(at, generator=g), group="zero", offset=0, numel=at, members=members)
        for k in keys
    }


KEYS = ("master", "exp_avg", "exp_avg_sq")
STEP = {"optimizer/state/*/step": "adam_step"}


@pytest.fixture
def zero(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """The run and the state of a ZeRO job whose parameters are bf16."""
    model = net().bfloat16()
    state = {"model": model, "zero": buffers(model, 1, KEYS), "adam_step": torch.tensor(5.0)}
    ckptspec.save(tmp_path, state, step=1)
    return tmp_path, state


def named(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def member(state: dict[str, Any], key: str, number: int) -> Tensor:
    """A member of a flat buffer."""
    f = state["zero"][key]
    m = f.members[number]
    shape = torch.Size(m["shape"])
    return f.tensor[m["offset"] : m["offset"] + shape.numel()].view(shape)


def test_an_optimizer_takes_from_flat_buffers_what_it_keeps_of_a_parameter_and_no_more(zero: Any) -> None:
    run, state = zero
    model = net(2).bfloat16()
    into = named(model)
    options = {"names": STEP, "skip": ["optimizer/param_groups"], "cast": None}
    with pytest.raises(ckptspec.PlanError, match="unexpected in it: zero/master  "):
        ckptspec.load(run, into=into, **options)
    assert not into["optimizer"].state
    result = ckptspec.load(run, into=into, **options, unexpected="ignore")
    assert result.unexpected == ("zero/master",)
    for number, p in enumerate(model.parameters()):
        kept = into["optimizer"].state[p]
        assert list(kept) == ["exp_avg", "exp_avg_sq", "step"]  # a copy of a master would be stale after a step
        assert torch.equal(kept["exp_avg"], member(state, "exp_avg", number))
        assert kept["step"] == 5


def test_parameters_of_full_precision_come_from_the_master_copies_where_a_map_says_so(zero: Any) -> None:
    run, state = zero
    model = net(2)
    into = named(model)
    names = {**STEP, "model/*": "optimizer/state/*/master"}
    result = ckptspec.load(run, into=into, names=names, skip=["*/param_groups"], unexpected="ignore")
    for number, p in enumerate(model.parameters()):
        assert torch.equal(p, member(state, "master", number))
    assert set(result.unexpected) == {f"model/{n}" for n, _ in model.named_parameters()}
    assert result.renamed["model/0.weight"] == "optimizer/state/0.weight/master"


def test_what_counts_the_steps_must_be_told_unless_nothing_of_the_optimizer_is_loaded(zero: Any) -> None:
    run, _ = zero
    into = named(net(2).bfloat16())
    with pytest.raises(ckptspec.PlanError, match="no `step` for this parameter") as e:
        ckptspec.load(run, into=into, skip=["*/param_groups", "zero/master", "adam_step"])
    assert 'names={"optimizer/state/*/step": ...}' in str(e.value.advice)
    with pytest.raises(ckptspec.PlanError, match="cannot take a part of it"):
        ckptspec.load(run, into=into, names=STEP, skip=["*/param_groups", "*/exp_avg_sq"], unexpected="ignore")
    for options in ({"only": ["model"]}, {"skip": ["optimizer", "zero", "adam_step"]}):
        result = ckptspec.load(run, into=into, **options)
        assert not into["optimizer"].state
        assert {"zero/master", "zero/exp_avg", "adam_step"} <= set(result.skipped)


def test_what_is_left_of_a_flat_buffer_is_named_by_member_and_skipped_by_the_buffers_name(zero: Any) -> None:
    run, state = zero
    wanted = {"state": {"2.bias": {k: torch.zeros(1) for k in KEYS}}}
    into = {"optimizer": wanted}
    with pytest.raises(ckptspec.PlanError, match=r"zero/exp_avg: model/0.weight") as e:
        ckptspec.load(run, into=into, skip=["model", "adam_step"])
    assert "zero/exp_avg: model/2.bias" not in str(e.value)
    result = ckptspec.load(run, into=into, skip=["model", "adam_step", "zero"])
    assert {"zero/master", "zero/exp_avg", "zero/exp_avg_sq"} <= set(result.skipped)
    assert torch.equal(wanted["state"]["2.bias"]["exp_avg"], member(state, "exp_avg", 3))


def test_a_buffer_of_fewer_members_on_as_many_ranks_leaves_nothing_out_in_silence(zero: Any) -> None:
    run, state = zero
    small = nn.Sequential(nn.Linear(2, 3))
    into = {"zero": buffers(small, 3, KEYS)}
    with pytest.raises(ckptspec.PlanError, match=r"unexpected in it: zero/master: model/2.weight"):
        ckptspec.load(run, into=into, skip=["model", "adam_step"])
    ckptspec.load(run, into=into, skip=["model", "adam_step"], unexpected="ignore")
    assert torch.equal(member(into, "exp_avg", 1), member(state, "exp_avg", 1))


def test_two_members_of_one_buffer_do_not_go_to_one_memory(zero: Any) -> None:
    memory = torch.zeros(6)
    into = {"state": {"0.weight": {"exp_avg": memory.view(3, 2)}, "0.bias": {"exp_avg": memory[:3]}}}
    with pytest.raises(ckptspec.PlanError, match="two tensors share memory") as e:
        ckptspec.load(zero[0], into={"optimizer": into}, only=["optimizer"])
    assert e.value.rule == "Q-ALIAS"


def test_an_optimizer_under_another_name_is_all_found_by_a_map_and_its_groups_are_compared(tmp_path: Path) -> None:
    model = net()
    adam = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(4, 2)).sum().backward()
    adam.step()
    ckptspec.save(tmp_path, {"net": model, "opt": adam}, step=1)
    names = {"model/*": "net/*", "optimizer/*": "opt/*"}
    into = named(net(1))
    ckptspec.load(tmp_path, into=into, names=names)
    for a, b in zip(model.parameters(), into["model"].parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(adam.state[a]["exp_avg_sq"], into["optimizer"].state[b]["exp_avg_sq"])
    assert into["optimizer"].param_groups[0]["lr"] == 0.5
    other = net(1)
    two = torch.optim.AdamW([{"params": [p]} for p in other.parameters()])
    with pytest.raises(ckptspec.PlanError, match="another number of parameter groups"):
        ckptspec.load(tmp_path, into={"model": other, "optimizer": two}, names=names)
    assert not two.state


def test_a_map_of_some_values_leaves_the_others_where_they_are(tmp_path: Path) -> None:
    model = net()
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 2)).sum().backward()
    adam.step()
    ckptspec.save(tmp_path, {"model": model, "optimizer": adam, "steps": torch.tensor(9.0)}, step=1)
    into = named(net(1))
    ckptspec.load(tmp_path, into=into, names={"optimizer/state/0.bias/step": "steps"}, unexpected="ignore")
    first, second = list(into["model"].parameters())[:2]
    assert into["optimizer"].state[first]["step"] == 1
    assert into["optimizer"].state[second]["step"] == 9
    assert torch.equal(into["optimizer"].state[second]["exp_avg"], adam.state[model[0].bias]["exp_avg"])


def test_names_may_change_places(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"a": torch.ones(2), "b": torch.zeros(2), "n": 1, "m": {"x": 2}}, step=1)
    into = {"a": torch.full((2,), 5.0), "b": torch.full((2,), 5.0), "n": {"x": 0}, "m": 0}
    result = ckptspec.load(tmp_path, into=into, names={"a": "b", "b": "a", "n": "m", "m": "n"})
    assert (into["a"].tolist(), into["b"].tolist(), into["n"], into["m"]) == ([0, 0], [1, 1], {"x": 2}, 1)
    assert dict(result.renamed) == {"a": "b", "b": "a", "n": "m", "m": "n"}


TEXT = st.text("ab/", min_size=1, max_size=4)
PATTERN = st.tuples(st.text("ab/", max_size=2), st.text("ab/", max_size=2)).map("*".join)


@given(st.dictionaries(TEXT | PATTERN, TEXT, max_size=4), st.dictionaries(PATTERN, PATTERN, max_size=4), TEXT)
def test_a_map_read_backwards_gives_the_names_that_lead_there(
    one: dict[str, str], more: dict[str, str], name: str
) -> None:
    known = renames({**one, **more})
    stored = known.of(name)
    assert all(known.of(wanted) == stored for wanted in known.leading_to(stored))
    to_one = any("*" in wanted and "*" not in target for wanted, target in {**one, **more}.items())
    assert stored == name or to_one or name in set(known.leading_to(stored))

"""Models and optimizers that torch spreads over ranks come back in new processes; replicas may differ if told so."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import run_phases

import ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.format.layout import MeshLayout
from ckptspec.format.placement import resolve

Saved = tuple[Path, dict[str, list[str]]]  # the folder of the runs, and what ranks printed by phase


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("wrapped")
    return folder, run_phases("state_cases", [("save", 2), ("load", 2), ("few", 3), ("fail", 2)], folder)


def test_ddp_zero_and_fsdp2_go_on_in_new_processes_as_if_they_had_never_stopped(saved: Saved) -> None:
    folder, printed = saved
    for text in printed["load"]:  # what is compared is in state_cases.load
        assert text.splitlines()[-1] == "equal", text
    for run in ("run", "one", "local"):
        assert ckptspec.validate(folder / run, level="bytes").findings == ()


def test_replicas_that_differ_are_refused_with_both_ways_out(saved: Saved) -> None:
    folder, printed = saved
    for text in printed["save"]:
        assert "'ddp/1.running_mean' differs between ranks" in text
        assert "[P-REPLICA]" in text
        assert "ckptspec.Local(x)" in text
        assert "ckptspec.Replicated(x, source=0)" in text
    assert ckptspec.latest(folder / "plain") is None


def test_what_one_rank_holds_for_all_is_stored_once_by_that_rank(saved: Saved) -> None:
    for run, source in (("run", 0), ("one", 1)):
        m = load_manifest(saved[0] / run)[1]
        entry = m.tensors["ddp/1.running_var"]
        assert resolve(m.layouts[entry.layout], m.meshes).ranks() == (source,)
        assert entry.role == "buffer"
    parameter = m.tensors["ddp/0.weight"]  # the names have no `module.`
    assert resolve(m.layouts[parameter.layout], m.meshes).ranks() == (0, 1)


def test_the_state_of_zero_is_stored_by_its_owner_under_the_parameters_name(saved: Saved) -> None:
    m = load_manifest(saved[0] / "run")[1]
    owners = {}
    for part in ("0", "1", "2"):
        for kind in ("weight", "bias"):
            layouts = {m.tensors[f"zero/state/{part}.{kind}/{k}"].layout for k in ("step", "exp_avg", "max_exp_avg_sq")}
            (layout,) = (m.layouts[name] for name in layouts)
            assert isinstance(layout, MeshLayout)
            (owners[part, kind],) = resolve(layout, m.meshes).ranks()
    assert set(owners.values()) == {0, 1}
    assert m.objects["zero/param_groups"] == "same"
    assert m.tensors["adam/state/0.weight/exp_avg"].layout == m.tensors["sharded/0.weight"].layout


def test_a_rank_without_any_state_of_zero_is_no_fault(saved: Saved) -> None:
    counts = [text.splitlines()[-1] for text in saved[1]["few"]]
    assert [c.split()[0] for c in counts] == ["1", "1", "0"]
    assert counts[0] == f"1 {[(0,)] * 3 + [(1,)] * 3}"
    assert ckptspec.validate(saved[0] / "few", level="bytes").findings == ()


def test_when_one_rank_fails_on_the_way_all_say_that_the_state_is_undefined(saved: Saved) -> None:
    zero, one = saved[1]["fail"]
    assert one.splitlines()[-1] == "IntegrityError None True rng/torch"
    assert zero.splitlines()[-1] == "LoadError 1 True rng/torch"

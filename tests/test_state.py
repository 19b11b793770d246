"""What may stand in a state and what is refused, object by object; every deviation asked for is made and listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

import ckptspec
from ckptspec.engine.documents import load_manifest
from ckptspec.pytorch.adapters.optimizers import device_rule


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()


# ---- modules ---------------------------------------------------------------------------------------------------------


def test_a_module_is_saved_by_name_and_role_and_filled_in_place(tmp_path: Path) -> None:
    model = net()
    m = ckptspec.save(tmp_path, {"model": model}, step=1)
    assert m.tensors["model/0.weight"].role == "parameter"
    assert m.tensors["model/1.running_mean"].role == "buffer"
    fresh = net()
    with torch.no_grad():
        fresh[0].weight.zero_()
    memory = fresh[0].weight.data_ptr()
    ckptspec.load(tmp_path, into={"model": fresh})
    assert fresh[0].weight.data_ptr() == memory
    assert torch.equal(fresh[0].weight, model[0].weight)


def test_what_wrappers_add_to_names_is_left_out(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.DataParallel(nn.Linear(2, 2))  # a module called `module`, and a wrapper inside it

    model = Inner()
    optimizer = torch.optim.SGD(nn.DataParallel(model).parameters(), lr=0.1, momentum=0.9)
    sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    m = ckptspec.save(tmp_path, {"model": nn.DataParallel(model), "optimizer": optimizer}, step=1)
    assert set(m.tensors) == {
        "model/module.weight",
        "model/module.bias",
        "optimizer/state/module.weight/momentum_buffer",
        "optimizer/state/module.bias/momentum_buffer",
    }


def test_a_compiled_model_and_a_bare_one_have_the_same_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2), backend="eager"))
    m = ckptspec.save(tmp_path, {"model": torch.compile(model, backend="eager")}, step=1)
    assert set(m.tensors) == {"model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias"}
    bare = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ckptspec.load(tmp_path, into={"model": bare})
    assert torch.equal(bare[1].weight, model[1].weight)


def test_fsdp1_is_refused_wherever_it_is_for_its_state_takes_collectives(tmp_path: Path) -> None:
    unmade = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # it cannot be made without an accelerator
    nn.Module.__init__(unmade)
    with pytest.raises(ckptspec.StateError, match="FullyShardedDataParallel") as e:
        ckptspec.save(tmp_path, {"model": {"part": nn.Sequential(nn.Linear(1, 1), unmade)}}, step=1)
    assert e.value.where.tensor == "model/part/1"


class Extra(nn.Linear):
    """A module with extra state and a hook that stores a derived copy under a name of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls: list[Any] = []
        self.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({prefix + "twice": 2 * self.weight.detach()})
        )
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: self.calls.append(state.pop(prefix + "twice"))
        )

    def get_extra_state(self) -> Any:
        return {"scales": [torch.full((3,), 2.0)] * len(self.calls), "n": 7}

    def set_extra_state(self, state: Any) -> None:
        self.calls.append(state)


def test_extra_state_and_derived_entries_go_through_load_state_dict(tmp_path: Path) -> None:
    model = Extra()
    model.calls = [None]
    ckptspec.save(tmp_path, {"model": model}, step=1)
    fresh = Extra()
    ckptspec.load(tmp_path, into={"model": fresh})
    twice, extra = fresh.calls
    assert torch.equal(twice, 2 * model.weight)
    assert extra["n"] == 7
    assert [t.tolist() for t in extra["scales"]] == [[2.0, 2.0, 2.0]]


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_optimizer_state_goes_by_the_name_of_its_parameter_whatever_the_order(tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module, *, reverse: bool) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        groups = [parameters[:2], parameters[2:]]
        return torch.optim.Adam(
            [{"params": g[::-1] if reverse else g, "lr": 0.1 * (i + 1)} for i, g in enumerate(groups)]
        )

    model = net()
    optimizer = optimizer_of(model, reverse=False)
    step(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.7
    m = ckptspec.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    assert m.tensors["optimizer/state/2.weight/exp_avg"].role == "optimizer"
    assert m.tensors["optimizer/state/2.weight/step"].shape == ()
    fresh = net()
    second = optimizer_of(fresh, reverse=True)
    ckptspec.load(tmp_path, into={"model": fresh, "optimizer": second})
    for a, b in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["exp_avg"], second.state[b]["exp_avg"])
        assert second.state[b]["exp_avg"].data_ptr() != optimizer.state[a]["exp_avg"].data_ptr()
    assert [g["lr"] for g in second.param_groups] == [0.1, 0.7]
    assert second.param_groups[0]["params"][0] is list(fresh.parameters())[1]


def test_frozen_and_never_stepped_parameters_are_explicit(tmp_path: Path) -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2), "frozen": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    m = ckptspec.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    assert m.omitted == {
        f"optimizer/state/{part}.{name}": why
        for part, why in (("unused", "never_stepped"), ("frozen", "frozen"))
        for name in ("weight", "bias")
    }
    second = torch.optim.Adam(model.parameters())
    ckptspec.load(tmp_path, into={"model": model, "optimizer": second})
    assert set(second.state) == set(model["used"].parameters())
    sum(p.sum() for p in model["unused"].parameters()).backward()
    second.step()
    with pytest.raises(ckptspec.PlanError, match=r"state/unused.weight was omitted as never_stepped"):
        ckptspec.load(tmp_path, into={"model": model, "optimizer": second})
    before = second.state[model["unused"].weight]["exp_avg"].clone()
    result = ckptspec.load(tmp_path, into={"model": model, "optimizer": second}, missing="keep")
    assert "optimizer/state/unused.weight/exp_avg" in result.missing
    assert torch.equal(second.state[model["unused"].weight]["exp_avg"], before)


def test_an_optimizer_that_never_stepped_restores_to_no_state(tmp_path: Path) -> None:
    model = net()
    ckptspec.save(tmp_path, {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.5)}, step=1)
    second = torch.optim.Adam(model.parameters())
    ckptspec.load(tmp_path, into={"model": model, "optimizer": second})
    assert not second.state
    assert second.param_groups[0]["lr"] == 0.5
    step(model, second)
    with pytest.raises(ckptspec.PlanError, match="never_stepped"):
        ckptspec.load(tmp_path, into={"model": model, "optimizer": second})
    ckptspec.load(tmp_path, into={"model": model, "optimizer": second}, missing="keep")
    assert len(second.state) == 6


def test_new_state_lives_where_torch_would_put_it() -> None:
    p = nn.Parameter(torch.empty(3, device="meta"))  # stands for a device that is not the CPU
    plain, on_device = device_rule(p, {"lr": 0.1}), device_rule(p, {"fused": None, "capturable": True})
    assert (plain("o/state/w/step").type, on_device("o/state/w/step").type) == ("cpu", "meta")
    assert plain("o/state/w/exp_avg").type == "meta"


def test_parameters_without_a_name_are_refused_with_the_way_out(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ckptspec.StateError, match="in no module of the state") as e:
        ckptspec.save(tmp_path, {"model": dict(model.state_dict()), "optimizer": optimizer}, step=1)
    assert e.value.where.tensor == "optimizer"
    assert "put the module itself in the state" in str(e.value.advice)
    weight = nn.Parameter(torch.ones(3))
    alone = torch.optim.Adagrad([weight])
    m = ckptspec.save(tmp_path, {"weights": [weight], "optimizer": alone}, step=1)  # a tensor of the state has a name
    assert "optimizer/state/weights~10/sum" in m.tensors


def test_two_modules_with_equal_names_are_told_apart_by_their_place(tmp_path: Path) -> None:
    def make() -> tuple[dict[str, Any], torch.optim.Optimizer]:
        torch.manual_seed(1)
        parts = {"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}
        optimizer = torch.optim.Adagrad([p for m in parts.values() for p in m.parameters()])
        return {**parts, "optimizer": optimizer}, optimizer

    state, optimizer = make()
    sum(p.sum() for p in state["critic"].parameters()).backward()
    optimizer.step()
    m = ckptspec.save(tmp_path, state, step=1)
    assert "optimizer/state/critic.weight/sum" in m.tensors
    into, second = make()
    ckptspec.load(tmp_path, into=into)
    assert second.state[into["critic"].weight]["sum"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert second.state[into["generator"].weight]["sum"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_groups_that_hold_other_parameters_are_refused_unless_that_is_asked_for(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    step(model, optimizer)
    ckptspec.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    fewer = torch.optim.Adam(list(model.parameters())[:4])
    into = {"model": model, "optimizer": fewer}
    with pytest.raises(ckptspec.PlanError, match=r"unexpected in it: .*2.weight"):
        ckptspec.load(tmp_path, into=into)
    with pytest.raises(ckptspec.PlanError, match="holds other parameters"):
        ckptspec.load(tmp_path, into=into, skip=["optimizer/state/2.*"])
    result = ckptspec.load(tmp_path, into=into, unexpected="ignore")
    assert "optimizer/param_groups/0/params/2.weight" in result.unexpected
    assert len(fewer.state) == 4
    assert fewer.param_groups[0]["lr"] == 0.5
    two = torch.optim.Adam([{"params": [p]} for p in model.parameters()])
    with pytest.raises(ckptspec.PlanError, match="another number of parameter groups"):
        ckptspec.load(tmp_path, into={"model": model, "optimizer": two})
    ckptspec.load(tmp_path, into={"model": model, "optimizer": two}, skip=["optimizer/param_groups"])
    assert len(two.state) == 6
    assert two.param_groups[0]["lr"] == 1e-3


def test_a_part_of_the_state_of_a_parameter_is_refused_where_there_is_none_to_keep(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    ckptspec.save(tmp_path, {"model": model, "optimizer": optimizer}, step=1)
    fresh = torch.optim.Adam(model.parameters())
    with pytest.raises(ckptspec.PlanError, match="cannot take a part of it"):
        ckptspec.load(tmp_path, into={"model": model, "optimizer": fresh}, skip=["*/exp_avg"])
    result = ckptspec.load(tmp_path, into={"model": model, "optimizer": fresh}, skip=["optimizer/state/0.*"])
    assert model[0].weight not in fresh.state
    assert len(fresh.state) == 4
    assert "optimizer/state/0.weight/exp_avg" in result.skipped


# ---- other objects ---------------------------------------------------------------------------------------------------


class Loader:
    """Data in an order of its own; what its state holds depends on where it is."""

    def __init__(self, *, begun: bool, log: list[str] | None = None) -> None:
        self.state: Any = {"order": torch.arange(5), "at": (3, 1.0)} if begun else {"order": None, "at": None}
        self.log = log if log is not None else []

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.log.append("loader")
        self.state = state


class Watcher(nn.Linear):
    def __init__(self, log: list[str]) -> None:
        super().__init__(2, 2)
        self.register_load_state_dict_post_hook(lambda *_: log.append(f"model {self.bias[0].item()}"))


def test_an_object_gets_the_state_that_was_saved_in_its_own_shape_after_the_modules(tmp_path: Path) -> None:
    log: list[str] = []
    model = Watcher([])
    nn.init.ones_(model.bias)
    ckptspec.save(
        tmp_path, {"loader": ckptspec.Local(Loader(begun=True)), "model": model, "rng": ckptspec.RNG()}, step=1
    )
    expected = torch.rand(1)
    fresh = Loader(begun=False, log=log)
    into = {"loader": ckptspec.Local(fresh), "model": Watcher(log), "rng": ckptspec.RNG()}
    ckptspec.load(tmp_path, into=into)
    assert log == ["model 1.0", "loader"]
    assert into["loader"].value is fresh
    assert fresh.state["order"].tolist() == [0, 1, 2, 3, 4]
    assert fresh.state["at"] == (3, 1.0)
    assert torch.equal(torch.rand(1), expected)
    assert load_manifest(tmp_path)[1].objects["loader/at"] == "rank"


def test_an_object_is_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"loader": Loader(begun=True)}, step=1)
    fresh = Loader(begun=False)
    with pytest.raises(ckptspec.PlanError, match="whole or not at all"):
        ckptspec.load(tmp_path, into={"loader": fresh}, skip=["loader/at"])
    ckptspec.load(tmp_path, into={"loader": fresh}, skip=["loader"])
    assert (fresh.log, fresh.state["at"]) == ([], None)


def test_code_in_a_state_is_refused_by_its_place(tmp_path: Path) -> None:
    loader = Loader(begun=True)
    loader.state["key"] = lambda x: x
    with pytest.raises(ckptspec.StateError, match="code is never stored") as e:
        ckptspec.save(tmp_path, {"loader": loader}, step=1)
    assert e.value.where.tensor == "loader/key"


# ---- tensor subclasses -----------------------------------------------------------------------------------------------


class Scaled(Tensor):
    """int8 values times one scale."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, zero: int) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Tensor, scale: Tensor, zero: int) -> None:
        self.values, self.scale, self.zero = values, scale, zero

    def __ckptspec_pieces__(self) -> Any:
        return {"values": self.values, "scale": self.scale}, {"zero": self.zero}, "tests.scaled"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].scale, args[0].zero)
        raise NotImplementedError(func)


def scaled(n: int, zero: int = 3) -> Scaled:
    return Scaled(torch.full((4,), n, dtype=torch.int8), torch.tensor(0.5), zero)


def test_a_subclass_is_filled_in_place_by_its_pieces_or_built_by_a_registered_constructor(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"w": scaled(7), "list": [scaled(1)]}, step=1)
    into = {"w": scaled(0), "list": [scaled(0, zero=9)]}
    first, inner = into["w"], into["w"].values
    with pytest.raises(ckptspec.PlanError, match="no constructor is registered") as e:
        ckptspec.load(tmp_path, into=into)
    assert e.value.rule == "Q-NOCODE"
    ckptspec.register_pieces("tests.scaled", lambda pieces, metadata: Scaled(**pieces, **metadata))
    ckptspec.load(tmp_path, into=into)
    assert into["w"] is first
    assert inner.tolist() == [7, 7, 7, 7]
    assert (into["list"][0].zero, into["list"][0].values.tolist()) == (3, [1, 1, 1, 1])


def test_a_subclass_without_pieces_and_a_dict_that_looks_like_pieces_are_refused(tmp_path: Path) -> None:
    class Plain(Tensor):
        pass

    with pytest.raises(ckptspec.StateError, match="no plain bytes") as e:
        ckptspec.save(tmp_path, {"w": torch.ones(2).as_subclass(Plain)}, step=1)
    assert "__ckptspec_pieces__" in str(e.value.advice)
    with pytest.raises(ckptspec.StateError, match="reserved"):
        ckptspec.save(tmp_path, {"w": {"ckptspec.pieces": "os.system", "t": torch.ones(1)}}, step=1)


# ---- meta tensors, partial saves, what is left of a failed load ------------------------------------------------------


def test_meta_tensors_are_named_or_given_memory_on_request(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    ckptspec.save(tmp_path, {"model": model, "optimizer": optimizer, "t": torch.ones(3)}, step=1)
    with torch.device("meta"):
        fresh = net()
        into = {"model": fresh, "optimizer": torch.optim.Adam(fresh.parameters()), "t": torch.zeros(3)}
    with pytest.raises(ckptspec.PlanError, match=r"model/0.weight, model/0.bias.*, t") as e:
        ckptspec.load(tmp_path, into=into)
    assert "materialize=" in str(e.value.advice)
    made: list[Tensor] = []
    result = ckptspec.load(
        tmp_path, into=into, materialize=lambda t: made.append(t) or torch.empty_like(t, device="cpu")
    )
    assert len(made) == len(result.materialized) == 10
    assert isinstance(fresh[0].weight, nn.Parameter)
    assert into["t"].tolist() == [1.0, 1.0, 1.0]
    for a, b in zip(model.state_dict().values(), fresh.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert into["optimizer"].state[fresh[2].bias]["exp_avg"].device.type == "cpu"
    step(fresh, into["optimizer"])  # the optimizer still has the module's own parameters
    with torch.device("meta"):
        other = {"t": torch.zeros(3), "x": torch.zeros(1)}
    with pytest.raises(ckptspec.PlanError, match="not in the checkpoint: x"):
        ckptspec.load(tmp_path, into=other, materialize="cpu", missing="keep", only=["t", "x"])
    ckptspec.load(tmp_path, into=other, materialize="cpu", only=["t"])
    assert (other["t"].is_meta, other["x"].is_meta) == (False, True)


def test_a_partial_save_records_what_it_leaves_out(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "big": {"cache": torch.ones(9)}, "n": 1}
    m = ckptspec.save(tmp_path, state, step=1, scope="partial", exclude=["optimizer", "big/*", "model/1.running_*"])
    assert m.omitted == dict.fromkeys(
        ["optimizer", "big/cache", "model/1.running_mean", "model/1.running_var"], "excluded"
    )
    assert not any(name.startswith("optimizer") for name in (*m.tensors, *m.objects))
    assert ckptspec.validate(tmp_path, level="bytes").findings == ()
    with pytest.raises(ckptspec.PlanError, match=r"optimizer was omitted as excluded"):
        ckptspec.load(tmp_path, into=state)
    mean = model[1].running_mean.clone()
    result = ckptspec.load(tmp_path, into=state, missing="keep")
    assert "model/1.running_mean" in result.missing
    assert torch.equal(model[1].running_mean, mean)
    for options in ({"scope": "partial"}, {"exclude": ["a"]}, {"scope": "some"}):
        with pytest.raises(ValueError, match="scope"):
            ckptspec.save(tmp_path, state, step=2, **options)
    with pytest.raises(ckptspec.StateError, match="part of a list"):
        ckptspec.save(tmp_path, {"l": [torch.ones(1)] * 2}, step=2, scope="partial", exclude=["l/0"])


def test_casts_reach_into_modules_and_are_listed(tmp_path: Path) -> None:
    model = net()
    ckptspec.save(tmp_path, {"model": model}, step=1)
    fresh = net().bfloat16()
    with pytest.raises(ckptspec.PlanError, match="dtypes differ"):
        ckptspec.load(tmp_path, into={"model": fresh})
    result = ckptspec.load(tmp_path, into={"model": fresh}, cast=["model/*"])
    assert result.cast is not None
    assert result.cast["model/0.weight"] == ("float32", "bfloat16")
    assert torch.equal(fresh[0].weight, model[0].weight.bfloat16())


def test_a_load_that_fails_on_the_way_says_that_the_state_is_undefined(tmp_path: Path) -> None:
    ckptspec.save(tmp_path, {"a": torch.randn(1000)}, step=1)
    with pytest.raises(ckptspec.PlanError) as before:
        ckptspec.load(tmp_path, into={"a": torch.zeros(999)})
    assert "undefined" not in str(before.value)
    (shard,) = tmp_path.rglob("*.shard")
    data = bytearray(shard.read_bytes())
    data[1500] ^= 1
    shard.write_bytes(data)
    with pytest.raises(ckptspec.IntegrityError, match="is now undefined"):
        ckptspec.load(tmp_path, into={"a": torch.zeros(1000)})

"""States that no optimizer of commopt has saved: continued where they are of the same family, refused with a sentence
where they are not; and a model that is cast between the steps of a base of torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim
from worlds import on_threads, params_of, same_bits, seeded

import commopt
from commopt import CSER, DiLoCo, Lamb, Lans, LocalSGD, OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from commopt.comm import LocalBackend


def net() -> nn.Module:
    with seeded():
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3, dtype=next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()


def saved_by(make: Any, steps: int = 2, **settings: Any) -> dict[str, Any]:
    model = net()
    optimizer = make(model.parameters(), lr=0.1, **settings)
    train(model, optimizer, steps)
    state: dict[str, Any] = optimizer.state_dict()
    return state


def spoilt(state: dict[str, Any], *path: Any, value: Any = None) -> dict[str, Any]:
    """``state`` with what is at ``path`` exchanged for ``value``, or deleted."""
    place: Any = state
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return state


@pytest.mark.parametrize("make", [OneBitAdam, OneBitLamb, ZeroOneAdam, Lans])
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("state", 1, "exp_avg"), "x", "parameter 1: exp_avg in the loaded state is 'x', not a tensor"),
        (("state", 1, "exp_avg_sq"), None, "its parameter 1 has no 'exp_avg_sq'"),
        (("state", 1), 3, "that of parameter 1 is 3, not a dict"),
        (("state",), [1], "'state' a dict"),
        (("param_groups",), 3, "'param_groups' must be a list of dicts"),
        (("param_groups", 0, "params"), None, "must be a list of dicts with 'params'"),
        (("state", 1, 3), torch.ones(2), "that of parameter 1 has the key 3, not a name"),
        (("residuals",), {"rank": 0}, "its 'residuals' have only 'rank'"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(make: Any, path: Any, value: Any, message: str) -> None:
    model = net()
    optimizer = make(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    before = params_of(model), str(optimizer.state_dict())
    if make is Lans and path == ("residuals",):
        return  # it has none
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(spoilt(copy.deepcopy(optimizer.state_dict()), *path, value=value))
    assert same_bits(params_of(model), before[0])
    assert str(optimizer.state_dict()) == before[1]


@pytest.mark.parametrize("value", ["7", -3, 2.5, float("nan"), True, [1], torch.ones(2)])
@pytest.mark.parametrize(
    ("make", "name"),
    [(OneBitAdam, "step"), (ZeroOneAdam, "step"), (CSER, "step"), (LocalSGD, "rounds"), (LocalSGD, "round_step")],
)
def test_a_number_of_steps_or_rounds_that_is_none_is_refused_and_changes_nothing(
    make: Any, name: str, value: Any
) -> None:
    model = net()
    optimizer = make(model.parameters(), lr=0.1)
    train(model, optimizer, 2)
    before = params_of(model), str(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"{name} of parameter group 0 in the loaded state must be an int >= 0, got"):
        optimizer.load_state_dict(spoilt(copy.deepcopy(optimizer.state_dict()), "param_groups", 0, name, value=value))
    assert same_bits(params_of(model), before[0])
    assert str(optimizer.state_dict()) == before[1]


def test_a_group_of_rounds_that_has_lost_its_step_is_no_group_of_the_base() -> None:
    model = net()
    optimizer = LocalSGD(model.parameters(), lr=0.1, period=4)
    train(model, optimizer, 6)
    state, before = copy.deepcopy(optimizer.state_dict()), params_of(model)
    optimizer.load_state_dict(spoilt(state, "param_groups", 0, "round_step"))
    assert same_bits(params_of(model), before)
    assert (optimizer.param_groups[0]["round_step"], optimizer.param_groups[0]["rounds"]) == (2, 1)  # its own
    train(model, optimizer, 1)


def test_muon_loads_its_own_and_refuses_others() -> None:
    def made(cls: Any, rows: int = 4) -> Any:
        with seeded():
            p = nn.Parameter(torch.randn(rows, 3))
        optimizer = cls([p], lr=0.1)
        p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    ours = made(commopt.Muon)
    before = str(ours.state_dict())
    for state, message in (
        (made(optim.AdamW).state_dict(), "has no 'momentum'"),
        (made(commopt.Muon, 5).state_dict(), r"momentum_buffer in the loaded state has shape \(5, 3\)"),
        (spoilt(made(commopt.Muon).state_dict(), "state", 0, "momentum_buffer", value="x"), "is 'x', not a tensor"),
        ({"step": 3}, "takes what state_dict"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.load_state_dict(state)
        assert str(ours.state_dict()) == before
    if hasattr(optim, "Muon"):
        theirs = made(optim.Muon)
        ours.load_state_dict(theirs.state_dict())
        assert torch.equal(*(next(iter(o.state.values()))["momentum_buffer"] for o in (ours, theirs)))


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (OneBitAdam, lambda: saved_by(optim.SGD), "its parameter group 0 has no 'betas'"),
        (OneBitAdam, lambda: saved_by(optim.SGD, 0), "its parameter group 0 has no 'betas'"),
        (OneBitAdam, lambda: saved_by(optim.RMSprop), "its parameter group 0 has no 'betas'"),
        (OneBitAdam, lambda: saved_by(optim.Adamax), "its parameter 0 has no 'exp_avg_sq'"),
        (OneBitLion, lambda: saved_by(optim.Adam), "its parameter 0 has 'exp_avg_sq'"),
        (CSER, lambda: saved_by(optim.AdamW), "its parameter group 0 has no 'momentum'"),
        (CSER, lambda: saved_by(optim.RMSprop, momentum=0.9), "its parameter group 0 has no 'nesterov'"),
        (DiLoCo, lambda: saved_by(optim.SGD, momentum=0.9), "its parameter group 0 has no 'betas'"),
        (DiLoCo, lambda: saved_by(optim.Adamax), "its parameter 0 has no 'exp_avg_sq'"),
        (OneBitAdam, lambda: {"model": 1, "step": 2}, "got a dict with 'model', 'step'; of a checkpoint of several"),
        (OneBitAdam, lambda: None, "'state' and 'param_groups', got None"),
        (OneBitAdam, lambda: {"rank": 0, "world_size": 2, "layout": 3, "state": {}}, r"give it what join_state_dict\("),
    ],
)
def test_a_state_of_another_family_is_refused_and_changes_nothing(make: Any, state: Any, message: str) -> None:
    model = net()
    optimizer = make(model.parameters(), lr=0.5)
    train(model, optimizer, 1)
    before = params_of(model), str(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state())
    assert same_bits(before[0], params_of(model))
    assert str(optimizer.state_dict()) == before[1]


@pytest.mark.parametrize(
    ("make", "state", "name"),
    [
        (OneBitAdam, lambda: saved_by(optim.AdamW), "exp_avg_sq"),
        (OneBitAdam, lambda: saved_by(optim.Adam, amsgrad=True), "exp_avg_sq"),
        (lambda p, lr: CSER(p, lr=lr, momentum=0.9), lambda: saved_by(optim.SGD, momentum=0.9), "momentum_buffer"),
    ],
)
def test_a_state_of_the_same_family_is_continued(make: Any, state: Any, name: str) -> None:
    given = state()
    model = net()
    optimizer = make(model.parameters(), lr=0.5)
    optimizer.load_state_dict(given)
    for i, p in enumerate(model.parameters()):
        assert torch.equal(optimizer.state[p][name], given["state"][i][name])
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_outer_step_loads_what_its_base_loads() -> None:
    given, model = saved_by(Lamb), net()
    optimizer = DiLoCo(OneBitLamb(model.parameters(), lr=0.5, backend=LocalBackend()), backend=LocalBackend())
    optimizer.load_state_dict(given)
    for i, p in enumerate(model.parameters()):
        assert torch.equal(optimizer.base.state[p]["exp_avg_sq"], given["state"][i]["exp_avg_sq"])
    with pytest.raises(ValueError, match=r"that of Lamb, and this is DiLoCo\(OneBitAdam\)"):
        DiLoCo(OneBitAdam(net().parameters(), backend=LocalBackend()), backend=LocalBackend()).load_state_dict(given)


@pytest.mark.parametrize("make", [CSER, lambda p, lr, momentum: LocalSGD(p, optim.SGD, lr=lr, momentum=momentum)])
def test_a_momentum_that_a_loaded_state_turns_off_is_said(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make(net().parameters(), lr=0.5, momentum=0.9)
    optimizer.load_state_dict(saved_by(optim.SGD, momentum=0.9))
    assert "momentum=0" not in caplog.text
    optimizer.load_state_dict(saved_by(optim.SGD))
    assert caplog.text.count("sets momentum=0 in parameter group 0, which had 0.9") == 1
    assert "set param_groups[0]['momentum'] = 0.9 after load_state_dict()" in caplog.text


def test_the_state_of_a_base_follows_a_model_that_is_cast() -> None:
    def run(backend: Any) -> tuple[list[torch.Tensor], set[torch.dtype]]:
        model = net()
        optimizer = DiLoCo(model.parameters(), lr=0.1, period=3, backend=backend)
        train(model, optimizer, 2)
        model.double()
        train(model, optimizer, 2)
        return params_of(model), {optimizer.base.state[p]["exp_avg"].dtype for p in model.parameters()}

    (a, dtypes), (b, _) = on_threads(2, run)
    assert same_bits(a, b)
    assert dtypes == {torch.float64}


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("cls", [Lamb, Lans])
def test_the_state_of_lamb_and_lans_stays_float32_where_the_model_is_cast(cls: Any, mixed: bool) -> None:
    """Also in a copy and in what is saved, and all of its bits."""
    model, alone = net(), net()
    base = cls(model.parameters(), lr=0.1)
    outer = DiLoCo(commopt.Mixed(base) if mixed else base, period=9, backend=LocalBackend())
    plain = cls(alone.parameters(), lr=0.1)
    for m, o in ((model, outer), (alone, plain)):
        train(m, o, 2)
        m.bfloat16()
    copied = copy.deepcopy(outer)
    saved = outer.state_dict()["residuals"]["base"]["state"]
    expected = [t for e in plain.state_dict()["state"].values() for t in e.values()]
    assert all(t.dtype == torch.float32 for t in expected)
    assert same_bits([t for e in saved.values() for t in e.values()], expected)
    assert same_bits([t for e in copied.base.state_dict()["state"].values() for t in e.values()], expected)
    train(model, outer, 1)
    train(alone, plain, 1)
    assert same_bits(params_of(model), params_of(alone))
    assert outer.base.state[model[0].weight]["exp_avg"].dtype == torch.float32


def test_local_steps_without_any_gradient_are_said(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = DiLoCo(model.parameters(), lr=0.1)
    model.to("meta")
    optimizer.step()
    optimizer.step()
    assert caplog.text.count("DiLoCo: no parameter has a gradient on this rank, so nothing moves") == 1


def lambs(params: Any, **settings: Any) -> commopt.Mixed:
    params = list(params)
    return commopt.Mixed(Lamb(params[:1], **settings), Lans(params[1:], **settings))


@pytest.mark.parametrize("base", [OneBitAdam, ZeroOneAdam, OneBitLamb, Lamb, lambs, optim.AdamW])
def test_the_state_of_a_base_alone_is_loaded_by_that_base_by_one_alone_and_by_an_outer_optimizer(
    base: Any,
) -> None:
    model = net()
    outer = DiLoCo(model.parameters(), base, lr=0.1, period=2, backend=LocalBackend())
    train(model, outer, 3)
    saved = copy.deepcopy(outer.base.state_dict())
    train(model, outer, 1)
    outer.base.load_state_dict(saved)
    assert str(outer.base.state_dict()["state"]) == str(saved["state"])
    assert str(outer.state_dict()["residuals"]["base"]["state"]) == str(saved["state"])
    alone = base(net().parameters(), lr=0.1)
    alone.load_state_dict(saved)
    assert str(alone.state_dict()["state"]) == str(saved["state"])
    for cls in (DiLoCo, LocalSGD):
        fresh = cls(net().parameters(), base, lr=0.1, period=2, backend=LocalBackend())
        for state in (saved, alone.state_dict()):
            fresh.load_state_dict(state)
            assert str(fresh.base.state_dict()["state"]) == str(saved["state"])
            assert fresh.param_groups[0]["rounds"] == fresh.param_groups[0]["round_step"] == 0
            assert fresh.param_groups[0]["outer_optimizer"].startswith(cls.__name__)


@pytest.mark.parametrize("base", [OneBitAdam, Lamb])
def test_the_state_of_an_outer_optimizer_is_loaded_by_no_base(base: Any) -> None:
    model = net()
    outer = DiLoCo(model.parameters(), base, lr=0.1, period=2, backend=LocalBackend())
    train(model, outer, 3)
    before = str(outer.state_dict())
    message = rf"that of DiLoCo\({base.__name__}\), and this is {base.__name__}: load it"
    for other in (outer.base, base(net().parameters(), lr=0.1)):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(outer.state_dict())
    assert str(outer.state_dict()) == before


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("make", [OneBitAdam, OneBitLamb, ZeroOneAdam, OneBitLion, Lamb, Lans, DiLoCo])
def test_none_in_a_state_is_as_if_it_were_not_there_or_refused_and_changes_nothing(make: Any, own: bool) -> None:
    """As torch's SGD keeps it; in what all ranks have alike, or in a rank's own part."""

    def load(state: dict[str, Any]) -> tuple[str, bool]:
        model = net()
        optimizer = make(model.parameters(), lr=0.1)
        train(model, optimizer, 1)
        before = str(optimizer.state_dict())
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            assert str(optimizer.state_dict()) == before
            return str(error), False
        train(model, optimizer, 2)
        return str(optimizer.state_dict()), True

    def entries_of(state: dict[str, Any]) -> dict[Any, dict[str, Any]]:
        found: dict[Any, dict[str, Any]] = state["residuals"]["state"] if own else state["state"]
        return found

    saved = saved_by(make, **({"period": 3} if make is DiLoCo else {}))
    if own and "residuals" not in saved:
        return
    loaded = []
    for name in {name for entry in entries_of(saved).values() for name in entry}:
        without, none = copy.deepcopy(saved), copy.deepcopy(saved)
        for i in entries_of(saved):
            del entries_of(without)[i][name]
            entries_of(none)[i][name] = None
        assert load(none) == load(without)
        loaded.append(load(none)[1])
    assert any(loaded)


def test_muon_begins_anew_where_a_loaded_state_has_none_for_its_momentum() -> None:
    some, other = nn.Parameter(torch.eye(3)), nn.Parameter(torch.eye(3))
    loads, fresh = commopt.Muon([some]), commopt.Muon([other])
    loads.load_state_dict({**loads.state_dict(), "state": {0: {"momentum_buffer": None}}})
    for p, optimizer in ((some, loads), (other, fresh)):
        p.grad = torch.ones(3, 3)
        optimizer.step()
    assert torch.equal(some, other)
    assert str(loads.state_dict()) == str(fresh.state_dict())


@pytest.mark.parametrize("make", [DiLoCo, OneBitAdam, Lamb])
def test_an_outer_optimizers_name_under_the_key_of_its_base_is_of_an_older_version(make: Any) -> None:
    state = saved_by(DiLoCo)
    for group in state["param_groups"]:
        group["optimizer"] = group.pop("outer_optimizer")
    with pytest.raises(ValueError, match=r"that of DiLoCo\(AdamW\), saved before commopt 0.2.0"):
        make(net().parameters()).load_state_dict(state)


@pytest.mark.parametrize("cls", [LocalSGD, DiLoCo])
def test_what_a_user_calls_step_beside_the_outer_state_makes_it_no_state_of_the_base(cls):
    model = net()
    optimizer = cls(model.parameters(), base=optim.SGD, lr=0.1, period=4, backend=LocalBackend())
    train(model, optimizer, 6)
    for p in model.parameters():
        optimizer.state[p]["step"] = torch.tensor(7.0)
    other = cls(net().parameters(), base=optim.SGD, lr=0.1, period=4, backend=LocalBackend())
    other.load_state_dict(optimizer.state_dict())
    assert [other.param_groups[0][key] for key in ("rounds", "round_step")] == [1, 2]

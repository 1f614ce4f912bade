"""Keywords of torch's optimizers that ours have not: a call of theirs is one of ours, if it asks for nothing more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worlds import Toy, on_threads, params_of, same_bits, train

from commopt import CSER, DiLoCo, Lamb, Lans, OneBitAdam, OneBitLamb, OneBitLion, QSparseLocalSGD, ZeroOneAdam

ADAMS = [OneBitAdam, OneBitLamb, ZeroOneAdam]
NOTHING = {"amsgrad": False, "foreach": None, "fused": None, "capturable": False, "differentiable": False}


@pytest.mark.parametrize("cls", ADAMS)
def test_a_call_of_adam_with_all_its_keywords(cls: Any) -> None:
    plain, called = Toy(), Toy()
    train(plain, cls(plain.parameters(), 1e-2, (0.8, 0.99), 1e-7, 0.1), range(3))
    options = {**NOTHING, "decoupled_weight_decay": True, "maximize": False}
    if torch.__version__ >= (2, 7):  # before, AdamW alone is decoupled
        torch.optim.Adam(called.parameters(), 1e-2, (0.8, 0.99), 1e-7, 0.1, **options)  # it is one
    train(called, cls(called.parameters(), 1e-2, (0.8, 0.99), 1e-7, 0.1, **options), range(3))
    assert same_bits(params_of(plain), params_of(called))


@pytest.mark.parametrize("cls", [CSER, QSparseLocalSGD])
def test_a_call_of_sgd_with_all_its_keywords(cls: Any) -> None:
    options = {"dampening": 0, "foreach": False, "fused": True, "differentiable": False, "weight_decay": 0.1}
    model = Toy()
    torch.optim.SGD(model.parameters(), 1e-2, 0.9, **options)  # it is one
    train(model, cls(model.parameters(), 1e-2, 0.9, **options), range(2))


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (OneBitAdam, {"amsgrad": True}, "OneBitAdam has no amsgrad=True: .* allowed is False"),
        (ZeroOneAdam, {"capturable": True}, "ZeroOneAdam has no capturable=True"),
        (OneBitLamb, {"differentiable": True}, "OneBitLamb has no differentiable=True"),
        (OneBitAdam, {"fused": "yes"}, "fused must be None, True or False, got 'yes'"),
        (OneBitLamb, {"decoupled_weight_decay": False, "weight_decay": 0.1}, r"as LAMB's is.*weight_decay=0"),
        (OneBitAdam, {"decoupled_weight_decay": None}, "decoupled_weight_decay must be True or False, got None"),
        (CSER, {"dampening": 0.1}, "CSER has no dampening=0.1: .* allowed is 0"),
    ],
)
def test_what_asks_for_more_is_refused_on_all_ranks(cls: Any, options: dict[str, Any], message: str) -> None:
    def run(backend: Any) -> None:
        mine = options if backend.rank == 1 else {}
        with pytest.raises(ValueError, match=message if mine else "rank 1"):
            cls(Toy().parameters(), backend=backend, **mine)

    on_threads(2, run)


def test_a_group_with_coupled_weight_decay_is_found() -> None:
    groups = [{"params": Toy().parameters(), "weight_decay": 0.1}]
    with pytest.raises(ValueError, match="decoupled_weight_decay"):
        OneBitLamb(groups, decoupled_weight_decay=False)
    OneBitLamb(Toy().parameters(), decoupled_weight_decay=False)


@pytest.mark.parametrize(("cls", "name"), [(OneBitAdam, "dampening"), (CSER, "amsgrad"), (OneBitAdam, "freeze_steps")])
def test_a_keyword_that_torch_does_not_know_either(cls: Any, name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        cls(Toy().parameters(), **{name: 1})


IN_GROUPS = [
    (OneBitAdam, {"amsgrad": True}, "OneBitAdam has no amsgrad=True in parameter group 1: .* allowed is False"),
    (ZeroOneAdam, {"capturable": True}, "no capturable=True in parameter group 1"),
    (OneBitLion, {"amsgrad": True}, "no amsgrad=True in parameter group 1"),
    (CSER, {"dampening": 0.1}, "no dampening=0.1 in parameter group 1"),
    (OneBitLamb, {"decoupled_weight_decay": False, "weight_decay": 0.1}, "no decoupled_weight_decay=False in param"),
    (OneBitAdam, {"max_grad_norm": 1.0}, r"parameter group 1 has max_grad_norm=1.0, .* give it to OneBitAdam\("),
    (CSER, {"bucket_mb": 1}, "parameter group 1 has bucket_mb=1, which is a setting of the whole optimizer"),
    (QSparseLocalSGD, {"bucket_mb": 1}, "parameter group 1 has bucket_mb=1, which is a setting of the whole optimizer"),
    (DiLoCo, {"compressor": None}, "parameter group 1 has compressor=None, which is a setting of the whole optimizer"),
]


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(("cls", "options", "message"), IN_GROUPS)
def test_what_a_group_asks_for_is_refused_too(cls: Any, options: dict[str, Any], message: str, later: bool) -> None:
    def run(backend: Any) -> None:
        a, b = Toy(), Toy()
        mine = options if backend.rank == 1 else {}
        groups = [{"params": a.parameters()}, {"params": list(b.parameters()), **mine}]
        add = cls(groups[:1], backend=backend).add_param_group if later else None
        with pytest.raises(ValueError, match=message if mine else "rank 1"):
            add(groups[1]) if add else cls(groups, backend=backend)

    on_threads(2, run)


def test_what_asks_for_nothing_and_what_is_the_users_own_may_be_in_a_group(caplog: Any) -> None:
    for cls in (OneBitAdam, CSER, OneBitLamb, OneBitLion, DiLoCo):
        cls([{"params": Toy().parameters(), "fused": True, "amsgrad": False, "lr_scale": 0.1, "max_momentum": 0.9}])
    assert not caplog.records


@pytest.mark.parametrize("cls", [OneBitAdam, DiLoCo])
def test_a_key_that_reads_like_a_hyperparameter_is_warned_of(cls: Any, caplog: Any) -> None:
    cls([{"params": Toy().parameters(), "weight_deacy": 0.1}])
    assert "parameter group 0 has 'weight_deacy', which changes nothing; did you mean weight_decay?" in caplog.text


@pytest.mark.parametrize(
    ("cls", "theirs", "said"),
    [
        (OneBitAdam, lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True"),
        (ZeroOneAdam, lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (CSER, lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5), "dampening=0.5"),
        pytest.param(
            OneBitLamb,
            lambda p: torch.optim.Adam(p, weight_decay=0.1),
            "decoupled_weight_decay=False",
            marks=pytest.mark.skipif(torch.__version__ < (2, 7), reason="of torch 2.7: before, no state says so"),
        ),
    ],
)
def test_what_a_loaded_run_had_and_this_one_has_not_is_told(cls: Any, theirs: Any, said: str, caplog: Any) -> None:
    model = Toy()
    other = theirs(model.parameters())
    train(model, other, range(2))
    mine = cls(model.parameters(), 1e-2)
    mine.load_state_dict(other.state_dict())
    told = f"{cls.__name__}: parameter group 0 of the loaded state has {said}, which this optimizer has not"
    assert caplog.text.count(told) == 1
    group = mine.param_groups[0]
    assert not group.get("amsgrad")
    assert not group.get("dampening")
    assert group.get("decoupled_weight_decay", True) or cls is not OneBitLamb
    mine.load_state_dict(mine.state_dict())
    assert caplog.text.count("which this optimizer has not") == 1


def test_a_loaded_run_that_was_computed_otherwise_can_be_continued() -> None:
    model = Toy()
    other = torch.optim.Adam(model.parameters(), foreach=False, differentiable=False)
    train(model, other, range(2))
    state = other.state_dict()
    state["param_groups"][0]["capturable"] = True  # how a step is computed, and not what
    mine = OneBitAdam(model.parameters())
    mine.load_state_dict(state)
    assert mine.param_groups[0]["step"] == 2


@pytest.mark.parametrize("cls", [Lamb, Lans])
def test_plain_optimizers_take_a_call_of_adam(cls: Any) -> None:
    plain, called = Toy(), Toy()
    train(plain, cls(plain.parameters(), 1e-2), range(2))
    train(called, cls(called.parameters(), 1e-2, **NOTHING), range(2))
    assert same_bits(params_of(plain), params_of(called))
    with pytest.raises(ValueError, match="has no amsgrad=True"):
        cls(called.parameters(), amsgrad=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'freeze_step'"):
        cls(called.parameters(), freeze_step=3)

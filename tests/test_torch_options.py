"""Keywords of torch's optimizers that ours have not: a call of theirs is one of ours, if it asks for nothing more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from worlds import Toy, on_threads, params_of, same_bits, train

from commopt import CSER, OneBitAdam, OneBitLamb, QSparseLocalSGD, ZeroOneAdam

ADAMS = [OneBitAdam, OneBitLamb, ZeroOneAdam]
NOTHING = {"amsgrad": False, "foreach": None, "fused": None, "capturable": False, "differentiable": False}


@pytest.mark.parametrize("cls", ADAMS)
def test_a_call_of_adam_with_all_its_keywords(cls: Any) -> None:
    plain, called = Toy(), Toy()
    train(plain, cls(plain.parameters(), 1e-2, (0.8, 0.99), 1e-7, 0.1), range(3))
    options = {**NOTHING, "decoupled_weight_decay": True, "maximize": False}
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

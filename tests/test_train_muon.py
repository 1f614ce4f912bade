"""Muon in a config, by itself and as the base of an outer optimizer: which parameters it has, and that runs resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainer_pair import Pair, run, run_and_stop
from trainer_runs import Make, assert_same, content, records

import commopt
from commopt.train.config import OptimConfig
from commopt.train.errors import ConfigError
from commopt.train.optimizer import make_optimizer, plan_optimizer

MUON: dict[str, Any] = {"name": "Muon", "args": {"momentum": 0.9, "adamw": {"betas": [0.9, 0.98]}}}
MULOCO: dict[str, Any] = {
    "name": "DiLoCo",
    "args": {"base": "Muon", "base_args": MUON["args"], "period": 4, "outer_momentum": 0.5},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 7)


def names_of(optimizer: torch.optim.Optimizer) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


@pytest.mark.parametrize("named", [MUON, MULOCO, {**MULOCO, "name": "SignMomentum", "args": {**MULOCO["args"]}}])
def test_hidden_matrices_are_muons_and_all_else_is_adamws(named: dict[str, Any]) -> None:
    args = {k: v for k, v in named["args"].items() if named["name"] != "SignMomentum" or k != "outer_momentum"}
    config = OptimConfig(name=named["name"], lr=0.25, weight_decay=0.5, args=args)
    made: Any = make_optimizer(config, Model())
    mixed = made if isinstance(made, commopt.Mixed) else made.base
    assert [type(part) for part in mixed.parts] == [commopt.Muon, torch.optim.AdamW]
    assert names_of(mixed.parts[0]) == [["layer.weight"]]
    assert names_of(mixed.parts[1]) == [
        ["embedding.weight", "lm_head.weight"],
        ["layer.bias", "lm_head.bias"],
    ]
    assert [group["weight_decay"] for group in mixed.param_groups] == [0.5, 0.5, 0.0]
    assert {group["lr"] for group in mixed.param_groups} == {0.25}
    hidden, rest, _ = mixed.param_groups
    assert (hidden["momentum"], hidden["adjust_lr_fn"]) == (0.9, "match_rms_adamw")
    assert rest["betas"] == (0.9, 0.98)
    if named["name"] == "SignMomentum":
        assert mixed.param_groups[2]["outer_weight_decay"] == 0.0


@pytest.mark.long(but="MuLoCo")
@pytest.mark.parametrize("optim", [MUON, MULOCO], ids=["Muon", "MuLoCo"])
def test_stopped_and_resumed_is_never_stopped(pair: Pair, tiny: Make, tmp_path: Path, optim: dict[str, Any]) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    pair.run(run, tiny(whole, optim=optim))
    pair.run(run_and_stop, tiny(stopped, optim=optim), 6, 1)
    pair.run(run, tiny(stopped, optim=optim, resume="auto"))
    assert_same(content(stopped, 12, 2), content(whole, 12, 2))
    assert records(stopped) == records(whole)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"betas": [0.9, 0.98]}, "optim.args.betas: Muon has no such argument"),
        ({"adamw": {"beta": 1}}, "optim.args.adamw.beta: AdamW has no such argument; did you mean betas?"),
        ({"adamw": {"lr": 1}}, "optim.args.adamw.lr: set optim.lr instead"),
        ({"adamw": 3}, "optim.args.adamw=3 is not allowed: it must be arguments of AdamW"),
        ({"lr": 1}, "optim.args.lr: set optim.lr instead"),
    ],
)
def test_arguments_that_neither_has(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_optimizer(OptimConfig(name="Muon", args=args))


def test_a_model_without_hidden_matrices() -> None:
    model = Model()
    model.layer.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="optim: Muon: Model has no trainable hidden matrix"):
        make_optimizer(OptimConfig(name="Muon"), model)

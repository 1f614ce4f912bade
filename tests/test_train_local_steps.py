"""The trainer with local steps: stopped between rounds and resumed; checkpoints and evaluations of the mean model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_pair import Pair, run, run_and_stop
from trainer_runs import Make, assert_same, content, records

from commopt.train.config import OptimConfig
from commopt.train.errors import ConfigError
from commopt.train.metrics import read_metrics
from commopt.train.optimizer import plan_optimizer

ZERO_ONE = {
    "name": "ZeroOneAdam",
    "args": {"variance": {"kappa": 2, "stop": 3}, "sync": {"first": 3, "double_every": None, "longest": 3}},
}
"""Of 12 steps 1 and 2 are exact, 3, 6, 9 and 12 compressed, the others local."""


@pytest.fixture(scope="module")
def whole(pair: Pair, tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 0/1 Adam that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    pair.run(run, tiny(folder, optim=ZERO_ONE))
    return folder


@pytest.mark.long(but="8")
@pytest.mark.parametrize("step", [8, 9])
def test_stopped_between_rounds_and_resumed_is_never_stopped(
    pair: Pair, tiny: Make, whole: Path, tmp_path: Path, step: int
) -> None:
    stopped = tmp_path / "stopped"
    pair.run(run_and_stop, tiny(stopped, optim=ZERO_ONE), step, 1)
    between = content(stopped, step, 2)
    pair.run(run, tiny(stopped, optim=ZERO_ONE, resume="auto"))
    assert_same(content(stopped, 12, 2), content(whole, 12, 2))
    assert records(stopped) == records(whole)

    own = [part["optimizer_state"]["state"] for part in between[1:]]
    assert all(("exp_avg" in entry) == (step != 9) for part in own for entry in part.values())
    if step != 9:
        assert any(not torch.equal(own[0][key]["exp_avg"], own[1][key]["exp_avg"]) for key in own[0])
    lines = read_metrics(whole)
    assert [line["phase"] for line in lines] == ["refreshing"] + ["frozen"] * 5
    assert lines[-1]["compressed_steps"] == 9  # 4 to 12
    assert [line["bytes"] == 0 for line in lines] == [False, True, False, True, True, False]


BLOCKS = {"name": "RandomBlocks", "args": {"ratio": 8, "block": 16}}
CSER = {
    "name": "CSER",
    "args": {"momentum": 0.9, "period": 4, "reset_compressor": {"name": "RandomBlocks", "args": {"ratio": 2}}},
    "compressor": BLOCKS,
}


@pytest.mark.long(but="compressor0")
@pytest.mark.parametrize("compressor", [BLOCKS, {"name": "Sign", "args": {"block": 64}}])
def test_cser_stopped_and_resumed_is_never_stopped_and_saves_the_mean_model(
    pair: Pair, tiny: Make, tmp_path: Path, compressor: dict[str, Any]
) -> None:
    whole, stopped, optim = tmp_path / "whole", tmp_path / "stopped", CSER | {"compressor": compressor}
    pair.run(run, tiny(whole, optim=optim))
    pair.run(run_and_stop, tiny(stopped, optim=optim), 6, 1)
    shared, *parts = content(stopped, 6, 2)
    pair.run(run, tiny(stopped, optim=optim, resume="auto"))
    assert_same(content(stopped, 12, 2), content(whole, 12, 2))
    assert records(stopped) == records(whole)

    names = [name for group in shared["optimizer_state"]["param_groups"] for name in group["param_names"]]
    a, b = (part["optimizer_state"]["state"] for part in parts)
    assert any(not torch.equal(a[i]["parameter"], b[i]["parameter"]) for i in a)
    for i, name in enumerate(names):
        torch.testing.assert_close(shared["weights"][name], (a[i]["parameter"] + b[i]["parameter"]) / 2)
    assert {line["phase"] for line in read_metrics(whole)} == {"compressed"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "RandomBlock"}, "optim.args.reset_compressor.name='RandomBlock' is no Compressor or RandomBlocks"),
        ({"name": "RandomBlocks", "args": {"rate": 2}}, "optim.args.reset_compressor.args.rate: RandomBlocks has no"),
        ({"name": "RandomBlocks", "args": {"ratio": 0.5}}, "ratio must be a number >= 1, got 0.5"),
        ({"ratio": 2}, r"optim.args.reset_compressor={'ratio': 2} is not allowed: it must be a name"),
    ],
)
def test_a_reset_compressor_that_cannot_be(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_optimizer(OptimConfig(name="CSER", args={"reset_compressor": value}))

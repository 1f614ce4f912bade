"""The trainer with local steps: stopped between rounds and resumed; checkpoints and evaluations of the mean model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_train_resume import Make, assert_same, content, records
from trainer_pair import Pair, run, run_and_stop

from commopt.train.metrics import read_metrics

ZERO_ONE = {
    "name": "ZeroOneAdam",
    "args": {"variance": {"kappa": 2, "stop": 3}, "sync": {"first": 3, "double_every": None, "longest": 3}},
}
"""Of 12 steps 1 and 2 are exact, 3, 6, 9 and 12 compressed, the others local."""


@pytest.mark.parametrize("step", [4, 8, 9])
def test_stopped_between_rounds_and_resumed_is_never_stopped(pair: Pair, tiny: Make, tmp_path: Path, step: int) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    pair.run(run, tiny(whole, optim=ZERO_ONE))
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
    assert [line["bytes"] == 0 for line in lines] == [False, True, False, True, True, False]

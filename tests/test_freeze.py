"""scripts/freeze.py: its table, and what a run's method stands for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import commopt
from commopt.comm import LocalBackend
from commopt.train.config import Config, OptimConfig, TrainConfig
from commopt.train.loop import learning_rate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import freeze  # noqa: E402


def run(spec: str, loss: float, *ends: list[Any]) -> dict[str, Any]:
    return {"spec": spec, "loss": loss, "ends": list(ends), "compressed": 0.5}


def test_the_page_has_the_figures_that_are_committed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "onebit_adam.md").read_text()
    (tmp_path / "docs").mkdir()
    copy = tmp_path / "docs" / "onebit_adam.md"
    assert "| OneBitLamb | 3 |" in page
    copy.write_text(page.replace("| OneBitLamb | 3 |", "| OneBitLamb | 2 |"))
    freeze.update_docs(json.loads(freeze.FIGURES.read_text()), tmp_path)
    assert copy.read_text() == page


def test_runs_that_differ_in_the_seed_are_a_row() -> None:
    same, ends = "gpt,{},400,2e-3,0.98,adam=", [[80, "compressed"], [120, "warmup"], [200, "compressed"]]
    records = [
        run(same.format(0) + "auto", 4.0, *ends),
        run(same.format(1) + "auto", 4.5, [100, "compressed"]),
        run(same.format(0) + "80", 4.1, [80, "compressed"]),
        run(same.format(0) + "80!", 9.0, [80, "compressed"]),  # no column of its own: the text has these
        run(same.format(1) + "never", 4.2),
        run("gpt,0,400,2e-3,0.98,lamb=auto", 5.0),
        run("gpt,0,400,2e-3,0.98,adam=auto,2", 4.6, [100, "compressed"]),
        run("gpt,0,400,2e-3,0.98,adam=120,2", 4.7, [120, "compressed"]),
        run("gpt,0,400,2e-3,0.98,adam=80,2", 4.8, [80, "compressed"]),
        run("gpt,0,400,1e-3,0.98,adam=80", 6.0),  # a setting without "auto" has no row
    ]
    setting = "gpt, 400 steps, lr 2e-3, β₂ 0.98"
    assert list(freeze.rows(records)) == [
        [setting, "OneBitAdam", "2", "4.200", "80: 4.100", "4.250 (4.000 to 4.500)", "80 → 120 → 200, 100"],
        [setting, "OneBitLamb", "1", "", "", "5.000", "not at all"],
        ["gpt, 400 steps, 2 cycles, lr 2e-3, β₂ 0.98", "OneBitAdam", "1", "", "80: 4.800; 120: 4.700", "4.600", "100"],
    ]
    lines = freeze.table(records).splitlines()
    assert len(lines) == 5
    assert {line.count("|") for line in lines} == {8}


def test_a_learning_rate_that_restarts_warms_up_once() -> None:
    config = Config(
        optim=OptimConfig(name="AdamW", lr=1.0, warmup_steps=10, min_lr_ratio=0.05), train=TrainConfig(steps=120)
    )
    once = [freeze.rate(config, step, 1) for step in range(120)]
    assert once == [learning_rate(config, step) for step in range(120)]
    rates = [freeze.rate(config, step, 3) for step in range(120)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    for first in (40, 80):
        assert rates[first : first + 11] == [1.0] * 11
        assert rates[first + 11 : first + 40] == rates[11:40]
        assert rates[first - 1] < 0.06
    assert rates[11:40] == sorted(rates[11:40], reverse=True)


@pytest.mark.parametrize(
    ("method", "cls", "freeze_step", "thaw"),
    [
        ("adam=auto", commopt.OneBitAdam, "auto", "auto"),
        ("adam=150", commopt.OneBitAdam, 150, "auto"),
        ("lamb=150!", commopt.OneBitLamb, 150, "always"),
        ("lamb=never", commopt.OneBitLamb, freeze.NEVER, "auto"),
    ],
)
def test_a_method_says_when_the_warm_up_ends(method: str, cls: type, freeze_step: Any, thaw: str) -> None:
    made: Any = SimpleNamespace(model=nn.Linear(3, 2))
    optimizer = freeze.optimizer_of(made, method, 1e-3, 0.98, 0.1, LocalBackend())
    group = optimizer.param_groups[0]
    assert type(optimizer) is cls
    assert (group["freeze_step"], group["thaw"], group["betas"]) == (freeze_step, thaw, (0.9, 0.98))


def test_a_method_says_when_the_variance_of_zero_one_adam_stands() -> None:
    made: Any = SimpleNamespace(model=nn.Linear(3, 2))
    optimizer = freeze.optimizer_of(made, "zero=150", 1e-3, 0.98, 0.1, LocalBackend())
    assert optimizer.param_groups[0]["variance_stop"] == 150

"""scripts/tuned.py: what is run next, which learning rate is the best, and what its table says. No run."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import tuned

GPT = tuned.TUNINGS["gpt"]


def ran(method: str, lr: float, seed: int, loss: float, steps: int = 600, task: str = "gpt") -> dict[str, Any]:
    run = {"task": task, "method": method, "lr": lr, "seed": seed, "steps": steps}
    return {**run, "heldout_loss": loss, "bytes": 1, "fp32_bytes": 4}


def grid_of(method: str, losses: list[float]) -> list[dict[str, Any]]:
    """Of one seed; of the other tuning seeds the best rate alone is worse."""
    runs = []
    for seed in tuned.TUNING_SEEDS:
        further = 0.0 if seed == tuned.TUNING_SEEDS[0] else 0.5
        runs += [ran(method, lr, seed, x + further * (x == min(losses))) for lr, x in zip(GPT.grid(method), losses)]
    return runs


@pytest.mark.parametrize("tuning", tuned.TUNINGS.values(), ids=tuned.TUNINGS)
def test_every_method_has_a_grid_of_the_same_size_and_a_counterpart_before_it(tuning):
    names = list(tuning.methods)
    assert not [name for name in names if "," in name]
    for i, name in enumerate(names):
        assert len(tuning.grid(name)) == tuned.SIZE
        counterpart = tuning.methods[name].counterpart
        assert counterpart is None or counterpart in names[:i], name


def test_first_the_grid_then_the_seeds_and_nothing_twice():
    methods = ["AdamW", "Muon"]
    todo = GPT.missing([], methods, [0, 1], 600)
    assert [run["seed"] for run in todo] == [seed for seed in tuned.TUNING_SEEDS for _ in range(5)] * 2
    records = grid_of("AdamW", [5, 4, 3, 4, 5])
    assert {run["method"] for run in GPT.missing(records, methods, [0, 1], 600)} == {"Muon"}
    records += grid_of("Muon", [5, 4, 4, 3, float("inf")])
    todo = GPT.missing(records, methods, [0, 1], 2000)
    assert [(run["method"], run["seed"], run["steps"]) for run in todo] == [
        ("AdamW", 0, 2000), ("Muon", 0, 2000), ("AdamW", 1, 2000), ("Muon", 1, 2000)
    ]  # fmt: skip
    assert [run["lr"] for run in todo[:2]] == [GPT.rates("AdamW")[5], GPT.rates("Muon")[6]]
    records += [ran(**{**run, "loss": 1.0}) for run in todo]
    assert GPT.missing(records, methods, [0, 1], 2000) == []


def test_the_best_rate_is_that_of_all_tuning_seeds():
    first, second = tuned.TUNING_SEEDS
    lrs = list(GPT.grid("AdamW"))
    records = [ran("AdamW", lr, first, loss) for lr, loss in zip(lrs, [5, 4, 3, 2, 1])]
    assert GPT.best(records, "AdamW") is None
    records += [ran("AdamW", lr, second, loss) for lr, loss in zip(lrs, [5, 4, 3, 4.5, 9])]
    assert GPT.best(records, "AdamW") == lrs[2]


@pytest.mark.parametrize(
    ("losses", "first", "missing", "best"), [([1, 2, 3, 4, 5], 2, 2, 3), ([5, 4, 3, 2, 1], 4, 8, 7)]
)
def test_a_grid_whose_best_is_at_its_end_moves_on_by_one(losses, first, missing, best):
    rates, records = GPT.rates("AdamW"), grid_of("AdamW", losses)
    assert list(GPT.grid("AdamW", records)) == rates[first : first + 5]
    assert GPT.best(records, "AdamW") is None
    todo = GPT.missing(records, ["AdamW"], [0], 600)
    assert [(run["lr"], run["seed"]) for run in todo] == [(rates[missing], seed) for seed in tuned.TUNING_SEEDS]
    records += [ran("AdamW", rates[missing], seed, 3.0) for seed in tuned.TUNING_SEEDS]
    assert GPT.best(records, "AdamW") == rates[best]


def test_a_row_is_of_the_best_rate_and_of_seeds_that_both_have():
    adam, onebit = list(GPT.grid("AdamW")), GPT.rates("OneBitAdam")
    records = [*grid_of("AdamW", [5, 4, 3, 4, 5]), *grid_of("OneBitAdam", [1, 2, 3, 4, 5])]
    records += [ran("OneBitAdam", lr, seed, 0.1 + lr) for lr in onebit[:3] for seed in tuned.TUNING_SEEDS]
    records += [ran("AdamW", adam[2], seed, loss) for seed, loss in ((0, 3.0), (1, 3.2), (2, 9.0))]
    records += [ran("OneBitAdam", onebit[0], seed, loss) for seed, loss in ((0, 3.1), (1, 3.4))]
    records += [ran("AdamW", adam[0], 0, 0.1), ran("AdamW", adam[2], 0, 0.1, steps=2000)]
    plain, compressed = GPT.rows(records, GPT.steps)
    assert (plain["loss"], plain["edge"], "against" in plain) == (pytest.approx(15.2 / 3), False, False)
    assert (compressed["edge"], compressed["against"], compressed["sent"]) == (True, "AdamW", 0.25)
    assert compressed["gap"] == pytest.approx(0.15)
    assert "| OneBitAdam | 0.0002 (edge) | 2 | 3.250 | 0.300 | AdamW | +0.150 | 2 of 2 | yes | 25.0 % |" in tuned.table(
        [plain, compressed]
    )


def test_of_what_sends_as_few_bytes_the_lowest_alone_is_the_best():
    def row(method, sent, loss):
        return {"method": method, "sent": sent, "loss": loss}

    adam, onebit, muon, sgd = (
        row("AdamW", 1.0, 3.0),
        row("OneBitAdam", 0.2, 3.1),
        row("Muon", 1.0, 2.9),
        row("SGD", 0.2, 3.5),
    )
    rounds, signs = row("MuLoCo", 0.05, 3.2), row("AdamW + Sign", 0.05, 3.3)
    found = [muon, adam, sgd, onebit, signs, rounds]
    assert tuned.frontier(found) == [rounds, onebit, muon]
    assert tuned.table_of_bytes(found).splitlines()[2:] == [
        "| 5.0 % | MuLoCo | 3.200 | AdamW + Sign | 3.300 |",
        "| 20.0 % | OneBitAdam | 3.100 | OneBitAdam | 3.100 |",
        "| 100.0 % | Muon | 2.900 | AdamW | 3.000 |",
    ]


def test_sign_momentum_has_the_same_outer_step_at_every_rate():
    for lr in GPT.grid("SignMomentum(AdamW)"):
        optim = GPT.optim_of("SignMomentum(AdamW)", lr)
        assert optim["lr"] == lr
        assert optim["lr"] * optim["args"]["outer_lr"] == pytest.approx(2e-3)
    assert GPT.optim_of("AdamW", 0.1) == {**GPT.methods["AdamW"].optim, "lr": 0.1}


def test_a_method_of_which_a_run_has_diverged_is_not_within_the_spread():
    """Which is infinite, as its gap is."""
    records = [*grid_of("AdamW", [5, 4, 3, 4, 5]), *grid_of("OneBitAdam", [5, 4, 3, 4, 5])]
    records += [ran("AdamW", GPT.best(records, "AdamW"), seed, 3.0) for seed in (0, 1)]
    records += [
        ran("OneBitAdam", GPT.best(records, "OneBitAdam"), seed, loss) for seed, loss in ((0, 3.0), (1, math.inf))
    ]
    _, row = GPT.rows(records, GPT.steps)
    assert (row["gap"], row["passed"]) == (math.inf, False)
    assert "| OneBitAdam | AdamW | diverged ✗ |" in tuned.overview(records)


def test_where_all_runs_have_diverged_what_is_sent_is_that_of_the_tuning_seeds():
    records = [*grid_of("AdamW", [5, 4, 3, 4, 5]), *grid_of("OneBitAdam", [5, 4, 3, 4, 5])]
    records += [ran("AdamW", GPT.best(records, "AdamW"), 0, 3.0)]
    records += [{**ran("OneBitAdam", GPT.best(records, "OneBitAdam"), 0, math.inf), "bytes": 0, "fp32_bytes": 0}]
    _, row = GPT.rows(records, GPT.steps)
    assert (row["loss"], row["gap"], row["spread"], row["passed"]) == (math.inf, math.inf, math.inf, False)
    assert row["sent"] == 0.25


def test_other_tasks_do_not_count():
    others = [ran("AdamW", lr, seed, 1.0, 600, "bert") for lr in GPT.grid("AdamW") for seed in tuned.TUNING_SEEDS]
    assert GPT.grid("AdamW", others) == {lr: [] for lr in GPT.grid("AdamW")}
    assert len(GPT.missing(others, ["AdamW"], [0], 600)) == 10
    records = [*grid_of("AdamW", [5, 4, 3, 4, 5]), ran("AdamW", GPT.rates("AdamW")[5], 0, 2.0)]
    assert len(GPT.rows(records, 600)) == 1
    assert tuned.TUNINGS["bert"].rows(records, 600) == []
    assert tuned.TUNINGS["digits"].missing(records, ["AdamW"], [0], 200)[0] == {
        "task": "digits", "method": "AdamW", "lr": 0.0012, "seed": 100, "steps": 200
    }  # fmt: skip


def test_the_pages_have_the_tables_of_the_figures_that_are_kept():
    page = (tuned.ROOT / "docs" / "convergence.md").read_text()
    assert "\n\n".join(tuned.tables(tuned.read())) in page
    assert tuned.overview(tuned.read()) in (tuned.ROOT / "README.md").read_text()


def test_the_summary_has_a_row_for_each_optimizer_and_says_what_another_seed_makes(monkeypatch):
    def seeds(method: str, lr: float, *losses: float, **of: Any) -> list[dict[str, Any]]:
        return [ran(method, lr, seed, loss, **of) for seed, loss in enumerate(losses)]

    monkeypatch.setattr(tuned, "IN_README", ("OneBitAdam", "ZeroOneAdam"))
    names, digits = ("AdamW", "OneBitAdam", "ZeroOneAdam"), {"steps": 200, "task": "digits"}
    records = [run for name in names for run in grid_of(name, [5, 4, 3, 4, 5])]
    lr, of_digits = GPT.rates("AdamW")[5], tuned.TUNINGS["digits"]
    records += seeds("AdamW", lr, 3.0, 3.25) + seeds("OneBitAdam", lr, 3.5, 3.5) + seeds("ZeroOneAdam", lr, 3.25, 3.0)
    for name in names[:2]:
        tried = [of_digits.rates(name)[tuned.FIRST + i] for i in range(tuned.SIZE)]
        grid = [
            ran(name, rate, seed, abs(i - 2), **digits) for i, rate in enumerate(tried) for seed in tuned.TUNING_SEEDS
        ]
        records += grid + seeds(name, tried[2], 0.5, **digits)
    head, _, first, second = tuned.overview(records).splitlines()
    assert head == "| optimizer | against | gap, gpt | gap, bert | gap, digits | sent |"
    assert first == "| OneBitAdam | AdamW | +0.375 (0.25) ✗ |  | +0.000 (0.00) | 25 % |"
    assert second == "| ZeroOneAdam | AdamW | +0.000 (0.25) |  |  | 25 % |"


def test_the_figures_that_are_kept_are_whole_runs():
    gradients = {"gpt": 821_760}
    for record in tuned.read():
        tuning = tuned.TUNINGS[record["task"]]
        assert record["lr"] in tuning.rates(record["method"])
        if record["heldout_loss"] == float("inf"):
            assert record["bytes"] == record["fp32_bytes"] == 0
        else:
            per_step = gradients.setdefault(record["task"], record["fp32_bytes"] / record["steps"])
            assert record["fp32_bytes"] == record["steps"] * per_step

"""scripts/tuned.py: what is run next, which learning rate is the best, and what its table says. No run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import tuned


def ran(method: str, lr: float, seed: int, loss: float, steps: int = tuned.STEPS) -> dict[str, Any]:
    run = {"method": method, "lr": lr, "seed": seed, "steps": steps}
    return {**run, "heldout_loss": loss, "bytes": 1, "fp32_bytes": 4}


def grid_of(method: str, losses: list[float]) -> list[dict[str, Any]]:
    """Of one seed; of the other tuning seeds the best rate alone is worse."""
    runs = []
    for seed in tuned.TUNING_SEEDS:
        further = 0.0 if seed == tuned.TUNING_SEEDS[0] else 0.5
        runs += [ran(method, lr, seed, x + further * (x == min(losses))) for lr, x in zip(tuned.grid(method), losses)]
    return runs


def test_every_method_has_a_grid_of_the_same_size_and_a_counterpart_before_it():
    names = list(tuned.METHODS)
    assert not [name for name in names if "," in name]
    for i, name in enumerate(names):
        assert len(tuned.grid(name)) == tuned.SIZE
        counterpart = tuned.METHODS[name].counterpart
        assert counterpart is None or counterpart in names[:i], name


def test_first_the_grid_then_the_seeds_and_nothing_twice():
    methods = ["AdamW", "Muon"]
    todo = tuned.missing([], methods, [0, 1], 600)
    assert [run["seed"] for run in todo] == [seed for seed in tuned.TUNING_SEEDS for _ in range(5)] * 2
    records = grid_of("AdamW", [5, 4, 3, 4, 5])
    assert {run["method"] for run in tuned.missing(records, methods, [0, 1], 600)} == {"Muon"}
    records += grid_of("Muon", [5, 4, 4, 3, float("inf")])
    todo = tuned.missing(records, methods, [0, 1], 2000)
    assert [(run["method"], run["seed"], run["steps"]) for run in todo] == [
        ("AdamW", 0, 2000), ("Muon", 0, 2000), ("AdamW", 1, 2000), ("Muon", 1, 2000)
    ]  # fmt: skip
    assert [run["lr"] for run in todo[:2]] == [tuned.rates("AdamW")[5], tuned.rates("Muon")[6]]
    records += [ran(**{**run, "loss": 1.0}) for run in todo]
    assert tuned.missing(records, methods, [0, 1], 2000) == []


def test_the_best_rate_is_that_of_all_tuning_seeds():
    first, second = tuned.TUNING_SEEDS
    lrs = list(tuned.grid("AdamW"))
    records = [ran("AdamW", lr, first, loss) for lr, loss in zip(lrs, [5, 4, 3, 2, 1])]
    assert tuned.best(records, "AdamW") is None
    records += [ran("AdamW", lr, second, loss) for lr, loss in zip(lrs, [5, 4, 3, 4.5, 9])]
    assert tuned.best(records, "AdamW") == lrs[2]


@pytest.mark.parametrize(
    ("losses", "first", "missing", "best"), [([1, 2, 3, 4, 5], 2, 2, 3), ([5, 4, 3, 2, 1], 4, 8, 7)]
)
def test_a_grid_whose_best_is_at_its_end_moves_on_by_one(losses, first, missing, best):
    rates, records = tuned.rates("AdamW"), grid_of("AdamW", losses)
    assert list(tuned.grid("AdamW", records)) == rates[first : first + 5]
    assert tuned.best(records, "AdamW") is None
    todo = tuned.missing(records, ["AdamW"], [0], 600)
    assert [(run["lr"], run["seed"]) for run in todo] == [(rates[missing], seed) for seed in tuned.TUNING_SEEDS]
    records += [ran("AdamW", rates[missing], seed, 3.0) for seed in tuned.TUNING_SEEDS]
    assert tuned.best(records, "AdamW") == rates[best]


def test_a_row_is_of_the_best_rate_and_of_seeds_that_both_have():
    adam, onebit = list(tuned.grid("AdamW")), tuned.rates("OneBitAdam")
    records = [*grid_of("AdamW", [5, 4, 3, 4, 5]), *grid_of("OneBitAdam", [1, 2, 3, 4, 5])]
    records += [ran("OneBitAdam", lr, seed, 0.1 + lr) for lr in onebit[:3] for seed in tuned.TUNING_SEEDS]
    records += [ran("AdamW", adam[2], seed, loss) for seed, loss in ((0, 3.0), (1, 3.2), (2, 9.0))]
    records += [ran("OneBitAdam", onebit[0], seed, loss) for seed, loss in ((0, 3.1), (1, 3.4))]
    records += [ran("AdamW", adam[0], 0, 0.1), ran("AdamW", adam[2], 0, 0.1, steps=2000)]
    plain, compressed = tuned.rows(records, tuned.STEPS)
    assert (plain["loss"], plain["edge"], plain["against"]) == (pytest.approx(15.2 / 3), False, None)
    assert (compressed["edge"], compressed["against"], compressed["sent"]) == (True, "AdamW", 0.25)
    assert compressed["gap"] == pytest.approx(0.15)
    assert "| OneBitAdam | 0.0002 (edge) | 2 | 3.250 | 0.300 | AdamW | +0.150 | yes | 25.0 % |" in tuned.table(
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
    for lr in tuned.grid("SignMomentum(AdamW)"):
        optim = tuned.optim_of("SignMomentum(AdamW)", lr)
        assert optim["lr"] == lr
        assert optim["lr"] * optim["args"]["outer_lr"] == pytest.approx(2e-3)
    assert tuned.optim_of("AdamW", 0.1) == {**tuned.METHODS["AdamW"].optim, "lr": 0.1}


def test_the_page_has_the_table_of_the_figures_that_are_kept():
    """Of runs of every length that there are."""
    page, records = (tuned.ROOT / "docs" / "convergence.md").read_text(), tuned.read()
    for steps in {record["steps"] for record in records}:
        assert f"**{steps} steps:**\n\n{tuned.table(tuned.rows(records, steps))}" in page
    assert tuned.table_of_bytes(tuned.rows(records, tuned.STEPS)) in page


def test_the_figures_that_are_kept_are_whole_runs():
    for record in tuned.read():
        assert record["method"] in tuned.METHODS
        assert record["lr"] in tuned.rates(record["method"])
        diverged = record["heldout_loss"] == float("inf")
        assert record["fp32_bytes"] * 600 == (0 if diverged else record["steps"] * 493_056_000)

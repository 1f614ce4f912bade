"""Do compressed runs learn what they did, and does a fault show? Every family, on real images: see digit_runs.py.

The whole comparison, with uncompressed counterparts and language models, is ``pytest -m convergence``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from digit_runs import FAMILIES, FAULTS, WRONG_BYTES, learnt
from forks import python

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import convergence  # noqa: E402
from convergence_tasks import TASKS  # noqa: E402

SEED = 0


def test_the_pages_have_the_figures_that_are_committed(tmp_path: Path) -> None:
    rows = json.loads(convergence.FIGURES.read_text())["rows"]
    (tmp_path / "docs").mkdir()
    methods = {"docs/convergence.md": "OneBitAdam", "docs/gradients_measured.md": "AdamW + Int8"}
    for name, method in methods.items():
        page = (ROOT / name).read_text()
        assert f"| {method} |" in page
        (tmp_path / name).write_text(page.replace(f"| {method} |", "| another |", 1))  # further ones: other tables
    convergence.update_docs(rows, tmp_path)
    for name in methods:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
    with pytest.raises(SystemExit, match="has no"):
        convergence.put("", ROOT / "LICENSE", convergence.MARKS)


def test_figures_of_other_runs_stay(tmp_path: Path) -> None:
    def run(method: str, seed: int, loss: float) -> dict[str, Any]:
        made = {"task": "digits", "method": method, "seed": seed, "heldout_loss": loss, "bytes": 1, "fp32_bytes": 2}
        return made

    path = tmp_path / "figures.json"
    assert convergence.earlier(path, 4) == []
    runs = [run("AdamW", 0, 1.0), run("AdamW + Int8", 0, 2.0), run("AdamW + Int8", 1, 3.0), run("of old", 0, 4.0)]
    path.write_text(json.dumps({"ranks": 4, "seeds": [0, 1], "rows": [{"runs": [one]} for one in runs]}))
    with pytest.raises(SystemExit, match="has figures of 4 ranks, these would be of 2"):
        convergence.earlier(path, 2)
    old = convergence.earlier(path, 4)
    assert old == runs[:3]
    again, more = run("AdamW + Int8", 0, 5.0), run("OneBitAdam", 0, 6.0)
    assert convergence.merge(old, [more, again]) == [runs[0], again, runs[2], more]


@pytest.mark.parametrize("name", FAMILIES)
def test_it_learns_what_it_has_learnt(name: str) -> None:
    family = FAMILIES[name]
    loss, sent = learnt(family.make, family.lr)
    assert not family.learns_otherwise(loss), loss
    assert not family.sends_otherwise(sent), sent


USUAL = (
    "OneBitAdam without residuals",
    "CSER without resets",
    "gradients of 1 bit without residuals",
    "LocalSGD that takes rank 0 for the mean",
    "OneBitAdam whose warm-up ends later",
    "SparseLoCo with a shorter period",
)
"""One fault of each kind; the others show with ``-m convergence``, as they are there to see if figures are changed."""


def each_kind(faults: Iterable[str]) -> list[Any]:
    """Parameters of a test: those that are not usual have the mark."""
    return [pytest.param(fault, marks=[] if fault in USUAL else pytest.mark.convergence) for fault in faults]


@pytest.mark.parametrize("fault", each_kind(FAULTS))
def test_a_fault_is_noticed(fault: str) -> None:
    name, make, spoil = FAULTS[fault]
    family = FAMILIES[name]
    loss, _ = learnt(make, family.lr, spoil)
    assert family.learns_otherwise(loss), loss


@pytest.mark.parametrize("fault", each_kind(WRONG_BYTES))
def test_bytes_show_when_something_is_sent(fault: str) -> None:
    name, make = WRONG_BYTES[fault]
    family = FAMILIES[name]
    _, sent = learnt(make, family.lr)
    assert family.sends_otherwise(sent), sent


def test_the_comparison_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", python())
    monkeypatch.setenv("PYTHON_EXEC", python())  # what torchrun starts
    runs = [("digits", method, SEED) for method in ("AdamW", "OneBitAdam")]
    program = (str(ROOT / "tests" / "convergence_short.py"),)
    plain, ours = convergence.summarise(convergence.launch(runs, 2, tmp_path, program))
    assert ours["against"] == "AdamW"
    assert plain["loss"] < 2.3  # 10 digits, alike likely: 2.303
    assert abs(ours["gap"]) < 1e-3  # of what is still its warm-up
    assert plain["sent"] == 1
    assert 1 < ours["sent"] < 1.05


@pytest.mark.convergence
@pytest.mark.timeout(7200)
def test_every_optimizer_learns_what_its_counterpart_learns(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "convergence.py"), "--json", str(tmp_path / "figures.json")]
    subprocess.run(command, check=True)
    for row in json.loads((tmp_path / "figures.json").read_text())["rows"]:
        assert row.get("passed", True) or TASKS[row["task"]].methods[row["method"]].why, row

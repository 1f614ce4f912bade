"""scripts/time_to_loss.py: when a curve has reached a loss, what is run again, what all methods have in common, and
real runs where there can be network namespaces."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bed import needs_bed
from forks import python

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import netbed  # noqa: E402
import time_to_loss  # noqa: E402
import time_to_loss_report as report  # noqa: E402
from convergence_tasks import TASKS  # noqa: E402
from time_to_loss_methods import METHODS, Share  # noqa: E402

from commopt.train.data import Corpus  # noqa: E402
from commopt.train.models import make_model  # noqa: E402
from commopt.train.optimizer import make_optimizer, plan_compression  # noqa: E402
from commopt.train.tasks import make_samples  # noqa: E402

TINY = ["--model.layers=1", "--model.heads=2", "--model.width=32", "--data.vocab_size=300", "--data.seq_len=16"]


def curve(*losses: float | None, seconds: float = 1.0) -> list[dict[str, Any]]:
    return [
        {
            "step": 8 * i,
            "seconds": seconds * i,
            "evaluating": 0.1 * seconds * i,
            "bytes": 1e6 * i,
            "loss": loss,
            "own": 1.0 * i,
            "busy": 1.0 * i,
            "data": i,
        }
        for i, loss in enumerate(losses, 1)
    ]


def run(method: str, points: list[dict[str, Any]], seed: int = 0, **further: Any) -> dict[str, Any]:
    given = {"method": method, "seed": seed, "hosts": 2, "rate": "1gbit", "steps": 8 * len(points), "curve": points}
    given |= {"ended": "at the end", "others_share": 0.0, "parameters": 4_000_000, "cores": 2}
    return given | further


def args(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["time_to_loss.py", *words])
    return time_to_loss.arguments()


def test_a_loss_is_reached_at_the_first_evaluation_that_finds_it() -> None:
    points = curve(5.0, None, 4.0, 4.2, 3.9)
    assert report.reached(points, 4.1) is points[2]
    assert report.reached(points, 4.0) is points[2]
    assert report.reached(points, 3.95) is points[4]
    assert report.reached(points, 3.8) is None
    assert report.reached([], 9.0) is None


def test_times_are_medians_over_the_seeds_and_never_is_for_ever() -> None:
    runs = [run("ddp", curve(5.0, 4.5, 4.0, seconds=10.0), seed) for seed in range(3)]
    runs += [
        run("fast", curve(5.0, 4.5, last, seconds=time), s)
        for s, last, time in ((0, 4.0, 1), (1, 4.01, 2), (2, 4.1, 1))
    ]
    runs += [run("late", curve(5.0, 4.5, 4.3), seed) for seed in range(3)]
    rows = report.summarise(runs, margin=0.02)
    assert rows["ddp"]["seconds"] == 30
    assert rows["ddp"]["speedup"] == 1
    assert rows["fast"]["seconds"] == 6  # of 3, 6 and never
    assert rows["fast"]["speedup"] == 5
    assert (rows["fast"]["reached"], rows["fast"]["seeds"]) == (2, 3)
    assert rows["fast"]["bytes"] == 3e6
    assert rows["late"]["seconds"] == float("inf")
    assert rows["late"]["bytes"] is None
    assert report.summarise(runs, margin=0.6)["ddp"]["seconds"] == 20  # the margin is DDP's, too


def test_with_more_seeds_the_bound_stands_for_the_rival() -> None:
    """Its losses, and the rival's seconds of as many steps; what was derived does not count as a seed that was run."""
    runs = [run("ddp", curve(5.0, 4.0, 3.9, seconds=10.0)), run("none", curve(5.0, 4.0, 3.9), rate="none")]
    runs += [run("none", curve(5.0, 3.5, 3.51), 1, rate="none"), run("fast", curve(3.5, seconds=2.0), 1)]
    rows = report.summarise(runs, margin=0.02)
    assert rows["ddp"]["seconds"] == 25  # 30 with seed 0; with seed 1 its loss is there after 16 steps
    assert rows["ddp"]["seeds"] == 1
    assert rows["none"]["seconds"] == 2.5
    assert rows["fast"]["speedup"] == 10  # 20 of DDP's
    assert "With seed 1 DDP's losses are those of the run without a network" in report.caveats(runs, rows, 0.02)
    assert "3.920, 3.530 nats per token by seed" in report.caveats(runs, rows, 0.02)


def test_the_table_says_what_was_reached_and_what_was_not() -> None:
    runs = [
        run("ddp", curve(5.0, 4.0, seconds=10.0)),
        run("none", curve(5.0, 4.0, seconds=2.5), rate="none"),
        run("fast", curve(4.0, 3.9, seconds=4.0), others_share=0.5),
        run("late", curve(5.0, 4.5), ended="out of time", steps=64),
        run("lost", curve(9.0, None), ended="diverged: at step 9"),
    ]
    labels = {name: [name.upper(), "somewhere"] for name in ("ddp", "none", "fast", "late", "lost")}
    figures = {"runs": runs, "margin": 0.0, "labels": labels}
    text = report.tables(figures)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert "**2 hosts on 2 cores, 1gbit, 4.0 M parameters**" in text
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| FAST ✗", "| NONE", "| DDP", "| LATE", "| LOST"]
    assert lines[2] == "| FAST ✗ | 4.0 s | 5.00 x | 1.0 | 8 | 450 | 3.900 | 16 of 16 | 1 |"
    assert lines[3].startswith("| NONE | 5.0 s | 4.00 x |  | 16 |")  # what goes over loopback is not sent
    assert "| LATE | not reached |  |  |  |" in text
    assert "16 of 64" in text
    assert "| diverged | 16 of 16 | 1 |" in text
    assert "50 % of the cores" in text
    seeds = [run("ddp", curve(4.0)), run("ddp", curve(4.0), 1), run("late", curve(4.0)), run("late", curve(4.5), 1)]
    assert "not reached (1 of 2 seeds)" in report.tables(figures | {"runs": seeds})


def test_every_setting_has_its_own_table_and_the_bound_is_in_all() -> None:
    runs = [run("ddp", curve(4.0), rate=rate) for rate in ("1gbit", "100mbit")]
    runs += [run("none", curve(4.0), rate="none"), run("ddp", curve(4.0), hosts=4)]
    found = report.settings(runs)
    assert {key: [r["method"] for r in of] for key, of in found.items()} == {
        (2, "1gbit"): ["ddp", "none"],
        (2, "100mbit"): ["ddp", "none"],
        (4, "1gbit"): ["ddp"],
    }


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    runs = [run("ddp", curve(5.0, 4.0)), run("none", curve(5.0, 4.0), rate="none")]
    runs += [run(f"m{i}", curve(5.0, 4.0 + 0.1 * i, None)) for i in range(report.SHOWN + 2)]
    labels = {r["method"]: [f"_{r['method']} $", ""] for r in runs}
    figures = {"runs": runs, "margin": 0.05, "labels": labels}
    report.draw(figures, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert len(report.colors_of(report.settings(runs), 0.05)) == report.SHOWN + 2


def test_the_page_that_is_committed_has_the_figures_that_are() -> None:
    assert report.page(*time_to_loss.published()) in time_to_loss.PAGE.read_text()


def test_a_page_is_made_of_figures_or_says_that_there_are_none(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.update_page(report.page(None), page)
    assert page.read_text().startswith(f"before\n{report.BEGIN}\nNo figures yet")
    machine = {"cores": 2, "cpu": "Some CPU", "kernel": "6.1", "torch": "2.13"}
    figures = {
        "runs": [run("ddp", curve(4.0))],
        "margin": 0.0,
        "labels": {"ddp": ["DDP", "a file"], "sgd": ["SGD", "a file"], "lans": ["Lans", "a file"]},
        "machine": machine,
    }
    report.update_page(report.page(figures | {"command": "scripts/time_to_loss.py --seeds 3"}), page)
    text = page.read_text()
    assert "2 cores of Some CPU" in text
    assert "| DDP | 8 | a file |\n\nMethods of the script without a run: SGD; Lans.\n" in text
    assert "--seeds 3" in text
    assert "No figures" not in text
    assert text.endswith("after\n")
    elsewhere = {
        "runs": [run("ddp", curve(4.0, seconds=9.0)), run("sgd", curve(4.0))],
        "machine": machine | {"cpu": "Slow CPU"},
        "command": "scripts/time_to_loss.py --seeds 1",
        "margin": 0.0,
        "labels": figures["labels"],
    }
    others = [("On another machine", elsewhere)]
    text = report.page(figures | {"command": "scripts/time_to_loss.py --seeds 3"}, others)
    assert "On another machine: 2 cores of Slow CPU" in text
    assert "| SGD | 1.0 s | 9.00 x |" in text
    assert "| SGD | 8 | a file |\n\nMethods of the script without a run: Lans.\n" in text
    assert "--seeds 3\nscripts/time_to_loss.py --seeds 1\n```" in text


def test_all_methods_have_the_same_model_samples_and_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    given = args(monkeypatch, "--steps", "64", "--rate", "1gbit", "--", *TINY)
    corpus = Corpus("some", 300, *(np.arange(n, dtype=np.uint16) % 300 for n in (4000, 400)))
    first = time_to_loss.make_run(2, "1gbit", "ddp", 0, given).config
    model = make_model(first, 300)
    runs = {made.method: made.config for made in time_to_loss.plan(given)}
    assert runs.keys() == METHODS.keys()
    for name, config in runs.items():
        steps = config.train.steps
        assert steps == round(64 * METHODS[name].stretch)
        train = dataclasses.replace(first.train, steps=steps, checkpoint_every=steps)
        assert config == dataclasses.replace(first, optim=config.optim, comm=config.comm, train=train)
        batch = make_samples(config, corpus).train_batch(range(160, 176))
        assert all(map(torch.equal, batch, make_samples(first, corpus).train_batch(range(160, 176))))
        make_optimizer(config.optim, model)  # all settings are allowed, together
        assert (plan_compression(config) is None) == (METHODS[name].compress is None)
    other = time_to_loss.make_run(2, "1gbit", "ddp", 1, given).config
    assert not torch.equal(make_samples(other, corpus).train_batch(range(160, 176))[0], batch[0])


def test_a_step_of_signs_is_as_long_as_where_it_was_found_to_be_best() -> None:
    ours, found = METHODS["sign_momentum"].optim, TASKS["gpt"].methods["SignMomentum(AdamW)"].optim
    assert ours["args"]["outer_betas"] == found["args"]["outer_betas"] == [0.0, 0.0]
    steps = [optim["lr"] * optim["args"]["outer_lr"] for optim in (ours, found)]
    assert steps[0] == pytest.approx(steps[1])


def test_steps_are_shares_of_a_methods_own_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    given = args(monkeypatch, "--steps", "200", "--", *TINY)
    made = {name: time_to_loss.make_run(2, "1gbit", name, 0, given) for name in METHODS}
    assert made["ddp"].config.optim.warmup_steps == 16
    assert made["local_sgd"].config.optim.warmup_steps == 24
    assert made["onebit_adam"].config.optim.args["freeze_step"] == 50
    assert made["zero_one_adam"].config.optim.args["variance"]["stop"] == 50
    assert made["ddp_powersgd4"].hook == {"name": "PowerSGD", "rank": 4, "start": 25}
    bounds = {"none", "none_fast", "none_muon"}
    assert {made[name].rate for name in made if name not in bounds} == {"1gbit"}
    assert {made[name].rate for name in bounds} == {"none"}
    assert time_to_loss.resolved(Share(0.001), 64) == 1


Start = Callable[..., dict[str, Any]]


def finishing(starts: list[str], data: Callable[[str], int] = lambda method: 1, loss: float | None = 4.0) -> Start:
    """In place of real runs: all take 8 s; notes the limit of each."""

    def start(made: Any, limit: float, folder: Path, timeout: float) -> dict[str, Any]:
        starts.append(f"{made.name} in {limit:g}")
        points = [{**point, "data": data(made.method)} for point in curve(5.0, loss, seconds=4.0)]
        given = {"hosts": made.hosts, "rate": made.rate, "seed": made.seed, "key": made.key}
        return run(made.method, points, **given)

    return start


def test_what_has_finished_is_not_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts: list[str] = []
    monkeypatch.setattr(time_to_loss, "start", finishing(starts))
    words = ["--rate", "1gbit", "--steps", "16", "--limit", "2", "--runs", str(tmp_path)]

    def again(*further: str) -> list[str]:
        starts.clear()
        records = time_to_loss.run_all(args(monkeypatch, *words, *further, "--", *TINY))
        assert ("ddp" in {record["method"] for record in records}) == ("--estimate" not in further)
        return list(starts)

    assert again("--methods", "cser", "--estimate") == []
    assert again("--methods", "cser") == ["2-1gbit-ddp-0 in inf", "2-1gbit-cser-0 in 16"]
    assert again("--methods", "cser") == []
    assert again("--methods", "cser,none") == ["2-none-none-0 in 16"]
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"key": {"cut off')
    assert again("--methods", "cser,none") == []
    assert again("--methods", "none", "--seeds", "2") == ["2-1gbit-ddp-1 in inf", "2-none-none-1 in 16"]
    once = ["--seeds", "3", "--rival-seeds", "1"]
    assert again("--methods", "cser", *once) == [
        "2-1gbit-cser-1 in 16", "2-none-none-2 in inf", "2-1gbit-cser-2 in 16",
    ]  # fmt: skip
    records = time_to_loss.run_all(args(monkeypatch, *words, "--methods", "cser", "--", *TINY))
    assert [(r["method"], r["seed"]) for r in records] == [
        ("none", 0),
        ("none", 1),
        ("none", 2),
        ("ddp", 0),
        ("ddp", 1),
        ("cser", 0),
        ("cser", 1),
        ("cser", 2),
    ]
    assert again("--methods", "cser", "--eval-samples", "8") == ["2-1gbit-ddp-0 in inf", "2-1gbit-cser-0 in 16"]


def test_disturbed_runs_are_repeated_if_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    starts: list[str] = []
    start = finishing(starts)
    disturb: list[float] = [0.5]
    monkeypatch.setattr(time_to_loss, "start", lambda *given: {**start(*given), "others_share": disturb[0]})
    words = ["--rate", "1gbit", "--methods", "ddp", "--steps", "16", "--runs", str(tmp_path)]
    for further, expected in (([], 1), ([], 1), (["--repeat-disturbed"], 2), (["--repeat-disturbed"], 2)):
        time_to_loss.run_all(args(monkeypatch, *words, *further, "--", *TINY))
        assert len(starts) == expected
        disturb[0] = 0.01


def test_runs_on_other_samples_are_refused_and_so_is_a_rival_without_a_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--rate", "1gbit", "--methods", "cser", "--steps", "16", "--runs"]
    monkeypatch.setattr(time_to_loss, "start", finishing([], data=len))
    with pytest.raises(netbed.BedError, match="cser: not the weights and samples of ddp at step 8"):
        time_to_loss.run_all(args(monkeypatch, *words, str(tmp_path / "a"), "--", *TINY))
    monkeypatch.setattr(time_to_loss, "start", finishing([], loss=None))
    with pytest.raises(netbed.BedError, match="ddp-0 has no loss at its end"):
        time_to_loss.run_all(args(monkeypatch, *words, str(tmp_path / "b"), "--", *TINY))


def test_the_estimate_follows_the_bytes_and_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    given = args(monkeypatch, "--steps", "100", "--rate", "100mbit", "--", *TINY)
    ddp, cser = (time_to_loss.make_run(2, "100mbit", name, 0, given) for name in ("ddp", "cser"))
    expected = 1.1 * 100 * 4 * 1_000_000 * 8 / 100e6  # 2 hosts each send as many bytes as the parameters have
    took = time_to_loss.estimate(ddp, [], 0.0, 1_000_000) - time_to_loss.START
    assert took == pytest.approx(expected)
    less = time_to_loss.estimate(cser, [], 0.0, 1_000_000) - time_to_loss.START
    assert less == pytest.approx(0.125 * 1.5 * expected)
    known = [run("ddp", curve(4.0, seconds=80.0), rate="100mbit")]  # 8 steps
    assert time_to_loss.estimate(ddp, known, 0.0, 1_000_000) == time_to_loss.START + 1000


@pytest.mark.long
@needs_bed
def test_methods_are_trained_on_the_bed(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"{i} is what {i + 1} was before {i + 2} came. " * 40)
    words = ["--rate", "100mbit", "--methods", "none,ddp_powersgd4", "--steps", "8", "--eval-every", "4"]
    words += ["--eval-samples", "8", "--timeout", "60", "--limit", "1000", "--runs", str(tmp_path / "runs")]
    words += ["--json", str(tmp_path / "figures.json"), "--", *TINY]
    words += [f"--data.corpus={tmp_path / 'text'}", f"--data.cache_dir={tmp_path / 'cache'}", "--train.batch_size=4"]
    env = {**os.environ, "PYTHON_EXEC": python()}
    command = [python(), str(SCRIPTS / "time_to_loss.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    runs = {made["method"]: made for made in figures["runs"]}
    payload = 4 * runs["ddp"]["parameters"]  # 2 ranks each send as many bytes as the parameters have
    assert [point["step"] for point in runs["ddp"]["curve"]] == [4, 8]
    assert [point["step"] for point in runs["ddp_powersgd4"]["curve"]] == [4, 8, 10]
    for made in runs.values():
        assert made["ended"] == "at the end"
        assert [p["data"] for p in made["curve"][:2]] == [p["data"] for p in runs["ddp"]["curve"]]
        assert 0 < made["curve"][0]["evaluating"] < made["curve"][0]["seconds"] < made["curve"][1]["seconds"]
    ddp, bound, low = (runs[name]["curve"][1] for name in ("ddp", "none", "ddp_powersgd4"))
    assert ddp["loss"] == bound["loss"]  # the same arithmetic
    assert 8 * payload < ddp["bytes"] < 8 * payload + 60_000  # messages between the ranks
    assert 2 * payload < low["bytes"] < 6 * payload  # 2 steps as DDP's
    assert "DDP, AdamW, no network (the bound)" in done.stdout
    assert "3 of 3 runs to do" in done.stderr

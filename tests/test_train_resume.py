"""A run that was stopped and resumed equals one that never was, bit for bit."""

from __future__ import annotations

import gc
import logging
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from trainer_pair import Pair, run, run_and_stop
from trainer_runs import Make, assert_same, content, records, sign_anew

from commopt.train import resume
from commopt.train.config import Config
from commopt.train.loop import Trainer
from commopt.train.metrics import read_metrics

BASELINE = {"name": "AdamW", "args": {}}


@pytest.fixture(scope="module")
def unstopped(pair: Pair, tiny: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("unstopped")
    pair.run(run, tiny(run_dir))
    return run_dir


@pytest.mark.long(but="5-switch")
@pytest.mark.parametrize(("step", "phase"), [(3, "warmup"), (5, "switch"), (9, "compressed")])
def test_stopped_and_resumed_is_never_stopped(
    pair: Pair, tiny: Make, unstopped: Path, tmp_path: Path, step: int, phase: str
) -> None:
    stopped = pair.run(run_and_stop, tiny(tmp_path), step, 1, True)
    assert [s["finished"] for s in stopped] == [False, False]
    assert [s["step"] for s in stopped] == [step, step]
    assert (tmp_path / "checkpoints" / f"step-{step:08d}").is_dir()
    assert (tmp_path / "curves.png").stat().st_size > 10_000

    finished = pair.run(run, tiny(tmp_path, resume="auto"))
    assert all(s["finished"] for s in finished)
    assert_same(content(tmp_path, 12, 2), content(unstopped, 12, 2))
    assert records(tmp_path) == records(unstopped)


def ends(config: Config, step: int) -> list[str]:
    """Train, and get a SIGTERM after ``step``; return what rank 0 has logged of the end of the run."""
    from _pytest.logging import LogCaptureHandler

    handler = LogCaptureHandler()
    logging.getLogger("commopt").addHandler(handler)
    run_and_stop(config, step, 0)
    gc.collect()
    logging.getLogger("commopt").removeHandler(handler)
    return [text for record in handler.records if "the run ends" in (text := record.getMessage())]


@pytest.mark.parametrize(("step", "said"), [(4, 0), (99, 1)])
def test_only_a_run_that_has_ended_is_told_what_it_has_missed(
    pair: Pair, tiny: Make, tmp_path: Path, step: int, said: int
) -> None:
    waits = {"name": "ZeroOneAdam", "args": {"betas": [0.5, 0.5], "variance": {"stop": "auto"}}}
    for name, optim in {"warm-up": {"args": {"betas": [0.5, 0.5], "freeze_step": 20}}, "variance": waits}.items():
        ends_of_ranks = pair.run(ends, tiny(tmp_path / name, optim=optim), step)
        assert [len(lines) for lines in ends_of_ranks] == [said, 0]


def test_residuals_differ_between_ranks_so_the_comparison_means_something(unstopped: Path) -> None:
    _, first, second = content(unstopped, 12, 2)
    a, b = (part["optimizer_state"]["state"] for part in (first, second))
    assert any(not torch.equal(a[key]["worker_error"], b[key]["worker_error"]) for key in a)
    assert not torch.equal(first["rng"]["cpu"], second["rng"]["cpu"])


def test_the_run_passes_through_both_phases_and_steps_appear_once(unstopped: Path) -> None:
    lines = read_metrics(unstopped)
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert [line["phase"] for line in lines] == ["warmup"] * 2 + ["compressed"] * 4
    assert [line["step"] for line in lines if "heldout_loss" in line] == [6, 12]
    assert lines[-1]["compressed_steps"] == 7
    assert lines[-1]["bytes"] < lines[-1]["fp32_bytes"] / 4 < lines[0]["bytes"]
    assert lines[0]["fp32_bytes"] <= lines[0]["bytes"]


def test_a_run_of_fewer_steps_than_the_checkpoint_has_is_refused_and_leaves_all_as_it_is(
    pair: Pair, tiny: Make, unstopped: Path, tmp_path: Path
) -> None:
    shutil.copytree(unstopped, tmp_path, dirs_exist_ok=True)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    errors = pair.errors(run, tiny(tmp_path, resume="auto", train={"steps": 8}))
    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointError"
    assert "is past the end of the run, train.steps=8: give at least 12 steps" in errors[0][1]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_lines_after_the_checkpoint_are_dropped(pair: Pair, tiny: Make, unstopped: Path, tmp_path: Path) -> None:
    """Killed after step 10: the newest checkpoint is that of step 8."""
    pair.run(run_and_stop, tiny(tmp_path, train={"checkpoint_every": 100}), 8, 0)
    lines = (unstopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    pair.run(run, tiny(tmp_path, resume="auto"))
    assert records(tmp_path) == records(unstopped)


def test_baseline_under_ddp_resumes_bit_for_bit(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    def config(name: str, **more: Any) -> Config:
        return tiny(tmp_path / name, optim=BASELINE, train={"accumulate": 2}, **more)

    whole, stopped = config("whole"), config("stopped")
    whole.train.run_dir, stopped.train.run_dir = str(tmp_path / "whole"), str(tmp_path / "stopped")
    for each in (whole, stopped):
        each.train.steps, each.train.log_every = 6, 2
    pair.run(run, whole)
    pair.run(run_and_stop, stopped, 3, 0)
    stopped.resume = "auto"
    pair.run(run, stopped)
    assert_same(content(tmp_path / "stopped", 6, 2), content(tmp_path / "whole", 6, 2))
    lines = records(tmp_path / "whole")
    assert lines == records(tmp_path / "stopped")
    assert {line["phase"] for line in lines} == {"ddp"}
    assert all(line["bytes"] == line["fp32_bytes"] > 0 for line in lines)


def skipped_more(folder: Path) -> None:
    """Make of a checkpoint one whose second rank has skipped three steps."""
    part = torch.load(folder / "rank-00001.pt", weights_only=True)
    torch.save(part | {"skipped_steps": 3}, folder / "rank-00001.pt")
    sign_anew(folder)


def test_from_two_ranks_to_one_and_back(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    """The data position is exact at any world size; what compression owes is merged and dealt out anew."""
    pair.run(run_and_stop, tiny(tmp_path), 7, 0)
    skipped_more(tmp_path / "checkpoints" / "step-00000007")
    alone = run_and_stop(tiny(tmp_path, resume="auto"), 9, 0)
    assert (alone["step"], alone["finished"]) == (9, False)
    shared, part = content(tmp_path, 9, 1)
    assert shared["consumed"] == 9 * 8
    assert part["skipped_steps"] == 3
    finished = pair.run(run, tiny(tmp_path, resume="auto"))
    assert all(s["finished"] for s in finished)
    assert finished[0]["heldout_loss"] == finished[1]["heldout_loss"] < 6
    assert content(tmp_path, 12, 2)[0]["consumed"] == 12 * 8


def test_the_place_in_the_data_is_in_samples(tiny: Make, tmp_path: Path) -> None:
    """With another batch size a run goes on behind the samples that it has had."""
    run_and_stop(tiny(tmp_path), 3, 0)
    run_and_stop(tiny(tmp_path, resume="auto", train={"batch_size": 2}), 5, 0)
    assert content(tmp_path, 5, 1)[0]["consumed"] == 3 * 8 + 2 * 2


def test_a_finished_run_resumes_into_its_summary(pair: Pair, tiny: Make, unstopped: Path) -> None:
    before = read_metrics(unstopped)
    again = pair.run(run, tiny(unstopped, resume="auto"))
    assert [s["heldout_loss"] for s in again] == [before[-1]["heldout_loss"]] * 2
    assert read_metrics(unstopped) == before


def test_a_setting_that_would_be_ignored_is_refused(tiny: Make, unstopped: Path) -> None:
    from commopt.train.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"made with optim.args=.*freeze_step.*5.*this run has .*7"):
        run(tiny(unstopped, resume="auto", optim={"args": {"freeze_step": 7}}))
    with pytest.raises(CheckpointError, match=r"class: OneBitAdam, this run has AdamW; optim.name was 'OneBitAdam'"):
        run(tiny(unstopped, resume="auto", optim=BASELINE))
    with pytest.raises(
        CheckpointError,
        match=r"it has net.transformer.wte.weight \(300, 16\) where .*24\); model.width was 16, now 24$",
    ):
        run(tiny(unstopped, resume="auto", model={"width": 24}))
    with pytest.raises(
        CheckpointError,
        match=r"it has net.transformer.ln_f.weight \(16,\) where .*h.1.ln_1.*; model.layers was 1, now 2$",
    ):
        run(tiny(unstopped, resume="auto", model={"layers": 2}))
    with pytest.raises(CheckpointError, match=r"another corpus or tokenizer.*; data.heldout was 0.2, now 0.3$"):
        run(tiny(unstopped, resume="auto", data={"heldout": 0.3}))


def test_numbers_that_stand_for_null_are_no_change(
    tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is a checkpoint that has none of them, as older ones have. Other numbers are other shapes, which is refused;
    so is a head of its own."""
    from commopt.train.errors import CheckpointError

    llama = {"kind": "llama", "dropout": 0.0}
    run(tiny(tmp_path, model=llama, train={"steps": 1, "checkpoint_every": 1}))
    folder = {"resume": "auto", "train": {"steps": 1, "checkpoint_every": 1}}
    run(tiny(tmp_path, model={**llama, "kv_heads": 2, "mlp_width": 256}, **folder))
    assert not [entry for entry in caplog.records if "changed since" in entry.getMessage()]
    caplog.clear()
    older = asdict(tiny(tmp_path))
    for name in ("kv_heads", "mlp_width", "tied"):
        del older["model"][name]
    resume._check_settings(older, asdict(tiny(tmp_path)), tmp_path)
    assert not caplog.records
    for other in ({"kv_heads": 1}, {"mlp_width": 40}, {"tied": False}):
        with pytest.raises(CheckpointError, match="another model"):
            run(tiny(tmp_path, model=llama | other, **folder))


SPELLINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"optim": {"args": {"betas": (0.9, 0.98)}}}, {"optim": {"args": {"betas": [0.9, 0.98]}}}),
    (
        {"optim": {"args": {"warmup_compressor": "Int8"}}},
        {"optim": {"args": {"warmup_compressor": {"name": "Int8", "args": {}}}}},
    ),
    (
        {"optim": BASELINE, "comm": {"compress": {"name": "Int4", "feedback": "LoCo"}}},
        {"optim": BASELINE, "comm": {"compress": {"name": "Int4", "feedback": {"name": "LoCo"}}}},
    ),
    (
        {"optim": {"name": "DiLoCo", "args": {"base": "AdamW", "base_args": {"betas": (0.9, 0.98)}}}},
        {"optim": {"name": "DiLoCo", "args": {"base": "AdamW", "base_args": {"betas": [0.9, 0.98]}}}},
    ),
]
"""As one writes it in Python, and in YAML."""


@pytest.mark.parametrize(("one", "other"), SPELLINGS, ids=str)
def test_another_spelling_is_no_other_setting(
    tiny: Make, tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    python, yaml = (asdict(tiny(tmp_path, **sections)) for sections in (one, other))
    assert python != yaml
    assert resume._check_settings(python, yaml, tmp_path) == resume._check_settings(yaml, python, tmp_path) == []


@pytest.mark.parametrize(
    "args", [{"betas": [0.98, 0.9]}, {"warmup_compressor": {"name": "Int8", "args": {"block": 64}}}], ids=str
)
def test_what_only_looks_alike_is_another_setting(tiny: Make, tmp_path: Path, args: dict[str, Any]) -> None:
    from commopt.train.errors import CheckpointError

    saved = asdict(tiny(tmp_path, optim={"args": {"betas": (0.9, 0.98), "warmup_compressor": "Int8"}}))
    given = asdict(tiny(tmp_path, optim={"args": {"betas": (0.9, 0.98), "warmup_compressor": "Int8", **args}}))
    with pytest.raises(CheckpointError, match=r"made with optim\.args="):
        resume._check_settings(saved, given, tmp_path)


def test_a_new_run_does_not_overwrite_an_old_one(tiny: Make, unstopped: Path) -> None:
    from commopt.train.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"already holds a run \(at step 12\): .*--resume=auto"):
        run(tiny(unstopped))


def test_resume_from_a_path_into_another_folder(pair: Pair, tiny: Make, unstopped: Path, tmp_path: Path) -> None:
    source = unstopped / "checkpoints" / "step-00000008"
    pair.run(run, tiny(tmp_path, resume=str(source)))
    assert_same(content(tmp_path, 12, 2), content(unstopped, 12, 2))
    assert [line["step"] for line in read_metrics(tmp_path)] == [10, 12]


def test_a_checkpoint_that_was_set_aside_can_be_taken_up_by_its_name(
    pair: Pair, tiny: Make, unstopped: Path, tmp_path: Path
) -> None:
    """A run goes back to step 4, is stopped at 6, and then goes on from 8 after all."""
    shutil.copytree(unstopped, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints"
    pair.run(run_and_stop, tiny(tmp_path, resume=str(folder / "step-00000004")), 6, 1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "discarded-step-00000008", "discarded-step-00000012", "step-00000004", "step-00000006",
    ]  # fmt: skip
    pair.run(run, tiny(tmp_path, resume=str(folder / "discarded-step-00000008")))
    assert_same(content(tmp_path, 12, 2), content(unstopped, 12, 2))


def start_again(
    config: Config, times: int, monkeypatch: pytest.MonkeyPatch, end: int | None = None
) -> list[dict[str, Any]]:
    """What torchrun does: the same command line, and how often it has started that again. Killed after step ``end``."""
    whole = Trainer.train_step

    def step_or_end(trainer: Trainer) -> Any:
        happened = whole(trainer)
        if trainer.step == end:
            raise ZeroDivisionError("killed")
        return happened

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(times))
    with mock.patch.object(Trainer, "train_step", step_or_end):
        if end is None:
            run(config)
        else:
            with pytest.raises(ZeroDivisionError):
                run(config)
    return records(Path(config.train.run_dir))


@pytest.mark.parametrize("place", ["own", "other"])
@pytest.mark.parametrize("keep", [1, 3])
def test_what_torchrun_starts_again_goes_on_from_the_newest_checkpoint_of_the_run_since(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, keep: int
) -> None:
    """Also where the checkpoint that was given is no longer there."""
    first, begun = tmp_path / "first", {"keep": keep, "checkpoint_every": 2}
    run(tiny(first, train={"steps": 8, "checkpoint_every": 4}))
    given = first / "checkpoints" / "step-00000004"
    config = tiny(first if place == "own" else tmp_path / "second", resume=str(given), train=begun)
    folder = Path(config.train.run_dir) / "checkpoints"

    start_again(config, 0, monkeypatch, end=5)  # before it has a checkpoint of its own
    start_again(config, 1, monkeypatch, end=9)
    assert (place == "own" and keep == 1) != given.exists()
    with caplog.at_level(logging.INFO, logger="commopt"):
        start_again(config, 2, monkeypatch)
    assert f"resumed from {folder / 'step-00000008'} at step 8" in caplog.text
    assert not list(folder.glob("discarded-step-00000006"))


@pytest.mark.parametrize(("resume", "most", "warned"), [("none", 3, True), ("none", 0, False), ("auto", 3, False)])
def test_restarts_that_would_be_refused_are_warned_of_at_the_first_start(
    tiny: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    resume: str,
    most: int,
    warned: bool,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(most))
    start_again(tiny(tmp_path, resume=resume), 0, monkeypatch, end=1)
    assert (f"(--max-restarts={most})" in caplog.text) == warned


def test_a_checkpoint_that_is_given_counts_where_the_start_that_failed_had_not_begun(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny(tmp_path))
    with caplog.at_level(logging.INFO, logger="commopt"):
        start_again(tiny(tmp_path, resume=f"{tmp_path}/checkpoints/step-00000004"), 1, monkeypatch)
    assert "step-00000004 at step 4" in caplog.text


def test_a_checkpoint_set_aside_counts_against_those_before_it(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny(tmp_path))
    folder = tmp_path / "checkpoints"
    start_again(tiny(tmp_path, resume=str(folder / "step-00000004")), 0, monkeypatch, end=5)
    aside = tiny(tmp_path, resume=str(folder / "discarded-step-00000008"))
    start_again(aside, 0, monkeypatch, end=9)
    with caplog.at_level(logging.INFO, logger="commopt"):
        start_again(aside, 1, monkeypatch)
    assert "discarded-step-00000008 at step 8" in caplog.text

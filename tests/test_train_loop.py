"""The loop, its engines, its models and what it records."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from forks import python
from ports import free_port
from trainer_pair import Pair, run
from worlds import on_threads

import commopt
from commopt.comm import all_reduce_bytes
from commopt.train.config import CompressorConfig, Config, ModelConfig, OptimConfig
from commopt.train.errors import CheckpointError, ConfigError
from commopt.train.loop import (
    SETTLES,
    Trainer,
    learning_rate,
    providers,
    steps_until_asked,
    train,
    warn_of_freeze,
    warn_of_short_run,
)
from commopt.train.metrics import make_bar, read_metrics
from commopt.train.models import count_parameters, make_model, parameter_groups
from commopt.train.optimizer import make_optimizer
from commopt.train.parse import from_dict, to_yaml
from commopt.train.stop import StopSignal
from commopt.train.tasks import IGNORE
from commopt.train.world import World, open_world

ALONE = World(0, 1, torch.device("cpu"))
Make = Callable[..., Config]


# --- models ---


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_models_are_built_from_numbers(kind: Any) -> None:
    config = Config(model=ModelConfig(kind=kind, layers=2, heads=2, width=32))
    config.data.seq_len = 24
    torch.manual_seed(0)
    model = make_model(config, 300)
    width, positions = 32, 24
    layer = 12 * width**2 + 13 * width
    head = {"gpt": 2 * width, "bert": 300 + width**2 + width + 2 * width + 2 * width + width}[kind]
    assert count_parameters(model) == 300 * width + positions * width + 2 * layer + head
    inputs = torch.randint(5, 300, (3, 24))
    labels = torch.where(torch.rand(3, 24) < 0.2, inputs, IGNORE) if kind == "bert" else inputs
    assert float(model(inputs, labels).detach()) == pytest.approx(math.log(300), rel=0.1)


def test_llama_is_built_from_numbers() -> None:
    """Whole heads and MLPs by default, embeddings tied; else as told."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"kind": "llama", "layers": 2, "heads": 4, "width": 32}
    layer, ends = 4 * 32**2 + 3 * 32 * 256 + 2 * 32, 300 * 32 + 32
    config = Config(model=ModelConfig(**shape))
    model = make_model(config, 300)
    assert count_parameters(model) == ends + 2 * layer
    assert not any("inv_freq" in name for name in model.state_dict())
    assert model.net.model.rotary_emb.inv_freq.tolist() == pytest.approx([1, 1e-1, 1e-2, 1e-3])
    inputs, labels = torch.randint(5, 300, (2, 3, 24))
    assert float(model(inputs, labels).detach()) == pytest.approx(math.log(300), rel=0.1)
    less = Config(model=ModelConfig(**shape, kv_heads=1, mlp_width=48, tied=False))
    layer = (2 + 2 / 4) * 32**2 + 3 * 32 * 48 + 2 * 32
    assert count_parameters(make_model(less, 300)) == ends + 300 * 32 + 2 * layer
    decay, rest = parameter_groups(model, 0.1)
    assert all(p.ndim >= 2 for _, p in decay["params"])
    assert all("norm" in name for name, _ in rest["params"])


def test_llama_sees_what_came_before_and_where_it_stood() -> None:
    torch.manual_seed(0)
    net = make_model(Config(model=ModelConfig(kind="llama", layers=1, heads=2, kv_heads=1, width=16)), 300).net
    for name, p in net.named_parameters():  # so that the attention is not the same everywhere
        p.data *= 20 if "q_proj" in name or "k_proj" in name else 1
    inputs = torch.randint(5, 300, (1, 8))
    changed, swapped = inputs.clone(), inputs.clone()
    changed[0, -1], swapped[0, :2] = 4, inputs[0, :2].flip(0)
    before, after, moved = (net(input_ids=x).logits.detach() for x in (inputs, changed, swapped))
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-3)
    assert not torch.allclose(before[:, -1], moved[:, -1], atol=1e-3)


@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_the_width_of_mlps(kind: Any) -> None:
    narrow, usual = (ModelConfig(kind=kind, layers=1, heads=2, width=16, mlp_width=size) for size in (24, None))
    fewer = count_parameters(make_model(Config(model=usual), 300)) - count_parameters(
        make_model(Config(model=narrow), 300)
    )
    assert fewer == (64 - 24) * (2 * 16 + 1)


def test_bert_without_a_prediction_has_no_nan() -> None:
    config = Config(model=ModelConfig(kind="bert", layers=1, heads=2, width=16))
    model = make_model(config, 300)
    assert model(torch.full((1, 8), 9), torch.full((1, 8), IGNORE)).item() == 0.0


def test_biases_and_norms_are_not_decayed() -> None:
    model = make_model(Config(model=ModelConfig(layers=1, heads=2, width=16)), 300)
    decay, rest = parameter_groups(model, 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim >= 2 for _, p in decay["params"])
    assert all(name.endswith("bias") or "ln_" in name for name, _ in rest["params"])
    assert sum(p.numel() for group in (decay, rest) for _, p in group["params"]) == count_parameters(model)


# --- optimizers ---


def model() -> torch.nn.Module:
    return torch.nn.Linear(3, 2)


def test_optimizers_by_name() -> None:
    sign = CompressorConfig("Sign", {"block": 64})
    config = OptimConfig(
        args={"freeze_step": 9, "betas": [0.8, 0.9]}, compressor=sign, weight_decay=0.1, max_grad_norm=2.0
    )
    mine: Any = make_optimizer(config, model())
    assert isinstance(mine, commopt.OneBitAdam)
    assert mine.compressor == commopt.compress.Sign(block=64)
    assert mine.max_grad_norm == 2.0
    assert [group["weight_decay"] for group in mine.param_groups] == [0.1, 0.0]
    assert mine.param_groups[0]["betas"] == (0.8, 0.9)
    assert mine.param_groups[0]["param_names"] == ["weight"]
    assert isinstance(make_optimizer(OptimConfig(name="AdamW"), model()), torch.optim.AdamW)
    assert isinstance(make_optimizer(OptimConfig(name="torch.optim.SGD"), model()), torch.optim.SGD)
    lans = make_optimizer(OptimConfig(name="Lans", weight_decay=0.1, args={"normalize_grad": False}), model())
    assert isinstance(lans, commopt.Lans)
    assert [group["weight_decay"] for group in lans.param_groups] == [0.1, 0.0]
    assert not lans.param_groups[0]["normalize_grad"]


NAMES = [
    ({"name": "OneBitAdm"}, "optim.name='OneBitAdm' .*; did you mean OneBitAdam"),
    ({"name": "AdamV"}, "did you mean Adam"),
    ({"name": "no.such.Thing"}, "cannot import no.such"),
    ({"name": "torch.nn.Linear"}, "is no Optimizer"),
    ({"args": {"freez_step": 3}}, "optim.args.freez_step: OneBitAdam has no such argument; did you mean freeze_step"),
    ({"args": {"lr": 3}}, "optim.args.lr: set optim.lr instead"),
    ({"args": {"freeze_step": 0}}, "optim: OneBitAdam: .*freeze_step.*0"),
    ({"args": {"betas": [2, 3]}}, "optim: OneBitAdam: .*betas"),
    ({"name": "AdamW", "compressor": {"name": "Sign"}}, "optim.compressor .*with optim.name=AdamW.*: comm.compress"),
    ({"name": "AdamW", "args": {"freeze_step": 3}}, "optim.args.freeze_step: AdamW has no such argument"),
    ({"name": "Rprop", "weight_decay": 0.1}, "optim.weight_decay: Rprop has no such argument"),
    ({"compressor": {"name": "Sing"}}, "optim.compressor.name='Sing' .*; did you mean Sign"),
    ({"compressor": {"name": "Sign", "args": {"blok": 3}}}, "Sign has no such argument; did you mean block"),
    ({"compressor": {"name": "Sign", "args": {"block": -3}}}, "optim.compressor: Sign: .*-3"),
]


@pytest.mark.parametrize(("values", "message"), NAMES, ids=[message[:40] for _, message in NAMES])
def test_a_wrong_name_or_argument_is_answered(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer(from_dict(values, OptimConfig), model())


# --- the loop ---


def test_learning_rate() -> None:
    config = from_dict({"optim": {"lr": 2.0, "warmup_steps": 4, "min_lr_ratio": 0.1}, "train": {"steps": 14}})
    rates = [learning_rate(config, step) for step in range(15)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[9] == pytest.approx(1.1)
    assert rates[14] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)


def test_other_ways_down() -> None:
    optim = {"lr": 2.0, "warmup_steps": 4, "min_lr_ratio": 0.5}
    linear = from_dict({"optim": {**optim, "decay": "linear"}, "train": {"steps": 14}})
    assert [learning_rate(linear, step) for step in (0, 3, 4, 9, 14)] == [0.5, 2.0, 2.0, 1.5, 1.0]
    exponential = {**optim, "decay": "exponential", "decay_rate": 0.8, "decay_every": 3}
    config = from_dict({"optim": exponential, "train": {"steps": 14}})
    rates = [learning_rate(config, step) for step in range(3, 14)]
    assert rates == pytest.approx([2, 2, 2, 2, 1.8, 1.8, 1.8, 1.64, 1.64, 1.64, 1.512])
    assert learning_rate(config, 1000) == pytest.approx(1.0)  # what is above the floor decays
    constant = from_dict({"optim": {**optim, "min_lr_ratio": 1.0}, "train": {"steps": 14}})
    assert {learning_rate(constant, step) for step in range(4, 14)} == {2.0}


def test_other_ways_up() -> None:
    """Warm-up and decay of 1-bit LAMB's example: 11e-3 ((step / 450)^2, then 0.9^(step / 250)), and 1e-3 after that."""
    optim = {
        "lr": 12e-3, "warmup_steps": 450, "warmup_power": 2.0, "min_lr_ratio": 1 / 12,
        "decay": "exponential", "decay_rate": 0.9, "decay_every": 250,
    }  # fmt: skip
    config = from_dict({"optim": optim, "train": {"steps": 5993}})
    assert [learning_rate(config, step) for step in (44, 224, 449, 450)] == pytest.approx([12e-5, 3e-3, 12e-3, 12e-3])
    for step in (700, 4450, 5993):
        assert learning_rate(config, step) == pytest.approx(1e-3 + 11e-3 * 0.9 ** ((step - 450) // 250))


@pytest.mark.long
def test_a_run_that_starts_from_the_weights_of_another_with_longer_samples(tiny: Make, tmp_path: Path) -> None:
    shape = {"layers": 1, "heads": 2, "width": 16, "positions": 32}
    train(tiny(tmp_path / "short", model=shape, train={"steps": 4, "checkpoint_every": 4}))
    first = tmp_path / "short/checkpoints/step-00000004"
    longer = tiny(tmp_path / "long", model=shape, data={"seq_len": 32}, init=str(first))
    weights = torch.load(first / "shared.pt", weights_only=True)["weights"]
    trainer = Trainer(longer, ALONE)
    assert trainer.step == 0
    assert weights.keys() == trainer.model.state_dict().keys()
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert all(not state["exp_avg"].any() for state in trainer.engine.optimizer.state.values())
    train(longer)
    resumed = tiny(tmp_path / "long", model=shape, data={"seq_len": 32}, init="elsewhere", resume="auto")
    assert Trainer(resumed, ALONE).step == 12  # a run that goes on has weights already

    for changes, message in (
        ({"init": str(tmp_path / "none")}, "none: no such folder"),
        ({"init": str(first), "model": {**shape, "width": 18}}, r"of another model: it has .* \(300, 16\) where"),
        ({"init": str(first), "model": {**shape, "positions": None}}, r"of another model: it has .*wpe.* \(32, 16\)"),
        ({"init": str(first), "data": {"vocab_size": 290}}, "of another corpus or tokenizer"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Trainer(tiny(tmp_path / "other", **{"model": shape, **changes}), ALONE)


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [("train", "run_dir", Path("runs/mine")), ("optim", "lr", np.float64(1e-3)), ("train", "steps", np.int64(5))],
)
def test_a_value_of_python_that_no_file_can_have_is_named_before_anything_is_read(
    tiny: Make, tmp_path: Path, section: str, name: str, value: Any
) -> None:
    config = tiny(tmp_path)
    setattr(getattr(config, section), name, value)
    with (
        mock.patch("commopt.train.loop.load_corpus", side_effect=AssertionError("it was read")),
        pytest.raises(ConfigError, match=rf"^{re.escape(repr(value))} of type \w+ is not allowed in a config"),
    ):
        train(config)


def test_a_batch_that_cannot_be_shared_out(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.batch_size=8 is not allowed: it must be a multiple of .* 1 \* 3"):
        Trainer(tiny(tmp_path, train={"accumulate": 3}), ALONE)


def batches(config: Config, step: int) -> list[Any]:
    with open_world() as world:
        trainer = Trainer(config, world)
        trainer.consumed = step * config.train.batch_size
        return [trainer._batch(number)[0] for number in range(config.train.accumulate)]


def test_the_batch_is_the_same_at_any_world_size_and_accumulation(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    shares = pair.run(batches, tiny(tmp_path / "a", train={"batch_size": 8, "accumulate": 2}), 5)
    (alone,) = batches(tiny(tmp_path / "b"), 5)
    assert torch.equal(torch.cat([piece for share in shares for piece in share]), alone)


def evaluate(config: Config) -> float:
    with open_world() as world:
        return Trainer(config, world).evaluate()


def test_evaluation_is_shared_and_exact(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    """13 samples: the ranks have different numbers of them, and BERT's samples different numbers of labels."""
    config = tiny(tmp_path, model={"kind": "bert"}, train={"eval_samples": 13})
    first, second = pair.run(evaluate, config)
    assert first == second == pytest.approx(evaluate(config), rel=1e-6)


@pytest.mark.long
def test_bert_in_bf16_with_accumulation_learns(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    config = tiny(tmp_path, model={"kind": "bert", "dropout": 0.0}, optim={"lr": 0.02, "args": {"freeze_step": 15}},
                  train={"precision": "bf16", "accumulate": 2, "steps": 60, "batch_size": 16})  # fmt: skip
    summary = pair.run(run, config)[0]
    lines = read_metrics(tmp_path)
    assert lines[0]["loss"] > 5
    assert summary["heldout_loss"] < lines[0]["loss"] - 1.5
    assert summary["compressed_ratio"] > 4
    folder = tmp_path / "checkpoints" / "step-00000060"
    weights = torch.load(folder / "shared.pt", weights_only=True)["weights"]
    assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}


def test_the_run_folder(tiny: Make, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(tmp_path)
    summary = run(config, draw=True)
    assert from_dict(yaml.safe_load((tmp_path / "config.yaml").read_text())) == config
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["heldout_loss"] == summary["heldout_loss"]
    assert lines[-1]["tokens_total"] == 12 * 8 * 16
    assert {line["phase"] for line in lines} == {"plain"}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 6, 8, 10, 12]
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert steps == ["step-00000004", "step-00000008", "step-00000012"]


def test_links_in_the_run_folder_are_replaced_and_never_followed(tiny: Make, tmp_path: Path) -> None:
    run_dir, mine = tmp_path / "run", tmp_path / "mine"
    run_dir.mkdir()
    mine.write_text("mine")
    for name in ("config.yaml", "metrics.jsonl", "curves.png"):
        (run_dir / name).symlink_to(mine)
    run(tiny(run_dir, train={"steps": 2}), draw=True)
    assert mine.read_text() == "mine"
    assert not any((run_dir / name).is_symlink() for name in ("config.yaml", "metrics.jsonl", "curves.png"))


def test_a_disk_that_is_full_of_metrics_ends_all_ranks(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    errors = pair.errors(run_on_a_full_disk, tiny(tmp_path))
    assert errors[0] == errors[1]
    kind, message = errors[0]
    assert kind == "RankError"
    assert message.startswith("the disk is full: ")


def run_on_a_full_disk(config: Config) -> None:
    full = OSError(28, "No space left on device")
    with mock.patch("commopt.train.metrics.RunRecorder.write", side_effect=full):
        run(config)


def test_the_progress_bar_tells_what_is_sent(tiny: Make, tmp_path: Path) -> None:
    from rich.console import Console

    with (tmp_path / "terminal").open("w+") as terminal:
        console = Console(file=terminal, force_terminal=True, width=140)
        with mock.patch("rich.get_console", return_value=console):
            run(tiny(tmp_path / "run", train={"steps": 4}))
        terminal.seek(0)
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.read())
    for words in ("plain", "4/4", "loss ", "tok/s", "MB/step"):
        assert words in shown


@pytest.mark.parametrize("optim", [{"name": "AdamW", "args": {}}, {"name": "Lans", "args": {"normalize_grad": False}}])
def test_bytes_of_the_baseline(pair: Pair, tiny: Make, tmp_path: Path, optim: dict[str, Any]) -> None:
    config = tiny(tmp_path, optim=optim, train={"steps": 2})
    summary, other = pair.run(run, config)
    assert summary["heldout_loss"] == other["heldout_loss"]
    each = all_reduce_bytes(4 * count_parameters(make_model(config, 300)), 2)
    assert summary["bytes"] == summary["fp32_bytes"] == 2 * each
    assert summary["compressed_ratio"] is None


def run_with_nan(config: Config, step: int, rank: int) -> tuple[Any, bool]:
    """Train; one rank's loss is NaN in one step. Also says whether that step changed any parameter."""
    changed = []
    whole = Trainer.train_step

    def step_with_nan(trainer: Trainer) -> Any:
        if trainer.step != step:
            return whole(trainer)
        before = [p.detach().clone() for p in trainer.model.parameters()]
        forward = trainer.model.forward
        bad = torch.tensor(float("nan") if trainer.world.rank == rank else 1.0)
        with mock.patch.object(trainer.model, "forward", lambda *batch: forward(*batch) * bad):
            happened = whole(trainer)
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters())))
        return happened

    with mock.patch.object(Trainer, "train_step", step_with_nan):
        return run(config), changed[0]


@pytest.mark.parametrize("optim", [{}, {"name": "AdamW", "args": {}}], ids=["OneBitAdam", "AdamW"])
def test_a_step_with_nan_is_skipped_and_reported(pair: Pair, tiny: Make, tmp_path: Path, optim: dict[str, Any]) -> None:
    results = pair.run(run_with_nan, tiny(tmp_path, optim=optim), 7, 1)  # 7 steps done: the 8th, which is recorded
    assert [changed for _, changed in results] == [False, False]
    assert [summary["skipped_steps"] for summary, _ in results] == [1, 1]
    assert results[0][0]["heldout_loss"] == results[1][0]["heldout_loss"]
    lines = read_metrics(tmp_path)
    assert [line["skipped_steps"] for line in lines] == [0, 0, 0, 1, 1, 1]
    assert [line["loss"] is None for line in lines] == [False, False, False, True, False, False]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


LOCAL: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "DiLoCo": ({"name": "DiLoCo", "args": {"period": 4}}, [True, False]),
    "ZeroOneAdam": (  # of the steps that follow, 9 and 12 are rounds; without a gradient the momentum still moves
        {
            "name": "ZeroOneAdam",
            "args": {"variance": {"kappa": 2, "stop": 3}, "sync": {"first": 3, "double_every": None, "longest": 3}},
        },
        [True, True],
    ),
}


@pytest.mark.parametrize("case", LOCAL)
def test_a_local_step_with_nan_on_one_rank_counts(pair: Pair, tiny: Make, tmp_path: Path, case: str) -> None:
    optim, moved = LOCAL[case]
    results = pair.run(run_with_nan, tiny(tmp_path, optim=optim), 6, 1)
    assert [changed for _, changed in results] == moved
    assert [summary["skipped_steps"] for summary, _ in results] == [1, 1]
    assert [line["skipped_steps"] for line in read_metrics(tmp_path)] == [0, 0, 0, 1, 1, 1]
    again = pair.run(run, tiny(tmp_path, optim=optim, resume="auto"))
    assert [summary["skipped_steps"] for summary in again] == [1, 1]


def run_quietly(config: Config) -> list[str]:
    """Train; return the warnings that this rank logged."""
    from _pytest.logging import LogCaptureHandler

    handler = LogCaptureHandler()
    logging.getLogger("commopt.train").addHandler(handler)
    run(config)
    logging.getLogger("commopt.train").removeHandler(handler)
    return [record.getMessage() for record in handler.records if record.levelno >= logging.WARNING]


def test_a_run_that_never_compresses_says_so(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    messages = pair.run(run_quietly, tiny(tmp_path, train={"steps": 4}))[0]
    assert messages == ["freeze_step=5 is not before train.steps=4: this run never compresses"]


def test_a_run_that_is_over_before_the_learning_rate_has_warmed_up_says_so(
    pair: Pair, tiny: Make, tmp_path: Path
) -> None:
    """Once, by one rank, and the run goes on: a short one may only be meant to show that it runs."""
    config = tiny(tmp_path, optim={"lr": 1e-3, "warmup_steps": 20, "args": {"freeze_step": 2}}, train={"steps": 4})
    first, other = pair.run(run_quietly, config)
    assert (len(first), other) == (1, [])
    assert first[0] == (
        "optim.warmup_steps=20 is more than train.steps=4: the learning rate only rises, to 0.0002 at the end, and "
        "never reaches optim.lr=0.001"
    )
    assert [record["lr"] for record in read_metrics(tmp_path)] == pytest.approx([1e-4, 2e-4])
    assert warn_of_short_run(from_dict({"optim": {"warmup_steps": 4}, "train": {"steps": 4}})) is None


def test_a_base_that_is_alone_on_its_rank_compresses_nothing_and_is_not_warned_of(
    pair: Pair, tiny: Make, tmp_path: Path
) -> None:
    optim = {"name": "DiLoCo", "args": {"base": "OneBitAdam", "period": 2}}
    assert pair.run(run_quietly, tiny(tmp_path, train={"steps": 4}, optim=optim))[0] == []


WIDTHS = {
    12: ["  3/1000"],
    30: ["  3/1000", "loss 3.142"],
    40: ["compressed", "  3/1000", "loss 3.142"],
    60: ["compressed", "  3/1000", "loss 3.142 · 123,456 tok/s"],
    80: ["compressed", "  3/1000", "loss 3.142 · 123,456 tok/s · 12.35 MB/step · 25.6x"],
    100: ["compressed", "━━━━", "  3/1000", "loss 3.142 · 123,456 tok/s · 12.35 MB/step · 25.6x"],
}


def test_the_bar_shows_what_a_terminal_has_room_for_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole words, also when the terminal has become narrower since the last line."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False, color_system="standard")
    monkeypatch.setattr("rich._console", console)
    bar = make_bar(0, 1000)
    assert bar is not None
    for _ in range(3):
        bar.advance("compressed")
    bar.show({"loss": 3.1416, "tokens_per_s": 123456.0, "bytes": 12_345_678, "ratio": 25.6})
    bar.close()
    for width, words in reversed(WIDTHS.items()):
        console.width = width
        with console.capture() as said:
            console.print(bar.progress)
        (line,) = re.sub(r"\x1b\[[0-9;]*m", "", said.get()).splitlines()
        assert len(line) <= width
        assert all(word in line for word in words), (width, line)
        assert "…" not in line


def asked_after(config: Config) -> dict[int, float]:
    """Steps behind which ranks asked each other whether one was told to stop, where that is for ten local steps; and
    the seconds of a step that they asked by."""
    asked, ask = {}, Trainer._told_to_stop

    def telling(trainer: Trainer, met: bool) -> bool:
        def ten(seconds: float) -> int:
            asked[trainer.step] = seconds
            return 10

        with mock.patch("commopt.train.loop.steps_until_asked", ten):
            return ask(trainer, met)

    with mock.patch.object(Trainer, "_told_to_stop", telling):
        run(config)
    return asked


@pytest.mark.parametrize(
    ("name", "period", "after"),
    [("LocalSGD", 6, [1, 6, 12, 16]), ("LocalSGD", 30, [1, 11, 16, 22]), ("AdamW", 0, None)],
)
def test_ranks_do_not_wait_for_each_other_behind_a_local_step(
    pair: Pair, tiny: Make, tmp_path: Path, name: str, period: int, after: list[int] | None
) -> None:
    """But where a record is due, at step 16, and now and then; by the time of the rank that is slowest, on all."""
    steps = 22 if period == 30 else 16
    train = {"steps": steps, "log_every": 16, "eval_every": 100, "checkpoint_every": 100}
    optim = {"name": name, "args": {"period": period} if period else {}}
    config = tiny(tmp_path, train=train, optim=optim)
    asked, of_the_other = pair.run(asked_after, config)
    assert list(asked) == (list(range(1, steps + 1)) if after is None else after)
    assert asked == of_the_other
    assert all(seconds > 0 for seconds in asked.values())


def test_ranks_ask_after_some_seconds_of_local_steps_and_after_ten_at_the_latest() -> None:
    assert [steps_until_asked(seconds) for seconds in (0.0, 0.001, 0.1, 0.9, 3.0, 100.0)] == [10, 10, 10, 2, 1, 1]


def test_a_warm_up_that_cannot_end_is_said() -> None:
    def warning(freeze: Any, steps: int) -> str | None:
        return warn_of_freeze({"freeze_step": freeze}, steps)

    assert str(warning("auto", 60)).startswith('freeze_step="auto" ends no warm-up before step 60, and this run has')
    assert warning("auto", 61) is None
    assert warning(120, 500) is None  # what is too early, the optimizer says
    assert warning(500, 500) == "freeze_step=500 is not before train.steps=500: this run never compresses"
    assert warn_of_freeze({"lr": 1.0}, 5) is None


def test_auto_fires_as_early_as_the_warning_says() -> None:
    def freeze(backend: Any) -> Any:
        p = torch.nn.Parameter(torch.zeros(64))
        optimizer = commopt.OneBitAdam([p], lr=1e-3, freeze_step="auto", backend=backend)
        for _ in range(70):
            p.grad = torch.ones(64)
            optimizer.step()
        return optimizer.param_groups[0]["freeze_step"]

    assert on_threads(2, freeze) == [SETTLES] * 2


# --- agreement ---


def fail_on(rank: int, kind: type[Exception]) -> None:
    def work() -> int:
        if world.rank == rank:
            raise kind("it broke")
        return world.rank

    with open_world() as world:
        assert world.gather(world.together(lambda: world.rank * 2)) == [0, 2]
        assert world.once(lambda: "from 0") == "from 0"
        assert world.any(world.rank == 1)
        assert not world.any(False)
        world.together(work)


def test_what_fails_on_one_rank_is_raised_on_all(pair: Pair) -> None:
    assert pair.errors(fail_on, 1, ConfigError) == [("ConfigError", "it broke (rank 1)")] * 2
    assert pair.errors(fail_on, 0, OSError) == [("RankError", "OSError: it broke (rank 0)")] * 2
    first, second = pair.errors(fail_on, 1, KeyError)
    assert first == ("RankError", "KeyError: 'it broke' (rank 1)")
    assert second == ("KeyError", "'it broke'")


# --- signals ---


def test_the_first_signal_is_a_wish_and_its_echo_is_ignored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert not stop.requested
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_ends_at_once() -> None:
    code = "from commopt.train.stop import *\nwith StopSignal():\n print('on', flush=True)\n time.sleep(60)"
    with subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        time.sleep(1.3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == -signal.SIGINT


JOIN_ONCE_MORE = """
import os, torch.distributed as dist
from commopt.train.join import join
from commopt.train.stop import Stopped, StopSignal

agents = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True)  # outlives what joins over it
with StopSignal() as stop:
    stop.requested = True
    try:
        join("gloo", 20.0, stop)
    except Stopped:
        print("stopped")
for _ in range(2):
    with StopSignal() as stop:
        join("gloo", 20.0, stop)
    print("joined", dist.get_world_size())
    dist.destroy_process_group()
"""


def test_a_process_may_join_several_times_over_one_store() -> None:
    """As a script does that calls train() once more, under torchrun, whose agents have a store."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**os.environ, **given, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    done = subprocess.run([python(), "-c", JOIN_ONCE_MORE], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["stopped", "joined 1", "joined 1"], done.stderr


def test_the_launcher_adds_nothing_to_a_mistake(tmp_path: Path) -> None:
    command = [python(), "-m", "commopt.train.launcher", "--standalone", "--nproc-per-node=2", "-m", "commopt"]
    done = subprocess.run(
        [*command, "train", "--data.corpus=/nowhere", f"--train.run_dir={tmp_path}"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHON_EXEC": python()},
    )  # fmt: skip
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "arning" not in line] == [
        "commopt: error: corpus /nowhere: no such file or folder"
    ]


def test_sigterm_under_torchrun_saves_and_exits_with_0(tiny: Make, tmp_path: Path) -> None:
    """What scripts/pretrain.sh does: torchrun's workers get the signal, end in good order, and so does torchrun."""
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(tiny(tmp_path / "run", train={"steps": 100_000, "checkpoint_every": 10**6})))
    command = [sys.executable, "-m", "commopt.train.launcher", "--standalone", "--nproc-per-node=2", "-m", "commopt"]
    with subprocess.Popen(
        [*command, "train", str(config)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHON_EXEC": python()},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if "step 10 " in line:
                break
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(workers) == 2
        os.kill(int(workers[1]), signal.SIGTERM)
        output = process.stdout.read()
        assert process.wait(60) == 0, output
    assert "checkpoint saved; go on with: --resume=auto" in output
    assert "Traceback" not in output
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_one_provider_of_kernels_is_named_once_and_others_with_what_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"a": {"default": "reference"}, "b": {"default": "reference", "cpu": "native"}, "c": {"default": "native"}}
    monkeypatch.setattr(commopt.ops, "report", lambda: served)
    assert providers("cpu") == "native; reference: a"
    assert providers("cuda") == "reference; native: c"
    monkeypatch.setattr(commopt.ops, "report", lambda: {"a": served["a"]})
    assert providers("cpu") == "reference"

"""The tables of docs/recipes.md are what the configs come to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from shipped import ROOT, shipped

from commopt.comm import all_reduce_bytes
from commopt.optim.policies import SyncPolicy, VariancePolicy, count_steps
from commopt.train.config import Config
from commopt.train.models import count_parameters, make_model

GPUS = {
    "bert_base_128": 64, "bert_base_512": 64, "bert_large_128": 64, "bert_large_512": 64,
    "gpt2_small": 8, "gpt2_medium": 8, "llama_1b": 16,
}  # fmt: skip
"""That a config is cut for: by its accumulate."""
PAIRS = (("OneBitAdam", "AdamW"), ("ZeroOneAdam",), ("OneBitLamb", "Lamb"))
"""Optimizers that differ in what they send only. Where a model is cut there is no Lamb."""


def runnable(name: str, optimizers: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a pair that the config can be run with."""
    on_mesh = chosen(name, optimizers[0]).parallel.on_mesh
    return tuple(optimizer for optimizer in optimizers if not (on_mesh and optimizer == "Lamb"))


def chosen(name: str, optimizer: str) -> Config:
    return shipped(ROOT / "configs" / f"{name}.yaml", optimizer)


def settings_row(name: str, optimizers: tuple[str, ...]) -> str:
    """Of the table of settings; also checks that the optimizers of a row are alike."""
    configs = [chosen(name, optimizer) for optimizer in optimizers]
    optim, train = configs[0].optim, configs[0].train
    for other in configs[1:]:
        assert (other.train, other.optim.lr, other.optim.warmup_steps) == (train, optim.lr, optim.warmup_steps)
        assert other.optim.args.items() <= optim.args.items()
    assert GPUS[name] % configs[0].parallel.shard == 0
    at_a_time, rest = divmod(train.batch_size, GPUS[name] * train.accumulate)
    assert rest == 0
    settled = optim.args.get("freeze_step") or optim.args["variance"]["stop"]
    cells = [
        f"`{name}`", ", ".join(optimizers), f"{optim.lr:g}", f"{optim.warmup_steps:,}", f"{train.batch_size:,}",
        f"{train.steps:,}", f"{settled:,}", f"{GPUS[name]} × {train.accumulate} × {at_a_time}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def bytes_row(name: str) -> str:
    """Of the table of bytes that a rank sends: of its piece of the model, to the other replicas."""
    config, ranks = chosen(name, "AdamW"), GPUS[name]
    pieces = config.parallel.shard
    with torch.device("meta"):
        parameters = count_parameters(make_model(config, config.data.vocab_size))
    full = all_reduce_bytes(4 * parameters // pieces, ranks // pieces)
    bits = full / 32 * (1 + 32 / 2048)
    cells = [f"`{name}`", f"{parameters / 1e6:.0f} M", str(ranks), f"{full / 1e9:.2f} GB", f"{bits / 1e9:.3f} GB"]
    for optimizers in PAIRS:
        for optimizer in reversed(optimizers):
            if optimizer not in runnable(name, optimizers):
                cells.append("–")
                continue
            config = chosen(name, optimizer)
            args, steps = config.optim.args, config.train.steps
            exact, compressed = args.get("freeze_step", steps), steps - args.get("freeze_step", steps)
            if optimizer == "ZeroOneAdam":
                exact, compressed, _ = count_steps(
                    VariancePolicy(**args["variance"]), SyncPolicy(**args["sync"]), steps
                )
            cells.append(f"{(exact * full + compressed * bits) / 1e12:.3g} TB")
    return f"| {' | '.join(cells)} |"


def test_a_model_of_a_known_size_has_it() -> None:
    """TinyLlama's, to the parameter; and the width that its MLPs have is the one of the rule."""
    config = chosen("llama_1b", "AdamW")
    with torch.device("meta"):
        assert count_parameters(make_model(config, config.data.vocab_size)) == 1_100_048_384
    assert config.model == replace(config.model, mlp_width=replace(config.model, mlp_width=None).mlp_width_made)


@pytest.mark.parametrize("name", GPUS)
def test_the_tables_are_what_the_configs_come_to(name: str) -> None:
    rows = (ROOT / "docs/recipes.md").read_text().splitlines()
    assert bytes_row(name) in rows
    for optimizers in PAIRS:
        start = settings_row(name, runnable(name, optimizers))  # then comes the source
        assert [row for row in rows if row.startswith(start)]

"""The tables of docs/recipes.md are what the configs come to."""

from __future__ import annotations

import pytest
import torch
from shipped import ROOT, shipped

from commopt.comm import all_reduce_bytes
from commopt.optim.policies import SyncPolicy, VariancePolicy, count_steps
from commopt.train.config import Config
from commopt.train.models import count_parameters, make_model

GPUS = {
    "bert_base_128": 64, "bert_base_512": 64, "bert_large_128": 64, "bert_large_512": 64,
    "gpt2_small": 8, "gpt2_medium": 8,
}  # fmt: skip
"""That a config is cut for: by its accumulate."""
PAIRS = (("OneBitAdam", "AdamW"), ("ZeroOneAdam",), ("OneBitLamb", "Lamb"))
"""Optimizers that differ in what they send only."""


def chosen(name: str, optimizer: str) -> Config:
    return shipped(ROOT / "configs" / f"{name}.yaml", optimizer)


def settings_row(name: str, optimizers: tuple[str, ...]) -> str:
    """Of the table of settings; also checks that the optimizers of a row are alike."""
    configs = [chosen(name, optimizer) for optimizer in optimizers]
    optim, train = configs[0].optim, configs[0].train
    for other in configs[1:]:
        assert (other.train, other.optim.lr, other.optim.warmup_steps) == (train, optim.lr, optim.warmup_steps)
        assert other.optim.args.items() <= optim.args.items()
    at_a_time, rest = divmod(train.batch_size, GPUS[name] * train.accumulate)
    assert rest == 0
    settled = optim.args.get("freeze_step") or optim.args["variance"]["stop"]
    cells = [
        f"`{name}`", ", ".join(optimizers), f"{optim.lr:g}", f"{optim.warmup_steps:,}", f"{train.batch_size:,}",
        f"{train.steps:,}", f"{settled:,}", f"{GPUS[name]} × {train.accumulate} × {at_a_time}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def bytes_row(name: str) -> str:
    """Of the table of bytes that a rank sends."""
    config, ranks = chosen(name, "AdamW"), GPUS[name]
    with torch.device("meta"):
        parameters = count_parameters(make_model(config, config.data.vocab_size))
    full = all_reduce_bytes(4 * parameters, ranks)
    bits = full / 32 * (1 + 32 / 2048)
    cells = [f"`{name}`", f"{parameters / 1e6:.0f} M", str(ranks), f"{full / 1e9:.2f} GB", f"{bits / 1e9:.3f} GB"]
    for optimizers in PAIRS:
        for optimizer in reversed(optimizers):
            config = chosen(name, optimizer)
            args, steps = config.optim.args, config.train.steps
            exact, compressed = args.get("freeze_step", steps), steps - args.get("freeze_step", steps)
            if optimizer == "ZeroOneAdam":
                exact, compressed, _ = count_steps(
                    VariancePolicy(**args["variance"]), SyncPolicy(**args["sync"]), steps
                )
            cells.append(f"{(exact * full + compressed * bits) / 1e12:.3g} TB")
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", GPUS)
def test_the_tables_are_what_the_configs_come_to(name: str) -> None:
    rows = (ROOT / "docs/recipes.md").read_text().splitlines()
    assert bytes_row(name) in rows
    for optimizers in PAIRS:
        start = settings_row(name, optimizers)  # then comes the source
        assert [row for row in rows if row.startswith(start)]

"""What the trainer's tests share: one small corpus with its prepared form, and one pair of processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_pair import Pair

WORDS = ("loss", "step", "gradient", "momentum", "sign", "bit", "rank", "world", "bucket", "scale", "residual", "send")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 30 small text files."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for number in range(30):
        lines = (" ".join(draw.choices(WORDS, k=9)) for _ in range(40))
        (folder / f"doc{number:02d}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """``tiny(run_dir, **overrides)``: the config of a run of milliseconds; override with ``optim={"lr": 1}`` and so on.

    It is in the warm-up phase up to step 5 of 12 and drops out, so that it cannot be resumed without generators.
    """
    from commopt.train.parse import from_dict

    cache = tmp_path_factory.mktemp("cache")

    def make(run_dir: Path, **overrides: Any) -> Any:
        tree: dict[str, Any] = {
            "model": {"layers": 1, "heads": 2, "width": 16, "dropout": 0.1},
            "data": {
                "corpus": str(corpus), "vocab_size": 300, "seq_len": 16, "heldout": 0.2, "cache_dir": str(cache),
            },
            "optim": {"lr": 3e-3, "warmup_steps": 2, "args": {"freeze_step": 5}},
            "train": {
                "run_dir": str(run_dir), "steps": 12, "batch_size": 8, "log_every": 2, "eval_every": 6,
                "eval_samples": 16, "checkpoint_every": 4, "keep": 3,
            },
        }  # fmt: skip
        for section, values in overrides.items():
            tree[section] = tree.get(section, {}) | values if isinstance(values, dict) else values
        return from_dict(tree)

    return make


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    """Two Gloo processes."""
    processes = Pair()
    yield processes
    processes.close()

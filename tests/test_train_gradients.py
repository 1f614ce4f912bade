"""The trainer with compressed means of gradients for a torch optimizer: comm.compress."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from trainer_pair import run, run_and_stop
from trainer_runs import Make, assert_same, content, records

from commopt.train.config import Config
from commopt.train.errors import CheckpointError, ConfigError
from commopt.train.metrics import read_metrics
from commopt.train.optimizer import check_plan

BASE = {"name": "AdamW", "args": {"eps": 1e-3}}


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    processes = Pool(4)
    yield processes
    processes.close()


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp, signs": (2, {"comm": {"compress": {"name": "Sign", "args": {"block": 64}}}, "train": {"accumulate": 2}}),
    "ddp, factors": (2, {"comm": {"compress": {"name": "ACP", "args": {"rank": 2, "min_compression": 1.0}}}}),
    "ddp, blocks": (2, {"comm": {"compress": {"name": "TopBlocks", "args": {"density": 0.2, "block": 64}}}}),
    "sharded": (4, {"comm": {"compress": {"name": "Sign"}}, "parallel": {"shard": 2}, "train": {"accumulate": 2}}),
}


@pytest.mark.parametrize("way", WAYS)
def test_stopped_and_resumed_is_never_stopped_and_it_learns(four: Pool, tiny: Make, tmp_path: Path, way: str) -> None:
    ranks, settings = WAYS[way]

    def config(folder: str, **more: Any) -> Config:
        return tiny(tmp_path / folder, optim=BASE, **{**settings, **more})

    four.run(run, config("whole"), ranks=ranks)
    four.run(run_and_stop, config("parts"), 6, 1, ranks=ranks)
    four.run(run, config("parts", resume="auto"), ranks=ranks)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert_same(content(tmp_path / "parts", 12, ranks), content(tmp_path / "whole", 12, ranks))
    lines = [line for line in read_metrics(tmp_path / "whole") if "loss" in line]
    assert {line["phase"] for line in lines} == {"compressed"}
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["bytes"] < 0.3 * lines[-1]["fp32_bytes"]


def test_on_another_number_of_ranks_and_with_another_compressor(four: Pool, tiny: Make, tmp_path: Path) -> None:
    """What is owed is kept; what lives in the checkpoint must be the same."""
    settings = {"optim": BASE, "comm": WAYS["ddp, signs"][1]["comm"]}
    four.run(run_and_stop, tiny(tmp_path, **settings), 6, 1, ranks=2)
    other = {**settings, "comm": {"compress": {"name": "Sign", "args": {"block": 128}}}}
    with pytest.raises(CheckpointError, match=r"comm\.compress"):
        run(tiny(tmp_path, **other, resume="auto"))
    assert run(tiny(tmp_path, **settings, resume="auto"))["finished"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optim": {"name": "OneBitAdam"}, "comm": {"compress": {"name": "Sign"}}},
            r"comm\.compress\.name=Sign is not allowed with optim\.name=OneBitAdam, which sends what it compresses",
        ),
        ({"comm": {"compress": {"name": "Sing"}}}, r"comm\.compress\.name='Sing' .*; did you mean Sign"),
        ({"comm": {"compress": {"name": "RandomBlocks"}}}, r"comm\.compress\.name='RandomBlocks'"),
        (
            {"comm": {"compress": {"name": "ACP", "args": {"rnak": 1}}}},
            r"comm\.compress\.args\.rnak: ACP has no such argument",
        ),
        ({"comm": {"compress": {"name": "ACP", "args": {"rank": 0}}}}, r"rank must be an int >= 1, got 0"),
        ({"comm": {"compress": {"name": "TopBlocks", "args": {"density": 2}}}}, r"density must be .*, got 2"),
        (
            {"optim": {"name": "OneBitAdam", "compressor": {"name": "TopBlocks"}}},
            r"optim\.compressor\.name='TopBlocks'",
        ),
    ],
)
def test_what_cannot_be(tiny: Make, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plan(tiny(tmp_path, **{"optim": BASE, **settings}))

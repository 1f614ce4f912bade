"""The trainer with compressed means of gradients for a torch optimizer: comm.compress."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import Pool
from trainer_pair import run, run_and_stop
from trainer_runs import Make, assert_same, content, records
from worlds import needs_fsdp2

from commopt.compress import Int4, Int8
from commopt.gradients import Differences, LoCo
from commopt.gradients.loco import LoCoRows
from commopt.train.config import Config, GradientsConfig
from commopt.train.engine import DataParallel, make_engine
from commopt.train.errors import CheckpointError, ConfigError
from commopt.train.metrics import read_metrics
from commopt.train.optimizer import check_plan, plan_compression
from commopt.train.parallel import open_mesh
from commopt.train.parse import parse
from commopt.train.world import World, open_world

BASE = {"name": "AdamW", "args": {"eps": 1e-3}}


@pytest.fixture(scope="module")
def four() -> Iterator[Pool]:
    processes = Pool(4)
    yield processes
    processes.close()


SHORT = {"steps": 6, "eval_every": 4, "checkpoint_every": 6}
"""Compressed from the first step to the last, and saved where it stops."""

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp, both levels": (
        4,
        {
            "comm": {"compress": {"name": "Sign", "args": {"block": 64}, "inside": "Int8"}, "ranks_per_node": 2},
            "train": {**SHORT, "accumulate": 2},
        },
    ),
    "ddp, factors": (
        2,
        {
            "comm": {"compress": {"name": "ACP", "args": {"rank": 2, "min_compression": 1.0}, "warmup_steps": 4}},
        },
    ),
    "sharded over all": (
        2,
        {
            "comm": {"compress": {"name": "Int4", "feedback": "LoCo", "weights": "Differences"}},
            "parallel": {"shard": 2},
            "train": {**SHORT, "accumulate": 2},
        },
    ),
    "sharded, both levels": (
        4,
        {
            "comm": {"compress": {"name": "Int4", "args": {"rotate": True}, "feedback": False, "inside": "Int8"}},
            "parallel": {"shard": 2},
            "train": {**SHORT, "accumulate": 2},
        },
    ),
    "sharded over two nodes": (
        4,
        {
            "comm": {
                "compress": {"name": "Int4", "feedback": False, "inside": "Int8", "weights": "Differences"},
                "ranks_per_node": 2,
            },
            "parallel": {"shard": 4},
        },
    ),
}


@pytest.mark.long(but="ddp, both levels")
@pytest.mark.parametrize("way", WAYS)
def test_stopped_and_resumed_is_never_stopped_and_it_learns(four: Pool, tiny: Make, tmp_path: Path, way: str) -> None:
    ranks, settings = WAYS[way]

    def config(folder: str, **more: Any) -> Config:
        return tiny(tmp_path / folder, optim=BASE, **{"train": SHORT, **settings, **more})

    four.run(run, config("whole"), ranks=ranks)
    four.run(run_and_stop, config("parts"), 3, 1, ranks=ranks)
    four.run(run, config("parts", resume="auto"), ranks=ranks)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert_same(content(tmp_path / "parts", 6, ranks), content(tmp_path / "whole", 6, ranks))
    lines = [line for line in read_metrics(tmp_path / "whole") if "loss" in line]
    exact = settings["comm"]["compress"].get("warmup_steps", 0)
    assert [line["phase"] for line in lines] == ["warmup" if line["step"] <= exact else "compressed" for line in lines]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["bytes"] < 0.3 * lines[-1]["fp32_bytes"]


def test_on_another_number_of_ranks_and_with_another_compressor(four: Pool, tiny: Make, tmp_path: Path) -> None:
    """What is owed is kept; what lives in the checkpoint must be the same."""
    settings = {"optim": BASE, "comm": {"compress": {"name": "Sign", "args": {"block": 64}}}, "train": SHORT}
    four.run(run_and_stop, tiny(tmp_path, **settings), 3, 1, ranks=2)
    other = {**settings, "comm": {"compress": {"name": "Sign", "args": {"block": 128}}}}
    with pytest.raises(CheckpointError, match=r"comm\.compress"):
        run(tiny(tmp_path, **other, resume="auto"))
    assert run(tiny(tmp_path, **settings, resume="auto"))["finished"]


@pytest.mark.parametrize(
    ("given", "feedback"),
    [
        ({}, True),
        ({"feedback": True}, True),
        ({"feedback": False}, False),
        ({"feedback": "LoCo"}, LoCo()),
        ({"feedback": {"name": "LoCo", "args": {"beta": 0.5}}}, LoCo(beta=0.5)),
    ],
)
def test_what_becomes_of_what_is_lost(tiny: Make, tmp_path: Path, given: dict[str, Any], feedback: bool | LoCo) -> None:
    config = tiny(tmp_path, optim=BASE, comm={"compress": {"name": "Int4", **given}})
    check_plan(config)
    assert plan_compression(config) == {"compressor": Int4(), "feedback": feedback}
    with open_world() as world:
        engine = make_engine(config, torch.nn.Linear(3, 2), world)
    assert isinstance(engine, DataParallel)
    assert engine.gradients is not None
    method = engine.gradients.mean.method
    assert isinstance(method, LoCoRows) == isinstance(feedback, LoCo)
    assert (method.loco if isinstance(method, LoCoRows) else method.feedback) == feedback  # type: ignore[attr-defined]


def test_what_else_is_compressed(tiny: Make, tmp_path: Path) -> None:
    given = {"name": "Int4", "inside": {"name": "Int8", "args": {"block": 64}}, "weights": "Differences"}
    plan = plan_compression(tiny(tmp_path, optim=BASE, comm={"compress": given}, parallel={"shard": 2}))
    assert plan == {"compressor": Int4(), "feedback": True, "inside": Int8(block=64), "weights": Differences()}
    words = ["--optim.name=AdamW", "--parallel.shard=2", "--comm.compress.name=Int4"]
    other = "--comm.compress.weights={name: Differences, args: {compressor: {name: Int8}}}"
    plan = plan_compression(parse([*words, other]))
    assert plan is not None
    assert plan["weights"] == Differences(Int8())


def test_a_warm_up_in_full_precision(tiny: Make, tmp_path: Path) -> None:
    words = ["--optim.name=AdamW", "--comm.compress.name=Int4"]
    assert plan_compression(parse([*words, "--comm.compress.warmup_steps=40"])) == {
        "compressor": Int4(),
        "feedback": True,
        "warmup_steps": 40,
    }
    with pytest.raises(ConfigError, match=r"comm\.compress\.warmup_steps.*-1"):
        parse([*words, "--comm.compress.warmup_steps=-1"])


def test_feedback_on_the_command_line() -> None:
    words = ["--optim.name=AdamW", "--comm.compress.name=Int4"]
    assert plan_compression(parse([*words, "--comm.compress.feedback=false"])) == {
        "compressor": Int4(),
        "feedback": False,
    }
    assert plan_compression(parse([*words, "--comm.compress.feedback=LoCo"])) == {
        "compressor": Int4(),
        "feedback": LoCo(),
    }
    with pytest.raises(ConfigError, match=r"unknown key 'comm\.compress\.feedbak' .*; did you mean"):
        parse([*words, "--comm.compress.feedbak=false"])


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
        ({"comm": {"compress": {"feedback": "LoKo"}}}, r"comm\.compress\.feedback\.name='LoKo' .*; did you mean LoCo"),
        ({"comm": {"compress": {"feedback": {"beta": 0.5}}}}, r"comm\.compress\.feedback=.* a name, or name and args"),
        (
            {"comm": {"compress": {"feedback": {"name": "LoCo", "args": {"bete": 0.5}}}}},
            r"comm\.compress\.feedback\.args\.bete: LoCo has no such argument; did you mean beta",
        ),
        (
            {"comm": {"compress": {"weights": "Int8"}}},
            r"comm\.compress\.weights='Int8' is not allowed with parallel\.shard=1: FSDP2 must cut the model$",
        ),
        (
            {"comm": {"compress": {"inside": "Int8"}}},
            r"comm\.compress\.inside='Int8' .*: FSDP2 must cut the model, or comm\.ranks_per_node say how many",
        ),
        (
            {"comm": {"compress": {"name": "ACP", "inside": "Int8"}, "ranks_per_node": 2}},
            r"inside='Int8' is not allowed with comm\.compress\.name=ACP and parallel\.shard=1: .* such as Int4",
        ),
        (
            {"comm": {"compress": {"inside": "Differences"}}, "parallel": {"shard": 2}},
            r"comm\.compress\.inside\.name='Differences'",
        ),
        (
            {"comm": {"compress": {"name": "ACP", "feedback": "LoCo"}}},
            r"comm\.compress\.feedback='LoCo' is not allowed with comm\.compress\.name=ACP: it must be true or false",
        ),
        (
            {"comm": {"compress": {"feedback": {"name": "LoCo", "args": None}}}},
            r"feedback={'name': 'LoCo', 'args': None} is not allowed: it must be a name, or name and args",
        ),
        ({"comm": {"compress": {"feedback": {"name": 3}}}}, r"comm\.compress\.feedback\.name=3 is not allowed"),
        (
            {"comm": {"compress": {"weights": {"name": "Differences", "block": 64}}}, "parallel": {"shard": 2}},
            r"weights={'name': 'Differences', 'block': 64.* is not allowed: it must be a name, or name and args",
        ),
        (
            {"optim": {"name": "DiLoCo", "args": {"base_args": {1: 2}}}},
            r"optim\.args\.base_args has the key 1, and keys must be words",
        ),
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


@needs_fsdp2
def test_what_does_not_go_with_the_ranks_is_an_error_of_the_config(four: Pool, tiny: Make, tmp_path: Path) -> None:
    config = tiny(tmp_path, optim=BASE, comm={"compress": {"name": "ACP"}}, parallel={"shard": 2})
    for kind, message in four.errors(run, config, ranks=2):
        assert kind == "ConfigError"
        assert re.match(r"comm\.compress: ACP\(.* goes by all ranks having the same of a gradient", message)


INSIDE = {"name": "Int4", "inside": "Int8"}


@pytest.mark.parametrize("places", [0, 2])
def test_alone_there_is_nothing_inside(
    tiny: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, places: int
) -> None:
    config = tiny(tmp_path, optim=BASE, comm={"compress": INSIDE, "ranks_per_node": places})
    check_plan(config)
    with open_world() as world:
        engine = make_engine(config, torch.nn.Linear(3, 2), world)
    assert isinstance(engine, DataParallel)
    assert engine.gradients is not None
    assert engine.gradients.mean.method.inside is None  # type: ignore[attr-defined]
    assert "comm.compress.inside: a node is one rank here (comm.ranks_per_node), so" in caplog.text


def one_a_machine(config: Config) -> Any:
    """Trains as where each rank has a machine of its own."""
    with mock.patch("commopt.train.started.local_size", return_value=1):
        return run(config)


@pytest.mark.parametrize(
    "parallel", [{}, pytest.param({"shard": 2}, marks=needs_fsdp2)], ids=["ddp", "sharded over all"]
)
def test_one_rank_a_machine_has_nothing_inside(
    four: Pool, tiny: Make, tmp_path: Path, parallel: dict[str, int]
) -> None:
    """It is the run without."""
    settings: dict[str, Any] = {"optim": BASE, "parallel": parallel, "train": {"steps": 2, "checkpoint_every": 2}}
    for name, given in (("with", INSIDE), ("without", {"name": "Int4"})):
        comm = {"compress": given, "ranks_per_node": 0}
        four.run(one_a_machine, tiny(tmp_path / name, comm=comm, **settings), ranks=2)
    assert records(tmp_path / "with") == records(tmp_path / "without")


def test_nodes_are_of_models_that_are_cut_over_all_ranks(tiny: Make, tmp_path: Path) -> None:
    """Else replicas are the nodes."""
    settings: dict[str, Any] = {"optim": BASE, "parallel": {"shard": 2}}
    with pytest.raises(
        ConfigError, match=r"comm\.ranks_per_node=2 .* 1 with parallel\.\*, whose replicas are the nodes"
    ):
        tiny(tmp_path, **settings, comm={"ranks_per_node": 2})
    config = tiny(tmp_path, **settings, comm={"ranks_per_node": 2, "compress": {"name": "Int4"}})
    cut = open_mesh(config, World(0, 4, torch.device("cpu")))
    with pytest.raises(ConfigError, match=r"comm\.ranks_per_node=2 .* parallel\.shard=2 and 4 ranks"), cut:
        pass


@pytest.mark.parametrize("feedback", ["", None])
def test_feedback_must_be_something(feedback: Any) -> None:
    with pytest.raises(ConfigError, match=r"comm\.compress\.feedback=.* it must be true, false or LoCo"):
        GradientsConfig("Int4", feedback=feedback)

"""A model that has diverged: never saved over one that has not, and never passed over in silence."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from trainer_pair import Pair, run
from worlds import needs_fsdp2

from commopt.cli import main
from commopt.comm import MessageDamaged
from commopt.sharding import local
from commopt.train.config import Config
from commopt.train.engine import DataParallel
from commopt.train.errors import DivergedError
from commopt.train.finite import bad, in_short
from commopt.train.loop import Trainer
from commopt.train.parse import to_yaml
from commopt.train.tasks import Samples

Make = Callable[..., Config]
BASELINE = {"name": "AdamW", "args": {}}


def poison_weights(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[3] = math.inf


def poison_state(trainer: Trainer) -> None:
    """What this rank's compression owes, which no other rank sees."""
    trainer.engine.optimizer.buckets[0].feedback.worker.view(-1)[0] = math.nan  # type: ignore[attr-defined]


def run_and_poison(config: Config, how: Callable[[Trainer], None], step: int, rank: int) -> Any:
    """Train; after ``step`` one rank's state is spoilt."""
    whole = Trainer.train_step

    def step_and_spoil(trainer: Trainer) -> Any:
        happened = whole(trainer)
        if trainer.step == step and trainer.world.rank == rank:
            how(trainer)
        return happened

    with mock.patch.object(Trainer, "train_step", step_and_spoil):
        return run(config)


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("how", "name"),
    [(poison_weights, "weights net.transformer.wte.weight"), (poison_state, r"optimizer state \S*worker_error")],
    ids=["weights", "residuals"],
)
def test_what_is_not_finite_is_not_saved(
    pair: Pair, tiny: Make, tmp_path: Path, how: Callable[[Trainer], None], name: str
) -> None:
    errors = pair.errors(run_and_poison, tiny(tmp_path, train={"keep": 1}), how, 8, 1)
    assert errors[0] == errors[1]
    kind, message = errors[0]
    assert kind == "DivergedError"
    assert re.match(rf"step 8: inf or NaN in {name}", message), message
    assert "the newest before it stays, step-00000004: go on from that with --resume=auto" in message
    assert message.endswith("(rank 1)")
    assert checkpoints(tmp_path) == ["step-00000004"]
    assert pair.run(run, tiny(tmp_path, resume="auto"))[0]["finished"]


def test_the_first_checkpoint_is_not_written_either(tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"step 4: inf or NaN in weights .*; there is none before it: start anew"):
        run_and_poison(tiny(tmp_path), poison_weights, 4, 0)
    assert not (tmp_path / "checkpoints").exists()


def run_with_nan_from(config: Config, step: int) -> Any:
    """Train; from ``step`` on every loss is NaN."""
    whole = Trainer.train_step

    def step_with_nan(trainer: Trainer) -> Any:
        forward = trainer.model.forward
        bad = math.nan if trainer.step >= step else 1.0
        with mock.patch.object(trainer.model, "forward", lambda *batch: forward(*batch) * bad):
            return whole(trainer)

    with mock.patch.object(Trainer, "train_step", step_with_nan):
        return run(config)


def test_ddp_gives_up_after_so_many_skipped_steps(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    config = tiny(tmp_path, optim=BASELINE | {"max_skipped": 3}, train={"checkpoint_every": 5})
    errors = pair.errors(run_with_nan_from, config, 5)
    assert errors[0] == errors[1]
    kind, message = errors[0]
    assert kind == "DivergedError"
    assert re.match(
        r"3 steps in a row were skipped \(optim.max_skipped\): inf or NaN in the gradients of \S+ and \d+ more; go on",
        message,
    )
    assert checkpoints(tmp_path) == ["step-00000005"]


@pytest.mark.parametrize("parallel", [{}, pytest.param({"replicate": 1}, marks=needs_fsdp2)], ids=["whole", "mesh"])
def test_only_the_gradients_that_are_not_finite_are_named(tiny: Make, tmp_path: Path, parallel: dict[str, int]) -> None:
    """The norm, which they make NaN, is that of all."""
    whole, names = DataParallel.step, set()

    def step_with_nan(engine: DataParallel) -> None:
        name, p = list(engine.module.named_parameters())[-1]
        assert p.grad is not None
        local(p.grad).view(-1)[0] = math.nan
        names.add(name)
        whole(engine)

    config = tiny(tmp_path, optim=BASELINE | {"max_skipped": 2}, parallel=parallel)
    with mock.patch.object(DataParallel, "step", step_with_nan), pytest.raises(DivergedError) as raised:
        run(config)
    (name,) = names
    assert f"inf or NaN in the gradients of {name}; go on" in str(raised.value)


def test_skipped_steps_that_are_not_in_a_row_or_never_count(tiny: Make, tmp_path: Path) -> None:
    whole = Trainer.train_step

    def every_other(trainer: Trainer) -> Any:
        forward = trainer.model.forward
        with mock.patch.object(
            trainer.model, "forward", lambda *b: forward(*b) * (math.nan if trainer.step % 2 else 1)
        ):
            return whole(trainer)

    with mock.patch.object(Trainer, "train_step", every_other):
        summary = run(tiny(tmp_path / "a", optim=BASELINE | {"max_skipped": 2}))
    assert (summary["finished"], summary["skipped_steps"]) == (True, 6)
    summary = run_with_nan_from(tiny(tmp_path / "b", optim=BASELINE | {"max_skipped": None}), 2)
    assert (summary["finished"], summary["skipped_steps"]) == (True, 10)


def test_a_held_out_loss_that_is_nan_is_said_at_once_and_ends_badly(
    tiny: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "c.yaml"
    config.write_text(to_yaml(tiny(tmp_path / "run")))
    with mock.patch.object(Trainer, "evaluate", return_value=math.nan), caplog.at_level(logging.WARNING):
        assert main(["train", str(config)]) == 2
    assert "held-out loss is nan at step 6: the model has diverged" in caplog.text
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "commopt: error: the run ends with a held-out loss of nan: the model has diverged"


def test_names_of_what_is_not_finite() -> None:
    good, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    assert bad([("a", good), ("n", torch.tensor([1, 2])), ("x", 3)]) == []
    assert bad([]) == []
    assert bad([("a", nan), ("b", good), ("c", -torch.tensor(math.inf))]) == ["a", "c"]
    assert in_short(["a"]) == "a"
    assert in_short(["a", "b", "c"]) == "a and 2 more"


# a message that was damaged, a rank that cannot take a step: one line, on every rank ----------------------------------


def damage_mean(trainer: Trainer) -> None:
    """What this rank has received in the last mean of gradients is not what was sent."""
    trainer.engine.gradients.mean._watch._balance += 1  # type: ignore[attr-defined]


def damaged_confirmation(*_: Any) -> None:
    raise MessageDamaged("it is not what was sent")


def run_with_damaged_means(config: Config) -> Any:
    with mock.patch("commopt.state.replicas.confirm", damaged_confirmation):
        return run(config)


def run_with_failing_base(config: Config, rank: int) -> Any:
    """The optimizer of ``rank`` fails in its fourth step, in which a round ends."""
    whole, calls = torch.optim.AdamW.step, []

    def step(optimizer: torch.optim.AdamW, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 4 and dist.get_rank() == rank:
            raise RuntimeError("no memory")
        return whole(optimizer, *given)

    with mock.patch.object(torch.optim.AdamW, "step", step):
        return run(config)


@pytest.mark.parametrize(("step", "left"), [(4, []), (5, ["step-00000004"])])
def test_a_mean_of_gradients_that_was_damaged_is_in_no_checkpoint(
    pair: Pair, tiny: Make, tmp_path: Path, step: int, left: list[str]
) -> None:
    config = tiny(tmp_path, optim=BASELINE, comm={"compress": {"name": "Int8"}})
    errors = pair.errors(run_and_poison, config, damage_mean, step, 1)
    for kind, message in errors:
        assert kind == "ReplicaError"
        assert message.startswith(f"compress_gradients(), mean {step}: what was received is not what was sent")
        assert message.endswith("--resume=auto")
    assert [path.name for path in sorted(tmp_path.glob("checkpoints/step-*"))] == left


def test_replicas_that_differ_on_compressed_gradients_end_the_run(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    optim = BASELINE | {"check_every": 3}
    config = tiny(tmp_path, optim=optim, comm={"compress": {"name": "Int8"}}, train={"checkpoint_every": 12})
    for kind, message in pair.errors(run_and_poison, config, shift_weights, 4, 1):
        assert kind == "ReplicaError"
        assert message.startswith("compress_gradients(), before mean 7: ranks [0] and [1] differ in the parameters")


def shift_weights(trainer: Trainer) -> None:
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[3] += 1e-3


def test_a_damaged_mean_of_replicas_is_one_line(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    config = tiny(tmp_path, optim={"name": "DiLoCo", "args": {"period": 4}}, train={"eval_every": 3})
    for kind, message in pair.errors(run_with_damaged_means, config):
        assert (kind, message) == ("ReplicaError", "it is not what was sent: --resume=auto")


def test_a_rank_that_cannot_take_a_step_is_one_line_on_the_others(pair: Pair, tiny: Make, tmp_path: Path) -> None:
    config = tiny(tmp_path, optim={"name": "DiLoCo", "args": {"period": 4}})
    (first, told), (second, said) = pair.errors(run_with_failing_base, config, 1)
    assert (second, said) == ("RuntimeError", "no memory")
    assert first == "RankError"
    assert told.startswith("step 4: ")
    assert "rank 1 cannot take this step; its own error says why" in told


@pytest.mark.parametrize(("batch", "step"), [("train_batch", 3), ("heldout_batch", 6)])
def test_an_error_that_nobody_expects_is_said_with_rank_and_step(
    tiny: Make, tmp_path: Path, batch: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """In the steps, or in the evaluation behind one."""
    whole, calls = getattr(Samples, batch), []

    def taken(samples: Samples, indices: Any) -> Any:
        calls.append(1)
        if batch == "heldout_batch" or len(calls) == step:
            raise KeyError("no such sample")
        return whole(samples, indices)

    with mock.patch.object(Samples, batch, taken), pytest.raises(KeyError, match="no such sample"):
        run(tiny(tmp_path, optim=BASELINE))
    assert f"rank 0, step {step}: KeyError: 'no such sample'" in caplog.text

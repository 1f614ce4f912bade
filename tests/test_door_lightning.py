"""Lightning's Trainer and Fabric, over two processes: what they train, validate, save and resume."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every import EVERY
from forks import python
from listening import listening
from ports import free_port
from torch.nn.parallel import DistributedDataParallel
from worlds import Used, on_processes, on_threads, params_of, same_bits, tensors_in, tokens

from commopt import DiLoCo, OneBitAdam, attach
from commopt.compress import Int4
from commopt.integrations import advice

NAMES = ("OneBitAdam", "ZeroOneAdam", "CSER", "DiLoCo")
APART = NAMES[1:]
"""Those whose replicas differ after step SAVED."""
SAVED, STEPS = 5, 9


def make(name: str, params: Any, **settings: Any) -> Any:
    return EVERY[name](params, lr=1e-2, bucket_mb=3e-4, **settings)


def by_hand(name: str, rank: int, world: int) -> tuple[list[Any], list[Any], list[list[Any]]]:
    """Parameters and state after STEPS steps of a loop of one's own, synchronized; and the parameters after each."""
    model = DistributedDataParallel(Used(), find_unused_parameters=True)
    optimizer = make(name, model.parameters())
    attach(model, optimizer)
    after = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(tokens(step, rank, world)).backward()
        optimizer.step()
        after.append(params_of(model))
    optimizer.synchronize()
    return params_of(model), tensors_in(optimizer.state_dict()), after


# the Trainer ----------------------------------------------------------------------------------------------------------


def module_class(rank: int, world: int) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self, name: str, seed: int = 0, fails: bool = False, **settings: Any) -> None:
            super().__init__()
            self.name, self.fails, self.net, self.settings = name, fails, Used(seed=seed), settings
            self.norm = torch.nn.BatchNorm1d(3, affine=False)
            self.validated: list[list[Any]] = []
            self.validated_buffers: list[list[Any]] = []

        def training_step(self, batch: Any, index: int) -> Any:
            self.norm(torch.arange(6.0).reshape(2, 3) * (1 + self.global_step + 10 * rank))
            return self.net(tokens(self.global_step, rank, world))

        def validation_step(self, batch: Any, index: int) -> None:
            self.validated.append(params_of(self.net))
            self.validated_buffers.append(buffers_of(self))
            if self.fails:
                raise ArithmeticError("of a validation")

        def configure_optimizers(self) -> Any:
            return make(self.name, self.net.parameters(), **self.settings)

    return Module


def buffers_of(module: Any) -> list[Any]:
    return [buffer.clone() for buffer in module.buffers()]


def trainer(*callbacks: Any, steps: int = STEPS, **settings: Any) -> Any:
    import lightning.pytorch as pl

    from commopt.integrations.lightning import CommoptCallback

    given = {"callbacks": [*callbacks] or [CommoptCallback()], "enable_checkpointing": bool(callbacks), "logger": False}
    return pl.Trainer(
        strategy="ddp_find_unused_parameters_true", accelerator="cpu", devices=2, max_steps=steps,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, **{**given, **settings},
    )  # fmt: skip


VALIDATED = {
    "limit_val_batches": 1,
    "num_sanity_val_steps": 0,
    "val_check_interval": SAVED,
    "check_val_every_n_epoch": None,
}
DATA = [0] * 100
BUFFERS: dict[str, Any] = {**dict.fromkeys(NAMES, "mean"), "CSER": "broadcast"}
STATISTICS = [name for name, _ in torch.nn.BatchNorm1d(3, affine=False).named_buffers()]


def fitted(folder: Path, module: Any, name: str) -> dict[str, Any]:
    """What a fit trains, validates and saves; and what is resumed of it."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from commopt.integrations.lightning import CommoptCallback

    weights = folder / f"{name}-weights.ckpt"
    own: list[list[Any]] = []

    class SaveWeights(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == SAVED:
                own.append(buffers_of(trainer.lightning_module))
                trainer.save_checkpoint(weights, weights_only=True)

    saving = ModelCheckpoint(folder / name, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    once, resumed = module(name), module(name, seed=1)
    never, again = trainer(CommoptCallback(BUFFERS[name]), SaveWeights(), saving, **VALIDATED), trainer()
    with listening() as said:
        never.fit(once, DATA, [0])
    saved = folder / name / f"step={SAVED}.ckpt"
    again.fit(resumed, DATA, ckpt_path=saved)
    read = [torch.load(path, weights_only=True)["state_dict"] for path in (saved, weights)]
    return {
        "said": said,
        "never": [params_of(once.net), tensors_in(never.optimizers[0].state_dict())],
        "resumed": [params_of(resumed.net), tensors_in(again.optimizers[0].state_dict())],
        "saved": [[state[f"net.{key}"] for key, _ in once.net.named_parameters()] for state in read],
        "validated": once.validated[0],
        "own buffers": own[0],
        "last buffers": buffers_of(once),
        "buffers": [once.validated_buffers[0], *([state[f"norm.{key}"] for key in STATISTICS] for state in read)],
    }


def trainers(folder: Path, rank: int, world: int) -> dict[str, Any]:
    from commopt.integrations.lightning import CommoptCallback

    module = module_class(rank, world)
    out: dict[str, Any] = {name: fitted(folder, module, name) for name in NAMES}
    out["by hand"] = {name: by_hand(name, rank, world) for name in NAMES}
    out["fails"] = failing(module("DiLoCo", fails=True), trainer(**VALIDATED))
    callback = CommoptCallback()
    with listening() as out["clipped"]:
        for _ in range(2):
            trainer(callback, steps=1, gradient_clip_val=0.5, enable_checkpointing=False).fit(
                module("OneBitAdam"), DATA
            )
    out["several"] = several(module, trainer())
    overlapped = module("OneBitAdam", overlap=True)
    trainer().fit(overlapped, DATA)
    out["overlapped"] = [params_of(overlapped.net), overlapped.trainer.optimizers[0].overlap]
    out["attached"] = attached(module)
    out["logged"] = logged(folder, module)
    with pytest.raises(ValueError, match="buffers must be 'mean' or 'broadcast', got 'own'"):
        CommoptCallback("own")
    return out


def attached(module: Any) -> list[Any]:
    """What a module has that attaches what Lightning itself has wrapped, without the callback."""
    import lightning.pytorch as pl

    seen = []

    class Attaching(module):  # type: ignore[misc]
        def on_train_start(self) -> None:
            optimizer, ddp = self.optimizers(), self.trainer.strategy.model
            attach(ddp, optimizer)
            seen.extend([type(optimizer).__name__, optimizer.optimizer._attachment.is_of(ddp)])

    one = Attaching("OneBitAdam")
    trainer(pl.Callback(), enable_checkpointing=False).fit(one, DATA)
    return [*seen, params_of(one.net)]


def failing(module: Any, trainer: Any) -> list[list[Any]]:
    """The parameters in a validation that raises, and after it."""
    with pytest.raises(ArithmeticError, match="of a validation"):
        trainer.fit(module, DATA, [0])
    return [module.validated[0], params_of(module.net)]


def logged(folder: Path, module: Any) -> list[Any]:
    """What a logger has of four steps, each of two batches, and what the optimizer says of the last."""
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder, name="logged", version=0)
    fit = trainer(steps=4, logger=logger, log_every_n_steps=2, accumulate_grad_batches=2)
    fit.fit(module("OneBitAdam"), DATA)
    file = Path(logger.log_dir, "metrics.csv")
    rows = [*csv.DictReader(file.open())] if fit.is_global_zero else []
    return [rows, fit.optimizers[0].comm_stats()]


def several(module: Any, trainer: Any) -> str:
    class Several(module):  # type: ignore[misc]
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            params = [p for p in self.net.parameters() if p.requires_grad]
            return [OneBitAdam(params[:2]), OneBitAdam(params[2:])]

    with pytest.raises(ValueError, match="one optimizer") as error:
        trainer.fit(Several("OneBitAdam"), DATA)
    return str(error.value)


def compressed(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """AdamW on compressed means, which are clipped: fitted, stopped in between and resumed."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    from commopt.integrations.lightning import CompressGradients

    class Module(pl.LightningModule):
        def __init__(self, seed: int, make: Any = torch.optim.AdamW) -> None:
            super().__init__()
            self.net, self.make = Used(seed=seed), make

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(tokens(self.global_step, rank, world))

        def configure_optimizers(self) -> Any:
            return self.make(self.net.parameters(), lr=1e-2)

        def test_step(self, batch: Any, index: int) -> None:
            pass

    def fit(module: Any, callback: Any, *callbacks: Any, ckpt_path: Any = None, **settings: Any) -> Any:
        given = {"gradient_clip_val": 0.5, "enable_checkpointing": bool(callbacks), **settings}
        trainer(callback, *callbacks, **given).fit(module, DATA, ckpt_path=ckpt_path)
        return params_of(module.net)

    saving = ModelCheckpoint(folder / "compressed", filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    logger = CSVLogger(folder, name="compressed-log", version=0)
    last = CompressGradients(Int4())
    never = fit(Module(0), CompressGradients(Int4()), saving, logger=logger, log_every_n_steps=STEPS)
    saved = folder / "compressed" / f"step={SAVED}.ckpt"
    again = fit(Module(1), last, ckpt_path=saved)
    trainer(last, enable_checkpointing=False, limit_test_batches=1).test(Module(0), DATA, saved, verbose=False)
    tested = fit(Module(0), last)
    with_none = folder / "without.ckpt"
    if rank == 0:
        content = torch.load(saved, weights_only=True)
        del content["commopt_gradients"]
        torch.save(content, with_none)
    dist.barrier()
    with listening() as said:
        without = fit(Module(1), CompressGradients(Int4()), ckpt_path=with_none)
    with pytest.raises(ValueError, match="OneBitAdam averages by itself"):
        fit(Module(0, OneBitAdam), CompressGradients(Int4()))
    file = Path(logger.log_dir, "metrics.csv")
    rows = [*csv.DictReader(file.open())] if rank == 0 else []
    return {
        "never": never, "again": again, "tested": tested, "without": without, "said": said, "rows": rows,
        "left": last.handle,
    }  # fmt: skip


# Fabric ---------------------------------------------------------------------------------------------------------------


def fabrics(folder: Path, rank: int, world: int) -> dict[str, Any]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=world, strategy=DDPStrategy(find_unused_parameters=True))
    fabric.launch()
    out = {}
    for name in NAMES:

        def begin(seed: int, name: str = name) -> tuple[Any, Any]:
            net = Used(seed=seed)
            model, optimizer = fabric.setup(net, make(name, net.parameters()))
            if not seed:  # the one that loads finds it by itself
                attach(model, optimizer)  # what Fabric has wrapped
                assert optimizer.optimizer._attachment.is_of(model._forward_module)
            return model, optimizer

        def steps(model: Any, optimizer: Any, which: range) -> None:
            for step in which:
                optimizer.zero_grad()
                fabric.backward(model(tokens(step, rank, world)))
                optimizer.step()

        model, optimizer = begin(0)
        steps(model, optimizer, range(SAVED))
        own = params_of(model)
        with optimizer.averaged():
            fabric.save(folder / f"{name}.fabric", {"model": model, "optimizer": optimizer})
        back = same_bits(own, params_of(model))
        steps(model, optimizer, range(SAVED, STEPS))
        optimizer.synchronize()
        resumed, second = begin(1)
        fabric.load(folder / f"{name}.fabric", {"model": resumed, "optimizer": second})
        steps(resumed, second, range(SAVED, STEPS))
        second.synchronize()
        state = torch.load(folder / f"{name}.fabric", weights_only=True)["model"]
        out[name] = {
            "back": back,
            "never": [params_of(model), tensors_in(optimizer.optimizer.state_dict())],
            "resumed": [params_of(resumed), tensors_in(second.optimizer.state_dict())],
            "saved": [state[key] for key, _ in model.module.named_parameters()],
        }
    return out


def scenes(rank: int, world: int) -> dict[str, Any]:
    os.environ["LOCAL_RANK"] = str(rank)
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    return {
        **trainers(Path(folder[0]), rank, world),
        "compressed": compressed(Path(folder[0]), rank, world),
        "fabric": fabrics(Path(folder[0]), rank, world),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_processes(2, scenes)


every = pytest.mark.parametrize("name", NAMES)


def mean_by_hand(ranks: list[Any], name: str, step: int) -> list[Any]:
    own = [rank["by hand"][name][2][step - 1] for rank in ranks]
    assert same_bits(*own) == (name not in APART)
    return [(a.double() + b.double()) / 2 for a, b in zip(*own)]


def close(a: list[Any], b: list[Any]) -> bool:
    """But for the rounding of a mean in float32."""
    return all(torch.allclose(x.double(), y.double(), rtol=3e-7, atol=1e-8) for x, y in zip(a, b))


@every
def test_a_fit_is_the_loop_of_ones_own(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        mine = rank[name]
        assert same_bits(mine["never"][0], rank["by hand"][name][0])
        assert same_bits(mine["never"][1], rank["by hand"][name][1])
        assert not [line for line in mine["said"] if "equal on all ranks" in line]


@every
def test_a_resumed_fit_is_one_never_stopped(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        mine = rank[name]
        assert same_bits(mine["resumed"][0], mine["never"][0])
        assert same_bits(mine["resumed"][1], mine["never"][1])


@every
def test_the_mean_is_validated_and_saved(ranks: list[Any], name: str) -> None:
    mean = mean_by_hand(ranks, name, SAVED)
    for rank in ranks:
        mine = rank[name]
        for tensors in (mine["validated"], *mine["saved"]):
            assert close(tensors, mean)
        assert same_bits(mine["saved"][0], mine["validated"])


@every
def test_buffers_of_the_mean_are_the_same_on_all_ranks(ranks: list[Any], name: str) -> None:
    own = [rank[name]["own buffers"] for rank in ranks]
    assert not same_bits(*own)
    wanted = [(a + b) / 2 if a.is_floating_point() else a for a, b in zip(*own)]
    if name not in APART or BUFFERS[name] == "broadcast":  # the former as Lightning alone has them: DDP sends rank 0's
        wanted = own[0]
    for rank in ranks:
        for found in rank[name]["buffers"]:
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", APART)
def test_a_fit_with_local_steps_leaves_the_same_buffers_on_all_ranks(ranks: list[Any], name: str) -> None:
    one, other = (rank[name]["last buffers"] for rank in ranks)
    assert same_bits(one, other)


def test_overlap_in_a_fit_is_the_same_to_the_bit(ranks: list[Any]) -> None:
    for rank in ranks:
        params, overlaps = rank["overlapped"]
        assert overlaps
        assert same_bits(params, rank["by hand"]["OneBitAdam"][0])


def test_what_lightning_has_wrapped_is_attached(ranks: list[Any]) -> None:
    for rank in ranks:
        kind, its_own, params = rank["attached"]
        assert kind == "LightningOneBitAdam"
        assert its_own
        assert same_bits(params, rank["by hand"]["OneBitAdam"][0])


def test_what_is_sent_is_logged_when_lightning_logs(ranks: list[Any]) -> None:
    rows, stats = ranks[0]["logged"]
    assert [int(row["step"]) for row in rows] == [1, 3]
    names = ("commopt/bytes", "commopt/bytes_total", "commopt/ratio", "commopt/residual_ratio")
    assert [float(rows[-1][name]) for name in names] == [
        stats["step"]["bytes"], stats["total"]["bytes"], stats["ratio"], stats["residual_ratio"],
    ]  # fmt: skip
    assert stats["step"]["bytes"] > 0


def test_a_validation_that_fails_leaves_each_rank_its_own(ranks: list[Any]) -> None:
    for rank in ranks:
        inside, after = rank["fails"]
        assert close(inside, mean_by_hand(ranks, "DiLoCo", SAVED))
        assert same_bits(after, rank["by hand"]["DiLoCo"][2][SAVED - 1])


def test_any_optimizer_is_fitted_on_compressed_means_and_resumes_to_the_bit(ranks: list[Any]) -> None:
    for rank in ranks:
        seen = rank["compressed"]
        assert same_bits(seen["never"], seen["again"])
        assert same_bits(seen["never"], seen["tested"])  # from the beginning, after a test of a checkpoint
        assert not same_bits(seen["never"], seen["without"])
        assert same_bits(seen["never"], ranks[0]["compressed"]["never"])
        assert seen["left"] is None
    assert [text for text in ranks[0]["compressed"]["said"] if "has no residuals" in text]
    (row,) = ranks[0]["compressed"]["rows"]
    assert float(row["commopt/ratio"]) > 3
    assert 0 < float(row["commopt/bytes"]) < float(row["commopt/bytes_total"])


def test_clipping_by_each_rank_is_reported_once(ranks: list[Any]) -> None:
    said = [[line for line in rank["clipped"] if "gradient_clip_val" in line] for rank in ranks]
    assert [len(lines) for lines in said] == [1, 0]
    assert "Trainer(gradient_clip_val=0.5)" in said[0][0]
    assert "OneBitAdam(..., max_grad_norm=0.5)" in said[0][0]


def test_clipping_by_value_has_no_counterpart(caplog: pytest.LogCaptureFixture) -> None:
    def run(backend: Any) -> None:
        advice.for_lightning(0.5, False, OneBitAdam([torch.nn.Parameter(torch.ones(2))], backend=backend))

    on_threads(2, run)
    assert "OneBitAdam has no clipping by value: set gradient_clip_val=None" in caplog.text
    assert "max_grad_norm=0.5" not in caplog.text


def test_clipping_is_right_for_an_optimizer_that_clips_each_ranks_own_itself(caplog: pytest.LogCaptureFixture) -> None:
    def run(backend: Any) -> None:
        for make in (DiLoCo, OneBitAdam):
            p = torch.nn.Parameter(torch.ones(2))
            advice.for_lightning(0.5, True, make([p], lr=0.1, backend=backend))

    on_threads(2, run)
    (line,) = caplog.messages
    assert "OneBitAdam(..., max_grad_norm=0.5)" in line


def test_several_optimizers_of_one_model_are_refused(ranks: list[Any]) -> None:
    assert {rank["several"] for rank in ranks} == {
        "a DDP model takes one optimizer of commopt, configure_optimizers() gave OneBitAdam, OneBitAdam"
    }


@every
def test_fabric_saves_and_resumes(ranks: list[Any], name: str) -> None:
    for rank in ranks:
        mine = rank["fabric"][name]
        assert mine["back"]
        assert same_bits(mine["never"][0], rank["by hand"][name][0])
        assert same_bits(mine["resumed"][0], mine["never"][0])
        assert same_bits(mine["resumed"][1], mine["never"][1])
        assert close(mine["saved"], mean_by_hand(ranks, name, SAVED))


@pytest.mark.long
def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[1] / "examples" / "lightning_trainer.py"
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    ranks = [
        subprocess.Popen(
            [python(), str(example)], env={**os.environ, **meeting, "LOCAL_RANK": str(rank)}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said, told = ranks[0].communicate(timeout=120)
        assert ranks[0].returncode == ranks[1].wait(60) == 0, told
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert float(said.partition("right: ")[2].split()[0]) > 0.9
    sent, whole = re.findall(r"a step sends (\d+) bytes, in float32 (\d+)", said)[0]
    assert int(whole) > 20 * int(sent)
    assert (tmp_path / "lightning_example" / "last.ckpt").exists()

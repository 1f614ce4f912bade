"""The trainer over MPI: `mpirun -np N commopt train ... --comm.backend=mpi`, without torchrun."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import python
from ports import free_port
from trainer_runs import saved, train_all
from worlds import mpirun, needs_mpi, on_mpi, same_bits

from commopt.cli import main
from commopt.comm import MPIBackend, TorchBackend
from commopt.train import started
from commopt.train.config import Config
from commopt.train.parse import to_yaml

Make = Callable[..., Config]
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
LAUNCHED += ("OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


class MeansOfMPI(TorchBackend):
    """Gloo, but for the order in which means are added up."""

    def all_reduce(self, x: torch.Tensor) -> Any:
        return MPIBackend().all_reduce(x)

    def channels(self, n: int) -> list[Any]:
        return []


@pytest.mark.long(but="2")
@needs_mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_it_trains_as_gloo_does_and_resumes_to_the_bit(ranks: int, tiny: Make, tmp_path: Path) -> None:
    def config(name: str, backend: str, overlap: bool, resume: str = "none") -> Config:
        optim = {"args": {"freeze_step": 5, "overlap": overlap}, "max_grad_norm": None}
        return tiny(tmp_path / name, comm={"backend": backend}, optim=optim, resume=resume)

    configs = [
        config("mpi", "mpi", True),
        config("gloo", "gloo", False),
        config("means", "test_train_mpi.MeansOfMPI", False),
        config("resumed", "mpi", True, resume=str(tmp_path / "mpi/checkpoints/step-00000008")),
    ]
    path = tmp_path / "configs"
    path.write_bytes(pickle.dumps([(config, free_port()) for config in configs]))
    for first, *_, last in on_mpi(ranks, train_all, str(path)):
        assert first["finished"]
        assert last["heldout_loss"] == first["heldout_loss"]
    for rank in range(ranks):
        ours = saved(tmp_path / "mpi", rank=rank)
        assert same_bits(saved(tmp_path / "resumed", rank=rank), ours)
        assert same_bits(saved(tmp_path / "means", rank=rank), ours)
        # with 2 ranks there is one order to add up in
        assert same_bits(saved(tmp_path / "gloo", rank=rank), ours) == (ranks == 2)
    # With 4, warm-up differs by roundings: 1e-8 here, and 1e-6 in the bias of the attention's keys. That has gradients
    # of nothing but roundings, and Adam makes whole steps of them; from the freeze on it is anything, to no effect.
    for a, b in zip(saved(tmp_path / "mpi", step=4), saved(tmp_path / "gloo", step=4)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.long
@needs_mpi
def test_the_command_line_without_torchrun(tiny: Make, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(to_yaml(tiny(tmp_path / "run")))
    done = mpirun(4, "-m", "commopt", "train", str(config), "--comm.backend=mpi", "--train.steps=6")
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.sub("\x1b\\[[0-9;]*m", "", done.stdout)  # mpirun may give its processes a terminal
    assert said.count("finished: held-out loss") == 1, "rank 0 speaks for all"
    assert "4 ranks on cpu" in said
    assert {p.name for p in (tmp_path / "run/checkpoints/step-00000006").glob("rank-*")} == {
        f"rank-{r:05d}.pt" for r in range(4)
    }


@needs_mpi
def test_a_mistake_under_mpirun_is_said_once(tiny: Make, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(to_yaml(tiny(tmp_path / "run", train={"batch_size": 7})))
    done = mpirun(2, "-m", "commopt", "train", str(config), "--comm.backend=mpi")
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("commopt: error:")]
    assert said == [
        "commopt: error: train.batch_size=7 is not allowed: it must be a multiple of ranks * train.accumulate = 2 * 1"
    ]
    assert not (tmp_path / "run").exists()


FAILING = """
import sys
from commopt.cli import main
from commopt.comm import MPIBackend, TorchBackend
from commopt.train.loop import Trainer
whole = Trainer.train_step
def step(trainer):
    if trainer.step == 3 and trainer.world.rank == 1:
        raise ArithmeticError("lost on the way")
    return whole(trainer)
Trainer.train_step = step
sys.exit(main(sys.argv[1:]))
"""


@needs_mpi
def test_a_rank_that_fails_alone_ends_the_run(tiny: Make, tmp_path: Path) -> None:
    """Else it would wait for the others to end, and they for its part of the next collective."""
    config = tmp_path / "c.yaml"
    config.write_text(to_yaml(tiny(tmp_path / "run")))
    done = mpirun(2, "-c", FAILING, "train", str(config), "--comm.backend=mpi", patience=90)
    assert done.returncode != 0
    assert "ArithmeticError: lost on the way" in done.stderr


SLEEPING = """
import sys, time
from mpi4py import MPI
from commopt.cli import main
from commopt.train import checkpoint
write = checkpoint._write
def slowly(path, content):
    time.sleep(200 if MPI.COMM_WORLD.rank == 1 else 0)
    return write(path, content)
checkpoint._write = slowly
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@needs_mpi
def test_messages_between_the_ranks_have_the_timeout_too(tiny: Make, tmp_path: Path) -> None:
    """One sleeps while it writes its part of a checkpoint: the other says so, and ends the job."""
    config = tmp_path / "c.yaml"
    config.write_text(to_yaml(tiny(tmp_path / "run")))
    done = mpirun(2, "-c", SLEEPING, "train", str(config), "--comm.backend=mpi", "--comm.timeout=5")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("commopt: error:")]
    assert len(said) == 1
    assert "a message between the ranks: rank 1 did not join within 5 s" in said[0]
    assert "Traceback" not in done.stderr


def test_the_timeout_of_mpi_is_that_of_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--comm.backend=mpi", "--comm.args.timeout=5"]) == 2
    assert "comm.args.timeout: set comm.timeout instead" in capsys.readouterr().err


@needs_mpi
def test_torchrun_and_mpi_that_disagree(tmp_path: Path) -> None:
    env = os.environ | {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    argv = ["train", "--comm.backend=mpi", f"--train.run_dir={tmp_path}/run"]
    done = subprocess.run(
        [python(), "-m", "commopt", *argv], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert "WORLD_SIZE is 2 in the environment and 1 in MPI: start with mpirun -np N" in done.stderr
    assert not (tmp_path / "run").exists()


def test_processes_of_mpirun_do_not_each_train_alone(
    no_launcher: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert main(["train", f"--train.run_dir={tmp_path}/run"]) == 2
    assert "mpirun has started 3 processes, but with comm.backend=auto each would" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_mpi_it_says_what_to_install(
    no_launcher: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    no_launcher.setitem(sys.modules, "mpi4py", None)
    assert main(["train", "--comm.backend=mpi", f"--train.run_dir={tmp_path}/run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("commopt: error: comm.backend=mpi: MPIBackend needs mpi4py and an MPI library: pip install")


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, (0, 0, None, None)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, (3, 1, 4, None)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
            (3, 1, None, 4),
        ),
        ({"PMI_RANK": "3", "MPI_LOCALRANKID": "1", "PMI_SIZE": "4"}, (3, 1, None, 4)),
        ({"RANK": "0", "OMPI_COMM_WORLD_RANK": "3"}, (0, 0, None, None)),
    ],
)
def test_what_launchers_say(no_launcher: pytest.MonkeyPatch, env: dict[str, str], expected: tuple[Any, ...]) -> None:
    for name, value in env.items():
        no_launcher.setenv(name, value)
    assert (started.rank(), started.local_rank(), started.by_torchrun(), started.by_mpirun()) == expected

"""Processes that are killed, stopped or told to end, at the start and later: those that are left end soon, and say why.

Ranks are started by hand, without a launcher that would end them all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import python
from ports import free_port

from commopt.train.config import Config
from commopt.train.parse import to_yaml
from commopt.train.stop import Stopped
from commopt.train.world import World

Make = Callable[..., Config]
PATIENCE = 90.0

STEER = """
import os, signal, sys, time
from unittest import mock
import commopt.cli
from commopt.train import data, join, loop

mode = sys.argv.pop(1)

def say(word):
    print(word, flush=True)

if mode == "meet":  # says when it is about to meet the others
    real = join._open_store
    def opening(*args):
        say("meeting")
        return real(*args)
    join._open_store = opening
if mode == "prepare":  # preparing the corpus takes for ever
    def fill(folder, key, config, heed):
        say("preparing")
        while True:
            heed()
            time.sleep(0.01)
    data._fill = fill
if mode in ("train", "freeze"):  # to freeze it stops itself: a fork is not the process that would get the signal
    whole = loop.Trainer.train_step
    def step(trainer):
        if trainer.step == 3:
            say("stepping")
        if trainer.step == 4 and mode == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        return whole(trainer)
    loop.Trainer.train_step = step
if mode == "save":  # says when it is writing a checkpoint, and takes its time
    from commopt.train import checkpoint
    write = checkpoint._write
    def slowly(path, content):
        say("saving")
        time.sleep(60 if os.environ["RANK"] == "1" else 0)
        return write(path, content)
    checkpoint._write = slowly
sys.exit(commopt.cli.main(sys.argv[1:]))
"""


class Rank:
    """A process of the trainer under ``STEER``."""

    def __init__(self, rank: int, port: int, mode: str, argv: list[str]) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "OMPI_", "PMI_"))}
        env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.process = subprocess.Popen(
            [python(), "-c", STEER, mode, "train", *argv],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        assert self.process.stderr is not None
        pytest.fail(f"ended before {word!r}:\n{self.process.stderr.read()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, patience: float = PATIENCE) -> tuple[int, list[str]]:
        """Exit code, and what it said of commopt on standard error; fails if it does not end."""
        try:
            _, err = self.process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            pytest.fail("a rank hangs")
        assert "Traceback" not in err, err
        return self.process.returncode, [line for line in err.splitlines() if line.startswith("commopt:")]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tiny: Make, tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    """``start(rank, mode, **overrides)``."""
    with ExitStack() as stack:
        port = free_port()

        def make(rank: int, mode: str, argv: list[str] | None = None, **overrides: Any) -> Rank:
            config = tmp_path / f"{rank}.yaml"
            config.write_text(to_yaml(tiny(tmp_path / "run", **overrides)))
            one = Rank(rank, port, mode, argv or [str(config)])
            stack.callback(one.close)
            return one

        yield make


FOREVER = {"steps": 100_000, "checkpoint_every": 10**6, "eval_every": 10**6}


@pytest.mark.parametrize("early", [1, 0])
def test_told_to_stop_before_the_other_is_there(start: Callable[..., Rank], tmp_path: Path, early: int) -> None:
    """Rank 1 waits for the store that rank 0 serves; rank 0 serves it, and stays until rank 1 has read its word."""
    first = start(early, "meet")
    first.wait_for("meeting")
    first.signal(signal.SIGTERM)
    second = start(1 - early, "meet")
    ends = [second.end(), first.end()]
    assert [code for code, _ in ends] == [0, 0]
    said = [line for _, lines in ends for line in lines]
    assert said == [f"commopt: stopped by a signal to rank {early}, before the first step"]
    assert not (tmp_path / "run").exists()


def test_one_process_that_is_told_to_stop_waits_for_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as that is at work, such as a tokenizer in training, it heeds nothing."""
    told, done = threading.Event(), threading.Event()
    monkeypatch.setattr(World, "wished", property(lambda _: told.is_set()))

    def work(_: Callable[[], None]) -> None:
        told.set()
        done.wait(60)

    try:
        with pytest.raises(Stopped, match="stopped by a signal, before the first step"):
            World(0, 1, torch.device("cpu")).patiently(work)
    finally:
        done.set()
    told.clear()
    assert World(0, 1, torch.device("cpu")).patiently(lambda heed: (heed(), 7)[1]) == 7


def test_told_to_stop_while_rank_0_prepares(start: Callable[..., Rank], tmp_path: Path) -> None:
    data = {"cache_dir": str(tmp_path / "cache")}
    ranks = [start(rank, "prepare", data=data) for rank in range(2)]
    ranks[0].wait_for("preparing")
    ranks[1].signal(signal.SIGTERM)
    ends = [rank.end() for rank in ranks]
    assert [code for code, _ in ends] == [0, 0]
    assert [line for _, lines in ends for line in lines] == ["commopt: stopped by a signal, before the first step"]
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("killed", "optim"), [(0, {}), (1, {"name": "AdamW", "args": {}})], ids=["0 of OneBitAdam", "1 of AdamW"]
)
def test_the_rank_that_is_left_says_so(
    start: Callable[..., Rank], tmp_path: Path, killed: int, optim: dict[str, Any]
) -> None:
    ranks = [start(rank, "train", train=FOREVER, optim=optim) for rank in range(2)]
    for rank in ranks:
        rank.wait_for("stepping")
    ranks[killed].signal(signal.SIGKILL)
    code, said = ranks[1 - killed].end()
    assert code == 1
    (line,) = said
    assert line.startswith("commopt: error: ")
    assert "GLHF" not in line
    assert "/gloo/" not in line
    assert line.endswith(
        ": another rank has ended or does not answer; go on from the newest checkpoint with --resume=auto"
    )


def test_a_rank_that_does_not_answer_costs_the_timeout(start: Callable[..., Rank]) -> None:
    modes = ["train", "freeze"]
    ranks = [start(rank, mode, train=FOREVER, comm={"timeout": 5.0}) for rank, mode in enumerate(modes)]
    for rank in ranks:
        rank.wait_for("stepping")
    begin = time.monotonic()
    code, said = ranks[0].end()
    assert code == 1
    assert len(said) == 1
    assert time.monotonic() - begin < 60


@pytest.mark.long
def test_one_that_sleeps_while_it_saves_costs_the_timeout_too(start: Callable[..., Rank], tmp_path: Path) -> None:
    ranks = [start(rank, "save", comm={"timeout": 5.0}) for rank in range(2)]
    ranks[1].wait_for("saving")
    begin = time.monotonic()
    code, said = ranks[0].end()
    assert (code, len(said)) == (1, 1)
    assert time.monotonic() - begin < 50


def test_an_error_of_one_rank_alone_is_said_by_it(start: Callable[..., Rank], tmp_path: Path) -> None:
    """Rank 1 cannot read its config; rank 0 waits for it, and says so too, when its time is over."""
    first = start(0, "none", comm={"timeout": 8.0})
    (tmp_path / "bad.yaml").write_text("model: {layerz: 3}")
    code, said = start(1, "none", argv=[str(tmp_path / "bad.yaml")]).end()
    assert code == 2
    assert len(said) == 1
    assert "unknown key 'model.layerz'" in said[0]
    code, said = first.end()
    assert code == 1
    assert "1 of 2 ranks have come in time (comm.timeout)" in said[0]

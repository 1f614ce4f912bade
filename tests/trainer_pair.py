"""Two Gloo processes that live as long as the test session and run one task after another: starting them costs seconds.

A task is an importable function. Each gets a process group of its own, from the environment as under torchrun.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from unittest import mock

from forks import python
from ports import free_port

from commopt.train.config import Config

PATIENCE = 120.0
"""Seconds after which a task counts as hung."""


def serve(rank: int, size: int, address: str, key: bytes) -> None:
    """Be a rank: run what comes from who listens at ``address``. ``key`` is that of the multiprocessing there, which
    hands out the memory of tensors."""
    import torch

    multiprocessing.current_process().authkey = key
    pipe = Client(address)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    while True:
        try:
            port, task, args = pipe.recv()
        except EOFError:
            return
        os.environ["MASTER_PORT"] = str(port)
        try:
            outcome = (True, task(*args))
        except Exception as error:
            outcome = (False, (type(error).__name__, str(error), traceback.format_exc()))
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        pipe.send(outcome)


class Pair:
    """``run(task, *args)`` calls the task on both ranks."""

    size = 2

    def __init__(self) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        with Listener() as listener:
            for rank in range(self.size):
                arguments = (rank, self.size, listener.address, bytes(multiprocessing.current_process().authkey))
                code = f"import sys; sys.path = {sys.path!r}; import trainer_pair; trainer_pair.serve{arguments!r}"
                self.processes.append(subprocess.Popen([python(), "-c", code]))
                self.pipes.append(listener.accept())

    def outcomes(self, task: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """(True, result) or (False, (error type, message, traceback)) of each rank; fails if one hangs."""
        port = free_port()
        for pipe in self.pipes:
            pipe.send((port, task, args))
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(PATIENCE), f"rank {rank} hangs"
        return [pipe.recv() for pipe in self.pipes]

    def run(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """Results by rank; fails with the traceback of a rank that raised."""
        outcomes = self.outcomes(task, *args)
        for good, result in outcomes:
            assert good, result[2]
        return [result for _, result in outcomes]

    def errors(self, task: Callable[..., Any], *args: Any) -> list[tuple[str, str]]:
        """(type, message) of the error that every rank raised; fails if one did not raise."""
        outcomes = self.outcomes(task, *args)
        assert not any(good for good, _ in outcomes), outcomes
        return [(result[0], result[1]) for _, result in outcomes]

    def close(self) -> None:
        """End both processes."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(config: Config, draw: bool = False) -> Any:
    """Train on one thread: more would spin for each other on a machine that is busy with tests.

    ``draw`` the curves, which takes longer than such a run.
    """
    import torch

    from commopt.train.loop import train

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.nullcontext() if draw else mock.patch("commopt.train.plot.draw_curves"):
            return train(config)
    finally:
        torch.set_num_threads(threads)


def run_and_stop(config: Config, step: int, rank: int, draw: bool = False) -> Any:
    """As ``run``; after ``step`` one rank alone gets a SIGTERM."""
    from commopt.train.loop import Trainer

    whole = Trainer.train_step

    def step_and_signal(trainer: Trainer) -> Any:
        happened = whole(trainer)
        if trainer.step == step and trainer.world.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return happened

    with mock.patch.object(Trainer, "train_step", step_and_signal):
        return run(config, draw)

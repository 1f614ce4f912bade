"""Two processes that train, for as long as the test session."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any
from unittest import mock

from pool import Pool

from commopt.train.config import Config


class Pair(Pool):
    """Two of them."""

    def __init__(self) -> None:
        super().__init__(2)


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

    at_once = mock.patch("commopt.train.loop.ASK_AFTER", 0.0)  # local steps, too
    with at_once, mock.patch.object(Trainer, "train_step", step_and_signal):
        return run(config, draw)

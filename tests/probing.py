"""What the probe's tests share: costs and a model that are given, a stand of one process, and a probe by several."""

from __future__ import annotations

import math
import os
import subprocess

import torch
from forks import python
from ports import free_port
from torch import nn

from commopt.compress import Sign
from commopt.probe.clock import Costs
from commopt.probe.compressors import COMPRESSORS, compressors
from commopt.probe.fit import Line
from commopt.probe.local import SGD, Mirrors
from commopt.probe.measure import Stand
from commopt.probe.messages import FLAT, Shapes, shapes_of
from commopt.probe.model import Model

NOTHING = Line(0.0, 0.0)
VERBS = ("all_reduce", "all_reduce_bf16", "all_to_all", "all_gather", "exchange")
AGREED = ("all_reduce", "all_reduce 2")
"""Stages of low rank, and of blocks."""
SMALL = shapes_of(110_013, 9_999, 64)
BUCKET = 50_000
"""Bytes, so that SMALL has many buckets, and some are sent in chunks."""


def costs(link: Line = NOTHING, world_size: int = 2, per: float = 0.0, copies: float = 0.0) -> Costs:
    """Every verb over the same link; a mean takes ``per`` seconds a parameter before each message, and at its end."""
    return Costs(
        world_size=world_size,
        link=dict.fromkeys(VERBS, link),
        loss=dict.fromkeys(VERBS, NOTHING),
        adamw=1e-9,
        copies={"all_reduce": copies, "all_reduce_bf16": copies},
        onebit=dict.fromkeys(("agreement", "all_to_all", "all_gather", "end"), 1e-10),
        sgd=dict.fromkeys(SGD, dict.fromkeys(("agreement", "all_reduce", "end"), 1e-10)),
        means={name: {"presence": 0.0, **dict.fromkeys((*FLAT, *AGREED, "end"), per)} for name in COMPRESSORS},
    )


def model(shapes: Shapes = SMALL, step_time: float = 0.0, bucket_bytes: int = BUCKET, shard: int = 1) -> Model:
    params = sum(math.prod(shape) for shape in shapes)
    return Model(params, step_time, 0, bucket_bytes, Sign(), shapes, shard, True, compressors(2048))


class Given(nn.Module):
    """Float32 parameters of given shapes, whose gradients are ones."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.ones(shape) for shape in shapes)

    def backward(self) -> None:
        self.zero_grad()
        torch.stack([p.sum() for p in self.params]).sum().backward()


class Alone(Stand):
    """A stand of one process."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.device = world_size, torch.device("cpu")
        self.backend = Mirrors(world_size, self.synchronize)

    def largest(self, values):
        return list(values)

    def time(self, do):
        for _ in range(3):
            do()
        return 1.0


def on_ranks(*arguments: list[str]) -> list[tuple[int, str, str]]:
    """``python -m commopt probe`` with the arguments of each rank, all on one machine; exit code and output by rank."""
    port = free_port()
    common = {"WORLD_SIZE": str(len(arguments)), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [python(), "-m", "commopt", "probe", *words],
            env={**os.environ, **common, "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, words in enumerate(arguments)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in ranks]
    return [(process.returncode, out, err) for process, (out, err) in zip(ranks, outputs)]

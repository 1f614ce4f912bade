"""SparseLoCo: every step against the loop on plain lists, what is sent, kept and refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracle import compress
from oracle_sparse_loco import SparseLoCoOracle
from oracle_top_k import encode, nbytes_of
from torch import Tensor, nn
from worlds import Toy, backward, on_processes, on_threads, params_of, same_bits, some_params, train

from commopt import DiLoCo, Guard, LocalSGD, SparseLoCo
from commopt.comm import LocalBackend
from commopt.compress import Identity, Sign, TopK
from commopt.outer.rounds import ROUND_BYTES

SIZES = [(3, 7), (), (40,), (0, 2), (2, 5), (26, 3)]
ORDER = list(reversed(range(len(SIZES))))  # how a bucket packs
STEPS = 14


def flat(tensors: list[Tensor]) -> list[float]:
    return [v for t in tensors for v in t.detach().double().flatten().tolist()]


def grad(step: int, rank: int, i: int) -> Tensor:
    """Of ranks of different loudness; a part of the third parameter never has one, and the fifth only on rank 1."""
    g = torch.Generator().manual_seed(100 * step + 10 * rank + i)
    out = (torch.randn(SIZES[i], generator=g, dtype=torch.float64) + 0.3) * (1 + rank)
    if i == 2:
        out[5:9] = 0
    return out * 0 if i == 4 and rank != 1 else out


def top_k(*shape: int):
    return lambda row: encode(row, *shape, kind=np.float64)[1]


def signs(row: list[float]) -> list[float]:
    return compress(row, 16, "l2", [v != 0 for v in row])


WIRES = {
    "4 of 16, 2 bits": (TopK(4, 16, 2), top_k(4, 16, 2)),
    "2 of 64, 8 bits": (TopK(2, 64, 8), top_k(2, 64, 8)),
    "3 of 32, all bits": (TopK(3, 32, 32), top_k(3, 32, 32)),
    "Templar's": (TopK(64, 4096, 2), top_k(64, 4096, 2)),
    "identity": (Identity(), list),
}
SETTINGS = [
    {},
    {"mean_over": "contributors"},
    {"clip_to_median": True},
    {"mean_over": "contributors", "clip_to_median": True, "error_decay": 0.5, "outer_lr": 0.7},
    {"error_decay": 1.0, "outer_lr": 0.9},
]
OF_ORACLE = {"mean_over": "over", "clip_to_median": "clip", "error_decay": "decay", "outer_lr": "lr"}


def expected_of(world_size: int, base: str, how, local: int = 1, **settings) -> list[list[list[float]]]:
    """Parameters of every rank after every step."""
    params, sizes = some_params(SIZES), [math.prod(SIZES[i]) for i in ORDER]
    given = {OF_ORACLE[name]: value for name, value in settings.items()}
    oracle = SparseLoCoOracle(flat([params[i] for i in ORDER]), sizes, world_size, 3, base, how, local=local, **given)
    out = []
    for step in range(STEPS):
        oracle.step([flat([grad(step, r, i) for i in ORDER]) for r in range(world_size)], 0.02 / (1 + step % 5))
        out.append([list(x) for x in oracle.x])
    return out


def follow(backend, rank: int, base: str, compressor, expected, **settings) -> SparseLoCo:
    """Trains as the oracle has, and compares every step with it."""
    mine = some_params(SIZES)
    extra = {"sgd": {"momentum": 0.9}, "adamw": {"betas": (0.9, 0.99), "weight_decay": 0.1}}[base]
    cls = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[base]
    optimizer = SparseLoCo(mine, cls, lr=1.0, period=3, backend=backend, compressor=compressor, **extra, **settings)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step % 5)
        for i, p in enumerate(mine):
            p.grad = grad(step, rank, i)
        optimizer.step()
        theirs = torch.tensor(expected[step][rank], dtype=torch.float64)
        now = torch.tensor(flat([mine[i] for i in ORDER]), dtype=torch.float64)
        torch.testing.assert_close(now, theirs, rtol=1e-12, atol=1e-12)
    assert optimizer.comm_stats()["rounds"] == STEPS // 3
    return optimizer


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("wire", WIRES)
def test_every_step_equals_the_papers_loop_on_plain_lists(world_size, settings, wire):
    compressor, how = WIRES[wire]
    base = "sgd" if wire == "identity" else "adamw"
    expected = expected_of(world_size, base, how, **settings)
    on_threads(world_size, lambda backend: follow(backend, backend.rank, base, compressor, expected, **settings) and 0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_on_nodes_of_several_ranks_a_node_is_a_worker(settings):
    compressor, how = WIRES["4 of 16, 2 bits"]
    for world_size, local in ((4, 2), (2, 2)) if settings else ((6, 2),):
        expected = expected_of(world_size, "adamw", how, local, **settings)

        def run(backend, local=local, expected=expected):
            follow(backend.nodes(local), backend.rank, "adamw", compressor, expected, **settings)

        on_threads(world_size, run)


def scenes(rank: int, world_size: int) -> None:
    compressor, how = WIRES["4 of 16, 2 bits"]
    for settings in SETTINGS[1:4]:
        expected = expected_of(world_size, "adamw", how, **settings)
        follow(None, rank, "adamw", compressor, expected, **settings)


def test_over_gloo():
    on_processes(2, scenes)

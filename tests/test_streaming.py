"""Streaming: fragments in flight, against an oracle on plain lists; and its laws."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from oracle_streaming import StreamingOracle
from oracle_top_k import encode
from torch import Tensor, nn
from worlds import Toy, backward, on_threads, params_of, same_bits, some_grads, some_params, through_a_file, train

from commopt import DiLoCo, Guard, LocalSGD, SignMomentum, SlowMo, SparseLoCo, Streaming
from commopt.comm import CollectiveError, LocalBackend, all_reduce_bytes
from commopt.compress import Int4, Sign, TopK
from commopt.optim import NotFinite, join_state_dict, split_state_dict
from commopt.outer.rounds import ROUND_BYTES

METHODS = {"average": LocalSGD, "slowmo": SlowMo, "diloco": DiLoCo, "sign": SignMomentum, "sparse": SparseLoCo}
OUTER = {
    "average": ({}, {}),
    "slowmo": ({"lr": 0.9, "momentum": 0.6}, {"outer_lr": 0.9, "outer_momentum": 0.6}),
    "diloco": ({"lr": 0.7, "momentum": 0.9}, {"outer_lr": 0.7, "outer_momentum": 0.9}),
    "sign": (
        {"lr": 0.8, "b1": 0.7, "b2": 0.9, "wd": 0.2},
        {"outer_lr": 0.8, "outer_betas": (0.7, 0.9), "outer_weight_decay": 0.2},
    ),
    "sparse": (
        {"lr": 0.8, "decay": 0.9, "compress": lambda row: encode(row, 4, 16, 2, kind=np.float64)[1]},
        {"outer_lr": 0.8, "error_decay": 0.9, "compressor": TopK(4, 16, 2)},
    ),
}
EVERY = pytest.mark.parametrize("method", METHODS)
SIZES = [(3, 7), (), (40,), (0, 2), (2, 5)]
STREAMS = {
    "waits": (2, 0, "mix", 0.0, Streaming(2, 0)),
    "one": (1, 2, "corrected", 0.0, Streaming(1, 2)),
    "mix": (2, 1, "mix", 0.5, Streaming(2, merge="mix")),
    "mix all": (3, 3, "mix", 0.25, Streaming(3, 3, "mix", 0.25)),  # two in flight at once
    "corrected": (3, 2, "corrected", 0.0, Streaming(3, 2)),
    "eager": (2, None, "eager", 0.0, Streaming(2, merge="eager")),
}
EVERY_STREAM = pytest.mark.parametrize("stream", STREAMS)
LATE = [Streaming(3, 2), Streaming(3, 4, "mix"), Streaming(2, merge="eager")]
EVERY_LATE = pytest.mark.parametrize("streaming", LATE, ids=["corrected", "mix", "eager"])


def flat(tensors: list[Tensor]) -> list[float]:
    return [v for t in tensors for v in t.detach().double().flatten().tolist()]


def make(method, params, backend, streaming, **settings):
    return METHODS[method](params, backend=backend, streaming=streaming, **settings)


def pieces_of(optimizer, params) -> list[tuple[int, list[int]]]:
    numbers = {id(p): i for i, p in enumerate(params)}
    return [(bucket.fragment, [numbers[id(p)] for p in bucket.params]) for bucket in optimizer.buckets]


def lr_of(step: int) -> float:
    return 0.02 / (1 + step % 5)


def compare_with_oracle(world_size, method, stream, block=0, steps=12, ends=()):
    fragments, delay, merge, alpha, streaming = STREAMS[stream]
    ours, arguments = OUTER[method]
    period, params = 5, some_params(SIZES)
    settings = {"lr": 1.0, "period": period, "betas": (0.9, 0.99), "weight_decay": 0.1, **arguments}
    if block:
        settings["compressor"] = Sign(block=block)
    layout = pieces_of(make(method, params, LocalBackend(), streaming, **settings), params)
    assert {p for p, _ in layout} == set(range(fragments))

    oracle = StreamingOracle(
        [(p, flat([params[i] for i in at]), [params[i].numel() for i in at]) for p, at in layout],
        method, world_size, period, "adamw", ours, block, fragments, delay, merge, alpha, ours,
    )  # fmt: skip
    expected = []
    for step in range(steps):
        grads = [some_grads(SIZES, step, r) for r in range(world_size)]
        oracle.step([[flat([of_rank[i] for i in at]) for of_rank in grads] for _, at in layout], lr_of(step))
        if step in ends:
            oracle.synchronize()
        expected.append([[list(x) for x in piece.x] for piece in oracle.pieces])

    def run(backend):
        mine = some_params(SIZES)
        optimizer = make(method, mine, backend, streaming, **settings)
        assert pieces_of(optimizer, mine) == layout
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr_of(step)
            for p, g in zip(mine, some_grads(SIZES, step, backend.rank)):
                p.grad = g
            optimizer.step()
            if step in ends:
                optimizer.synchronize()
                assert not optimizer.replicas_differ
            for (_, at), of_ranks in zip(layout, expected[step]):
                theirs = torch.tensor(of_ranks[backend.rank], dtype=torch.float64)
                now = torch.tensor(flat([mine[i] for i in at]), dtype=torch.float64)
                torch.testing.assert_close(now, theirs, rtol=1e-12, atol=1e-12, msg=lambda m: f"step {step}: {m}")  # noqa: B023
        return optimizer.comm_stats()["rounds"]

    assert on_threads(world_size, run) == [oracle_rounds(steps, ends, period)] * world_size


def oracle_rounds(steps: int, ends: tuple[int, ...], period: int) -> int:
    at = rounds = 0
    for step in range(steps):
        at += 1
        if at == period or step in ends:
            rounds += 1 + (at == period and step in ends)
            at = 0
    return rounds


@pytest.mark.parametrize("world_size", [1, 3])
@EVERY
@EVERY_STREAM
def test_every_step_equals_the_algorithm_on_plain_lists(world_size, method, stream):
    compare_with_oracle(world_size, method, stream)


@pytest.mark.parametrize("method", ["diloco", "sign"])
@EVERY_STREAM
def test_compressed_fragments_equal_the_loop_with_residuals(method, stream):
    compare_with_oracle(2, method, stream, block=16)


@pytest.mark.parametrize("method", ["average", "diloco", "sparse"])
@EVERY_STREAM
def test_synchronize_merges_what_is_in_flight_and_ends_all_rounds(method, stream):
    """Between rounds, right behind one that was sent, and in the middle of a flight."""
    compare_with_oracle(2, method, stream, ends=(3, 8, 10))

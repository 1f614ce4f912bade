"""Integers and 8- and 16-bit floats where a compressor is used: chunks, the compressed mean, optimizers."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from payloads import bits_equal
from torch import Tensor, nn
from worlds import on_threads

from commopt import DiLoCo, OneBitAdam
from commopt.comm import compressed_all_reduce, run
from commopt.compress import BFloat16, Compressor, Feedback, Float8, FrozenAdam, Int2, Int4, Int8, Momentum, Sign

CASES = [
    Int8(block=32),
    Int4(block=64, rotate=True),
    Int4(block=8, rounding="stochastic"),
    Int2(block=64),
    Int2(block=16, rounding="stochastic", rotate=True, seed=9),
    Float8(block=32),
    Float8(format="e5m2", block=64),
    BFloat16(),
]
every_case = pytest.mark.parametrize("compressor", CASES, ids=repr)


class Plain:
    """Of a compressor, what a newcomer writes; the rest is inherited."""

    decompress_active = Compressor.decompress_active
    compress_with_feedback = Compressor.compress_with_feedback
    compress_momentum = Compressor.compress_momentum
    decompress_adam = Compressor.decompress_adam


class PlainSign(Plain, Sign):
    pass


class PlainInt8(Plain, Int8):
    pass


def in_pieces(compressor: Any, cuts: list[int], rows: int, n: int, dtype: torch.dtype, masked: bool) -> list[Tensor]:
    """A step of compressing and decompressing, by pieces of the columns: residual, momentum, means, parameters."""
    g = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    m, error, v = normal(rows * n), normal(rows, n), normal(rows * n).abs()
    active = torch.randint(0, 256, (rows, -(-n // 8)), generator=g, dtype=torch.uint8) if masked else None
    params = [normal(700), normal(9, 300).t(), normal(300).bfloat16()]
    grads, offsets = [normal(*p.shape) for p in params], [5, 800, n + 1700]
    momentum = Momentum(m, grads, offsets, 0.9, 0.1)
    update = FrozenAdam(v, params, offsets, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6], 1e-8, 0.99)
    rest, again, new_m, mean = torch.zeros_like(error), torch.zeros_like(error), torch.zeros_like(m), normal(rows, n)
    for chunk in itertools.pairwise(cuts):
        payload = torch.empty(rows, compressor.nbytes(chunk[1] - chunk[0], dtype), dtype=torch.uint8)
        given = None if len(cuts) == 2 else chunk
        compressor.compress_momentum(momentum, error, payload, active, rest, given)
        assert bool(compressor.is_sound(payload, chunk[1] - chunk[0], dtype))
        compressor.decompress_active(payload, mean, active, given)
        compressor.decompress_adam(payload, new_m, update, active, given)
        compressor.compress_momentum(None, error, payload, active, again, given)
    return [rest, again, new_m, mean, *params]


@pytest.mark.parametrize("compressor", [*CASES, Sign(block=64), PlainSign(block=64)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_cut_into_chunks_are_compressed_as_whole(compressor, dtype, masked):
    n, unit = 2004, compressor.chunk_multiple
    assert unit % 8 == 0
    cuts = [0, 192 // unit * unit, 1536 // unit * unit, n]
    whole = in_pieces(compressor, [0, n], 2, n, dtype, masked)
    for a, b in zip(whole, in_pieces(compressor, cuts, 2, n, dtype, masked)):
        if b.is_contiguous():
            assert bits_equal(a, b)
        else:  # whole, no kernel reads it, and torch's square root rounds otherwise
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("cuts", [[0, 2004], [0, 192, 1536, 2004]])
@pytest.mark.parametrize(
    ("fused", "plain", "masked"),  # the mean in the scale of a sign counts what is absent, unless fused
    [(Sign(64), PlainSign(64), False), (Int8(64), PlainInt8(64), False), (Int8(64), PlainInt8(64), True)],
)
def test_what_a_compressor_inherits_is_what_fused_operators_do(fused, plain, masked, cuts):
    for a, b in zip(*(in_pieces(c, cuts, 2, 2004, torch.float32, masked) for c in (fused, plain))):
        torch.testing.assert_close(a, b)


def test_a_row_is_cut_only_where_a_compressor_says_so():
    with pytest.raises(AssertionError, match="only where a compressor says so"):
        in_pieces(PlainSign(block=None), [0, 64, 2004], 2, 2004, torch.float32, False)


@every_case
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_what_comes_out_plus_the_residuals_is_what_went_in(world_size, compressor, dtype, tolerance):
    """Sum over steps of mean x = sum over steps of the result + mean worker error + server error; same bits
    everywhere."""
    n, steps = 72 * world_size, 8

    def inputs(rank: int, step: int) -> Tensor:
        return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)

    def reduce(backend):
        feedback = Feedback.zeros(n, world_size, dtype, torch.device("cpu"))
        results = []
        for step in range(steps):
            results.append(inputs(backend.rank, step))
            run([compressed_all_reduce(results[-1], feedback, compressor, backend)])
        return results, feedback

    ranks = on_threads(world_size, reduce)
    for results, _ in ranks[1:]:
        assert all(bits_equal(a, b) for a, b in zip(results, ranks[0][0]))
    given = sum(inputs(r, s) for r in range(world_size) for s in range(steps)) / world_size
    residuals = sum(f.worker for _, f in ranks) / world_size + torch.cat([f.server for _, f in ranks])
    torch.testing.assert_close(sum(ranks[0][0]) + residuals, given, rtol=tolerance, atol=tolerance * steps)
    assert residuals.any()


def model_of() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(41, 97, bias=False), nn.Tanh(), nn.Linear(97, 31, bias=False))
    for p in model.parameters():  # torch's own generator is shared with the other ranks' threads
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(p))) / 8
    return model


def steps_of(make: Any, backend: Any, **settings: Any) -> tuple[list[Tensor], Any]:
    """Nine steps; the parameters, and the optimizer."""
    model = model_of()
    optimizer = make(model, backend=backend, **settings)
    for step in range(9):
        data = torch.Generator().manual_seed(100 * step + backend.rank)
        model(torch.randn(5, 41, generator=data)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], optimizer


def adam(model: nn.Module, **settings: Any) -> OneBitAdam:
    return OneBitAdam([{"params": [p]} for p in model.parameters()], 1e-2, freeze_step=3, **settings)


@every_case
@pytest.mark.parametrize("overlap", [False, True])
def test_one_bit_adam_with_another_compressor_whole_and_in_pieces(compressor, overlap):
    def train(backend, bucket_mb):
        params, optimizer = steps_of(adam, backend, bucket_mb=bucket_mb, compressor=compressor, overlap=overlap)
        return params, [len(bucket.chunks) for bucket in optimizer.buckets]

    whole, cut = (on_threads(2, partial(train, bucket_mb=size)) for size in (25, 0.003))
    assert whole[0][1] == [1, 1]
    assert all(pieces > 2 for pieces in cut[0][1])
    for params, _ in (whole[1], *cut):
        assert all(bits_equal(a, b) for a, b in zip(params, whole[0][0]))
    assert not any(bits_equal(p.detach(), moved) for p, moved in zip(model_of().parameters(), whole[0][0]))


@every_case
def test_outer_steps_with_another_compressor(compressor):
    def outer(model: nn.Module, **settings: Any) -> DiLoCo:
        return DiLoCo(model.parameters(), torch.optim.SGD, period=3, **settings)

    def train(backend):
        return steps_of(outer, backend, compressor=compressor)[0]

    first, second = on_threads(2, train)
    assert all(bits_equal(a, b) for a, b in zip(first, second))

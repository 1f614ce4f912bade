"""Laws of compressors that send some elements of a row and keep the others."""

from __future__ import annotations

import torch
from worlds import Used, on_threads, params_of, same_bits, train

from commopt import DiLoCo, OneBitAdam
from commopt.compress import Compressor


def check_error_feedback_telescopes(compressor: Compressor) -> None:
    """What was sent plus the residual is what was given; and every element gets its turn."""
    n, dtype = 200, torch.float64
    g, payload = torch.Generator().manual_seed(0), torch.empty(1, compressor.nbytes(n, dtype), dtype=torch.uint8)
    error, sent, given, out = (torch.zeros(1, n, dtype=dtype) for _ in range(4))
    for _ in range(150):
        x = torch.randn(1, n, dtype=dtype, generator=g) + torch.linspace(0, 1, n, dtype=dtype)
        compressor.compress_with_feedback(x, error, payload)
        compressor.decompress(payload, out)
        given, sent = given + x, sent + out
    torch.testing.assert_close(sent + error, given, rtol=1e-12, atol=1e-10)
    assert error.abs().max() < 40


def check_optimizers_keep_replicas_equal(compressor: Compressor, overlap: bool) -> None:
    def rank(backend):
        model, outer = Used(), Used()
        optimizer = OneBitAdam(
            model.parameters(), freeze_step=2, compressor=compressor, backend=backend, overlap=overlap
        )
        train(model, optimizer, range(5), backend.rank, 2)
        rounds = DiLoCo(torch.optim.SGD(outer.parameters(), 0.1), period=2, backend=backend, compressor=compressor)
        train(outer, rounds, range(4), backend.rank, 2)
        return params_of(model), params_of(outer)

    first, second = on_threads(2, rank)
    assert same_bits(first[0], second[0])
    assert same_bits(first[1], second[1])
    assert not same_bits(first[0], params_of(Used()))
    assert not same_bits(first[1], params_of(Used()))

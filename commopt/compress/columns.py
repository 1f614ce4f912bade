"""Columns of rows that lie end to end in a flat buffer: what a compressor needs to work on a chunk [start, stop)."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt import ops
from commopt.compress.compressor import Chunk, FrozenAdam, Momentum
from commopt.ops.reference import adam_in_columns_


def momentum_columns(momentum: Momentum, rows: int, columns: Chunk) -> Tensor:
    """The columns of the momentum, seen as ``rows`` rows: a new tensor (rows, stop - start)."""
    start, stop = columns
    n = momentum.m.shape[0] // rows
    out = torch.empty((rows, stop - start), dtype=momentum.m.dtype, device=momentum.m.device)
    if stop - start == n:
        ops.momentum(momentum.m, momentum.grads, momentum.offsets, momentum.beta, momentum.alpha, out.view(-1))
        return out
    for row in range(rows):
        first, last = row * n + start, row * n + stop
        grads, offsets = [], []
        for g, offset in zip(momentum.grads, momentum.offsets):
            low, high = max(offset, first), min(offset + g.numel(), last)
            if low < high:
                grads.append(g.reshape(-1)[low - offset : high - offset])
                offsets.append(low - first)
        ops.momentum(momentum.m[first:last], grads, offsets, momentum.beta, momentum.alpha, out[row])
    return out


def mask_columns(active: Tensor | None, columns: Chunk) -> Tensor | None:
    """The columns of a bit mask (rows, ceil(n / 8)); ``start`` is a multiple of 8."""
    start, stop = columns
    return None if active is None else active[:, start // 8 : (stop + 7) // 8]


def frozen_adam_columns(m: Tensor, update: FrozenAdam, rows: int, columns: Chunk) -> None:
    """Moves what of the parameters lies in the columns of ``m``, seen as ``rows`` rows."""
    adam_in_columns_(
        ops.frozen_adam_apply_, rows, m, update.v, list(update.params), list(update.offsets), list(update.step_sizes),
        list(update.sqrt_bias_corrections2), update.eps, update.decay, *columns,
    )  # fmt: skip

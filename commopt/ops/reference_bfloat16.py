"""Rows of bfloat16 in plain PyTorch: what :mod:`commopt.ops.bfloat16` says, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.ops.reference import mask_of_columns, masked, momentum_of_columns, write_columns


def _send(z: Tensor, new_error: Tensor, payload: Tensor) -> None:
    """payload <- z as bfloat16, new_error <- what that loses; rows."""
    sent = payload.view(torch.bfloat16)
    sent[:, : z.shape[1]] = z
    sent[:, z.shape[1] :] = 0
    torch.sub(z, _rows(payload, z.shape[1], z.dtype), out=new_error)


def _rows(payload: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return payload.view(torch.bfloat16)[:, :n].to(dtype)


def bf16_compress_momentum(
    m: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    beta: float,
    alpha: float,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    active: Tensor | None,
    start: int,
    stop: int,
) -> None:
    if not payload.numel():
        return
    world = payload.shape[0]
    rows, residual, after = (t.view(world, -1)[:, start:stop] for t in (m, error, new_error))
    if grads or beta != 1.0:
        rows = momentum_of_columns(m, grads, offsets, beta, alpha, world, start, stop)
    _send(masked(rows + residual, mask_of_columns(active, start, stop)), after, payload)


def bf16_reduce(payloads: Tensor, error: Tensor, new_error: Tensor, own: Tensor, active: Tensor | None = None) -> None:
    n = error.shape[0]
    if not n:
        return
    mean = torch.zeros_like(error)
    for row in payloads.view(torch.bfloat16)[:, :n]:
        mean += row
    mean /= mean.new_full((), len(payloads))  # a tensor: on CUDA, not its reciprocal
    _send(masked((mean + error)[None], None if active is None else active[None]), new_error[None], own[None])


def bf16_decompress_to(
    payload: Tensor,
    outs: list[Tensor],
    offsets: list[int],
    numel: int,
    active: Tensor | None,
    start: int,
    stop: int,
) -> None:
    if payload.numel():
        rows = masked(_rows(payload, stop - start, torch.float32), mask_of_columns(active, start, stop))
        write_columns(rows, outs, offsets, numel // payload.shape[0], start)

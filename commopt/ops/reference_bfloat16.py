"""Rows of bfloat16 in plain PyTorch: what :mod:`commopt.ops.bfloat16` says, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from commopt.ops.reference import mask_of_columns, masked, momentum_of_columns, write_columns


def _send(z: Tensor, new_error: Tensor, wire: Tensor) -> None:
    """wire <- z as bfloat16, new_error <- what that loses; rows."""
    sent = wire.view(torch.bfloat16)
    sent[:, : z.shape[1]] = z
    sent[:, z.shape[1] :] = 0
    torch.sub(z, _rows(wire, z.shape[1], z.dtype), out=new_error)


def _rows(wire: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return wire.view(torch.bfloat16)[:, :n].to(dtype)


def bf16_compress_momentum(
    m: Tensor,
    grads: list[Tensor],
    offsets: list[int],
    beta: float,
    alpha: float,
    error: Tensor,
    new_error: Tensor,
    wire: Tensor,
    live: Tensor | None,
    start: int,
    stop: int,
) -> None:
    if not wire.numel():
        return
    world = wire.shape[0]
    rows, residual, after = (t.view(world, -1)[:, start:stop] for t in (m, error, new_error))
    if grads or beta != 1.0:
        rows = momentum_of_columns(m, grads, offsets, beta, alpha, world, start, stop)
    _send(masked(rows + residual, mask_of_columns(live, start, stop)), after, wire)


def bf16_reduce(wires: Tensor, error: Tensor, new_error: Tensor, own: Tensor, live: Tensor | None = None) -> None:
    n = error.shape[0]
    if not n:
        return
    mean = torch.zeros_like(error)
    for row in wires.view(torch.bfloat16)[:, :n]:
        mean += row
    mean /= mean.new_full((), len(wires))  # a tensor: on CUDA, not its reciprocal
    _send(masked((mean + error)[None], None if live is None else live[None]), new_error[None], own[None])


def bf16_decompress_to(
    wire: Tensor,
    outs: list[Tensor],
    offsets: list[int],
    numel: int,
    live: Tensor | None,
    start: int,
    stop: int,
) -> None:
    if wire.numel():
        rows = masked(_rows(wire, stop - start, torch.float32), mask_of_columns(live, start, stop))
        write_columns(rows, outs, offsets, numel // wire.shape[0], start)

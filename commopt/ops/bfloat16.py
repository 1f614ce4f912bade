"""Rows of bfloat16, with what the cast loses kept: the operators of :class:`commopt.compress.BFloat16`.

**Payload row.** ``n`` elements::

    [n bfloat16][zeros up to a multiple of 16 bytes]

Each is the element rounded to nearest, ties to even; float64 by way of float32. What is beyond the largest number is
inf; NaN is NaN, of whatever bits.

A ``active`` mask, (r, ceil(n / 8)) uint8, least significant bit first, makes the elements with bit 0 count as absent:
they enter as 0, and decode to 0 with the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt.ops.checks import check_like, check_real, check_runs, check_shared_rows

_ops = torch.ops.commopt


def bf16_nbytes(n: int) -> int:
    """Bytes of the payload row of ``n`` elements: 2 n, rounded up to a multiple of 16. Raises ValueError for n < 0."""
    if n < 0:
        raise ValueError(f"n must be at least 0, got {n}")
    return (2 * n + 15) & ~15


def bf16_compress_momentum(
    m: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    beta: float,
    alpha: float,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    active: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """:func:`commopt.ops.momentum`, compressed with the residual, in one pass:

        x = beta m + alpha g;  z = x + error;  payload = z as bfloat16;  new_error <- z - payload

    Args:
        m: (r n,) float32 or float64, contiguous, seen as r rows of n; unchanged.
        grads, offsets, beta, alpha: as for :func:`commopt.ops.momentum`.
        error: like m: the residual; unchanged unless it is ``new_error``.
        new_error: like m; written. It may be ``error`` itself; no two arguments may overlap otherwise, but that m may
            be ``error``.
        payload: (r, bf16_nbytes(stop - start)) uint8, contiguous, r >= 1; written.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all.
        start, stop: the columns of each row to work on, [start, stop); the others are not touched. Multiples of 8,
            but that stop may be n, as it is if None.

    Raises:
        ValueError: a shape, dtype, device, layout, offset or column is not as above.
    """
    check_real("m", m, 1)
    stop = check_shared_rows(payload, m.shape[0], m.device, bf16_nbytes, active, start, stop)
    check_like("error", error, m.shape, m.dtype, m.device)
    check_like("new_error", new_error, m.shape, m.dtype, m.device)
    check_runs("grads", grads, offsets, m.shape[0], m.device)
    _ops.bf16_compress_momentum.default(m, grads, offsets, beta, alpha, error, new_error, payload, active, start, stop)


def bf16_reduce(payloads: Tensor, error: Tensor, new_error: Tensor, own: Tensor, active: Tensor | None = None) -> None:
    """The mean of rows, compressed with the residual, in one pass:

        z = ((w_0 + w_1) + ...) / W + error;  own = z as bfloat16;  new_error <- z - own

    Args:
        payloads: (W, bf16_nbytes(n)) uint8, contiguous, W >= 1.
        error: (n,) float32 or float64, contiguous: the residual; unchanged unless it is ``new_error``.
        new_error: like error; written. It may be ``error`` itself; no two arguments may overlap otherwise.
        own: (bf16_nbytes(n),) uint8, contiguous; written.
        active: (ceil(n / 8),) uint8 bit mask of the elements that take part, or None for all.

    Raises:
        ValueError: a shape, dtype, device or layout is not as above.
    """
    check_real("error", error, 1)
    n, device = error.shape[0], error.device
    if payloads.dim() != 2 or payloads.shape[0] == 0:
        raise ValueError(f"payloads must have a row for each of at least one rank, got shape {tuple(payloads.shape)}")
    check_like("payloads", payloads, (payloads.shape[0], bf16_nbytes(n)), torch.uint8, device)
    check_like("new_error", new_error, error.shape, error.dtype, device)
    check_like("own", own, (payloads.shape[1],), torch.uint8, device)
    if active is not None:
        check_like("active", active, ((n + 7) // 8,), torch.uint8, device)
    _ops.bf16_reduce.default(payloads, error, new_error, own, active)


def bf16_decompress_to(
    payload: Tensor,
    outs: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    active: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Writes what the rows stand for to tensors that lie in a flat buffer which is not there; rounded to theirs.

    Args:
        payload: (r, bf16_nbytes(stop - start)) uint8, contiguous, r >= 1.
        outs: of any shape, floating dtype and layout; written where they are in the columns [start, stop).
        offsets: for each of them the element of the buffer where it starts; ascending, without overlap.
        numel: r n, elements of the buffer, seen as r rows of n.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all; 0 at the others.
        start, stop: as for :func:`bf16_compress_momentum`.

    Raises:
        ValueError: a shape, dtype, device, layout, offset or column is not as above.
    """
    stop = check_shared_rows(payload, numel, payload.device, bf16_nbytes, active, start, stop)
    check_runs("outs", outs, offsets, numel, payload.device)
    _ops.bf16_decompress_to.default(payload, outs, offsets, numel, active, start, stop)

"""The scaled sign: one bit an element and a scale a block.

**Payload row.** ``n`` elements in blocks of ``block`` (the last one may be shorter; 0 = one block)::

    [ceil(n / block) float32 scales][ceil(n / 8) bytes of signs][zeros up to a multiple of 16 bytes]

The sign of element i is bit i % 8 (least significant first) of byte i // 8: 1 for z >= 0 (both zeros are plus), 0 for
minus; unused bits are 0. The scale of a block is

    norm=2:  s = sqrt(sum z^2 / count)        norm=1:  s = sum |z| / count

summed in float64 and rounded to float32. The order of the sum is the provider's, so that two providers may, about once
in 10^8 blocks, round a scale differently; what is sent and what stays in the residual always agree. A block of zeros
has scale 0 and decodes to zeros. Arithmetic is never contracted to fused multiply-adds, so that providers agree bit for
bit otherwise.

A ``active`` mask, (r, ceil(n / 8)) uint8 in the bit order of the signs, makes the elements with bit 0 count as absent:
they are not in the scale, their sign bit is 0, their residual is 0. They decode to -s, or to 0 with the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt.ops.checks import check_like, check_real, check_runs, check_shared_rows

_ops = torch.ops.commopt


def sign_nbytes(n: int, block: int) -> int:
    """Bytes of the payload row of ``n`` elements: 4 ceil(n / block) + ceil(n / 8), rounded up to a multiple of 16.

    Args:
        n: elements in the row; 0 gives 0.
        block: elements that share a scale, a positive multiple of 8, or 0 for one scale a row.

    Raises:
        ValueError: n is negative, or block is neither 0 nor a positive multiple of 8.
    """
    if n < 0:
        raise ValueError(f"n must be at least 0, got {n}")
    if block < 0 or block % 8:
        raise ValueError(f"block must be 0 or a positive multiple of 8, got {block}")
    if n == 0:
        return 0
    nblocks = -(-n // block) if block else 1
    return (4 * nblocks + (n + 7) // 8 + 15) & ~15


def sign_compress(x: Tensor, payload: Tensor, block: int, norm: int, active: Tensor | None = None) -> None:
    """Writes C[x], the scaled sign of each row of ``x``, to ``payload``.

    Args:
        x: (r, n) float32 or float64, contiguous; unchanged.
        payload: (r, sign_nbytes(n, block)) uint8, contiguous; written, in the format that the module states.
        block: elements that share a scale, a positive multiple of 8, or 0 for one scale a row.
        norm: 2 (root mean square) or 1 (mean magnitude).
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout, block or norm is not as above.
    """
    _check_compress(x, payload, block, norm, active)
    _ops.sign_compress.default(x, payload, block, norm, active)


def sign_compress_with_feedback(
    x: Tensor,
    error: Tensor,
    payload: Tensor,
    block: int,
    norm: int,
    active: Tensor | None = None,
    new_error: Tensor | None = None,
) -> None:
    """Sends the residual too, and keeps what is lost: z = x + error;  payload = C[z];  new_error <- z - C[z].

    Args:
        x: (r, n) float32 or float64, contiguous; unchanged unless it is ``new_error``.
        error: like x: the residual; unchanged unless it is ``new_error``.
        payload: (r, sign_nbytes(n, block)) uint8, contiguous; written, in the format that the module states.
        block: elements that share a scale, a positive multiple of 8, or 0 for one scale a row.
        norm: 2 (root mean square) or 1 (mean magnitude).
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all.
        new_error: like x; written; None for ``error``. It may be ``error`` or ``x`` itself; no two arguments may
            overlap otherwise.

    Raises:
        ValueError: a shape, dtype, device, layout, block or norm is not as above.
    """
    _check_compress(x, payload, block, norm, active)
    check_like("error", error, x.shape, x.dtype, x.device)
    if new_error is None:
        new_error = error
    else:
        check_like("new_error", new_error, x.shape, x.dtype, x.device)
    _ops.sign_compress_with_feedback.default(x, error, new_error, payload, block, norm, active)


def sign_compress_momentum(
    m: Tensor,
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    beta: float,
    alpha: float,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    block: int,
    norm: int,
    active: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """:func:`momentum`, then :func:`sign_compress_with_feedback` of it, in one pass and to the same bits:

        x = beta m + alpha g;  z = x + error;  payload = C[z];  new_error <- z - C[z]

    Args:
        m: (r n,) float32 or float64, contiguous, seen as r rows of n; unchanged.
        grads, offsets, beta, alpha: as for :func:`momentum`.
        error: like m: the residual; unchanged unless it is ``new_error``.
        new_error: like m; written. It may be ``error`` itself; no two arguments may overlap otherwise.
        payload: (r, sign_nbytes(stop - start, block)) uint8, contiguous, r >= 1; written, in the format that the module
            states.
        block: elements that share a scale, a positive multiple of 8, or 0 for one scale a row.
        norm: 2 (root mean square) or 1 (mean magnitude).
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all.
        start, stop: the columns of each row to work on, [start, stop); the others are not touched. Multiples of 8,
            but that stop may be n, as it is if None. Cut at multiples of ``block``, a row is compressed to the same
            values as whole.

    Raises:
        ValueError: a shape, dtype, device, layout, offset, column, block or norm is not as above.
    """
    check_real("m", m, 1)
    _check_norm(norm)
    stop = check_shared_rows(payload, m.shape[0], m.device, lambda n: sign_nbytes(n, block), active, start, stop)
    check_like("error", error, m.shape, m.dtype, m.device)
    check_like("new_error", new_error, m.shape, m.dtype, m.device)
    check_runs("grads", grads, offsets, m.shape[0], m.device)
    _ops.sign_compress_momentum.default(
        m, grads, offsets, beta, alpha, error, new_error, payload, block, norm, active, start, stop
    )


def sign_reduce(
    payloads: Tensor,
    error: Tensor,
    new_error: Tensor,
    own: Tensor,
    block: int,
    norm: int,
    active: Tensor | None = None,
) -> None:
    """:func:`sign_decompress_mean`, then :func:`sign_compress_with_feedback` of it, in one pass and to the same bits:

        z = mean of the rows of payloads + error;  own = C[z];  new_error <- z - C[z]

    Args:
        payloads: (W, sign_nbytes(n, block)) uint8, contiguous, W >= 1.
        error: (n,) float32 or float64, contiguous: the residual; unchanged unless it is ``new_error``.
        new_error: like error; written. It may be ``error`` itself; no two arguments may overlap otherwise.
        own: (sign_nbytes(n, block),) uint8, contiguous; written.
        block, norm: of ``own``; the block of ``payloads`` is the same.
        active: (ceil(n / 8),) uint8 bit mask of the elements that take part, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout, block or norm is not as above.
    """
    check_real("error", error, 1)
    n = error.shape[0]
    if payloads.dim() != 2 or payloads.shape[0] == 0:
        raise ValueError(f"payloads must have a row for each of at least one rank, got shape {tuple(payloads.shape)}")
    check_like("payloads", payloads, (payloads.shape[0], sign_nbytes(n, block)), torch.uint8, error.device)
    check_like("new_error", new_error, error.shape, error.dtype, error.device)
    check_like("own", own, (payloads.shape[1],), torch.uint8, error.device)
    _check_norm(norm)
    if active is not None:
        check_like("active", active, ((n + 7) // 8,), torch.uint8, error.device)
    _ops.sign_reduce.default(payloads, error, new_error, own, block, norm, active)


def sign_decompress(payload: Tensor, out: Tensor, block: int, active: Tensor | None = None) -> None:
    """Writes +s or -s to every element of ``out``, as the rows of ``payload`` say, and 0 to the inactive ones.

    Args:
        payload: (r, sign_nbytes(n, block)) uint8, contiguous.
        out: (r, n) float32 or float64, contiguous; written.
        block: as it was for compression.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part; None for all, so that elements that were
            inactive for compression come out as -s.

    Raises:
        ValueError: a shape, dtype, device, layout or block is not as above.
    """
    check_real("out", out, 2)
    rows, n = out.shape
    _check_rows(payload, rows, n, block, active, out.device)
    _ops.sign_decompress.default(payload, out, block, active)


def sign_decompress_adam_(
    payload: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Tensor],
    offsets: Sequence[int],
    step_sizes: Sequence[float],
    sqrt_bias_corrections2: Sequence[float],
    eps: float,
    decay: float,
    block: int,
    active: Tensor | None = None,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """:func:`sign_decompress` to the momentum, then :func:`frozen_adam_apply_`, in one pass and to the same bits.

    Args:
        payload: (r, sign_nbytes(stop - start, block)) uint8, contiguous, r >= 1.
        exp_avg: m, (r n,) float32 or float64, contiguous, seen as r rows of n; written.
        exp_avg_sq: v, like m; unchanged.
        params: p, of any shape, floating dtype and layout; changed in place.
        offsets: for each of them the element of m and v where it starts; ascending, without overlap.
        step_sizes, sqrt_bias_corrections2, eps, decay: as for :func:`frozen_adam_apply_`.
        block: as it was for compression.
        active: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all; m is 0 at the others.
        start, stop: the columns of each row to work on, as for :func:`sign_compress_momentum`. Nothing else of m and
            p is touched.

    Raises:
        ValueError: the lists differ in length, or a shape, dtype, device, layout, offset, column or block is not as
            above.
    """
    check_real("exp_avg", exp_avg, 1)
    check_like("exp_avg_sq", exp_avg_sq, exp_avg.shape, exp_avg.dtype, exp_avg.device)
    stop = check_shared_rows(
        payload, exp_avg.shape[0], exp_avg.device, lambda n: sign_nbytes(n, block), active, start, stop
    )
    check_runs("params", params, offsets, exp_avg.shape[0], exp_avg.device)
    if not len(params) == len(step_sizes) == len(sqrt_bias_corrections2):
        lengths = len(params), len(step_sizes), len(sqrt_bias_corrections2)
        raise ValueError(f"all lists must have the same length, got lengths {lengths}")
    _ops.sign_decompress_adam_.default(
        payload, exp_avg, exp_avg_sq, params, offsets, step_sizes, sqrt_bias_corrections2, eps, decay, block, active,
        start, stop,
    )  # fmt: skip


def sign_decompress_mean(payload: Tensor, out: Tensor, block: int) -> None:
    """Writes the mean of the W rows of ``payload`` to ``out``.

        a_k = s_k / W;   out = (((+-a_0) +- a_1) +- ...) +- a_{W-1}

    in rank order and rounded in the dtype of ``out`` after each operation, so that it is the same on every rank.

    Args:
        payload: (W, sign_nbytes(n, block)) uint8, contiguous, W >= 1.
        out: (n,) float32 or float64, contiguous; written.
        block: as it was for compression.

    Raises:
        ValueError: a shape, dtype, device, layout or block is not as above.
    """
    check_real("out", out, 1)
    if payload.dim() != 2 or payload.shape[0] == 0:
        raise ValueError(f"payload must have a row for each of at least one rank, got shape {tuple(payload.shape)}")
    check_like("payload", payload, (payload.shape[0], sign_nbytes(out.shape[0], block)), torch.uint8, out.device)
    _ops.sign_decompress_mean.default(payload, out, block)


def _check_norm(norm: int) -> None:
    if norm not in (1, 2):
        raise ValueError(f"norm must be 1 or 2, got {norm}")


def _check_rows(payload: Tensor, rows: int, n: int, block: int, active: Tensor | None, device: torch.device) -> None:
    check_like("payload", payload, (rows, sign_nbytes(n, block)), torch.uint8, device)
    if active is not None:
        check_like("active", active, (rows, (n + 7) // 8), torch.uint8, device)


def _check_compress(x: Tensor, payload: Tensor, block: int, norm: int, active: Tensor | None) -> None:
    check_real("x", x, 2)
    rows, n = x.shape
    _check_norm(norm)
    _check_rows(payload, rows, n, block, active, x.device)

"""Operators on tensors: each one a schema, a reference in PyTorch, and native providers where they are faster.

**Wire row of the scaled sign.** ``n`` elements in blocks of ``block`` (the last one may be shorter; 0 = one block)::

    [ceil(n / block) float32 scales][ceil(n / 8) bytes of signs][zeros up to a multiple of 16 bytes]

The sign of element i is bit i % 8 (least significant first) of byte i // 8: 1 for z >= 0 (both zeros are plus), 0 for
minus; unused bits are 0. The scale of a block is

    norm=2:  s = sqrt(sum z^2 / count)        norm=1:  s = sum |z| / count

summed in float64 and rounded to float32. The order of the sum is the provider's, so that two providers may, about once
in 10^8 blocks, round a scale differently; what is sent and what stays in the residual always agree. A block of zeros
has scale 0 and decodes to zeros. Arithmetic is never contracted to fused multiply-adds, so that providers agree bit for
bit otherwise.

A ``live`` mask, (r, ceil(n / 8)) uint8 in the bit order of the signs, makes the elements with bit 0 count as absent:
they are not in the scale, their sign bit is 0, their residual is 0. They decode to -s: see :func:`zero_dead_`.

Environment: ``COMMOPT_NATIVE=0`` keeps to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt.ops import catalogue
from commopt.ops import native as native  # for its registrations

__all__ = [
    "frozen_adam_apply_",
    "momentum_",
    "pack_nonzero",
    "report",
    "sign_compress",
    "sign_compress_with_feedback",
    "sign_decompress",
    "sign_decompress_mean",
    "sign_nbytes",
    "square_sum",
    "zero_dead_",
]

_ops = torch.ops.commopt
_REAL = (torch.float32, torch.float64)


def report() -> dict[str, dict[str, str]]:
    """Which provider serves each operator: {operator: {device: provider}}, "default" being every other device.

    For instance ``{"sign_compress": {"default": "reference", "cpu": "native (avx512)"}, ...}``.
    """
    return {name: dict(by_device) for name, by_device in catalogue.PROVIDERS.items()}


def sign_nbytes(n: int, block: int) -> int:
    """Bytes of the wire row of ``n`` elements: 4 ceil(n / block) + ceil(n / 8), rounded up to a multiple of 16.

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


def sign_compress(x: Tensor, wire: Tensor, block: int, norm: int, live: Tensor | None = None) -> None:
    """Writes C[x], the scaled sign of each row of ``x``, to ``wire``.

    Args:
        x: (r, n) float32 or float64, contiguous; unchanged.
        wire: (r, sign_nbytes(n, block)) uint8, contiguous; written, in the format that the module states.
        block: elements that share a scale, a positive multiple of 8, or 0 for one scale a row.
        norm: 2 (root mean square) or 1 (mean magnitude).
        live: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout, block or norm is not as above.
    """
    _check_compress(x, wire, block, norm, live)
    _ops.sign_compress.default(x, wire, block, norm, live)


def sign_compress_with_feedback(
    x: Tensor, error: Tensor, wire: Tensor, block: int, norm: int, live: Tensor | None = None
) -> None:
    """Sends what was owed too, and keeps what is lost: z = x + error;  wire = C[z];  error <- z - C[z].

    Args:
        x: (r, n) float32 or float64, contiguous; unchanged.
        error: like x: the residual, updated in place.
        wire: (r, sign_nbytes(n, block)) uint8, contiguous; written, in the format that the module states.
        block: elements that share a scale, a positive multiple of 8, or 0 for one scale a row.
        norm: 2 (root mean square) or 1 (mean magnitude).
        live: (r, ceil(n / 8)) uint8 bit mask of the elements that take part, or None for all.

    Raises:
        ValueError: a shape, dtype, device, layout, block or norm is not as above.
    """
    _check_compress(x, wire, block, norm, live)
    _check_like("error", error, x.shape, x.dtype, x.device)
    _ops.sign_compress_with_feedback.default(x, error, wire, block, norm, live)


def sign_decompress(wire: Tensor, out: Tensor, block: int) -> None:
    """Writes +s or -s to every element of ``out``, as the rows of ``wire`` say (dead elements get -s).

    Args:
        wire: (r, sign_nbytes(n, block)) uint8, contiguous.
        out: (r, n) float32 or float64, contiguous; written.
        block: as it was for compression.

    Raises:
        ValueError: a shape, dtype, device, layout or block is not as above.
    """
    _check_real("out", out, 2)
    _check_like("wire", wire, (out.shape[0], sign_nbytes(out.shape[1], block)), torch.uint8, out.device)
    _ops.sign_decompress.default(wire, out, block)


def sign_decompress_mean(wire: Tensor, out: Tensor, block: int) -> None:
    """Writes the mean of the W rows of ``wire`` to ``out``.

        a_k = s_k / W;   out = (((+-a_0) +- a_1) +- ...) +- a_{W-1}

    in rank order and rounded in the dtype of ``out`` after each operation, so that it is the same on every rank.

    Args:
        wire: (W, sign_nbytes(n, block)) uint8, contiguous, W >= 1.
        out: (n,) float32 or float64, contiguous; written.
        block: as it was for compression.

    Raises:
        ValueError: a shape, dtype, device, layout or block is not as above.
    """
    _check_real("out", out, 1)
    if wire.dim() != 2 or wire.shape[0] == 0:
        raise ValueError(f"wire must have a row for each of at least one rank, got shape {tuple(wire.shape)}")
    _check_like("wire", wire, (wire.shape[0], sign_nbytes(out.shape[0], block)), torch.uint8, out.device)
    _ops.sign_decompress_mean.default(wire, out, block)


def pack_nonzero(x: Tensor, bits: Tensor) -> None:
    """Writes a bit mask of where ``x`` is not 0 (NaN counts as not 0), least significant bit first.

    Args:
        x: (n,) float32 or float64, contiguous; unchanged.
        bits: (ceil(n / 8),) uint8, contiguous; written, unused bits 0.

    Raises:
        ValueError: a shape, dtype, device or layout is not as above.
    """
    _check_real("x", x, 1)
    _check_like("bits", bits, ((x.shape[0] + 7) // 8,), torch.uint8, x.device)
    _ops.pack_nonzero.default(x, bits)


def zero_dead_(x: Tensor, bits: Tensor) -> None:
    """Sets x[i] = 0 wherever bit i of ``bits`` is 0.

    Args:
        x: (n,) float32 or float64, contiguous; changed in place.
        bits: (ceil(n / 8),) uint8, contiguous, as :func:`pack_nonzero` makes it.

    Raises:
        ValueError: a shape, dtype, device or layout is not as above.
    """
    _check_real("x", x, 1)
    _check_like("bits", bits, ((x.shape[0] + 7) // 8,), torch.uint8, x.device)
    _ops.zero_dead_.default(x, bits)


def square_sum(xs: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, accumulated in float64: 0-d float64, on the device of ``xs``.

    It is finite if and only if every element is (float32 squares cannot overflow in float64), and does not depend on
    the number of threads. An empty list gives 0 on the CPU.

    Args:
        xs: tensors of any shape and floating dtype on one device; unchanged.

    Raises:
        ValueError: a dtype is not floating, or the devices differ.
    """
    if not xs:
        return torch.zeros((), dtype=torch.float64)
    for x in xs:
        if not x.is_floating_point() or x.device != xs[0].device:
            raise ValueError(f"xs must be floating and on {xs[0].device}, got {x.dtype} on {x.device}")
    return _ops.square_sum.default(xs)


def momentum_(ms: Sequence[Tensor], gs: Sequence[Tensor], beta: float, alpha: float) -> None:
    """m <- beta m + alpha g for each pair, in the dtype of m.

    Args:
        ms: tensors of float32 or float64; changed in place.
        gs: for each of ``ms`` one of the same shape and device and of any floating dtype; unchanged.
        beta, alpha: the factors.

    Raises:
        ValueError: the lists differ in length, or a shape, dtype or device is not as above.
    """
    if len(ms) != len(gs):
        raise ValueError(f"ms and gs must have the same length, got {len(ms)} and {len(gs)}")
    for m, g in zip(ms, gs):
        if m.shape != g.shape or m.device != g.device or m.dtype not in _REAL or not g.is_floating_point():
            raise ValueError(
                "m must be float32 or float64 and g floating, of one shape and device, got "
                f"{_describe(m)} and {_describe(g)}"
            )
    if ms:
        _ops.momentum_.default(ms, gs, beta, alpha)


def frozen_adam_apply_(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step_sizes: Sequence[float],
    sqrt_bias_corrections2: Sequence[float],
    eps: float,
    decay: float,
) -> None:
    """Moves each parameter along its momentum, with decoupled weight decay:

        p <- decay p - step_size m / (sqrt(v) / sqrt_bias_correction2 + eps)

    Where v is 0 there was never a gradient, so that m is taken as 0 and p only decays. Everything is computed in the
    dtype of the state, or of p where that is wider, and rounded once to the dtype of p.

    Args:
        params: p, of any floating dtype and layout; changed in place.
        exp_avgs, exp_avg_sqs: m and v, both float32 or both float64, with the shape and device of p; unchanged.
        step_sizes: lr / (1 - beta1^t), one a tensor.
        sqrt_bias_corrections2: sqrt(1 - beta2^t), one a tensor.
        eps: added to the denominator.
        decay: factor on p, that is 1 - lr * weight_decay.

    Raises:
        ValueError: the lists differ in length, or a shape, dtype or device is not as above.
    """
    lengths = {len(params), len(exp_avgs), len(exp_avg_sqs), len(step_sizes), len(sqrt_bias_corrections2)}
    if len(lengths) != 1:
        raise ValueError(f"all lists must have the same length, got lengths {sorted(lengths)}")
    for p, m, v in zip(params, exp_avgs, exp_avg_sqs):
        same_place = p.shape == m.shape == v.shape and p.device == m.device == v.device
        if not (same_place and m.dtype == v.dtype and m.dtype in _REAL and p.is_floating_point()):
            raise ValueError(
                "p must be floating, m and v both float32 or both float64, of one shape and device, got "
                f"{_describe(p)}, {_describe(m)} and {_describe(v)}"
            )
    if params:
        _ops.frozen_adam_apply_.default(params, exp_avgs, exp_avg_sqs, step_sizes, sqrt_bias_corrections2, eps, decay)


def _describe(x: Tensor) -> str:
    layout = "" if x.is_contiguous() else "strided "
    return f"{layout}{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _check_real(name: str, x: Tensor, dim: int) -> None:
    if x.dtype not in _REAL or x.dim() != dim or not x.is_contiguous():
        raise ValueError(f"{name} must be float32 or float64, contiguous, of {dim} dimensions, got {_describe(x)}")


def _check_like(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if x.shape != shape or x.dtype != dtype or x.device != device or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {tuple(shape)} {dtype} on {device}, got {_describe(x)}")


def _check_compress(x: Tensor, wire: Tensor, block: int, norm: int, live: Tensor | None) -> None:
    _check_real("x", x, 2)
    rows, n = x.shape
    if norm not in (1, 2):
        raise ValueError(f"norm must be 1 or 2, got {norm}")
    _check_like("wire", wire, (rows, sign_nbytes(n, block)), torch.uint8, x.device)
    if live is not None:
        _check_like("live", live, (rows, (n + 7) // 8), torch.uint8, x.device)

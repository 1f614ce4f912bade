"""Operators on flat buffers: masks, sums of squares, momentum, and Adam with a variance that stands."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from commopt.ops.checks import REAL, check_like, check_real, check_runs, describe

_ops = torch.ops.commopt


def pack_nonzero(x: Tensor, bits: Tensor) -> None:
    """Writes a bit mask of where ``x`` is not 0 (NaN counts as not 0), least significant bit first.

    Args:
        x: (n,) float32 or float64, contiguous; unchanged.
        bits: (ceil(n / 8),) uint8, contiguous; written, unused bits 0.

    Raises:
        ValueError: a shape, dtype, device or layout is not as above.
    """
    check_real("x", x, 1)
    check_like("bits", bits, ((x.shape[0] + 7) // 8,), torch.uint8, x.device)
    _ops.pack_nonzero.default(x, bits)


def zero_inactive_(x: Tensor, bits: Tensor) -> None:
    """Sets x[i] = 0 wherever bit i of ``bits`` is 0.

    Args:
        x: (n,) float32 or float64, contiguous; changed in place.
        bits: (ceil(n / 8),) uint8, contiguous, as :func:`pack_nonzero` makes it.

    Raises:
        ValueError: a shape, dtype, device or layout is not as above.
    """
    check_real("x", x, 1)
    check_like("bits", bits, ((x.shape[0] + 7) // 8,), torch.uint8, x.device)
    _ops.zero_inactive_.default(x, bits)


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
        return torch.zeros((), dtype=torch.float64, device="cpu")
    _check_floating(xs)
    return _ops.square_sum.default(xs)


def square_sums(xs: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each of ``xs``, as :func:`square_sum` gives that of one: (n,) float64, on their device;
    without any, on the CPU.

    Args:
        xs: n tensors of any shape and floating dtype on one device; unchanged.

    Raises:
        ValueError: a dtype is not floating, or the devices differ.
    """
    if not xs:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    _check_floating(xs)
    return _ops.square_sums.default(xs)


def _check_floating(xs: Sequence[Tensor]) -> None:
    for x in xs:
        if not x.is_floating_point() or x.device != xs[0].device:
            raise ValueError(f"xs must be floating and on {xs[0].device}, got {x.dtype} on {x.device}")


def momentum(
    m: Tensor, grads: Sequence[Tensor], offsets: Sequence[int], beta: float, alpha: float, out: Tensor
) -> None:
    """out <- beta m + alpha g, where g is 0 but for the gradients that are given.

    beta m is rounded in the dtype of m, then the sum is, as ``m.mul_(beta).add_(g, alpha=alpha)`` does it on the same
    machine.

    Args:
        m: (n,) float32 or float64, contiguous; unchanged unless it is ``out``.
        grads: tensors of any shape, layout and floating dtype; unchanged.
        offsets: for each of them the element of m where it starts; ascending, without overlap.
        beta, alpha: the factors.
        out: like m; written. It may be m itself; no two arguments may overlap otherwise.

    Raises:
        ValueError: the lists differ in length, or a shape, dtype, device, layout or offset is not as above.
    """
    check_real("m", m, 1)
    check_like("out", out, m.shape, m.dtype, m.device)
    check_runs("grads", grads, offsets, m.shape[0], m.device)
    _ops.momentum.default(m, grads, offsets, beta, alpha, out)


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
    dtype of the state, or of p where that is wider, and rounded once to the dtype of p. The fraction is expanded by the
    correction, which leaves one division an element.

    Args:
        params: p, of any floating dtype and layout; changed in place.
        exp_avgs, exp_avg_sqs: m and v, both float32 or both float64, with the shape and device of p; unchanged.
        step_sizes: lr / (1 - beta1^t), one a tensor.
        sqrt_bias_corrections2: sqrt(1 - beta2^t), one a tensor.
        eps: added to the denominator.
        decay: factor on p, that is 1 - lr * weight_decay.

    Raises:
        ValueError: the lists differ in length, a shape, dtype or device is not as above, or there are several devices.
    """
    lengths = {len(params), len(exp_avgs), len(exp_avg_sqs), len(step_sizes), len(sqrt_bias_corrections2)}
    if len(lengths) != 1:
        raise ValueError(f"all lists must have the same length, got lengths {sorted(lengths)}")
    for p, m, v in zip(params, exp_avgs, exp_avg_sqs):
        same_place = p.shape == m.shape == v.shape and p.device == m.device == v.device
        if not (same_place and m.dtype == v.dtype and m.dtype in REAL and p.is_floating_point()):
            raise ValueError(
                "p must be floating, m and v both float32 or both float64, of one shape and device, got "
                f"{describe(p)}, {describe(m)} and {describe(v)}"
            )
    if any(p.device != params[0].device for p in params):
        raise ValueError(f"all p must be on one device, got {sorted({str(p.device) for p in params})}")
    if params:
        _ops.frozen_adam_apply_.default(params, exp_avgs, exp_avg_sqs, step_sizes, sqrt_bias_corrections2, eps, decay)


def all_finite(x: Tensor) -> Tensor:
    """0-d bool: whether no element is inf or NaN. On a CPU it takes a 20th of the time of ``x.isfinite().all()``.

    Args:
        x: of any shape, floating dtype and layout.
    """
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    if x.dtype.itemsize == 1:  # float8, which torch does not compare
        x = x.float()
    least, most = x.aminmax()  # both NaN if any is
    return (least > -torch.inf) & (most < torch.inf)

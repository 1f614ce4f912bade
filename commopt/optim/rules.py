"""Update rules on lists of tensors, with the arithmetic of torch.optim.

Each list holds one tensor per parameter. Nothing here communicates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    clocks: list[tuple[float, float]],
    group: dict[str, Any],
) -> None:
    """One step of Adam with decoupled weight decay (AdamW), operation for operation as ``torch.optim.Adam``.

        m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2
        x = x (1 - lr wd);     x = x - lr / (1-b1^t) * m / (sqrt(v / (1-b2^t')) + eps)

    Args:
        params: x, of any floating dtype; the arithmetic is done in the dtype of the state.
        grads, exp_avgs, exp_avg_sqs: g, m and v, all of the dtype of the state.
        clocks: (t, t') of each parameter, this step included: how often m and v have been updated.
        group: lr, betas, eps, weight_decay.
    """
    if not params:
        return
    beta1, beta2 = group["betas"]
    work = [x if x.dtype == m.dtype else x.to(m.dtype) for x, m in zip(params, exp_avgs)]
    if group["weight_decay"] != 0:
        torch._foreach_mul_(work, weight_decay_factor(group))
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    step_sizes, sqrt_corrections = bias_corrections(clocks, group)
    torch._foreach_div_(denominators, sqrt_corrections)
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(work, exp_avgs, denominators, [-s for s in step_sizes])
    for x, result in zip(params, work):
        if result is not x:
            x.copy_(result)


def frozen_adam_factors(
    clocks: list[tuple[float, float]], group: dict[str, Any]
) -> tuple[list[float], list[float], float, float]:
    """What :class:`commopt.compress.FrozenAdam` needs for the second half of :func:`adam_`, in which x moves along m,
    while m and v stay: step sizes, corrections, eps, decay."""
    return (*bias_corrections(clocks, group), group["eps"], weight_decay_factor(group))


def scaled_gradient(p: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """``scale`` times the gradient of ``p`` in ``dtype``, zeros if it has none; itself where that is the same."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad
    grad = grad.to(dtype)
    return grad if scale == 1 else grad * scale


def bias_corrections(clocks: list[tuple[float, float]], group: dict[str, Any]) -> tuple[list[float], list[float]]:
    """lr / (1 - b1^t) and sqrt(1 - b2^t') for each (t, t')."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    step_sizes = [float(lr / (1 - beta1**t)) for t, _ in clocks]
    return step_sizes, [(1 - beta2**t) ** 0.5 for _, t in clocks]


def weight_decay_factor(group: dict[str, Any]) -> float:
    """1 - lr * weight_decay, rounded as a tensor ``lr`` rounds it."""
    return float(1 - group["lr"] * group["weight_decay"])

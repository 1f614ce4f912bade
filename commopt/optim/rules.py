"""Update rules on lists of tensors, with the arithmetic of torch.optim.

Each list holds one tensor per parameter. Nothing here communicates, but what is given to: where a rank has a piece of
each tensor, ``total`` and ``highest`` make what all pieces come to out of what this one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.state.host import numbers_of, square_sums

Reduce = Callable[[Sequence[float]], Sequence[float]]


def itself(numbers: Sequence[float]) -> Sequence[float]:
    """``numbers`` as they are: what a whole tensor comes to is what its only piece does."""
    return numbers


VANISHING = 0.1
"""Root mean square of a momentum over that of sqrt(v), below which it counts as vanished. It is more than 0.2 where
gradients are nothing but noise."""


def adam_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    counts: list[tuple[float, float]],
    group: dict[str, Any],
) -> None:
    """One step of Adam, operation for operation as ``torch.optim.Adam``.

        x = x (1 - lr wd) if the decay is decoupled (AdamW), else g = g + wd x
        m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2
        x = x - lr / (1-b1^t) * m / (sqrt(v / (1-b2^t')) + eps)

    Args:
        params: x, of any floating dtype; the arithmetic is done in the dtype of the state.
        grads, exp_avgs, exp_avg_sqs: g, m and v, all of the dtype of the state.
        counts: (t, t') of each parameter, this step included: how often m and v have been updated.
        group: lr, betas, eps, weight_decay, decoupled_weight_decay, bias_correction.
    """
    if not params:
        return
    beta1, beta2 = group["betas"]
    work = _in_dtypes_of(exp_avgs, params)
    if coupled_decay(group) != 0:
        grads = list(torch._foreach_add(grads, work, alpha=coupled_decay(group)))
    elif group["weight_decay"] != 0:
        torch._foreach_mul_(work, weight_decay_factor(group))
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(exp_avg_sqs)
    step_sizes, sqrt_corrections = bias_corrections(counts, group)
    torch._foreach_div_(denominators, sqrt_corrections)
    torch._foreach_add_(denominators, group["eps"])
    torch._foreach_addcdiv_(work, exp_avgs, denominators, [-s for s in step_sizes])
    _take_back(params, work)


def sign_step_(params: list[Tensor], directions: list[Tensor], group: dict[str, Any]) -> None:
    """One step of lr along the signs of ``directions``, as Lion takes it: x = x (1 - lr wd) - lr sign(c), sign(0) = 0.

    Args:
        params: x, of any floating dtype; the arithmetic is done in the dtype of the directions.
        directions: c; overwritten.
        group: lr, weight_decay.
    """
    if not params:
        return
    work = _in_dtypes_of(directions, params)
    if group["weight_decay"] != 0:
        torch._foreach_mul_(work, weight_decay_factor(group))
    torch._foreach_sign_(directions)
    torch._foreach_add_(work, directions, alpha=-float(group["lr"]))
    _take_back(params, work)


def sgd_(params: list[Tensor], grads: list[Tensor], momenta: list[Tensor], group: dict[str, Any]) -> None:
    """One step of SGD, operation for operation as ``torch.optim.SGD``.

        g = g + wd x;   m = b m + g;   x = x - lr (m, or g + b m with Nesterov)

    Args:
        params: x, of any floating dtype; the arithmetic is done in the dtype of the gradients.
        grads: g, unchanged.
        momenta: m, of the dtype of the gradients; read only if there is momentum.
        group: lr, momentum, nesterov, weight_decay.
    """
    if not params:
        return
    work = _in_dtypes_of(grads, params)
    directions: Any = grads
    if group["weight_decay"] != 0:
        directions = torch._foreach_add(directions, work, alpha=group["weight_decay"])
    if group["momentum"] != 0:
        torch._foreach_mul_(momenta, group["momentum"])
        torch._foreach_add_(momenta, directions)
        directions = torch._foreach_add(directions, momenta, alpha=group["momentum"]) if group["nesterov"] else momenta
    torch._foreach_add_(work, directions, alpha=-float(group["lr"]))
    _take_back(params, work)


def lamb_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    group: dict[str, Any],
    total: Reduce = itself,
) -> list[float | None]:
    """One step of LAMB, without bias correction (see :mod:`commopt.optim.lamb` for what that changes).

        m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2;   u = m / (sqrt(v) + eps) + wd x
        x = x - lr c u,        c = :func:`trust_ratios`, or 1 where there is none

    Args:
        params: x, of any floating dtype; the arithmetic is done in the dtype of the state.
        grads, exp_avgs, exp_avg_sqs: g, m and v, all of the dtype of the state.
        group: lr, betas, eps, weight_decay, min_coeff, max_coeff.
        total: the sums over all pieces.

    Returns:
        c of each parameter, None where there is none.
    """
    if not params:
        return []
    beta1, beta2 = group["betas"]
    work = _in_dtypes_of(exp_avgs, params)
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    updates = list(torch._foreach_div(exp_avgs, _roots(exp_avg_sqs, group["eps"])))
    if group["weight_decay"] != 0:
        torch._foreach_add_(updates, work, alpha=group["weight_decay"])
    ratios = trust_ratios(work, updates, group, total)
    _move(params, work, [(updates, [1.0 if c is None else c for c in ratios])], group)
    return ratios


def lans_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[float],
    group: dict[str, Any],
) -> None:
    """One step of LANS.

        g = g / (||g|| + eps) if normalize_grad;    m = b1 m + (1-b1) g;   v = b2 v + (1-b2) g^2
        s = sqrt(v / (1-b2^t)) + eps;               r = m / (1-b1^t) / s + wd x;   c = g / s + wd x
        x = x - lr (b1 p r + (1-b1) q c),           p, q = :func:`trust_ratio` of r and of c, or 1 where there is none

    Args:
        params: x, of any floating dtype; the arithmetic is done in the dtype of the state.
        grads, exp_avgs, exp_avg_sqs: g, m and v, all of the dtype of the state; g stays as it is.
        steps: t of each parameter, this step included.
        group: lr, betas, eps, weight_decay, normalize_grad, min_coeff, max_coeff.
    """
    if not params:
        return
    beta1, beta2 = group["betas"]
    work = _in_dtypes_of(exp_avgs, params)
    if group["normalize_grad"]:
        grads = list(torch._foreach_div(grads, [g**0.5 + group["eps"] for g in square_sums(grads)]))
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    roots = _roots(exp_avg_sqs, group["eps"], [(1 - beta2**t) ** 0.5 for t in steps])
    fresh = list(torch._foreach_div(grads, roots))
    del grads
    updates = list(torch._foreach_div(exp_avgs, roots))
    torch._foreach_div_(updates, [1 - beta1**t for t in steps])
    weights, terms = square_sums(work), []
    for share, directions in ((beta1, updates), (1 - beta1, fresh)):
        if group["weight_decay"] != 0:
            torch._foreach_add_(directions, work, alpha=group["weight_decay"])
        ratios = [trust_ratio(x, u, group) for x, u in zip(weights, square_sums(directions))]
        terms.append((directions, [share * (1.0 if c is None else c) for c in ratios]))
    _move(params, work, terms, group)


def frozen_lamb_(
    params: list[Tensor],
    news: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    fresh_sqs: list[Tensor],
    averages: Sequence[float | None],
    lasts: Sequence[float],
    group: dict[str, Any],
    total: Reduce = itself,
    highest: Reduce = itself,
) -> tuple[list[float | None], list[float]]:
    """One step of 1-bit LAMB after the momentum has come.

        g = (m - b1 m') / (1-b1), with m' the momentum before;    f = b2 f + (1-b2) g^2;    m' = m
        u0 = m / (sqrt(v) + eps);   u = u0 + wd x;                r = :func:`bounded_factors` of v over f
        x = x - lr c r u

    Args:
        params: x, of any floating dtype; the arithmetic is done in the dtype of the state.
        news: m; overwritten.
        exp_avgs: m', which becomes m.
        exp_avg_sqs, fresh_sqs: v, which stands, and f. Elements with v = 0 are no evidence of anything: r ignores them.
        averages: c of each parameter; where it is None, the trust ratio of this step serves, if there is one.
        lasts: r of the last step.
        group: lr, betas, eps, weight_decay, min_coeff, max_coeff, factor_min, factor_max, factor_threshold.
        total, highest: the sums, and the largest, over all pieces.

    Returns:
        c as it was used (None stands for 1), and r.
    """
    if not params:
        return [], []
    beta1, beta2 = group["betas"]
    work = _in_dtypes_of(exp_avgs, params)
    torch._foreach_mul_(exp_avgs, -beta1)
    torch._foreach_add_(exp_avgs, news)
    torch._foreach_div_(exp_avgs, 1 - beta1)
    torch._foreach_mul_(fresh_sqs, beta2)
    torch._foreach_addcmul_(fresh_sqs, exp_avgs, exp_avgs, 1 - beta2)
    torch._foreach_copy_(exp_avgs, news)
    roots = _roots(exp_avg_sqs, group["eps"])
    largest = [r or 1.0 for r in highest(_largest(roots, _roots(fresh_sqs, group["eps"]), exp_avg_sqs))]
    updates = news
    torch._foreach_div_(updates, roots)
    weights = [1.0] * len(params)
    if group["weight_decay"] != 0:
        before = square_sums(updates)
        torch._foreach_add_(updates, work, alpha=group["weight_decay"])
        pairs = halves(total([*before, *square_sums(updates)]))
        weights = [min(1.0, (a / b) ** 0.5) if b > 0 else 1.0 for a, b in pairs]
    factors = bounded_factors(largest, weights, lasts, group)
    ratios = list(averages)
    lacking = [i for i, c in enumerate(averages) if c is None]
    fresh = trust_ratios([work[i] for i in lacking], [updates[i] for i in lacking], group, total)
    for i, c in zip(lacking, fresh):
        ratios[i] = c
    _move(params, work, [(updates, [(1.0 if c is None else c) * r for c, r in zip(ratios, factors)])], group)
    return ratios, factors


def bounded_factors(
    largest: Sequence[float], weights: Sequence[float], lasts: Sequence[float], group: dict[str, Any]
) -> list[float]:
    """By how much 1-bit LAMB corrects its trust ratios: r = w R + (1-w), kept in [factor_min, factor_max] and then
    within a factor 1 +- factor_threshold of what it was.

    Args:
        largest: R of each parameter, the largest (sqrt(v) + eps) / (sqrt(f) + eps) of its elements.
        weights: w, the share of the update that has to do with v, at most 1.
        lasts: r of the last step.
        group: factor_min, factor_max, factor_threshold.
    """
    threshold, out = group["factor_threshold"], []
    for ratio, w, last in zip(largest, weights, lasts):
        r = min(max(w * ratio + (1 - w), group["factor_min"]), group["factor_max"])
        out.append(min(max(r, last * (1 - threshold)), last * (1 + threshold)))
    return out


def trust_ratios(
    params: list[Tensor], updates: list[Tensor], group: dict[str, Any], total: Reduce = itself
) -> list[float | None]:
    """:func:`trust_ratio` of each parameter."""
    if not params:
        return []
    return [trust_ratio(x, u, group) for x, u in halves(total([*square_sums(params), *square_sums(updates)]))]


def trust_ratio(x: float, u: float, group: dict[str, Any]) -> float | None:
    """||x|| / ||u|| of their squares, kept in [min_coeff, max_coeff]; None if one of them is 0. A max_coeff of None is
    no bound."""
    if not (x > 0 and u > 0):
        return None
    ratio = max((x / u) ** 0.5, group["min_coeff"])
    return ratio if group["max_coeff"] is None else min(ratio, group["max_coeff"])


def scaling_coeffs(exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], total: Reduce = itself) -> list[float]:
    """Factors that make the root mean square of each momentum 1, over the elements with v > 0.

    A momentum that has vanished counts with :data:`VANISHING` of the root mean square of sqrt(v). 1 where v is 0
    everywhere, and for an empty tensor.
    """
    if not exp_avgs:
        return []
    counts = torch.stack([v.count_nonzero().to(exp_avgs[0].device) for v in exp_avg_sqs]).tolist()
    both = total([*counts, *square_sums(exp_avgs), *square_sums(list(torch._foreach_sqrt(exp_avg_sqs)))])
    n = len(counts)
    sums = zip(both[:n], both[n : 2 * n], both[2 * n :])
    return [1 / max((m / n) ** 0.5, VANISHING * (v / n) ** 0.5) if n else 1.0 for n, m, v in sums]


def halves(numbers: Sequence[float]) -> list[tuple[float, float]]:
    """Pairs of the first and second half of ``numbers``."""
    half = len(numbers) // 2
    return list(zip(numbers[:half], numbers[half:]))


def _roots(squares: list[Tensor], eps: float, corrections: list[float] | None = None) -> list[Tensor]:
    """sqrt(v) + eps; sqrt(v) over its bias correction, if there is one."""
    out = list(torch._foreach_sqrt(squares))
    if corrections is not None:
        torch._foreach_div_(out, corrections)
    torch._foreach_add_(out, eps)
    return out


def _largest(roots: list[Tensor], fresh_roots: list[Tensor], squares: list[Tensor]) -> list[float]:
    """The largest ratio of ``roots`` to ``fresh_roots`` of each tensor where ``squares`` is not 0; 0 if it is 0
    everywhere. Overwrites ``fresh_roots``."""
    out = []
    for root, fresh, square in zip(roots, fresh_roots, squares):
        ratio = torch.div(root, fresh, out=fresh).masked_fill_(square == 0, 0)
        out.append(ratio.amax() if ratio.numel() else ratio.new_zeros(()))
    return numbers_of(out)


def _move(
    params: list[Tensor],
    work: list[Tensor],
    terms: Sequence[tuple[list[Tensor], Sequence[float]]],
    group: dict[str, Any],
) -> None:
    """x <- x - lr factor u for each (u, factor) of ``terms``. ``work`` is x in the dtype of u; overwrites u.

    A factor that u's dtype cannot hold is its largest number: an infinite one would make NaN of elements that are 0.
    """
    lr = float(group["lr"])
    for updates, factors in terms:
        torch._foreach_mul_(updates, [-min(lr * f, torch.finfo(u.dtype).max) for u, f in zip(updates, factors)])
        torch._foreach_add_(work, updates)
    _take_back(params, work)


def _in_dtypes_of(state: Sequence[Tensor], params: Sequence[Tensor]) -> list[Tensor]:
    """The parameters in the dtypes in which the arithmetic is done; themselves where they have them."""
    return [x if x.dtype == s.dtype else x.to(s.dtype) for x, s in zip(params, state)]


def _take_back(params: Sequence[Tensor], work: Sequence[Tensor]) -> None:
    """Rounds what was done in other dtypes to the parameters' own."""
    for x, result in zip(params, work):
        if result is not x:
            x.copy_(result)


def scaled_gradient(x: Tensor, grad: Tensor | None, dtype: torch.dtype, scale: float) -> Tensor:
    """``scale`` times the gradient of x in ``dtype``, zeros if it has none; itself where that is the same."""
    grad = torch.zeros_like(x) if grad is None else grad
    grad = grad.to(dtype)
    return grad if scale == 1 else grad * scale


def bias_corrections(counts: list[tuple[float, float]], group: dict[str, Any]) -> tuple[list[float], list[float]]:
    """lr / (1 - b1^t) and sqrt(1 - b2^t') for each (t, t'); lr and 1 where the group has no bias correction."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    lr = lr.cpu() if isinstance(lr, Tensor) else lr  # waited for once
    if not group.get("bias_correction", True):
        return [float(lr)] * len(counts), [1.0] * len(counts)
    step_sizes = [float(lr / (1 - beta1**t)) for t, _ in counts]
    return step_sizes, [(1 - beta2**t) ** 0.5 for _, t in counts]


def weight_decay_factor(group: dict[str, Any]) -> float:
    """1 - lr * weight_decay, rounded as a tensor ``lr`` rounds it; 1 if the decay is a part of the gradient."""
    return 1.0 if coupled_decay(group) else float(1 - group["lr"] * group["weight_decay"])


def coupled_decay(group: dict[str, Any]) -> float:
    """The weight decay that is a part of the gradient, wd of g + wd x: Adam's own; 0 where it is decoupled."""
    decay: float = group["weight_decay"]
    return 0.0 if group.get("decoupled_weight_decay", True) else decay

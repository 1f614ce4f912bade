"""Parameters between two rounds of 0/1 Adam: always made from the anchor x_a, the model after the last round.

x_i = x_a - G (u_i / G) / D,     D = sqrt(v / (1-b2^k)) + eps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from commopt import ops
from commopt.compress import FrozenAdam
from commopt.optim.exchange import frozen_adam
from commopt.optim.rules import weight_decay_factor
from commopt.state.state_bucket import StateBucket


@dataclass(frozen=True)
class Interval:
    """The steps since the last round, of one parameter group.

    Attributes:
        steps: how many.
        lr_sum: of their lr.
        decay: the product of their 1 - lr wd.
        share: of the last step in ``lr_sum``, 1 if that is 0: its weight in the mean of the momenta.
        betas, eps: of the last step, after which the group's may have changed.
    """

    steps: int
    lr_sum: float
    decay: float
    share: float
    betas: tuple[float, float]
    eps: float


def next_interval(group: dict[str, Any]) -> Interval:
    """The steps since the last round, with the next one."""
    lr = float(group["lr"])
    lr_sum = group["local_lr_sum"] + lr
    share = lr / lr_sum if lr_sum > 0 else 1.0
    decay = group["local_decay"] * weight_decay_factor(group)
    return Interval(group["local_steps"] + 1, lr_sum, decay, share, group["betas"], group["eps"])


def moves(bucket: StateBucket, group: dict[str, Any], interval: Interval, moving: Sequence[int]) -> FrozenAdam:
    """Update that brings the parameters of the indices ``moving`` from the anchor to where ``interval`` has."""
    t, since, k = (bucket.numbers[name].tolist() for name in ("step", "interval_step", "variance_step"))
    counts = [(t[i] - since[i] + 1, k[i]) for i in moving]
    over = {**group, "lr": interval.lr_sum, "betas": interval.betas, "eps": interval.eps}
    return replace(frozen_adam(bucket, bucket["exp_avg_sq"], moving, over, counts), decay=interval.decay)


def add_params_(flat: Tensor, bucket: StateBucket, indices: Sequence[int], factor: float) -> None:
    """Adds ``factor`` times the parameters of ``indices`` to ``flat``, a flat buffer of the bucket."""
    if factor != 0:
        views, values = bucket.views(flat), bucket.values
        for i in indices:
            views[i].add_(values[i].detach(), alpha=factor)


def to_anchor(bucket: StateBucket, update: FrozenAdam) -> None:
    """x = x_a, for the parameters that ``update`` moves."""
    for p, anchor in zip(update.params, _views(bucket["anchor"], update)):
        p.copy_(anchor)


def place(bucket: StateBucket, update: FrozenAdam, mean: Tensor) -> None:
    """x = x_a - G mean / D, where ``mean`` is a flat buffer: this rank's u_i / G, or that of all ranks."""
    to_anchor(bucket, update)
    means, variances = _views(mean, update), _views(update.v, update)
    corrections = update.sqrt_bias_corrections2
    ops.frozen_adam_apply_(update.params, means, variances, update.step_sizes, corrections, update.eps, update.decay)


def _views(flat: Tensor, update: FrozenAdam) -> list[Tensor]:
    """Views of the parameters that move in ``flat``."""
    return [flat[o : o + p.numel()].view(p.shape) for o, p in zip(update.offsets, update.params)]

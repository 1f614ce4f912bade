"""The least that an element's variance stands as, beside those of the elements that it shares a scale with.

In a compressed step a block of momenta comes as signs of one size s, about their root mean square. Residuals see to it
that their mean over time is right. But from step to step an element moves by

    lr s / (sqrt(v) + eps),    where Adam would move it by about lr,

and back, if nothing has happened meanwhile. One whose gradients were a thousandth of its neighbours' moves by a
thousand lr: the weight of a pixel that is rarely lit or of a word that is rare, those of a unit that is nearly dead, a
bias before a norm, whose gradient is rounding. Small networks with ReLU are lost by that within a few steps of the
switch; and BatchNorm's running mean is then of biases that there no longer are. So v is raised before it is used in
such steps,

    v = max(v, c mean(v over its block)),    c = ``min_variance`` of the group;    zeros stay, and move nothing

and an element moves by about 1 / sqrt(c) lr at most, 10 at c = 0.01. What was raised learns more slowly than by Adam,
by a factor of sqrt(c mean(v) / v). With ``Identity()``, which loses nothing, c is 0.

1-bit Adam (arXiv 2102.02888), 1-bit LAMB (2104.06069) and 0/1 Adam (2202.06009) leave v as it is: c = 0. Of c = 0.0001,
0.001 and 0.01, all have kept small networks with ReLU from being lost; at 0.0001 a bias before a BatchNorm still moves
by too much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt import ops
from commopt.compress import Compressor, Identity, Sign
from commopt.optim.masks import active_mask
from commopt.optim.rules import halves
from commopt.state.host import square_sums
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.step.base import CommOptimizer

LEAST = 0.01
"""Of the mean of its block: the least that an element's variance stands as, unless it is 0."""
BLOCK = 2048
"""Elements of a block, where the compressor has none."""
OUTSIZED = 10
"""Times the root mean square of its block: gradients of a parameter that a sign of that size stops."""
ROOT_MEAN_SQUARE = 2


def defaults(min_variance: float) -> dict[str, Any]:
    """Defaults of parameter groups whose variance is raised; ``raised``: by what it is, since it has moved last."""
    return {"min_variance": min_variance, "raised": ""}


def raised_by(group: dict[str, Any], compressor: Compressor) -> str:
    """What v is raised by in steps of ``group`` with ``compressor``: whose mean, of which blocks."""
    return "" if isinstance(compressor, Identity) else f"{float(group['min_variance'])!r} {compressor!r}"


def raise_in_blocks(bucket: StateBucket, group: dict[str, Any], compressor: Compressor) -> None:
    """Makes v max(v, c mean of the v that are not 0 in its block), once since it has moved, or parameters of other
    groups have come; zeros stay. Of the blocks that ``compressor`` has scales of; to the bit the same on all ranks that
    hold the same of ``bucket``."""
    share = _share(group, compressor)
    if share:
        least = _means_of_blocks(bucket, compressor).mul_(share)
        set_variance(bucket, torch.maximum(bucket["exp_avg_sq"], least, out=least))


def _means_of_blocks(bucket: StateBucket, compressor: Compressor) -> Tensor:
    """Of each element the mean of the v that are not 0 in its block; 0 where v is. A new flat buffer."""
    v, block = bucket["exp_avg_sq"], getattr(compressor, "block", BLOCK) or 0
    roots, active = v.sqrt().view(bucket.world_size, -1), active_mask(bucket).view(bucket.world_size, -1)
    payload = torch.empty(bucket.world_size, ops.sign_nbytes(roots.shape[1], block), dtype=torch.uint8, device=v.device)
    ops.sign_compress(roots, payload, block, ROOT_MEAN_SQUARE, active)
    ops.sign_decompress(payload, roots, block, active)  # the root of the mean
    return roots.view(-1).square_()


def report_outsized(optimizer: CommOptimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Warns of parameters of ``groups``, whose variance stands from now on, that the scale of their block stops."""
    times: dict[Tensor, float] = {}
    for bucket, _ in optimizer.compressed_buckets(groups):
        times |= outsized(bucket, optimizer.compressor)
    optimizer._diagnostics.outsized(times, optimizer.param_groups)


def outsized(bucket: StateBucket, compressor: Compressor) -> dict[Tensor, float]:
    """The parameters of ``bucket`` with so few elements that they hardly count in the scale of their block, of which
    the gradients are ``OUTSIZED`` times as large as it or more: how many times."""
    if not isinstance(compressor, Sign):
        return {}
    out: dict[Tensor, float] = {}
    means = bucket.views(_means_of_blocks(bucket, compressor))
    for p, v, mean in zip(bucket.params, bucket.tensors("exp_avg_sq"), means):
        if 0 < v.numel() < BLOCK / OUTSIZED**2 and float(mean.sum()) > 0:
            times = math.sqrt(float(v.sum()) / float(mean.sum()))
            out |= {p: times} if times >= OUTSIZED else {}
    return out


def raised_in_tensors(bucket: StateBucket, group: dict[str, Any], compressor: Compressor) -> Tensor:
    """As :func:`raise_in_blocks`, of the mean of its tensor: for scales that are a tensor's own. All ranks that hold
    pieces of one replica call it.

    Returns:
        A new flat buffer, for :func:`set_variance`; v itself if that was raised since it has moved, or is not to be.
    """
    share = _share(group, compressor)
    if share == 0:
        return bucket["exp_avg_sq"]
    out = bucket["exp_avg_sq"].clone()
    variances = bucket.views(out)
    counts = [float(v.count_nonzero()) for v in variances]
    sums = square_sums([v.sqrt() for v in variances])
    for v, (total, n) in zip(variances, halves(bucket.total([*sums, *counts]))):
        if total > 0:
            v.copy_(torch.where(v > 0, v.clamp(min=share * total / n), v))
    return out


def _share(group: dict[str, Any], compressor: Compressor) -> float:
    """c, 0 if nothing is to be raised: it was, or nothing is lost, and no element moves by what others lack."""
    by = raised_by(group, compressor)
    return 0.0 if by in ("", group["raised"]) else float(group["min_variance"])


def set_variance(bucket: StateBucket, raised: Tensor) -> None:
    """Makes the variance of ``bucket`` what was ``raised``; when the step is taken that uses it."""
    if raised is not bucket["exp_avg_sq"]:
        bucket["exp_avg_sq"].copy_(raised)
        bucket.standing = None

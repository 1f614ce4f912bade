"""Elements that have gradients now, and had none before their variance was frozen: v = 0, and nothing moves them.

The rows of positions in the second half of a run that begins with short sequences; weights whose pruning has ended; a
layer that was frozen. Where ``SHARE`` of a tensor or more are such, in ``LOOKS`` looks in a row
(:mod:`commopt.optim.thaw`), it is no row of a rare word: all ranks go back to where the variance moves, as they do
where gradients have outgrown it, or a warning names the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from commopt.optim.host import numbers_of
from commopt.optim.state_bucket import StateBucket

SHARE = 0.1
"""Of the elements of a tensor, of what a rank has of it."""
LOOKS = 3
"""In which ``SHARE`` of a tensor's elements have gradients that do not move them."""
TIMES = 8
"""Times that a group goes back at most for such elements."""
LEAST = 1e-15
"""Smaller gradients have a square that is 0 in float32."""


def unmoved(
    bucket: StateBucket, with_zeros: Sequence[int], scale: float, of_parameters: bool
) -> list[tuple[Tensor, Tensor]]:
    """The parameters of ``bucket`` that have gradients of this rank where v is 0, each with the share of its elements,
    0-d. Gradients are to be multiplied by ``scale``.

    Args:
        with_zeros: the indices of those in whose v there are zeros; others are not looked at.
        of_parameters: whether those count that have had no gradient at all.
    """
    variances, counts = bucket.tensors("exp_avg_sq"), bucket.numbers["variance_step"].tolist()
    found = []
    for i in with_zeros:
        g, v = bucket.gradient(i), variances[i]
        if g is not None and v.numel() and (counts[i] or of_parameters):
            late = (v == 0).logical_and_(g.abs() > LEAST / scale)
            found.append((bucket.params[i], late.sum() / v.numel()))
    return found


def enough(found: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Those of the parameters in which it is ``SHARE`` of the elements."""
    shares = numbers_of([share for _, share in found])
    return [p for (p, _), share in zip(found, shares) if share >= SHARE]


def count(groups: Sequence[dict[str, Any]], found: Sequence[bool]) -> list[dict[str, Any]]:
    """Counts a look at ``groups``; of each whether some rank has ``found`` such parameters in groups of its kind.
    Returns those for which it is the one at which something follows."""
    for group, has in zip(groups, found):
        group["watch_unmoved"] = group["watch_unmoved"] + 1 if has else 0
    return [group for group in groups if group["watch_unmoved"] == LOOKS]

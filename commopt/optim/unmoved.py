"""Elements that have gradients now, and had none before their variance was frozen: v = 0, and nothing moves them.

The rows of positions in the second half of a run that begins with short sequences; weights whose pruning has ended; a
layer that was frozen. Where ``SHARE`` of a tensor or more are such, in ``LOOKS`` looks in a row
(:mod:`commopt.optim.thaw`), it is no row of a rare word: all ranks go back to where the variance moves, as they do
where gradients have outgrown it, or a warning names the tensor.

Where a warm-up was compressed by a scale for each block, an element whose gradient is very small beside those that it
shares a scale with has never been sent, and v stays 0 whatever is done: there only those count that the compressor
would send if they were ``KEPT_BACK`` times as large, which is what error feedback adds up to in a warm-up (the
refreshes of 0/1 Adam have none but where they follow each other, and send it as it is). And what is so at the first
look after a group went back for it is not late, whatever it is (gradients that cancel among the ranks): the log says
so, and nothing is done about it until the variance stands anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt.agreement.diagnostics import names_of
from commopt.agreement.setup import gather_texts
from commopt.compress import Compressor
from commopt.compress.scaled import Scaled
from commopt.state.host import numbers_of
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.step.base import CommOptimizer

SHARE = 0.1
"""Of the elements of a tensor, of what a rank has of it."""
LOOKS = 3
"""In which ``SHARE`` of a tensor's elements have gradients that do not move them."""
NOT_HELPED = -1
"""In place of the looks of a group: going back has not helped what is unmoved in it."""
TIMES = 8
"""Times that a group goes back at most for such elements."""
KEPT_BACK = 10.0
"""Gradients of an element that error feedback adds up to before they are sent, of either sign: some hundred steps."""
LEAST = 1e-15
"""Smaller gradients have a square that is 0 in float32."""


def report_zero(optimizer: CommOptimizer, groups: Sequence[dict[str, Any]], later: str) -> None:
    """Warns of parameters of ``groups``, whose variance stands from now on, that will not move, as it is 0. ``later``
    says what lets a variance stand later."""
    found = dict[Tensor, bool]()
    for bucket, _ in optimizer.compressed_buckets(groups):
        largest = bucket.highest([float(v.any()) for v in bucket.tensors("exp_avg_sq")])
        found.update((p, m > 0) for p, m in zip(bucket.params, largest) if p.numel())
    moves = {p: found[p] for group in groups for p in group["params"] if p in found}  # as they were given
    optimizer._diagnostics.zero_variance(moves, optimizer.state, optimizer.param_groups, later)


def unmoved(
    bucket: StateBucket,
    with_zeros: Sequence[int],
    scale: float,
    of_parameters: bool,
    sent_by: Compressor | None = None,
    kept_back: float = KEPT_BACK,
) -> list[tuple[Tensor, Tensor]]:
    """The parameters of ``bucket`` that have gradients of this rank where v is 0, each with the share of its elements,
    0-d. Gradients are to be multiplied by ``scale``.

    Args:
        with_zeros: the indices of those in whose v there are zeros; others are not looked at.
        of_parameters: whether those count that have had no gradient at all.
        sent_by: what the gradients of the warm-up are sent by; None if they are exact.
        kept_back: gradients of an element that add up before that sends them.
    """
    variances, counts = bucket.tensors("exp_avg_sq"), bucket.numbers["variance_step"].tolist()
    sent = None
    if with_zeros and isinstance(sent_by, Scaled):
        sent = bucket.views(_as_sent(bucket, scale, sent_by, kept_back))
    found = []
    for i in with_zeros:
        g, v = bucket.gradient(i), variances[i]
        if g is not None and v.numel() and (counts[i] or of_parameters):
            late = (v == 0).logical_and_(g.abs() > LEAST / scale)
            if sent is not None:
                late.logical_and_(sent[i] != 0)
            found.append((bucket.params[i], late.sum() / v.numel()))
    return found


def _as_sent(bucket: StateBucket, scale: float, compressor: Compressor, kept_back: float) -> Tensor:
    """What ``compressor`` makes of this rank's gradients of ``bucket``, (padded,), after ``kept_back`` of those where v
    is 0."""
    flat = bucket.pack_gradients(scale)
    torch.where(bucket["exp_avg_sq"] == 0, flat * kept_back, flat, out=flat)
    flat = flat.view(1, -1)
    payload = flat.new_empty(1, compressor.nbytes(flat.shape[1], flat.dtype), dtype=torch.uint8)
    compressor.compress(flat, payload)
    compressor.decompress(payload, flat)
    return flat.view(-1)


def enough(found: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Those of the parameters in which it is ``SHARE`` of the elements."""
    shares = numbers_of([share for _, share in found])
    return [p for (p, _), share in zip(found, shares) if share >= SHARE]


def names(optimizer: CommOptimizer, found: Sequence[Tensor]) -> list[str]:
    """The names of the parameters that any rank has ``found``, the same on all of them. All ranks call it."""
    known = names_of(optimizer.param_groups)
    texts = gather_texts(optimizer.agrees_over.inner, "\n".join(known[p] for p in found))  # not counted: rare
    return list(dict.fromkeys(name for text in texts for name in text.split("\n") if name))


def count(groups: Sequence[dict[str, Any]], found: Sequence[bool]) -> list[dict[str, Any]]:
    """Counts a look at ``groups``; of each whether some rank has ``found`` such parameters in groups of its kind.
    Returns those for which it is the one at which something follows: they have ``LOOKS`` such looks, or NOT_HELPED."""
    reached = []
    for group, has in zip(groups, found):
        if has and group["late"] and not group["watch_looks"]:
            group["watch_unmoved"] = NOT_HELPED
            reached.append(group)
        elif group["watch_unmoved"] != NOT_HELPED:
            group["watch_unmoved"] = group["watch_unmoved"] + 1 if has else 0
            reached += [group] if group["watch_unmoved"] == LOOKS else []
    return reached

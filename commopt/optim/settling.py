"""Test of whether the variance has settled: when ``freeze_step="auto"`` ends a warm-up.

The ranks look at the steps t = 20, 40, 60, 80, 100, 125, 156, ...: each look is a quarter of t after the last one, and
20 steps at least. What has come into the variance of a tensor in between is known from its sums alone,

    E = (||v_t||_1 - b2^k ||v_s||_1) / (1 - b2^k),    k updates of v since the last look, at s:

the mean of ||g||^2 over the window, the newest counting most where the window is longer than 1 / (1-b2). So a look
costs one pass over v, no memory but three numbers a tensor, and does not depend on how long b2 remembers. With E' of
the window before, c = log(E / E') of each tensor, and means over all tensors, each counting as one:

    the warm-up ends where    mean |c| <= 0.4,    mean c >= -0.4 at the look before,    lr has not risen since,
                              and of each tensor    k_t n_g / n_v >= 20

**Tensor by tensor, in logarithms.** A model that leaves a plateau does so exponentially, from gradients that are
nothing beside those of the embedding: on a small BERT ||v||_1 changed by 1 % in 50 steps while the variance of the
queries and keys grew a thousandfold. It is these that a frozen variance throws off: their steps become thirty times too
long. mean |c| was 1.3 to 1.7 there; before, in the decline to the plateau, 0.2 to 1.3; and from then on 0.1 to 1.0.

**Windows in proportion to t.** Gradients change with the logarithm of time. What has not changed by half in the last
quarter of it will not have changed by much when the run is a few times as long; and a short run, or one with b2 =
0.999, is not kept waiting for 1 / (1-b2) steps.

**Twenty gradients an element.** k_t are the updates of v since the beginning, n_g the elements of the gradient at this
look that are not 0, n_v those of v: so many gradients has an element of v had on average. In most tensors every step
brings one to each. The rows of an embedding get one where a batch has them. The sum over a table is steady from the
first step on; but what stands of a row is the square of its two or three gradients, or 0. Recommenders were lost by it.
0/1 Adam, which compresses from the start, waits for these before it does: :func:`rarely_updated`.

**What follows a decline must last.** The calm after a decline may be a plateau, with learning still to come; that after
growth comes when learning has begun. A plateau that outlasts two looks is not told from the end of it: for that there
is :mod:`commopt.optim.thaw`.

1-bit Adam (arXiv 2102.02888) compares ||v||_1 of the whole model over a window of 1 / (1-b2) steps instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from commopt.comm import wait
from commopt.optim.rules import halves
from commopt.state.host import square_sums
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.step.base import CommOptimizer
    from commopt.step.in_flight import StepContext

FIRST = 20
"""Steps to the first look, and at least so many from one to the next."""
SHARE = 4
"""A look is this part of all steps after the last one."""
CALM = 0.4
"""The most that log(E / E') may be, in the mean over all tensors."""
ENOUGH = 20
"""Gradients that an element of a tensor has had, in the mean over those that have had any."""
UNKNOWN = -1.0
"""The trend before there was one, in a run that begins: as of a decline."""

SCALARS = {"look_norm": 0.0, "look_energy": 0.0, "look_count": 0.0}
"""Numbers of a tensor: ||v||_1, E, and the updates of v, at the last look."""
DEFAULTS = {"look_trend": UNKNOWN, "look_lr": 0.0}
"""Numbers of a group: mean c of its cohort, and lr, at the last look."""


class Change(NamedTuple):
    """Change of the gradients of a cohort from one window to the next."""

    size: float
    """mean |c|; inf if there is nothing to compare."""
    trend: float
    """mean c; negative if they have become smaller."""
    rare: int
    """How many tensors there are whose elements have had fewer than ``ENOUGH`` gradients."""


def is_look(step: int) -> bool:
    """True if the ranks look after ``step``, >= 1."""
    look = 0
    while look < step:
        look += max(FIRST, look // SHARE)
    return look == step


def changes(optimizer: CommOptimizer, cohorts: Sequence[Sequence[dict[str, Any]]]) -> list[Change]:
    """The change of each of ``cohorts`` of groups since the last look, which this one then is; the same on every rank.
    Communicates: all ranks call it at the same step, also those that train nothing."""
    number = {id(group): i for i, groups in enumerate(cohorts) for group in groups}
    sums = torch.zeros(len(cohorts), 4, dtype=torch.float64, device="cpu")
    for bucket, group in optimizer.compressed_buckets([group for groups in cohorts for group in groups]):
        found, rare = _look(bucket, group["betas"][1]), len(rarely_updated(bucket))
        sums[number[id(group)]] += sums.new_tensor([sum(map(abs, found)), sum(found), len(found), rare])
    return [
        Change(size / n, trend / n, round(rare)) if n else Change(math.inf, UNKNOWN, round(rare))
        for size, trend, n, rare in _of_all(optimizer, sums)
    ]


def ends_warmup(groups: Sequence[dict[str, Any]], change: Change) -> bool:
    """True if ``change`` ends the warm-up of a cohort of groups, each of which remembers it."""
    calm = change.size <= CALM and not change.rare
    for group in groups:
        lr = float(group["lr"])
        calm = calm and group["look_trend"] >= -CALM and lr <= group["look_lr"]
        group["look_trend"] = change.trend if math.isfinite(change.size) else group["look_trend"]
        group["look_lr"] = lr
    return calm


def stop_where_settled(
    optimizer: CommOptimizer,
    groups: Sequence[dict[str, Any]],
    key: str,
    until: str,
) -> list[dict[str, Any]]:
    """Looks at those of ``groups`` whose ``key`` is "auto", if this is a step to look at: where the variance has
    settled, the step takes its place. Groups of one age decide together. All ranks call it after each step.

    Args:
        optimizer: of the groups.
        groups: those whose variance moves.
        key: of the step after which it stands.
        until: what goes on until then, and how to end it, for the warning where that is long.

    Returns:
        the groups whose variance stands from now on.
    """
    cohorts: dict[int, list[dict[str, Any]]] = {}
    for group in groups:
        if group[key] == "auto" and is_look(group["step"]):
            cohorts.setdefault(group["step"], []).append(group)
    stopped = []
    if cohorts:
        for (step, cohort), change in zip(cohorts.items(), changes(optimizer, list(cohorts.values()))):
            lr_rises = any(float(group["lr"]) > group["look_lr"] for group in cohort)
            if ends_warmup(cohort, change):
                stopped += cohort
            else:
                beta2 = max(group["betas"][1] for group in cohort)
                optimizer._diagnostics.unsettled(step, beta2, change.size, change.rare, lr_rises, until)
    for group in stopped:
        group[key] = group["step"]
    return stopped


def counts(stop: Any, step: int) -> bool:
    """True if :func:`count_nonzero` counts in ``step``: by it a variance is judged that is frozen after ``stop``, a
    step or "auto"."""
    return step == stop or (stop == "auto" and is_look(step))


def count_nonzero(bucket: StateBucket, ctx: StepContext, gradients: Sequence[Tensor], wanted: bool) -> None:
    """Notes how many elements of the mean ``gradients``, of the parameters that move, are not 0, if that is ``wanted``;
    else that they are not counted."""
    bucket.nonzero = [0.0] * len(bucket.params) if wanted else []
    for i, g in zip(ctx.moving(bucket), gradients) if wanted else ():
        bucket.nonzero[i] = float(g.count_nonzero())


def rarely_updated(bucket: StateBucket) -> list[Tensor]:
    """The parameters of ``bucket`` whose elements have had fewer than ``ENOUGH`` gradients because fewer than half of
    them get one in a step, by those that were counted last. All ranks that hold pieces of them call it."""
    if not bucket.nonzero:
        return []
    ours = [float(v.count_nonzero()) for v in bucket.tensors("exp_avg_sq")]
    totals = halves(bucket.total([*bucket.nonzero, *ours]))
    updates = bucket.numbers["variance_step"].tolist()
    per_step = [n_g / n_v if n_v else 1.0 for n_g, n_v in totals]
    return [p for p, k, share in zip(bucket.params, updates, per_step) if 0 < share < 0.5 and k * share < ENOUGH]


def any_in(
    optimizer: CommOptimizer,
    groups: Sequence[dict[str, Any]],
    find: Callable[[StateBucket, dict[str, Any]], Sequence[Tensor]],
) -> list[bool]:
    """Of each of ``groups`` whether ``find`` finds any parameters in its buckets; the same on every rank. Communicates
    where ranks hold parts of a model: all call it at the same step, also those that train nothing."""
    if not groups:
        return []
    number = dict.fromkeys(map(id, groups), 0)
    for bucket, group in optimizer.compressed_buckets(groups):
        number[id(group)] += len(find(bucket, group))
    found = [[float(count)] for count in number.values()]
    if optimizer.topology.is_sharded:
        found = _of_all(optimizer, torch.tensor(found, dtype=torch.float64, device="cpu"))
    return [count > 0 for (count,) in found]


def report_rare(optimizer: CommOptimizer, groups: list[dict[str, Any]], setting: str) -> None:
    """Warns of parameters of ``groups``, whose variance stands from now on, that it has few gradients of; ``setting``
    says since when it stands. All ranks call it."""
    rare = [p for bucket, _ in optimizer.compressed_buckets(groups) for p in rarely_updated(bucket)]
    optimizer._diagnostics.rarely_updated(rare, optimizer.param_groups, ENOUGH, setting)


def forget(bucket: StateBucket) -> None:
    """Makes the next look at ``bucket`` the first one."""
    for name in SCALARS:
        bucket.numbers[name].zero_()


def _of_all(optimizer: CommOptimizer, sums: Tensor) -> list[list[float]]:
    """The rows of ``sums`` over all ranks. They are equal already where every rank holds the whole; what is decided by
    them must be."""
    sums = sums.to(optimizer.control_device([p for bucket in optimizer.buckets for p in bucket.params]))
    wait(optimizer.topology.world.all_reduce(sums), "whether the variance has settled")
    return sums.tolist()  # type: ignore[no-any-return]


def _look(bucket: StateBucket, beta2: float) -> list[float]:
    """c of each tensor of ``bucket`` that has one: with gradients in this window and in the one before it that are not
    so small that rounding hides them."""
    norms = bucket.total(norms_of(bucket.tensors("exp_avg_sq")))
    norm, energy, count = (bucket.numbers[name] for name in SCALARS)
    now, out = bucket.numbers["variance_step"].tolist(), []
    for i, (v, before, last, then) in enumerate(zip(norms, norm.tolist(), energy.tolist(), count.tolist())):
        k = now[i] - then
        if k <= 0 or not v > 0:
            continue
        kept = beta2**k
        new, rounding = v - kept * before, k * torch.finfo(bucket.dtype).eps * kept * before
        fresh = new / (1 - kept) if new > rounding else 0.0
        if last > 0 and fresh > 0:
            out.append(math.log(fresh / last))
        norm[i], energy[i], count[i] = v, fresh, now[i]
    return out


def norms_of(variances: Sequence[Tensor]) -> list[float]:
    """||v||_1 of each tensor, to the bit the same whatever the number of threads."""
    return square_sums([v.sqrt() for v in variances])

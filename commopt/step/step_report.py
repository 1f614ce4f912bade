"""What a rank brings to the agreement on a step: its gradients, its refusal, and what the ranks compare. Functions of
an optimizer."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.agreement.decision import StepReport, is_usable
from commopt.agreement.digest import digest_of_all
from commopt.state import assigned, comparing, following, packing, replicas, wrapped
from commopt.state.host import as_numbers, numbers_of
from commopt.step.in_flight import StepInFlight

if TYPE_CHECKING:
    from commopt.step.base import CommOptimizer


def report_of(
    optimizer: CommOptimizer,
    step: StepInFlight,
    local: bool,
    overlapped: bool,
    unscale: float,
    refused: Exception | None,
) -> StepReport:
    """This rank's report on ``step``.

    Args:
        step: its parameters are known.
        local: whether it is local.
        overlapped: whether its buckets start in backward.
        unscale: what gradients are to be multiplied by.
        refused: why this rank cannot take it, if that is known.
    """
    report = _of_gradients(optimizer, step.params, unscale, refused or _refusal(optimizer, overlapped, unscale))
    if local:
        return _of_local_step(optimizer, report, step)
    optimizer.before_agreement(report)
    return _with_comparison(optimizer, report, step.number)


def follow(optimizer: CommOptimizer, step: StepInFlight) -> Exception | None:
    """Follows parameters that were moved, cast or unfrozen, and assigned state; what forbids this step if something
    else was done to them. The other ranks hear of it when they agree."""
    try:
        following.refuse_exchanged(optimizer)
        following.refuse_regrouped(optimizer)
    except ValueError as error:
        return error
    if step.started and following.stale(optimizer):
        return ValueError(
            "parameters were moved, cast or put into other groups between backward() and step(), but overlap=True "
            "has sent gradients of them already; do it after step()"
        )
    try:
        for bucket in optimizer.buckets:
            bucket.check_shapes()
        late = step.started > 0 and assigned.follow(optimizer)
        if following.follow_parameters(optimizer):
            step.replace(optimizer.buckets)
    except ValueError as error:
        return error
    if late:
        return ValueError(
            "state was assigned to since the last step(), but overlap=True has sent in backward() what is made of "
            "what was there. It counts from the next backward on; change state in place, "
            "optimizer.state[p][name].copy_(...), before backward()"
        )
    return None


def _refusal(optimizer: CommOptimizer, overlapped: bool, unscale: float) -> Exception | None:
    """Error that forbids the step on this rank: a setting of it, or that buckets have started in backward, or would
    have."""
    if overlapped and unscale != 1:
        return ValueError(
            "overlap=True sends gradients before a GradScaler has unscaled them; train in bfloat16 without a "
            "scaler, or create the optimizer with overlap=False"
        )
    try:
        optimizer.check_step()
        if optimizer._watching is not None:
            optimizer._watching.check(optimizer.param_groups)
    except ValueError as error:
        return error
    return None


def blame(optimizer: CommOptimizer, error: Exception) -> Exception:
    """Why the step failed with ``error``: ValueError, as where it is given, for a hyper-parameter that is out of range;
    if none is, ``error``."""
    try:
        for group in optimizer.param_groups:
            optimizer.check_group(group)
    except Exception as wrong:  # KeyError for one that is gone
        return wrong if isinstance(wrong, ValueError) else error
    return error


def _of_gradients(
    optimizer: CommOptimizer, params: list[Tensor], unscale: float, refused: Exception | None
) -> StepReport:
    """Report on a step of ``params``, whose gradients are to be multiplied by ``unscale``."""
    present = [p.grad is not None for p in params]
    if refused is not None:
        return StepReport(0.0, present, False, refused)
    try:
        checks.check_gradients([p.grad for p in params if p.grad is not None])
        checks.check_common(optimizer.max_grad_norm, optimizer.bucket_mb, optimizer.overlap)  # it may have been set
        if optimizer.overlap != optimizer._made_to_overlap:
            raise ValueError(f"overlap was set to {optimizer.overlap}: give it where the optimizer is made")
        growth = optimizer.growth(unscale)
    except Exception as error:
        return StepReport(0.0, present, False, blame(optimizer, error))
    averaged = optimizer._attachment.averaged if optimizer._attachment is not None else {}
    groups = optimizer.param_groups
    wanting = {id(p) for group in groups if optimizer.wants_average(group) for p in group["params"]}
    fresh = [p for p in params if p.grad is not None and id(p) not in averaged]
    square = optimizer.square_norm_of(fresh)
    square += sum(numbers_of(list(averaged.values())))
    unaveraged = not wanting.isdisjoint(map(id, fresh))

    def digest_of_gradients() -> int:
        return digest_of_all([torch.tensor([unscale], dtype=torch.float64, device="cpu"), *(p.grad for p in params)])

    # where buckets start before the ranks agree, or a part of the model is not everybody's, all are averaged
    averages_all = optimizer.topology.is_sharded or (optimizer.overlap and not wrapped.may_average(optimizer))
    gradients = None if averages_all else digest_of_gradients
    square *= unscale**2
    return StepReport(square, present, unaveraged, gradients=gradients, growth=growth, unmoved=optimizer.unmoved())


def _of_local_step(optimizer: CommOptimizer, report: StepReport, step: StepInFlight) -> StepReport:
    """``report`` of the local ``step``, with what the ranks that hold a replica together bring to it; gradients that
    are inf or NaN count as missing."""
    where = f"{type(optimizer).__name__}, step {step.number}"
    square, error = replicas.agree_inside(optimizer.topology, report.square_norm, report.error, where)
    if error is None and not is_usable(square):
        optimizer.dropped_gradients += 1
        optimizer._diagnostics.dropped(optimizer.dropped_gradients)
        step.nonfinite_dropped = True
        return StepReport(0.0, [False] * len(step.params), False)
    return dataclasses.replace(report, square_norm=square, error=error)


def _with_comparison(optimizer: CommOptimizer, report: StepReport, number: int) -> StepReport:
    """``report`` of step ``number``, with what the ranks compare."""
    groups = optimizer.param_groups
    same_params = len(set(optimizer.topology.stages)) == 1
    apart = () if same_params else optimizer.follows_from_params
    names = [name for name in optimizer.defaults if name not in apart]
    terms = [as_numbers(group, names) for group in groups]
    own: dict[str, Any] = {}
    if report.error is None and same_params:
        own = {**optimizer.terms(), "buckets": packing.layout(optimizer)}
        for group, words in zip(groups, terms):
            words["parameters"] = len(group["params"])
    terms.append({**own, "compressor": optimizer.compressor, "max_grad_norm": optimizer.max_grad_norm})
    local = min((group.get("local_steps", 0) for group in groups), default=0)
    return dataclasses.replace(
        report,
        terms=terms,
        checks=optimizer.guard.checks_at(number, number - 1 - local, optimizer._check_next),
        digests=functools.partial(comparing.digests, optimizer),
        decide=functools.partial(optimizer._compare, number),
        skipped=optimizer._skipped_in_a_row,
    )

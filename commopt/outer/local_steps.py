"""One local step of a rank: functions of an outer optimizer. Nothing is sent, but inside a replica that several ranks
hold together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from commopt.agreement import checks
from commopt.agreement.decision import LARGEST_NORM, is_usable
from commopt.outer.wrap import step_base
from commopt.state.guard import NotFinite
from commopt.state.host import square_norm
from commopt.state.replicas import agree_inside

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer


def step(optimizer: OuterOptimizer) -> None:
    """A step of the base, unless a gradient is inf or NaN."""
    error: Exception | None = None
    try:
        optimizer.follow()
        optimizer.adopt_values()
        checks.check_common(optimizer.max_grad_norm, optimizer.bucket_mb, overlap=False)  # it may have been set
    except Exception as caught:
        error = caught  # ranks that hold a replica with this one are about to wait for it
    topology = optimizer.topology
    if topology.is_sharded:
        optimizer.settle()
    params = [p for p in optimizer.params if p.grad is not None]
    unscale = 1 / float(getattr(optimizer, "grad_scale", None) or 1)  # set by torch.amp.GradScaler around step()
    if error is None and unscale != 1:
        error = _lost_without_scale(params)
    where = f"{type(optimizer).__name__}, local step {optimizer.param_groups[0]['round_step'] + 1}"
    square, error = agree_inside(topology, optimizer.square_norm_of(params) * unscale**2, error, where)
    if error is not None:
        raise error
    if not params and not square:  # also of other parts of the model
        optimizer._diagnostics.idle(optimizer.params, "on this rank")
    finite = is_usable(square)
    optimizer._square = square if finite else 0.0
    optimizer._local_skips = 0 if finite else optimizer._local_skips + 1
    if not finite:
        optimizer.skipped_steps += 1
        optimizer._diagnostics.local_step_skipped(optimizer.skipped_steps)
        return
    scale = unscale
    if optimizer.max_grad_norm is not None:
        scale *= min(1.0, optimizer.max_grad_norm / (square**0.5 + 1e-6))
    factors = {id(p): bucket.factor for bucket in optimizer.buckets for p in bucket.params}
    for p in params:
        if (factor := scale * factors.get(id(p), 1.0)) != 1:
            p.grad.mul_(factor)  # type: ignore[union-attr]
    step_base(optimizer.base)


def _lost_without_scale(params: Sequence[Tensor]) -> ValueError | None:
    """Error if gradients of ``params`` are float16: without its scale, the base would be given zeros for small ones."""
    if all(p.grad is None or p.grad.dtype != torch.float16 for p in params):
        return None
    return ValueError(
        "a GradScaler's scale cannot be taken out of gradients of float16, which the base needs: small ones would be 0 "
        "again. As with any optimizer of torch, keep parameters in float32 and train under torch.autocast, or use "
        "bfloat16 without a scaler"
    )


def too_many_skipped(optimizer: OuterOptimizer) -> Exception | None:
    """Error that ends the run if this rank has skipped its local steps for too long, though its parameters are
    finite."""
    skips = optimizer._local_skips
    if not optimizer.guard.ends_after(skips) or not is_usable(square_norm(optimizer.values())):
        return None
    number = optimizer.topology.numbers[optimizer.topology.rank]
    return NotFinite(
        f"{type(optimizer).__name__}: rank {number} has skipped its last {skips} local steps: inf, "
        f"NaN or a norm above {LARGEST_NORM:g} in its gradients, while its parameters are finite; look at its data and "
        "the learning rate"
    )

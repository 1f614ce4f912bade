"""What the doors share: who the optimizer is, and its DDP model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from commopt.attach import attach, unwrapped
from commopt.ddp_models import ddp_models_in
from commopt.hsdp import has_replicas
from commopt.optim import binding
from commopt.optim.model_buffers import HowBuffers
from commopt.optim.packed import PackedOptimizer


def bare(optimizer: Any) -> PackedOptimizer:
    """The optimizer of commopt that a framework has wrapped, or that is given itself.

    Raises:
        ValueError: if it is another one.
    """
    found = unwrapped(optimizer)
    if not isinstance(found, PackedOptimizer):
        raise ValueError(
            f"this connects an optimizer of commopt that communicates (OneBitAdam, DiLoCo, ...), got "
            f"{type(found).__name__}; for any other there is commopt.compress_gradients()"
        )
    return found


def take_over(model: Any, optimizer: PackedOptimizer) -> None:
    """Takes over what a framework has put in place of the optimizer's parameters, and averages over replicas that FSDP2
    takes of ``model``."""
    if isinstance(model, nn.Module) and has_replicas(model):
        attach(model, optimizer)
    elif binding.exchanged(optimizer):
        optimizer.rebind()


def attach_once(model: Any, optimizer: PackedOptimizer) -> None:
    """:func:`take_over`; and attaches ``model`` if it is a DDP model, or has one inside, that is not attached yet. Any
    other needs no attaching."""
    take_over(model, optimizer)
    attachment = optimizer._attachment
    if any(attachment is None or not attachment.is_of(ddp) for ddp in ddp_models_in(model)):
        attach(model, optimizer)


def takes_local_steps(optimizer: PackedOptimizer) -> bool:
    """True if replicas may differ between two rounds, of which there are more than one."""
    local = type(optimizer).replicas_differ is not PackedOptimizer.replicas_differ
    return local and optimizer.topology.copies > 1


@contextlib.contextmanager
def mean_model(optimizers: Sequence[PackedOptimizer], model: nn.Module | None, buffers: HowBuffers) -> Iterator[None]:
    """``averaged()`` of all ``optimizers`` of ``model``; ``averaged(model, buffers)`` of one that takes local steps.

    Without local steps nothing is sent: buffers are as the framework has them, and one rank may save alone. Else all
    ranks must enter it. Where ranks hold parts of the model, or come and go, ``averaged()`` takes no model, and buffers
    are each rank's own.
    """
    last = next(filter(_takes_model, optimizers), None)
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            if optimizer is not last:
                stack.enter_context(optimizer.averaged())
        if last is not None:  # by now parameters that it does not hold are equal, if another optimizer does
            stack.enter_context(last.averaged(model, buffers))
        yield


def _takes_model(optimizer: PackedOptimizer) -> bool:
    come_and_go = getattr(optimizer, "members", None) is not None
    return takes_local_steps(optimizer) and not optimizer.topology.is_sharded and not come_and_go


def of_the_mean(
    method: Callable[..., Any], optimizer: PackedOptimizer, model: nn.Module | None, buffers: HowBuffers
) -> Callable[..., Any]:
    """``method`` within :func:`mean_model`."""

    @functools.wraps(method)
    def with_mean(*args: Any, **kwargs: Any) -> Any:
        with mean_model([optimizer], model, buffers):
            return method(*args, **kwargs)

    return with_mean

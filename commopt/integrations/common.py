"""What the doors share: who the optimizer is, and its DDP model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from commopt.attach import attach, ddp_models_in, unwrapped
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


def attach_once(model: Any, optimizer: PackedOptimizer) -> None:
    """Attaches ``model`` if it is a DDP model, or has one inside, that is not attached yet; any other needs no
    attaching."""
    attachment = optimizer._attachment
    if any(attachment is None or not attachment.is_of(ddp) for ddp in ddp_models_in(model)):
        attach(model, optimizer)


def takes_local_steps(optimizer: PackedOptimizer) -> bool:
    """True if replicas may differ between two rounds, of which there are more than one."""
    local = type(optimizer).replicas_differ is not PackedOptimizer.replicas_differ
    return local and optimizer.topology.copies > 1


def of_the_mean(method: Callable[..., Any], optimizer: PackedOptimizer) -> Callable[..., Any]:
    """``method`` within ``optimizer.averaged()``."""

    @functools.wraps(method)
    def with_mean(*args: Any, **kwargs: Any) -> Any:
        with optimizer.averaged():
            return method(*args, **kwargs)

    return with_mean

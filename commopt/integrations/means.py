"""The mean of all replicas, as the doors have it evaluated and saved, and left behind."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from commopt.state.model_buffers import HowBuffers
from commopt.state.packed import PackedOptimizer


@contextlib.contextmanager
def mean_model(optimizers: Sequence[PackedOptimizer], model: nn.Module | None, buffers: HowBuffers) -> Iterator[None]:
    """``averaged()`` of all ``optimizers`` of ``model``; ``averaged(model, buffers)`` of one that takes local steps.

    Without local steps nothing is sent: buffers are as the framework has them, and one rank may save alone. Else all
    ranks must enter it. Where ranks hold parts of the model, or come and go, ``averaged()`` takes no model, and buffers
    are each rank's own.
    """
    with contextlib.ExitStack() as stack:
        for optimizer, given in _in_order(optimizers, model, buffers):
            stack.enter_context(optimizer.averaged(*given))
        yield


def end_training(optimizers: Sequence[PackedOptimizer], model: nn.Module | None, buffers: HowBuffers) -> None:
    """``synchronize()`` of all ``optimizers`` of ``model``; ``synchronize(model, buffers)`` of one that takes local
    steps, as :func:`mean_model` has it."""
    for optimizer, given in _in_order(optimizers, model, buffers):
        optimizer.synchronize(*given)


def of_the_mean(
    method: Callable[..., Any], optimizers: Sequence[PackedOptimizer], model: nn.Module | None, buffers: HowBuffers
) -> Callable[..., Any]:
    """``method`` within :func:`mean_model`."""

    @functools.wraps(method)
    def with_mean(*args: Any, **kwargs: Any) -> Any:
        with mean_model(optimizers, model, buffers):
            return method(*args, **kwargs)

    return with_mean


def _in_order(
    optimizers: Sequence[PackedOptimizer], model: nn.Module | None, buffers: HowBuffers
) -> Iterator[tuple[PackedOptimizer, tuple[Any, ...]]]:
    """``optimizers``, each with what it is given; the one that is given the model comes last, when parameters that it
    does not hold are equal, if another optimizer does."""
    last = next(filter(_takes_model, optimizers), None)
    yield from ((optimizer, ()) for optimizer in optimizers if optimizer is not last)
    if last is not None:
        yield last, (model, buffers)


def _takes_model(optimizer: PackedOptimizer) -> bool:
    come_and_go = getattr(optimizer, "members", None) is not None
    return optimizer.takes_local_steps and optimizer.topology.holds_whole and not come_and_go

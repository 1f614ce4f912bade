"""A bare model, or one sharded by FSDP2 <-> the mean of its gradients: hooks on its parameters."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt.gradients.mean import GradientMean
from commopt.optim.overlap import arrival_hook, remove_all
from commopt.sharding import local, settle


class _End:
    """The end of a backward, as a callback of autograd: takes the mean. Autograd lets go of it uncalled if the backward
    has failed; then what it has brought is forgotten."""

    def __init__(self, mean: GradientMean) -> None:
        self._mean: GradientMean | None = mean

    def __call__(self) -> None:
        mean, self._mean = self._mean, None
        assert mean is not None
        mean.finish()

    def __del__(self) -> None:
        if self._mean is not None:
            self._mean.forget()


class ParameterHooks:
    """Sees gradients arrive on ``params``, and the end of a backward. The hooks go when this does: parameters may
    outlive it."""

    def __init__(self, params: Sequence[Tensor], mean: GradientMean) -> None:
        self._mean, self._held = mean, 0
        hook = arrival_hook(weakref.ref(self))
        self._handles = {id(p): p.register_post_accumulate_grad_hook(hook) for p in params}
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def remove(self) -> None:
        """Takes the hooks away."""
        remove_all(self._handles)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients that arrive meanwhile add up, and stay this rank's own."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def arrived(self, p: Tensor) -> None:
        """The gradient of ``p`` is complete, as far as this backward goes."""
        if self._held or p.grad is None:
            return
        settle([p])
        self.begin()
        self._mean.arrive(p, local(p.grad))

    def begin(self) -> None:
        """In a backward, before what has to be ended at its end."""
        if self._mean.begin():
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(_End(self._mean))

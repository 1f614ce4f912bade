"""Buckets that start while backward runs: hooks that see gradients arrive, and what was used of them then."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt.state.host import as_numbers
from commopt.state.state_bucket import StateBucket
from commopt.step.arrival import Arrivals
from commopt.step.in_flight import StepInFlight
from commopt.step.step_report import blame

if TYPE_CHECKING:
    from commopt.step.base import CommOptimizer


class Overlap:
    """Sees gradients arrive, by hooks on the parameters, and gives them to the optimizer's step in flight.

    Holds the optimizer weakly: parameters outlive it. The hooks go when this does.
    """

    def __init__(self, optimizer: CommOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._arrivals = Arrivals(self)
        self._bucket_of: dict[int, int] = {}
        self._held = 0
        self._used: Used | None = None
        self._starts: bool | None = None

    def follow(self, buckets: Sequence[StateBucket]) -> None:
        """Watches the parameters of ``buckets``, which are all there are, for the next step."""
        self._used = self._starts = None
        self._bucket_of = {id(p): i for i, bucket in enumerate(buckets) for p in bucket.params}
        self._arrivals.follow([p for bucket in buckets for p in bucket.params if p.requires_grad])

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Gradients that arrive meanwhile are not the last of their step."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @torch.no_grad()
    def arrived(self, p: Tensor) -> None:
        """The gradient of ``p`` is complete, as far as this backward goes."""
        optimizer = self._optimizer()
        if optimizer is None or self._held or optimizer.accumulating():
            return
        try:
            if self._starts is None:  # the same for all gradients of a step
                self._starts = optimizer.starts_in_backward()
            index = self._bucket_of.get(id(p))
            if self._starts and index is not None and p.numel():  # no bucket waits for an empty one
                self._start(optimizer, index, p)
        except Exception as error:
            raise blame(optimizer, error) from None

    def _start(self, optimizer: CommOptimizer, index: int, p: Tensor) -> None:
        """Gives the gradient of ``p``, of bucket ``index``, to the step in flight."""
        step = optimizer.step_in_flight()
        if index < step.started and self._used is not None and not self._used.ended:
            raise RuntimeError(
                "the last backward() did not end, and overlap=True had sent gradients of it already. If it failed on "
                "all ranks, each can go on after optimizer.load_state_dict(optimizer.state_dict()), which forgets what "
                "was sent, and zero_grad()"
            )
        step.arrive(index, p)
        if step.started and self._used is None:
            self._used = Used(step, optimizer.param_groups, optimizer.hyperparams_used_in_backward)

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises ValueError if a gradient, or a hyper-parameter in ``groups``, has changed since backward has used
        it."""
        if self._used is not None:
            self._used.check(groups)


class Used:
    """Gradients and hyper-parameters that backward has used, to see whether they are still the same."""

    def __init__(self, step: StepInFlight, groups: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        self._step, self._names = step, names
        self._hyperparams = [self._read(group) for group in groups]
        self._gradients: list[tuple[Tensor, Tensor | None, int]] = []
        self.ended = False
        _after_backward(self._remember)

    def _read(self, group: dict[str, Any]) -> dict[str, Any]:
        decays = () if group.get("decoupled_weight_decay", True) else ("weight_decay",)  # a part of the gradient
        return copy.deepcopy(as_numbers(group, (*self._names, *decays)))

    def _remember(self) -> None:
        """Remembers the gradients that were used, as they are when backward and DDP are done with them."""
        self.ended = True
        params = [p for bucket in self._step.buckets[: self._step.started] for p in bucket.params]
        self._gradients = [(p, p.grad, 0 if p.grad is None else p.grad._version) for p in params]

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        """Makes sure that what was sent in backward is still what the step is about.

        Raises:
            ValueError: a gradient or a hyper-parameter has changed since.
        """
        for p, grad, version in self._gradients:
            if p.grad is not grad or (grad is not None and grad._version != version):
                raise ValueError(
                    f"the gradient of a parameter of shape {tuple(p.shape)} was changed between backward() and step(), "
                    "but overlap=True has sent it already. Clip, scale or edit gradients with overlap=False "
                    "(max_grad_norm= clips inside the optimizer)"
                )
        for group, before in zip(groups, self._hyperparams):
            now = self._read(group)
            if now != before:
                raise ValueError(
                    f"a parameter group changed between backward() and step(), from {before} to {now}, but "
                    "overlap=True has used it already. Change it after step()"
                )


def _after_backward(call: Callable[[], None]) -> None:
    """Calls ``call()`` when the backward under way ends, after what DDP does then."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))

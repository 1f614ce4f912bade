"""A bare model, or one sharded by FSDP2 <-> the mean of its gradients: hooks on its parameters."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from commopt.exchanged import refuse_assign
from commopt.gradients.mean import OF_HOOKS, GradientMean, why_unknown
from commopt.sharding import is_sharded, local, settle
from commopt.step.arrival import Arrivals, remove_all


class _End:
    """The end of a backward, as a callback of autograd: takes the means that were begun in it, in the order in which
    :func:`commopt.compress_gradients` made them. That is the same on all ranks, where that in which their gradients
    come need not be. Autograd lets go of it uncalled if the backward has failed; then what it has brought is
    forgotten."""

    _means: dict[int, GradientMean] | None = None  # where a compiled backward has not made one

    def __init__(self, task: int) -> None:
        self._means, self._task = dict[int, GradientMean](), task

    @staticmethod
    def add(number: int, mean: GradientMean, alone: bool) -> None:
        """Has ``mean``, the one of this ``number``, taken at the end of the backward that is under way; ``alone``: with
        no others, so that FSDP2's own end of it, which was begun before, has come by then.

        Raises:
            RuntimeError: there is none.
        """
        engine: Any = torch.autograd.Variable._execution_engine
        task = -1 if alone else torch._C._current_graph_task_id()
        with _ADDING:
            end = _ENDS.get(task)
            if end is None:
                end = _End(task)
                engine.queue_callback(end)
                if task >= 0:
                    _ENDS[task] = end
            assert end._means is not None
            end._means[number] = mean

    @torch._disable_dynamo
    def __call__(self) -> None:
        with _ADDING:
            _ENDS.pop(self._task, None)  # what is begun from now on has an end of its own
        assert self._means is not None
        try:
            for number in sorted(self._means):
                self._means.pop(number).finish()
        finally:
            self._forget()

    def __del__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        while self._means:
            self._means.popitem()[1].forget()


_ENDS: weakref.WeakValueDictionary[int, _End] = weakref.WeakValueDictionary()
"""By the number of a backward, as autograd counts them."""
_ADDING = threading.Lock()  # autograd has a thread for each device
_NUMBERS = itertools.count()


class _Look:
    """A hook before the forward of ``model``: whether something is trained that nobody averages. Where all that was
    trained is frozen now, no gradient arrives that could tell. Empty in a copy of the model.

    To go through all modules takes 15 ms where there are thousands; to see that none has changed, 1 ms.
    """

    def __init__(self, look: weakref.WeakMethod[Callable[[bool], None]] | None, model: nn.Module) -> None:
        self._look = look
        dicts = (d for module in model.modules() for d in (module._parameters, module._modules))
        self._dicts: list[dict[str, Any]] = [d for d in dicts if isinstance(d, dict)]
        self._there = self._now()

    def __reduce__(self) -> tuple[type[_Look], tuple[None, nn.Module]]:
        return type(self), (None, nn.Module())

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._look is None:
            return
        if (look := self._look()) is not None:
            now = self._now()
            look(len(now) == len(self._there) and all(map(is_, now, self._there)))

    def _now(self) -> list[Any]:
        """All parameters and modules, as the modules that there were know them."""
        return [*chain.from_iterable(map(dict.values, self._dicts))]


class ParameterHooks:
    """Sees gradients arrive on ``params``, and the end of a backward. The hooks go when this does: parameters may
    outlive it.

    Args:
        model: has ``params``.
        params: their gradients are averaged.
        mean: averages them.
        frozen: parameters that nobody would average if they were trained.
        checks: called before each mean.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[Tensor],
        mean: GradientMean,
        frozen: Sequence[Tensor] = (),
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._mean, self._held, self._frozen, self._checks = mean, 0, frozen, checks
        self._model, self._number = weakref.ref(model), next(_NUMBERS)
        every = list(model.parameters())
        self._known = None if any(map(is_sharded, every)) else {id(p) for p in every}  # FSDP2 exchanges its own
        self._params, self._arrivals = params, Arrivals(self)
        self._arrivals.follow(params)
        why = (
            "nobody would average the gradients of the new ones; call remove() on the handle of compress_gradients() "
            "before, and compress_gradients() after it, or load without assign=True"
        )
        self._handles = refuse_assign(model, {id(p) for p in params}, why)
        look = _Look(weakref.WeakMethod(self._look), model)
        self._handles[id(look)] = model.register_forward_pre_hook(look, prepend=True)
        weakref.finalize(self, remove_all, self._handles).atexit = False

    def remove(self) -> None:
        """Takes the hooks away."""
        self._arrivals.remove()
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
        if p.grad is None:
            if is_sharded(p) or not p.numel():
                return
            raise RuntimeError(
                f"the gradient of a parameter of shape {tuple(p.shape)} was taken away in backward, before it was "
                f"averaged: {OF_HOOKS}"
            )
        if self._held:
            self._mean.keep(p)
            return
        settle([p])
        self.begin()
        self._mean.arrive(p, local(p.grad), stays=True)

    def begin(self) -> None:
        """In a backward, before what has to be ended at its end.

        Raises:
            RuntimeError: something has changed since, so that gradients would not be averaged, or not as they should;
                or there is no backward.
        """
        if self._mean.begin():
            try:
                _End.add(self._number, self._mean, alone=self._known is None)
            except RuntimeError as error:
                self._mean.forget()  # the next backward begins another
                raise RuntimeError(
                    "gradients came outside of a backward(), as those of a stage of torch.distributed.pipelining that "
                    "FSDP2 cuts, so that nobody would say when all have come: wrap the stage's module in "
                    "DistributedDataParallel over the group of its replicas, and give compress_gradients() that"
                ) from error
            self._check()  # by now its error is that of a backward that fails

    def _look(self, same: bool) -> None:
        """Raises RuntimeError for parameters that are trained, and were not before; or, unless all modules are the
        ``same`` as then, were not there."""
        self._refuse_trained()
        self._arrivals.follow(self._params)
        model = self._model()
        if same or model is None or self._known is None:
            return
        trained = [p for p in model.parameters() if p.requires_grad]
        new = [
            p for p in trained if isinstance(p, nn.Parameter) and id(p) not in self._known
        ]  # not functional_call()'s
        if new:
            raise RuntimeError(
                f"{len(new)} parameters, such as one of shape {tuple(new[0].shape)}, are new since "
                "compress_gradients() was called: call remove() on its handle, and compress_gradients() once more, so "
                "that their gradients are averaged"
            )

    def _check(self) -> None:
        self._refuse_trained()
        for check in self._checks:
            check()

    def _refuse_trained(self) -> None:
        trained = [p for p in self._frozen if p.requires_grad]
        if trained:
            raise RuntimeError(why_unknown(trained))

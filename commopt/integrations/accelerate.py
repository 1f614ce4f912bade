"""Hugging Face accelerate.

model, optimizer, loader = accelerator.prepare(model, commopt.OneBitAdam(model.parameters(), lr=1e-3), loader)
commopt.integrations.accelerate.connect(accelerator, model, optimizer)

model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
commopt.integrations.accelerate.compress_gradients(accelerator, model, commopt.compress.Int4())
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from accelerate import Accelerator
from torch import nn

from commopt import gradients
from commopt.attach import unwrapped
from commopt.gradients import CompressedGradients
from commopt.gradients.method import OfGradients
from commopt.integrations import advice, common, means, parts, residuals
from commopt.state.model_buffers import HowBuffers, check_how
from commopt.state.packed import PackedOptimizer
from commopt.state.split import StateDict


class _Connection:
    """What is known of an optimizer that is connected. Holds the model weakly.

    Attributes:
        loading: folder of a ``load_state()`` under way, and the number of the optimizer in it.
    """

    def __init__(self, model: nn.Module, buffers: HowBuffers) -> None:
        self.model, self.buffers = weakref.ref(model), buffers
        self.loading: tuple[str, int] | None = None

    def join(self, optimizer: Any, state_dict: StateDict) -> StateDict | None:
        """A hook of the optimizer's ``load_state_dict()``."""
        loading, self.loading = self.loading, None
        return None if loading is None else parts.join(optimizer, state_dict, *loading)


_connected: WeakKeyDictionary[Accelerator, WeakKeyDictionary[PackedOptimizer, _Connection]] = WeakKeyDictionary()
"""The optimizers of each that are connected, in that order."""
_compressed: WeakKeyDictionary[Accelerator, WeakKeyDictionary[nn.Module, weakref.ref[CompressedGradients]]]
_compressed = WeakKeyDictionary()
"""The models of each whose gradients are compressed, in that order, and their handles, which may have been removed."""


def connect(accelerator: Accelerator, model: nn.Module, optimizer: Any, buffers: HowBuffers = "mean") -> None:
    """Lets ``optimizer`` decide when ``model`` averages gradients, and ``save_state()`` and ``load_state()`` resume to
    the bit.

    Call it once, on all ranks, after ``accelerator.prepare()`` and before ``load_state()``; for several optimizers in
    the same order as when they were saved; those that ``accelerator.free_memory()`` has let go of do not count. Then

    * a DDP model is attached (:func:`commopt.attach`);
    * parameters that FSDP2 has put in place of those that the optimizer was made with are taken over, and so are
      averages over replicas (``dp_replicate_size``);
    * ``save_state()``, which all ranks call, writes each rank's own part of the optimizer's state beside the rest, and
      the mean model where replicas differ; with local steps its buffers, such as BatchNorm's running statistics, are
      ``buffers``, too;
    * ``load_state()`` gives every rank its own part again. In a world of another size each starts from the mean.

    Args:
        accelerator: whose ``prepare()`` it was.
        model: what it gave for the model.
        optimizer: what it gave for an optimizer of commopt.
        buffers: "mean" of the ranks' buffers, or "broadcast", rank 0's. Those of a sharded model are each rank's own.
            The same for all optimizers of a model.

    Raises:
        ValueError: for another word, or another than another optimizer of the same model has; if it is no optimizer of
            commopt that communicates, or ``accelerator.prepare()`` has not seen it; for parameters in pieces where
            the accelerator has no FSDP2; and what :func:`commopt.attach` raises.
    """
    check_how(buffers)
    ours = common.bare(optimizer)
    _check(accelerator, model, ours, buffers)
    common.attach_once(model, ours)
    if ours.own_in_state and not getattr(accelerator, "is_fsdp2", False):
        raise ValueError(
            "parameters are DTensors: what is a rank's own of them all ranks save together, which save_state() does "
            "with FSDP2 only. Make the accelerator with "
            "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), or leave connect() out, and save model and "
            "optimizer with torch.distributed.checkpoint"
        )
    advice.of_full_states(accelerator, ours)
    if accelerator not in _connected:
        _connected[accelerator] = WeakKeyDictionary()
        _take_part(accelerator)
    connection = _connected[accelerator][ours] = _Connection(model, buffers)
    ours.register_load_state_dict_pre_hook(connection.join)


def compress_gradients(
    accelerator: Accelerator, model: nn.Module, compressor: OfGradients, **options: Any
) -> CompressedGradients:
    """Compresses the means of the gradients of ``model``, whatever its optimizer is
    (:func:`commopt.compress_gradients`); ``save_state()`` writes each rank's residuals beside the rest, and
    ``load_state()`` gives them back, so that a run continues to the bit. In a world of another size each rank has its
    share.

    Call it on all ranks, after ``accelerator.prepare()`` and before ``load_state()``; for several models in the same
    order as when they were saved. One that ``free_memory()`` has let go of does not count.

    Args:
        accelerator: whose ``prepare()`` it was.
        model: what it gave for the model.
        compressor: of the gradients.
        options: further arguments of :func:`commopt.compress_gradients`, such as ``feedback`` and ``warmup_steps``.

    Raises:
        ValueError: if an optimizer of ``accelerator`` is one of commopt that communicates itself, and has parameters of
            ``model``; if ``model`` is not what ``prepare()`` gave; and what :func:`commopt.compress_gradients` raises.
    """
    mine = {id(p) for p in model.parameters()}
    for optimizer in map(unwrapped, accelerator._optimizers):
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            residuals.refuse_own(optimizer)
    if not _has(accelerator, model):
        raise ValueError(
            f"accelerator.prepare() has not given this {type(model).__name__}, and save_state() would leave it out: "
            "give the model to prepare() first, and then to compress_gradients() what that gave"
        )
    handle = gradients.compress_gradients(model, compressor, **options)
    if accelerator not in _compressed:
        _compressed[accelerator] = WeakKeyDictionary()
        _take_residuals(accelerator)
    _compressed[accelerator][model] = weakref.ref(handle)
    return handle


def _has(accelerator: Accelerator, model: nn.Module) -> bool:
    """Whether it is one that ``accelerator`` has, which knows it without what it has wrapped it in."""
    theirs = {id(p) for one in accelerator._models for p in one.parameters()}
    return any(id(p) in theirs for p in model.parameters())


def _take_residuals(accelerator: Accelerator) -> None:
    """Has ``accelerator.save_state()`` save every rank's residuals, which ``load_state()`` gives back."""

    def each(do: Callable[[CompressedGradients, str, int], None], folder: str) -> None:
        has = [handle() for model, handle in _compressed[accelerator].items() if _has(accelerator, model)]
        for index, handle in enumerate(has):
            if handle is not None and not handle.removed:
                do(handle, folder, index)

    accelerator.register_save_state_pre_hook(lambda models, weights, folder: each(residuals.save, folder))
    accelerator.register_load_state_pre_hook(lambda models, folder: each(residuals.load, folder))


def _check(accelerator: Accelerator, model: nn.Module, ours: PackedOptimizer, buffers: HowBuffers) -> None:
    if not any(unwrapped(optimizer) is ours for optimizer in accelerator._optimizers):
        raise ValueError(
            f"accelerator.prepare() has not seen this {type(ours).__name__}, and save_state() would leave it out: give "
            "it to prepare() first, and then to connect() what that gave"
        )
    for other, connection in _in_use(accelerator):
        if other is not ours and connection.model() is model and connection.buffers != buffers:
            raise ValueError(
                f"buffers={buffers!r}: a {type(other).__name__} of the same model was connected with "
                f"{connection.buffers!r}; give both the same"
            )


def _in_use(accelerator: Accelerator) -> list[tuple[PackedOptimizer, _Connection]]:
    """The connected optimizers that ``accelerator`` has, in the order of their numbers."""
    has = [unwrapped(optimizer) for optimizer in accelerator._optimizers]
    return [(ours, connection) for ours, connection in _connected.get(accelerator, {}).items() if ours in has]


def _take_part(accelerator: Accelerator) -> None:
    """Has ``accelerator.save_state()`` save mean models, and every rank's own part, which ``load_state()`` finds."""
    save_state = accelerator.save_state

    @functools.wraps(save_state)
    def of_the_mean(*args: Any, **kwargs: Any) -> Any:  # not by a hook: FSDP2 has saved the model before these
        together: dict[tuple[nn.Module | None, HowBuffers], list[PackedOptimizer]] = {}
        for ours, connection in _in_use(accelerator):
            together.setdefault((connection.model(), connection.buffers), []).append(ours)
        with contextlib.ExitStack() as stack:
            for (model, buffers), optimizers in together.items():
                stack.enter_context(means.mean_model(optimizers, model, buffers))
            return save_state(*args, **kwargs)

    def save(models: Sequence[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        for index, (ours, _) in enumerate(_in_use(accelerator)):
            if not ours.own_in_state:  # FSDP2: saved already, by all ranks together
                parts.save(ours, folder, index)

    def load(models: Sequence[nn.Module], folder: str) -> None:
        for index, (ours, connection) in enumerate(_in_use(accelerator)):
            if not ours.own_in_state:
                connection.loading = folder, index

    accelerator.save_state = of_the_mean  # type: ignore[method-assign]
    accelerator.load_state = _forgetting(accelerator)  # type: ignore[method-assign]
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _forgetting(accelerator: Accelerator) -> Callable[..., None]:
    """``accelerator.load_state()``, after which no optimizer waits for its part: one that fails has not come to all."""
    load_state = accelerator.load_state

    @functools.wraps(load_state)
    def load(*args: Any, **kwargs: Any) -> None:
        try:
            load_state(*args, **kwargs)
        finally:
            for _, connection in _in_use(accelerator):
                connection.loading = None

    return load

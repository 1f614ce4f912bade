"""Hugging Face Trainer.

Trainer(..., optimizer_cls_and_kwargs=(commopt.OneBitAdam, {"lr": 1e-3}), callbacks=[CommoptCallback()])
Trainer(..., callbacks=[CompressGradients(commopt.compress.Int4())])  # any optimizer that does not communicate
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import Trainer, TrainerCallback

from commopt.attach import unwrapped
from commopt.gradients import CompressedGradients, compress_gradients
from commopt.gradients.method import OfGradients
from commopt.integrations import advice, common, means, parts, residuals
from commopt.state.model_buffers import HowBuffers, check_how
from commopt.state.packed import PackedOptimizer

_OF_THE_MEAN = ("evaluate", "save_model", "_save_checkpoint")
_SAVE = "_save_optimizer_and_scheduler"
"""Part of every checkpoint, also of one at a SIGTERM, of which callbacks hear nothing."""


class CommoptCallback(TrainerCallback):
    """Connects a Trainer to the optimizer of commopt that it trains with.

    Before the first step it attaches the DDP model (:func:`commopt.attach`). Each checkpoint gets every rank's own part
    of the optimizer's state, so that ``train(resume_from_checkpoint=...)`` continues to the bit. While replicas differ
    (local steps), ``evaluate()``, ``save_model()`` and checkpoints have the mean model, with such optimizers also its
    buffers, as BatchNorm's running statistics are; as training ends, all ranks get it. What each step sends is logged
    with the loss. Settings of Trainer that work against the optimizer are warned of.

    Args:
        buffers: "mean" of the ranks' buffers, or "broadcast", rank 0's. Those of a sharded model are each rank's own.

    Raises:
        ValueError: for another word; and as training begins, if the optimizer is no optimizer of commopt that
            communicates.
    """

    _trainer: Trainer | None = None

    def __init__(self, buffers: HowBuffers = "mean") -> None:
        check_how(buffers)
        self._buffers: HowBuffers = buffers

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """FSDP2 exchanges the parameters, and a resume asks for the optimizer's state before it asks a callback."""
        made = common.frame_of(Trainer, lambda frame: frame.f_code.co_name == "__init__")
        if made is None:
            return
        trainer = made.f_locals["self"]
        load = trainer._load_optimizer_and_scheduler

        def rebound(*args: Any, **kwargs: Any) -> Any:
            ours = unwrapped(trainer.optimizer)
            if isinstance(ours, PackedOptimizer):
                common.take_over(trainer.model, ours)
            return load(*args, **kwargs)

        trainer._load_optimizer_and_scheduler = rebound

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        self._leave()
        ours = common.bare(optimizer)
        self._trainer, folder = _who_trains()
        self._trainer.callback_handler.callbacks.sort(key=lambda one: one is not self)  # others see the mean at the end
        common.attach_once(self._trainer.model_wrapped, ours)
        if args.save_strategy != "no":
            advice.of_full_states(self._trainer.accelerator, ours)
        if folder is not None and not ours.own_in_state:
            parts.load(ours, Path(folder, "optimizer.pt"))
        for name in _OF_THE_MEAN:  # all events come after these
            method, model = getattr(self._trainer, name), self._trainer.model
            setattr(self._trainer, name, means.of_the_mean(method, [ours], model, self._buffers))
        if not ours.own_in_state:  # else FSDP2 saves it
            _save_too(self._trainer, functools.partial(parts.save, ours))
        if state.is_world_process_zero:
            advice.for_transformers(args, ours, self._trainer.model_wrapped)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, optimizer: Any = None, **_: Any) -> None:
        """The callbacks that come later are given the same ``logs``; the history has a copy of them already."""
        if self._trainer is None or not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        stats = common.bare(optimizer).comm_stats()
        found = common.numbers(stats)
        logs.update(found)
        state.log_history[-1].update(found, **{"commopt/phase": stats["phase"]})  # not every logger takes a word

    def on_train_end(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        self._leave()
        if not (args.load_best_model_at_end and state.best_model_checkpoint):  # else all ranks have that model now
            means.end_training([common.bare(optimizer)], model, self._buffers)

    def _leave(self) -> None:
        for name in (*_OF_THE_MEAN, _SAVE) if self._trainer is not None else ():
            vars(self._trainer).pop(name, None)
        self._trainer = None


class CompressGradients(TrainerCallback):
    """Has a Trainer's means of gradients compressed, whatever its optimizer is (:func:`commopt.compress_gradients`).

    ::

        Trainer(model, args, ..., callbacks=[CompressGradients(commopt.compress.Int4())])

    What else there is stays as it is: ``max_grad_norm`` clips the mean. Each checkpoint gets every rank's residuals, so
    that ``train(resume_from_checkpoint=...)`` continues to the bit. What a step sends is logged with the loss. When
    training ends the model averages as before.

    Args:
        compressor: of the gradients.
        options: further arguments of :func:`commopt.compress_gradients`, such as ``feedback`` and ``warmup_steps``.

    Attributes:
        handle: that of :func:`commopt.compress_gradients`, while training.

    Raises:
        ValueError: as training begins, if the optimizer is one of commopt that communicates itself; and what
            :func:`commopt.compress_gradients` and :func:`commopt.integrations.residuals.load` raise.
    """

    _trainer: Trainer | None = None
    handle: CompressedGradients | None = None

    def __init__(self, compressor: OfGradients, **options: Any) -> None:
        self._compressor, self._options = compressor, options

    def on_train_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        self._leave()
        residuals.refuse_own(unwrapped(optimizer))
        self._trainer, folder = _who_trains()
        self.handle = compress_gradients(self._trainer.model_wrapped, self._compressor, **self._options)
        if folder is not None:
            residuals.load(self.handle, folder)
        _save_too(self._trainer, functools.partial(residuals.save, self.handle))

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        """As :meth:`CommoptCallback.on_log`."""
        if self.handle is None or not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        found = common.numbers(self.handle.comm_stats())
        logs.update(found)
        state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._trainer is not None:
            vars(self._trainer).pop(_SAVE, None)
        if self.handle is not None:
            self.handle.remove()
        self._trainer = self.handle = None


def _save_too(trainer: Trainer, save: Callable[[str], None]) -> None:
    """Has every checkpoint of ``trainer`` get what ``save(folder)`` writes on each rank."""
    its_own = getattr(trainer, _SAVE)

    @functools.wraps(its_own)
    def save_all(folder: str) -> None:
        its_own(folder)
        if not trainer.state.is_hyper_param_search:
            save(folder)
            PartialState().wait_for_everyone()  # rank 0 pushes this checkpoint, and deletes old ones

    setattr(trainer, _SAVE, save_all)


def _who_trains() -> tuple[Trainer, str | None]:
    """The Trainer that has called us, and the checkpoint that it has resumed: what no event of a callback is given."""
    found = common.frame_of(Trainer, lambda frame: "resume_from_checkpoint" in frame.f_locals)
    if found is None:
        raise RuntimeError("this callback is for transformers.Trainer.train(), which has not called it")
    return found.f_locals["self"], found.f_locals["resume_from_checkpoint"]

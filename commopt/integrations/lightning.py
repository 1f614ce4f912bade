"""Lightning's Trainer: a callback for optimizers of commopt, and one for any other on compressed gradients.

    trainer = lightning.Trainer(strategy="ddp", callbacks=[CommoptCallback()])
    trainer = lightning.Trainer(strategy="ddp", callbacks=[CompressGradients(commopt.compress.Int4())])

The optimizer is what ``configure_optimizers()`` returns. Checkpoints keep every rank's own part with or without the
callback: Lightning calls ``consolidate_state_dict()``, and each rank takes its own when it loads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from commopt.ddp_models import ddp_models_in
from commopt.gradients import CompressedGradients, compress_gradients
from commopt.gradients.method import OfGradients
from commopt.integrations import advice
from commopt.integrations.common import attach_once, numbers
from commopt.integrations.means import end_training, mean_model
from commopt.integrations.residuals import refuse_own
from commopt.integrations.shards import has_no_replicas, tell_of_shards
from commopt.state.model_buffers import HowBuffers, check_how
from commopt.state.packed import PackedOptimizer

logger = logging.getLogger("commopt")

_RESIDUALS = "commopt_gradients"
"""Key of a checkpoint."""


class CommoptCallback(Callback):
    """Lets the optimizers of commopt in a Trainer decide when DDP averages gradients, and has the mean of all replicas
    validated, tested and saved.

    * Before the first step the optimizer is attached to the model (:func:`commopt.attach`).
    * While replicas differ, validation, tests, predictions and checkpoints are of their mean
      (``optimizer.averaged(module, buffers)``); training continues from each rank's own, and resumes from it, to the
      bit. With local steps that goes for buffers, such as BatchNorm's running statistics, too; what a validation writes
      into a buffer is undone.
    * What the last step has sent is logged every ``log_every_n_steps``: ``commopt/bytes`` and its like.
    * When training ends, replicas are made equal (``optimizer.synchronize(module, buffers)``).
    * ``gradient_clip_val`` is reported once: each rank would clip its own gradient. So is a model that FSDP2 shards
      over all ranks of ``data_parallel``: there are no replicas to average.

    Args:
        buffers: "mean" of the ranks' buffers, or "broadcast", rank 0's. Those of a sharded model are each rank's own.

    Raises:
        ValueError: for another word; and when fitting begins, if a DDP model has several optimizers of commopt: it has
            one hook.
    """

    def __init__(self, buffers: HowBuffers = "mean") -> None:
        check_how(buffers)
        self._buffers: HowBuffers = buffers
        self._mean = contextlib.ExitStack()  # open while the parameters are the mean
        self._warned = False
        self._told_of_shards = False
        self._step = 0  # before this batch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches, and has ``trainer.save_checkpoint()`` save the mean."""
        optimizers, model = _ours(trainer), trainer.strategy.model
        if len(optimizers) > 1 and ddp_models_in(model):
            names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
            raise ValueError(f"a DDP model takes one optimizer of commopt, configure_optimizers() gave {names}")
        for optimizer in optimizers:
            attach_once(model, optimizer)
        if any(has_no_replicas(optimizer) for optimizer in optimizers) and not self._told_of_shards:
            self._told_of_shards = True
            tell_of_shards(getattr(trainer.strategy, "device_mesh", None), optimizers[0])
        if optimizers and trainer.gradient_clip_val and not self._warned:
            self._warned = True
            by_norm = trainer.gradient_clip_algorithm in (None, "norm")
            advice.for_lightning(trainer.gradient_clip_val, by_norm, optimizers[0])
        # not by on_save_checkpoint(): Lightning leaves it out where only weights are saved
        trainer.save_checkpoint = functools.partial(_save_mean, trainer, self._buffers)  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for number, optimizer in enumerate(_ours(trainer)):
            _log(trainer, self._step, optimizer.comm_stats(), f"commopt-{number}" if number else "commopt")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mean.enter_context(_averaged(trainer, self._buffers))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mean.close()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._mean.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        end_training(_ours(trainer), trainer.lightning_module, self._buffers)


class CompressGradients(Callback):
    """Has the means of gradients compressed in a Trainer, whatever the optimizers are
    (:func:`commopt.compress_gradients`).

    * What else there is stays as it is: ``gradient_clip_val`` clips the mean.
    * Checkpoints have the residuals of every rank, so that ``fit(ckpt_path=...)`` continues to the bit; in a world of
      another size each rank has its share. That takes the memory of all of them on rank 0. One that is saved after
      ``fit()`` has none.
    * What the last mean has sent is logged every ``log_every_n_steps``: ``commopt/bytes`` and its like.

    Args:
        compressor: of the gradients.
        options: further arguments of :func:`commopt.compress_gradients`, such as ``feedback`` and ``warmup_steps``.

    Attributes:
        handle: that of :func:`commopt.compress_gradients`, from the start of a training to its end.

    Raises:
        ValueError: as training begins, if an optimizer is one of commopt that communicates itself; and what
            :func:`commopt.compress_gradients` raises.
    """

    handle: CompressedGradients | None = None

    def __init__(self, compressor: OfGradients, **options: Any) -> None:
        self._compressor, self._options = compressor, options
        self._loaded: Mapping[str, Any] | None = None  # residuals of a loaded checkpoint; {}: it has none
        self._step = 0  # before this batch

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Comes before a checkpoint is loaded: what a test has loaded, or a fit that failed, is not of this one."""
        self._loaded = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get(_RESIDUALS, {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()
        for optimizer in trainer.optimizers:
            refuse_own(optimizer)
        self.handle = compress_gradients(trainer.strategy.model, self._compressor, **self._options)
        loaded, self._loaded = self._loaded, None
        if loaded:
            self.handle.load_state_dict(loaded)
        elif loaded is not None and trainer.is_global_zero:
            logger.warning("the checkpoint has no residuals of compressed gradients; they begin at 0")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.handle is not None:
            _log(trainer, self._step, self.handle.comm_stats(), "commopt")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Called on all ranks, but where only weights are saved."""
        if self.handle is not None:
            checkpoint[_RESIDUALS] = self.handle.consolidated_state_dict()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The last checkpoint is saved when training has ended."""
        self._leave()

    def _leave(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = None


def _log(trainer: Trainer, before: int, stats: Mapping[str, Any], prefix: str) -> None:
    """Logs ``stats``, of ``comm_stats()``, when and where Lightning logs the metrics of this step, as its own callbacks
    do; nothing if there was none since the step ``before``."""
    logs = trainer.is_global_zero and trainer.loggers and trainer._logger_connector.should_update_logs
    for each in trainer.loggers if logs and trainer.global_step != before else ():
        each.log_metrics(numbers(stats, prefix), step=trainer.fit_loop.epoch_loop._batches_that_stepped)


def _ours(trainer: Trainer) -> list[PackedOptimizer]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, PackedOptimizer)]


def _averaged(trainer: Trainer, buffers: HowBuffers) -> contextlib.AbstractContextManager[None]:
    return mean_model(_ours(trainer), trainer.lightning_module, buffers)


def _save_mean(trainer: Trainer, buffers: HowBuffers, *args: Any, **kwargs: Any) -> None:
    with _averaged(trainer, buffers):
        type(trainer).save_checkpoint(trainer, *args, **kwargs)

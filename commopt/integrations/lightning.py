"""Lightning's Trainer: one callback.

    trainer = lightning.Trainer(strategy="ddp", callbacks=[CommoptCallback()])

The optimizer is what ``configure_optimizers()`` returns. Checkpoints keep every rank's own part with or without the
callback: Lightning calls ``consolidate_state_dict()``, and each rank takes its own when it loads.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from commopt.ddp_models import ddp_models_in
from commopt.integrations import advice
from commopt.integrations.common import attach_once, numbers
from commopt.integrations.means import end_training, mean_model
from commopt.integrations.shards import has_no_replicas, tell_of_shards
from commopt.optim.model_buffers import HowBuffers, check_how
from commopt.optim.packed import PackedOptimizer


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
        """Logs when and where Lightning logs the metrics of this step, as its own callbacks do."""
        logs = trainer.is_global_zero and trainer.loggers and trainer._logger_connector.should_update_logs
        if not logs or trainer.global_step == self._step:
            return
        for number, optimizer in enumerate(_ours(trainer)):
            found = numbers(optimizer.comm_stats(), f"commopt-{number}" if number else "commopt")
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

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


def _ours(trainer: Trainer) -> list[PackedOptimizer]:
    return [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, PackedOptimizer)]


def _averaged(trainer: Trainer, buffers: HowBuffers) -> contextlib.AbstractContextManager[None]:
    return mean_model(_ours(trainer), trainer.lightning_module, buffers)


def _save_mean(trainer: Trainer, buffers: HowBuffers, *args: Any, **kwargs: Any) -> None:
    with _averaged(trainer, buffers):
        type(trainer).save_checkpoint(trainer, *args, **kwargs)

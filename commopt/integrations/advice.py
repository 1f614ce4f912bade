"""Settings of trainers that work against the optimizer: what to set instead, as warnings."""

from __future__ import annotations

import logging
from typing import Any

from commopt.state.packed import PackedOptimizer
from commopt.step.base import CommOptimizer

logger = logging.getLogger("commopt")


def for_transformers(args: Any, optimizer: PackedOptimizer, model: Any) -> None:
    """Warns of ``args``, TrainingArguments."""
    name = type(optimizer).__name__
    # an outer optimizer clips each rank's own gradient itself
    if args.max_grad_norm and optimizer.topology.copies > 1 and isinstance(optimizer, CommOptimizer):
        logger.warning(
            "TrainingArguments(max_grad_norm=%s) clips what each rank has, averaged or not, by its own norm: set it to "
            "0, and give %s a max_grad_norm",
            args.max_grad_norm, name,
        )  # fmt: skip
    if not optimizer.takes_local_steps:
        return
    waits = f"makes all ranks wait for each other in every step, local steps of {name} too"
    if args.average_tokens_across_devices:
        logger.warning("average_tokens_across_devices=True %s: set it to False", waits)
    if getattr(model, "broadcast_buffers", False) and [*model.buffers()]:
        logger.warning("the model has buffers, and DDP %s to send them: set ddp_broadcast_buffers=False", waits)


def of_full_states(accelerator: Any, optimizer: PackedOptimizer) -> None:
    """Warns, on rank 0, where checkpoints of an ``accelerator`` with FSDP2 will lack what is each rank's own."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    full = "FULL_STATE_DICT" in str(getattr(plugin, "state_dict_type", ""))
    replicated = any(bucket.replicas.world_size > 1 for bucket in optimizer.buckets)
    own = replicated or not isinstance(optimizer, CommOptimizer)  # an outer optimizer's base steps on each rank alone
    if full and own and optimizer.own_in_state and optimizer.topology.rank == 0:
        logger.warning(
            "%s: FSDP's state_dict_type FULL_STATE_DICT saves of what is each rank's own (residuals; with local steps "
            "parameters, momenta and the state of the base) that of rank 0 alone, so that a resumed run goes on "
            'otherwise: set state_dict_type="SHARDED_STATE_DICT" (in fsdp_config of TrainingArguments, or in '
            "FullyShardedDataParallelPlugin)",
            type(optimizer).__name__,
        )  # fmt: skip


def for_lightning(gradient_clip_val: float, by_norm: bool, optimizer: PackedOptimizer) -> None:
    """Warns of a Trainer's, on rank 0 of several; ``by_norm``: else it clips each element."""
    several = optimizer.topology.world_size > 1
    if several and optimizer.topology.rank == 0 and isinstance(optimizer, CommOptimizer):  # as above
        name = type(optimizer).__name__
        logger.warning(
            "Trainer(gradient_clip_val=%s) clips each rank's own gradient, another on each rank, unless DDP has "
            "averaged it. %s",
            gradient_clip_val,
            f"Set gradient_clip_val=None and {name}(..., max_grad_norm={gradient_clip_val}): that norm is of all ranks."
            if by_norm
            else f"{name} has no clipping by value: set gradient_clip_val=None, and max_grad_norm= clips by a norm.",
        )

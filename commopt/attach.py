"""Connects an optimizer to a DistributedDataParallel model, so that DDP averages gradients only while that is asked
for."""

# No postponed annotations in this file: DDP reads the annotations of the hook and wants the classes, not their names.

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from commopt import ops
from commopt.comm.torch import ranks_of
from commopt.gradients.ddp import joining
from commopt.optim.base import CommOptimizer
from commopt.outer import OuterOptimizer


class Attachment:
    """State of DDP's averaging of the gradients since the last step.

    Holds model and optimizer weakly: both hold the attachment.

    Attributes:
        averaged: id of each parameter whose gradient DDP has averaged -> the sum of squares of what this rank brought,
            0-d.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: CommOptimizer | OuterOptimizer) -> None:
        self._model = weakref.ref(model)
        self._group = model.process_group
        self.serve(optimizer)

    def serve(self, optimizer: CommOptimizer | OuterOptimizer) -> None:
        """Belongs to ``optimizer`` from now on."""
        self._optimizer = weakref.ref(optimizer)
        self.averaged: dict[int, Tensor] = {}

    def is_free(self) -> bool:
        """True if the optimizer has gone."""
        return self._optimizer() is None

    def accumulating(self) -> bool:
        """True if the model is in its ``no_sync()``."""
        model = self._model()
        return model is not None and not model.require_backward_grad_sync

    def joining(self) -> bool:
        """True if the model is in its ``join()``: then DDP answers for ranks that have ended, but the optimizer
        cannot."""
        return joining(self._model())

    def refuse_join(self) -> None:
        """Raises RuntimeError in the model's ``join()``, on every rank that comes here."""
        if self.joining():
            self.clear()
            raise RuntimeError(
                "step() within model.join() or Join([model]): a rank that has no batches left would answer what "
                "DistributedDataParallel sends, but not what the optimizer does. Give every rank the same number of "
                "batches (drop_last=True, or a sampler that pads), or end all together with "
                "model.join(throw_on_early_termination=True)"
            )

    def clear(self) -> None:
        self.averaged = {}

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Averages DDP's bucket if the next step wants that for any parameter in it, and if the optimizer has gone;
        else leaves it local."""
        optimizer = self._optimizer()
        if optimizer is None:
            return allreduce_hook(self._group, bucket)
        groups = optimizer.group_of()
        owned = [(p, g) for p, g in zip(bucket.parameters(), bucket.gradients()) if id(p) in groups]
        foreign = len(owned) < len(bucket.parameters())  # parameters of another optimizer need their average always
        if not foreign and not any(optimizer.wants_average(groups[id(p)]) for p, _ in owned):
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        for p, g in owned:
            self.averaged[id(p)] = ops.square_sum([g])
        work = optimizer.topology.world.all_reduce(bucket.buffer())
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[attr-defined]


def attach(model: DistributedDataParallel, optimizer: CommOptimizer | OuterOptimizer) -> None:
    """Lets ``optimizer`` decide when ``model`` averages gradients.

    While the optimizer wants exact averages (warm-up), DDP averages gradients and overlaps that with backward, as
    always. In the compressed phase, and in local steps, it leaves them local and sends nothing. ``no_sync()`` and
    gradient accumulation work as always. Evaluating the model while replicas differ is reported once. When the
    optimizer is deleted, DDP averages all gradients again, and another one may be attached.

    Within ``model.join()`` step() raises RuntimeError, unless it is ``join(throw_on_early_termination=True)``.

    Args:
        model: a DDP model without a communication hook of its own.
        optimizer: a commopt optimizer of its parameters, over the same ranks.

    Raises:
        ValueError: if ``model`` is no DDP model, or optimizer and model have no parameter in common or different ranks.
        RuntimeError: from DDP, if a communication hook is registered already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"attach() connects a DistributedDataParallel; a bare {type(model).__name__} needs no attaching"
        )
    if not isinstance(optimizer, (CommOptimizer, OuterOptimizer)):
        raise ValueError(f"attach() connects a commopt optimizer, got {type(optimizer).__name__}")
    if optimizer.reduction == "sum":
        raise ValueError("reduction='sum' and DistributedDataParallel exclude each other: it averages gradients")
    mine = ranks_of(optimizer.topology.backend)
    theirs = dist.get_process_group_ranks(model.process_group)
    if mine != theirs:
        raise ValueError(f"the model averages over ranks {theirs}, the optimizer over {mine or 'another backend'}")
    if not {id(p) for p in model.parameters()} & set(optimizer.group_of()):
        raise ValueError("the optimizer holds none of the model's parameters")
    # DDP keeps its hook for good
    free = [state for _, state in model._comm_hooks if isinstance(state, Attachment) and state.is_free()]
    attachment = free[0] if free else Attachment(model, optimizer)
    if free:
        attachment.serve(optimizer)
    else:
        model.register_comm_hook(attachment, Attachment.hook)
    optimizer._attachment = attachment
    optimizer.warn_in_evaluation(model.module)

"""Connects an optimizer to a DistributedDataParallel model, so that DDP averages gradients only while that is asked
for."""

# No postponed annotations in this file: DDP reads the annotations of the hook and wants the classes, not their names.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from commopt import ops
from commopt.comm import TorchBackend
from commopt.optim.base import CommOptimizer
from commopt.outer import OuterOptimizer


class Attachment:
    """What DDP has done to the gradients since the last step.

    Attributes:
        averaged: id of each parameter whose gradient DDP has averaged -> the sum of squares of what this rank brought,
            0-d.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: CommOptimizer | OuterOptimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.averaged: dict[int, Tensor] = {}

    def accumulating(self) -> bool:
        """Whether the model is in its ``no_sync()``."""
        return not self.model.require_backward_grad_sync

    def clear(self) -> None:
        self.averaged = {}

    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Averages DDP's bucket if the next step wants that for any parameter in it; else leaves it local."""
        optimizer = self.optimizer
        groups = optimizer.group_of()
        owned = [(p, g) for p, g in zip(bucket.parameters(), bucket.gradients()) if id(p) in groups]
        foreign = len(owned) < len(bucket.parameters())  # parameters of another optimizer need their average always
        if not foreign and not any(optimizer.wants_average(groups[id(p)]) for p, _ in owned):
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done
        for p, g in owned:
            self.averaged[id(p)] = ops.square_sum([g])
        work = optimizer.backend.all_reduce(bucket.buffer())
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[attr-defined]


def attach(model: DistributedDataParallel, optimizer: CommOptimizer | OuterOptimizer) -> None:
    """Lets ``optimizer`` decide when ``model`` averages gradients.

    While the optimizer wants exact averages (warm-up), DDP averages gradients and overlaps that with backward, as
    always. In the compressed phase, and in local steps, it leaves them local and sends nothing. ``no_sync()`` and
    gradient accumulation work as always. Evaluating the model while replicas differ is reported once.

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
    inner = getattr(optimizer.backend.inner, "everyone", optimizer.backend.inner)
    mine = dist.get_process_group_ranks(inner.group) if isinstance(inner, TorchBackend) else None
    theirs = dist.get_process_group_ranks(model.process_group)
    if mine != theirs:
        raise ValueError(f"the model averages over ranks {theirs}, the optimizer over {mine or 'another backend'}")
    if not {id(p) for p in model.parameters()} & set(optimizer.group_of()):
        raise ValueError("the optimizer holds none of the model's parameters")
    attachment = Attachment(model, optimizer)
    model.register_comm_hook(attachment, Attachment.hook)
    optimizer._attachment = attachment
    optimizer.warn_in_evaluation(model.module)

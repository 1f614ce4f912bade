"""What a DistributedDataParallel model and an optimizer tell each other: whose gradients are averaged, and whose are
left local."""

# No postponed annotations in this file: DDP reads the annotations of the hook and wants the classes, not their names.

import logging
import weakref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from commopt import ops
from commopt.comm.counting import all_reduce_bytes
from commopt.gradients.ddp import CopiedHook, joining
from commopt.outer import OuterOptimizer
from commopt.state.host import square_norm
from commopt.step.base import CommOptimizer

logger = logging.getLogger("commopt")

Ours = CommOptimizer | OuterOptimizer


class Attachment:
    """State of DDP's averaging of the gradients since the last step.

    Holds model and optimizer weakly: both hold the attachment.

    Attributes:
        averaged: id of each parameter whose gradient DDP has averaged -> the sum of squares of what this rank brought,
            0-d.
        agreed: False while this rank alone knows of it, from the first backward after a state was loaded to the step
            that follows. It sends then what DDP sends on a rank that has loaded nothing, so that none waits in vain.
    """

    averaged: dict[int, Tensor]
    agreed: bool

    def __init__(self, model: DistributedDataParallel, optimizer: Ours) -> None:
        self._model = weakref.ref(model)
        self._group = model.process_group
        self.serve(optimizer)

    def serve(self, optimizer: Ours) -> None:
        """Belongs to ``optimizer`` from now on."""
        self._optimizer = weakref.ref(optimizer)
        self.agreed, self._looked = True, False
        self._shares = False  # whether another optimizer has a part of the model
        self._told = False  # whether that was warned of
        self._norms: list[float] = []
        self.clear()

    def __reduce__(self) -> tuple[type[CopiedHook], tuple[()]]:
        return CopiedHook, ()

    def is_of(self, model: DistributedDataParallel) -> bool:
        """True if it is the state of this very model."""
        return self._model() is model

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

    def before_step(self) -> None:
        """Looks at what the optimizer's step, which is about to begin, could not go by.

        Raises:
            RuntimeError: in the model's ``join()``, on every rank that comes here.
            ValueError: on every rank, where a GradScaler would have replicas drift apart.
        """
        self._refuse_join()
        self._refuse_scaler()
        self._look_for_clipping()

    def _refuse_join(self) -> None:
        """Raises RuntimeError in the model's ``join()``, on every rank that comes here."""
        if self.joining():
            self.clear()
            raise RuntimeError(
                "step() within model.join() or Join([model]): a rank that has no batches left would answer what "
                "DistributedDataParallel sends, but not what the optimizer does. Give every rank the same number of "
                "batches (drop_last=True, or a sampler that pads), or end all together with "
                "model.join(throw_on_early_termination=True)"
            )

    def _refuse_scaler(self) -> None:
        """Raises ValueError, on every rank, where a GradScaler's scales may differ between ranks, and DDP averages the
        scaled gradients of parameters that are another optimizer's. Warns in the first step if that is to come."""
        optimizer, model = self._optimizer(), self._model()
        if optimizer is None or model is None or getattr(optimizer, "found_inf", None) is None:
            return
        comes_later = all(map(optimizer.lets_average, optimizer.param_groups))
        if self._group.size() == 1 or (comes_later and (self._looked or optimizer.topology.nodes == 1)):
            return
        self._looked, owned = True, optimizer.group_of()
        others = sum(p.requires_grad and id(p) not in owned for p in model._module_parameters)
        if not others:
            return
        why = (
            f"{others} trainable parameters of the DistributedDataParallel are not this optimizer's, and their "
            "gradients are averaged as they are scaled, but a GradScaler whose rank overflows alone, as it may "
            "where gradients stay local, halves its scale alone: replicas would drift apart. Give this optimizer "
            "all of them, freeze those that nobody trains, wrap each optimizer's part of the model in a "
            "DistributedDataParallel of its own, or train in bfloat16 without a scaler"
        )
        if not comes_later:
            self.clear()
            raise ValueError(why)
        if self._group.rank() == 0:
            logger.warning(
                "%s: the first step whose gradients stay local will be refused: %s", type(optimizer).__name__, why
            )

    def _look_for_clipping(self) -> None:
        """Warns once if gradients that are each rank's own seem to have been clipped to one norm with those of another
        optimizer, which are then others on each rank: the norm of all is the same in three steps in a row."""
        optimizer, model = self._optimizer(), self._model()
        if not self._shares or self._told or optimizer is None or model is None:
            return
        if self._group.size() == 1 or self._group.rank() != 0:
            return
        if all(map(optimizer.lets_average, optimizer.param_groups)):
            self._norms.clear()
            return
        grads = [p.grad for p in model._module_parameters if p.grad is not None]
        self._norms = [*self._norms[-2:], square_norm(grads) ** 0.5]
        if len(self._norms) == 3 and 0 < max(self._norms) <= min(self._norms) * (1 + 1e-5):
            self._told = True
            logger.warning(
                "%s: the norm of all gradients of the DistributedDataParallel is %.6g in three steps in a row, as "
                "after clip_grad_norm_ of all of them, and another optimizer has some: clipped by a norm that is "
                "another one on each rank, its parameters drift apart between ranks. Clip these by themselves, and "
                "give this optimizer max_grad_norm=",
                type(optimizer).__name__, self._norms[-1],
            )  # fmt: skip

    def clear(self) -> None:
        self.averaged, self._late = {}, False

    def has_averaged(self) -> bool:
        """True if DDP has averaged the gradients of this step."""
        return self._late or bool(self.averaged)

    def came_late(self) -> None:
        """It was made after the backward of this step, in which DDP has averaged all gradients."""
        self._late = True

    @torch._disable_dynamo
    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Averages DDP's bucket if the next step wants that for any parameter in it, and if the optimizer has gone;
        else leaves it local."""
        optimizer = self._optimizer()
        if optimizer is None:
            return allreduce_hook(self._group, bucket)
        groups = optimizer.group_of()
        gradients = list(zip(bucket.parameters(), bucket.gradients()))
        owned = [(p, g) for p, g in gradients if id(p) in groups]
        others = [g for p, g in gradients if id(p) not in groups]  # of another optimizer: these need their average
        self._shares |= bool(others)
        if not any(optimizer.lets_average(groups[id(p)]) for p, _ in owned):
            if not others:
                return self._leave_local(bucket, optimizer)
            if owned and self.agreed:
                return _average_alone(others, bucket, optimizer)
        for p, g in owned:
            self.averaged[id(p)] = ops.square_sum([g])
        work = optimizer.topology.world.all_reduce(bucket.buffer())
        return work.get_future().then(lambda future: future.value()[0])  # type: ignore[attr-defined]

    def _leave_local(self, bucket: dist.GradBucket, optimizer: Ours) -> torch.futures.Future[Tensor]:
        """Leaves ``bucket`` as it is; where other ranks do not know of this, sends what they would wait for."""
        if not self.agreed:
            sent = dist.all_reduce(bucket.buffer().clone(), group=self._group, async_op=True)
            optimizer.topology.traffic.add("ddp", all_reduce_bytes(bucket.buffer().nbytes, self._group.size()))
            return sent.get_future().then(lambda _: bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def _average_alone(gradients: list[Tensor], bucket: dist.GradBucket, optimizer: Ours) -> torch.futures.Future[Tensor]:
    """Averages these ``gradients`` of ``bucket``, and leaves the others local."""
    flat = torch.cat([g.reshape(-1) for g in gradients])

    def put_back(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        means = future.value()[0].split([g.numel() for g in gradients])
        for g, mean in zip(gradients, means):
            g.copy_(mean.view_as(g))
        return bucket.buffer()

    work = optimizer.topology.world.all_reduce(flat)
    return work.get_future().then(put_back)  # type: ignore[attr-defined]


def strangers(model: nn.Module) -> str:
    """Says that an optimizer has none of the parameters of ``model``."""
    return (
        f"the optimizer holds none of the {len(list(model.parameters()))} parameters of this {type(model).__name__}: "
        "make it of this model's, after whatever replaces them"
    )

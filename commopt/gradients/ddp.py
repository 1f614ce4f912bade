"""A DistributedDataParallel model <-> the mean of its gradients: DDP's communication hook."""

# No postponed annotations in this file: DDP reads the annotations of the hook and wants the classes, not their names.

import weakref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from commopt.agreement.checks import check_gradients
from commopt.comm import MessageDamaged
from commopt.gradients.mean import GradientMean, why_unknown
from commopt.state.guard import ReplicasDiffer
from commopt.step.arrival import Arrivals


def joining(model: DistributedDataParallel | None) -> bool:
    """True if the model is in its ``join()``: then DDP answers for ranks that have ended, and nobody else can."""
    config = getattr(model, "_join_config", None)
    return config is not None and config.enable and not config.throw_on_early_termination


def _raise_behind_ddp(error: Exception) -> None:
    """Has backward() raise ``error`` when DDP has ended it, which it cannot take up again where a hook of it raises."""
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

    def fail() -> None:
        raise error

    engine.queue_callback(lambda: engine.queue_callback(fail))  # DDP's own end comes between


def _laid_out_as(p: Tensor, gradient: Tensor) -> Tensor:
    """``gradient`` of ``p``, which DDP says is contiguous, as it lies in its bucket: as ``p``, if that is dense."""
    if p.is_contiguous():
        return gradient
    dense = torch.empty_like(p, device="meta").stride() == p.stride()  # which keeps what is dense as it is
    return gradient.as_strided(p.shape, p.stride()) if dense else gradient


class CopiedHook:
    """Stand-in for a :class:`DDPHook` in a copy of a DistributedDataParallel model. DDP has no hook there, but averages
    by itself."""


class DDPHook:
    """Takes DDP's buckets apart, for ours are the same in every run, and gives them back when all means have come.

    DDP holds this for good; it holds the model weakly. Without a ``mean`` DDP averages by itself.
    """

    mean: GradientMean | None

    def __init__(self, model: DistributedDataParallel, mean: GradientMean) -> None:
        self._model, self._group = weakref.ref(model), model.process_group
        self._pending: list[tuple[torch.futures.Future[Tensor], Tensor]] = []
        self._arrivals, self._reached = Arrivals(self), set[int]()
        self.serve(mean)
        model.register_comm_hook(self, DDPHook.hook)

    def __reduce__(self) -> tuple[type[CopiedHook], tuple[()]]:
        return CopiedHook, ()

    def serve(self, mean: GradientMean) -> None:
        """Averages by ``mean`` from now on."""
        self.mean = mean
        model = self._model()
        # of both, what was not used comes as zeros, or as what it has from an earlier backward
        mean.zeros_are_absent = model is not None and (model.find_unused_parameters or model.static_graph)
        self._arrivals.follow(mean.params if mean.zeros_are_absent else ())
        self._reached.clear()

    def remove(self) -> None:
        """Leaves the averages to DDP again."""
        self.mean = None
        self._arrivals.remove()

    def arrived(self, p: Tensor) -> None:
        """A backward has reached ``p``, maybe one in ``no_sync()``."""
        self._reached.add(id(p))

    @torch._disable_dynamo
    def hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """For DDP."""
        if self.mean is None:
            return allreduce_hook(self._group, bucket)
        self._refuse_join()
        if bucket.index() == 0 and self._pending:  # of a backward that has failed
            self._pending = []
            self.mean.forget()
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        check_gradients([bucket.buffer()])
        self._pending.append((done, bucket.buffer()))
        for p, gradient in zip(bucket.parameters(), bucket.gradients()):
            if self.mean.averages(p):
                used = not self.mean.zeros_are_absent or id(p) in self._reached
                self.mean.arrive(p, _laid_out_as(p, gradient), used=used)
            elif p.requires_grad:
                raise RuntimeError(why_unknown([p]))  # one that was frozen since DDP was made comes as zeros
        if bucket.is_last():
            try:
                self.mean.finish()
            except (MessageDamaged, ReplicasDiffer) as error:  # on all ranks
                _raise_behind_ddp(error)
            for future, buffer in self._pending:
                future.set_result(buffer)
            self._pending = []
            self._reached.clear()
        return done

    def _refuse_join(self) -> None:
        if joining(self._model()):
            raise RuntimeError(
                "compressed gradients within model.join(): a rank that has no batches left would answer what "
                "DistributedDataParallel sends, but not what is sent in its place. Give every rank the same number of "
                "batches, or end all together with model.join(throw_on_early_termination=True)"
            )

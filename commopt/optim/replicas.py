"""Replicas that may differ between two rounds of an algorithm with local steps: their mean, and how they become one."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from commopt.comm import (
    CollectiveError,
    MessageDamaged,
    Pipeline,
    Topology,
    confirm,
    mean_over_all,
    message_device,
    wait,
)

if TYPE_CHECKING:
    from commopt.optim.state_bucket import StateBucket

logger = logging.getLogger("commopt")

_REMEDY = (
    "nothing is lost: every rank still has its own parameters and state. Go on over the ranks that are left with "
    "state = optimizer.state_dict(), a new optimizer over them, and its load_state_dict(state)"
)
"""What to do when a rank has gone between two rounds."""


class Replicas:
    """What all optimizers offer for the case that replicas differ. A subclass with local steps says ``apart`` and
    ``meet``."""

    topology: Topology
    buckets: list[StateBucket]
    _own_values: dict[Tensor, Tensor] | None = None  # what each parameter was, while it is the mean
    _reported_differ = False

    @property
    def replicas_differ(self) -> bool:
        """Whether replicas may differ now; the same on all ranks."""
        return False

    def synchronize_replicas(self) -> None:
        """Makes all replicas equal; called while they are apart."""
        raise NotImplementedError

    def why_not_synchronize(self) -> Exception | None:
        """What forbids this rank to take the mean now, if anything does."""
        return None

    @torch._disable_dynamo
    @torch.no_grad()
    def synchronize(self) -> None:
        """Makes all replicas equal now, and ends the local steps since the last round for good. All ranks must call it
        at the same point. Does nothing where they are equal: after a round, and for optimizers without local steps.

        Raises:
            RuntimeError: within :meth:`averaged`; and if another rank cannot take part.
            commopt.comm.CollectiveError: a collective failed or timed out.
        """
        self.refuse_inside_averaged("synchronize()")
        if self.replicas_differ:
            self._agree_to_synchronize("synchronize()")
            self.synchronize_replicas()
            self.topology.traffic.leave_out()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the parameters are the mean of all replicas, for evaluating or saving the model; they come
        back afterwards, to the bit, and training goes on as if nothing had happened. All ranks must enter it at the
        same point.

        ::

            with optimizer.averaged():
                evaluate(model)

        Sends what an all-reduce of the parameters in full precision does, and takes their memory once more; nothing
        where replicas are equal. Inside, ``state_dict()`` is what it is outside; ``step()``, ``synchronize()`` and
        ``load_state_dict()`` are refused. Buffers of the model, such as running statistics, are each rank's own.

        Raises:
            RuntimeError: if another rank cannot take part.
            commopt.comm.CollectiveError: a collective failed or timed out.
        """
        if self._own_values is not None:
            yield
            return
        own: dict[Tensor, Tensor] = {}
        if self.replicas_differ:
            self._agree_to_synchronize("averaged()")
            with torch.no_grad():
                own = {p: p.detach().clone() for bucket in self.buckets for p in bucket.params}
        self._own_values = own
        try:
            if own:
                with self.reaching_others("averaged()"):
                    self.take_mean()
            yield
        finally:
            self._own_values = None
            with torch.no_grad():
                for p, value in own.items():
                    p.copy_(value)

    @torch._disable_dynamo
    @torch.no_grad()
    def take_mean(self) -> None:
        """Makes the parameters the mean of all replicas, and nothing else."""
        for i, bucket in enumerate(self.buckets):
            flat = bucket.pack_params()
            where = f"mean of the replicas, bucket {i} of {len(self.buckets)} ({bucket.describe()})"
            self.average_exactly(flat, where)
            bucket.unpack_params(flat)
        self.topology.traffic.leave_out()

    def average_exactly(self, flat: Tensor, where: str) -> None:
        """``flat``, shape (padded,) of a bucket, <- its mean over all ranks; ``where`` says in an error what it was."""
        pipeline = Pipeline()
        pipeline.launch(mean_over_all(flat, self.topology.channel, self.topology.channel), where)
        pipeline.finish()
        if self.topology.world_size > 1:
            confirm(self.topology.world, True, where)

    def own_value(self, p: Tensor) -> Tensor:
        """What ``p`` is on this rank, also within :meth:`averaged`."""
        return p.detach() if self._own_values is None else self._own_values.get(p, p.detach())

    def refuse_inside_averaged(self, what: str) -> None:
        """Raises RuntimeError within :meth:`averaged`."""
        if self._own_values is not None:
            raise RuntimeError(
                f"{what} within `with optimizer.averaged():`, where the parameters are the mean of all replicas; leave "
                "it first"
            )

    @torch._disable_dynamo
    def _agree_to_synchronize(self, what: str) -> None:
        """Makes sure that all ranks can take the mean now."""
        error = self.why_not_synchronize()
        failed = torch.tensor([float(error is not None)], device=message_device(self.topology.backend))
        where = f"{what}, whether all ranks can"
        with self.reaching_others(where):
            wait(self.topology.world.all_reduce(failed), where)
        self.topology.traffic.leave_out()
        if error is not None:
            raise error
        if failed.item() > 0:
            raise RuntimeError(f"another rank cannot take part in {what}; its own error says why")

    @contextlib.contextmanager
    def reaching_others(self, where: str) -> Iterator[None]:
        """Context of collectives before whose end nothing changes that lasts. If the other ranks cannot be reached, the
        error says that nothing is lost, and how to go on.

        Raises:
            commopt.comm.CollectiveError: begins with ``where``, or with where in it the collective was.
        """
        now = self.topology.world_size
        had = next((bucket.world_size for bucket in self.buckets), now)
        if now != had:
            raise CollectiveError(f"{where}: the backend has {now} ranks now, it had {had}; {_REMEDY}")
        try:
            yield
        except MessageDamaged:
            raise
        except CollectiveError as error:
            raise CollectiveError(f"{error}; {_REMEDY}") from error
        except (RuntimeError, ValueError, TimeoutError) as error:  # of a group that is gone when one is started
            raise CollectiveError(f"{where}: {error}; {_REMEDY}") from error

    def warn_in_evaluation(self, model: nn.Module) -> None:
        """Warns once if ``model`` runs in ``eval()`` mode while replicas differ, and says what to call.

        ``attach()`` does this for a DDP model; call it for a bare one. Nothing to do for optimizers without local
        steps.
        """
        if type(self).replicas_differ is not Replicas.replicas_differ:
            handle = model.register_forward_pre_hook(_EvaluationWatch(self))
            weakref.finalize(self, handle.remove).atexit = False

    def report_replicas_differ(self) -> None:
        """Warns once, on rank 0, that a model is evaluated while replicas differ."""
        if self._reported_differ or self._own_values is not None or not self.replicas_differ:
            return
        self._reported_differ = True
        if self.topology.rank == 0:
            logger.warning(
                "%s: the model is evaluated between two rounds, and every rank's differs. Evaluate it within `with "
                "optimizer.averaged():`, or call optimizer.synchronize() first (on all ranks)",
                type(self).__name__,
            )


class _EvaluationWatch:
    """A forward pre-hook that reports that a model is evaluated while replicas differ.

    Holds the optimizer weakly, and is empty in a copy of the model.
    """

    def __init__(self, optimizer: Replicas | None = None) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)

    def __reduce__(self) -> tuple[type[_EvaluationWatch], tuple[()]]:
        return type(self), ()

    def __call__(self, module: nn.Module, _: Sequence[Any]) -> None:
        optimizer = self._optimizer()
        if optimizer is not None and not module.training:
            optimizer.report_replicas_differ()

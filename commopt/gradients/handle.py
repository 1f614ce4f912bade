"""The handle of a model whose gradients are compressed, and which models have one."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commopt.agreement.checks import check_rank
from commopt.gradients.ddp import DDPHook
from commopt.gradients.hooks import ParameterHooks
from commopt.gradients.mean import GradientMean
from commopt.gradients.method import OfGradients
from commopt.gradients.saving import load_residuals, nodes_of, saved_residuals
from commopt.gradients.sharded import ShardedDoor
from commopt.hsdp import TakenReplicas, give_back
from commopt.state.consolidate import gather_parts
from commopt.state.split import OF_RANKS
from commopt.state.state_bucket import fp32_bytes

logger = logging.getLogger("commopt")

HANDLES: weakref.WeakKeyDictionary[nn.Module, Callable[[], CompressedGradients | None]] = weakref.WeakKeyDictionary()
"""Models whose gradients are compressed. Not an attribute of theirs: they are copied and pickled. Those that FSDP2 has
sharded are not; their handles refer to their modules, and so are held by them, and not here."""


class CompressedGradients:
    """Handle that :func:`compress_gradients` returns. It lives as long as the model does, or, where that was not
    wrapped by DistributedDataParallel, any module of it with trained parameters, or until :meth:`remove`.

    Attributes:
        compressor: of the gradients.
        mean: takes the means.
        removed: whether it has ended.
    """

    def __init__(
        self,
        model: nn.Module,
        compressor: OfGradients,
        mean: GradientMean,
        door: DDPHook | ParameterHooks,
        sharded: ShardedDoor | None = None,
        taken: Sequence[TakenReplicas] = (),
    ) -> None:
        self._model, self.mean, self._door, self._sharded = weakref.ref(model), mean, door, sharded
        self.compressor, self._taken, self.removed = compressor, taken, False

    def __repr__(self) -> str:
        model, ranks = self._model(), self.mean.topology.world_size
        name = "a model that has gone" if model is None else type(model).__name__
        return f"CompressedGradients({name}, {self.compressor!r}, ranks={ranks}, steps={self.mean.steps})"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: copies of a model, which may have it as an attribute, are not compressed."""

    def __reduce__(self) -> Any:
        raise TypeError(
            "the handle of compress_gradients() cannot be pickled: save its state_dict(), and keep it out of what is "
            "pickled (it lives as long as the model)"
        )

    @property
    def nodes(self) -> int:
        """The ``nodes`` that :func:`commopt.optim.join_state_dict` wants for this handle."""
        return nodes_of(self.mean, self._sharded)

    @property
    def compresses(self) -> bool:
        """True if anything is sent between ranks that it compresses."""
        return self.mean.topology.nodes > 1 or (self._sharded is not None and bool(self._sharded.means))

    @property
    def warms_up(self) -> bool:
        """True while means are in full precision (``warmup_steps``)."""
        return self.compresses and self.mean.exact_left > 0

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of this rank.

        Returns:
            ``step`` (the last mean) and ``total``, each ``{"bytes", "calls", "by_collective"}`` and, where ranks are
            grouped, what stays inside as ``"intra_node"``; ``fp32_bytes``, what all-reduces of float32 would send in a
            step (FSDP's exchanges, as far as they are compressed); ``ratio``, that over the bytes of the last step, or
            None if either is 0; ``steps``, the means taken, and ``not_finite``, how many of them were not finite.
        """
        mean = self.mean
        sharded = 0 if self._sharded is None else self._sharded.fp32_bytes
        traffic = mean.topology.summary(fp32_bytes(mean.buckets) + sharded)
        return {**traffic, "steps": mean.steps, "not_finite": mean.not_finite}

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of every backward of a step but the last: gradients add up on each rank. (That of a
        DistributedDataParallel model is its own ``no_sync()``.)"""
        if isinstance(self._door, DDPHook):
            model = self._model()
            assert isinstance(model, DistributedDataParallel)
            return model.no_sync()
        return self._no_sync(self._door)

    @contextlib.contextmanager
    def _no_sync(self, door: ParameterHooks) -> Iterator[None]:
        with door.no_sync(), contextlib.nullcontext() if self._sharded is None else self._sharded.no_sync():
            yield

    def state_dict(self) -> dict[str, Any]:
        """The residuals of this rank, as copies. Communicates nothing.

        All of it is this rank's own (``"residuals"``): save that of every rank, and give each its own back, or, in a
        world of another size, with other nodes (:attr:`nodes`) or on another mesh, what
        :func:`commopt.optim.join_state_dict` makes of all of them.
        """
        return saved_residuals(self.mean, self._sharded)

    def consolidated_state_dict(self, to: int = 0) -> dict[str, Any]:
        """:meth:`state_dict`, on rank ``to`` with the residuals of every rank: for whoever saves one file for all
        ranks, such as Lightning. Each rank takes its own when it loads that. All ranks must call it, between two
        backward passes.

        Rank ``to`` has the residuals of all ranks in host memory then.

        Raises:
            ValueError: if there is no rank ``to``.
            commopt.comm.CollectiveError: a collective failed or timed out.
            commopt.comm.MessageDamaged: see :meth:`confirm`.
        """
        topology = self.mean.topology
        check_rank("to", to, topology.world_size)
        self.confirm()
        state = self.state_dict()
        mine = state["residuals"]
        parts = gather_parts(topology, mine, to, "compress_gradients, consolidated_state_dict()")
        topology.traffic.leave_out()
        return {**state, OF_RANKS: [mine if part is None else part for part in parts]} if parts else state

    def confirm(self) -> None:
        """Makes sure that the last mean was received as it was sent, of which the ranks else hear in the next one: for
        whoever saves what an optimizer has made of it. All ranks must call it, between two backward passes; it sends 16
        bytes, and nothing where the model is sharded.

        Raises:
            commopt.comm.MessageDamaged: it was not.
        """
        self.mean.confirm()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what :meth:`state_dict`, :meth:`consolidated_state_dict` or ``join_state_dict`` gave. All ranks must do
        so between two backward passes; with ``weights``, at the same point.

        Raises:
            ValueError: for residuals of another model, with ``weights`` on all ranks.
        """
        load_residuals(self.mean, state, self._sharded)
        self.mean.topology.traffic.leave_out()

    def remove(self) -> None:
        """Ends it: a DistributedDataParallel model averages by itself again, and so does FSDP2; of any other model each
        rank keeps its gradients. Residuals are forgotten. The second time it does nothing."""
        if self.removed:
            return
        self._door.remove()
        if self._sharded is not None:
            self._sharded.remove()
        give_back(self._taken)
        for module in models_with_handles():
            if HANDLES.get(module, lambda: None)() is self:
                HANDLES.pop(module, None)
        self.removed = True


def models_with_handles() -> list[nn.Module]:
    """Those whose gradients are compressed, and modules of them. Ranks may be threads, which connect models of their
    own meanwhile: values() would raise then, keyrefs() copies."""
    return [model for ref in HANDLES.keyrefs() if (model := ref()) is not None]


def handles_of(params: Collection[Tensor]) -> list[CompressedGradients]:
    """The handles of models that have any of ``params``."""
    mine = {id(p) for p in params}
    handles = {handle for model in models_with_handles() if (handle := HANDLES.get(model, lambda: None)()) is not None}
    return [handle for handle in handles if not mine.isdisjoint(map(id, handle.mean.params))]

"""compress_gradients: any model, any optimizer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commopt import ops
from commopt.comm import Backend, Topology, TorchBackend, message_device, resolve_backend, sends_from
from commopt.comm.torch import ranks_of
from commopt.compress import Compressor, TopBlocks
from commopt.compress.low_rank import LowRank
from commopt.gradients.ddp import DDPHook
from commopt.gradients.hooks import ParameterHooks
from commopt.gradients.loco import LoCo, LoCoRows
from commopt.gradients.low_rank import Thin
from commopt.gradients.mean import GradientMean
from commopt.gradients.method import Method
from commopt.gradients.rows import Rows
from commopt.gradients.saving import load_residuals, saved_residuals
from commopt.gradients.top_blocks import AgreedBlocks
from commopt.optim import checks
from commopt.optim.setup import agree_on_setup, equalize, versions
from commopt.optim.state_bucket import fp32_bytes
from commopt.sharding import is_sharded, local

logger = logging.getLogger("commopt")

_HANDLES: weakref.WeakKeyDictionary[nn.Module, CompressedGradients] = weakref.WeakKeyDictionary()
"""Models whose gradients are compressed. Not an attribute of theirs: they are copied and pickled."""


class CompressedGradients:
    """What :func:`compress_gradients` returns. It lives as long as the model does, or until :meth:`remove`.

    Attributes:
        mean: takes the means.
    """

    def __init__(self, model: nn.Module, mean: GradientMean, door: DDPHook | ParameterHooks) -> None:
        self._model, self.mean, self._door = weakref.ref(model), mean, door

    def comm_stats(self) -> dict[str, Any]:
        """Traffic of this rank.

        Returns:
            ``step`` (the last mean) and ``total``, each ``{"bytes", "calls", "by_collective"}`` and, where ranks are
            grouped, what stays inside as ``"intra_node"``; ``fp32_bytes``, what all-reduces of float32 would send in a
            step; ``ratio``, that over the bytes of the last step, or None; ``steps``, the means taken, and
            ``not_finite``, how many of them were not finite.
        """
        mean = self.mean
        traffic = mean.topology.summary(fp32_bytes(mean.buckets))
        return {**traffic, "steps": mean.steps, "not_finite": mean.not_finite}

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of every backward of a step but the last: gradients add up on each rank. (That of a
        DistributedDataParallel model is its own ``no_sync()``.)"""
        if isinstance(self._door, DDPHook):
            model = self._model()
            assert isinstance(model, DistributedDataParallel)
            return model.no_sync()
        return self._door.no_sync()

    def state_dict(self) -> dict[str, Any]:
        """What this rank owes: its residuals, as copies. Communicates nothing.

        All of it is this rank's own (``"residuals"``): save that of every rank, and give each its own back, or, in a
        world of another size, what :func:`commopt.optim.join_state_dict` makes of all of them.
        """
        return saved_residuals(self.mean)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what :meth:`state_dict` or ``join_state_dict`` gave. All ranks must do so between two backward passes.

        Raises:
            ValueError: for residuals of another model.
        """
        load_residuals(self.mean, state)

    def remove(self) -> None:
        """Ends it: a DistributedDataParallel model averages by itself again, of any other each rank keeps its
        gradients. What is owed is forgotten."""
        self._door.remove()
        model = self._model()
        if model is not None and _HANDLES.get(model) is self:
            del _HANDLES[model]


def compress_gradients(
    model: nn.Module,
    compressor: Compressor | LowRank | TopBlocks,
    *,
    process_group: Any = None,
    backend: Backend | None = None,
    feedback: bool | LoCo = True,
    bucket_mb: float | None = None,
    reduction: str = "mean",
) -> CompressedGradients:
    """Averages the gradients of ``model`` over the ranks, compressed, in every ``backward()``; whatever optimizer
    follows.

    ::

        model = DistributedDataParallel(model)      # or fully_shard(model, mesh=mesh["shard"]), or as it is
        handle = commopt.compress_gradients(model, Sign())

    After ``backward()`` every rank has the same gradients, to the bit, so that clipping, a GradScaler, schedulers and
    any optimizer work as they do with exact means. Where the means are inf or NaN on any rank, they are so on all of
    them, in the same elements, and what is owed stays as it was.

    ================================  ==================================================================================
    model                             what is averaged
    ================================  ==================================================================================
    ``DistributedDataParallel``       in its stead; ``no_sync()``, ``find_unused_parameters``, ... as always
    sharded, ``process_group=mesh``   over the dimensions that its parameters lack (``docs/sharding.md``)
    any other                         all gradients. Parameters start as rank 0's; buffers are each rank's own
    ================================  ==================================================================================

    Memory of a rank, for N elements of gradients that it holds: residuals of 4 N bytes and 4 N / W (8 for float64), and
    while means are taken (on a CPU always) as much again. Without ``feedback`` only the latter. With LoCo: N bytes, N
    more while means are taken, 4 N / W, and 8 bytes an element of the largest bucket.

    Args:
        model: before the first backward; its parameters where they will stay.
        compressor: the same on every rank: a :class:`commopt.compress.Compressor` such as ``Sign()``, or
            :class:`commopt.compress.PowerSGD`, :class:`commopt.compress.ACP` or :class:`commopt.compress.TopBlocks`.
        process_group: a ProcessGroup or a DeviceMesh; of a DistributedDataParallel model its own, by default. In a mesh
            of (nodes, ranks of a node) only what goes between nodes is compressed.
        backend: in its place, a :class:`commopt.comm.Backend`.
        feedback: whether what compression loses is kept, and sent with the next gradients (error feedback). Without it
            biased compressors, such as Sign, need not converge. Or :class:`commopt.gradients.LoCo`, which keeps it in
            one byte an element; not with PowerSGD, ACP and TopBlocks.
        bucket_mb: most MB (2**20 bytes) of a bucket; None chooses.
        reduction: "sum" where a step goes by the sum of all ranks' gradients; not for DistributedDataParallel.

    Raises:
        ValueError: on every rank, for an argument that is not allowed on any of them, a model without trainable
            parameters, one whose gradients something else averages or compresses, or ranks that differ.
        RuntimeError: from DDP, if a communication hook is registered already.
    """
    params = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else []
    backend = _ranks(model, process_group, backend, params)
    topology = Topology(backend)
    error: Exception | None = None
    try:
        _check(model, compressor, feedback, params, topology, bucket_mb, reduction)
    except ValueError as caught:
        error = caught
    _agree(topology, params, error, f"{compressor!r}, {feedback=}, {bucket_mb=}, {reduction=}")
    mean = GradientMean(params, topology, _method(compressor, feedback), bucket_mb, reduction)
    if isinstance(model, DistributedDataParallel):
        door: DDPHook | ParameterHooks = _ddp_door(model, mean)
    else:
        for replicas in topology.replicas:
            same = [local(p) for p in params if topology.held(p)[0] is replicas]
            if equalize(replicas.world, message_device(topology.backend), same) and replicas.rank == 0:
                logger.warning("compress_gradients: parameters differed between ranks; all have those of rank 0 now")
        door = ParameterHooks(params, mean)
    handle = CompressedGradients(model, mean, door)
    topology.traffic.leave_out()
    _HANDLES[model] = handle
    return handle


def _method(compressor: Compressor | LowRank | TopBlocks, feedback: bool | LoCo) -> Method:
    if isinstance(compressor, LowRank):
        return Thin(compressor, bool(feedback))
    if isinstance(compressor, TopBlocks):
        return AgreedBlocks(compressor, bool(feedback))
    return LoCoRows(compressor, feedback) if isinstance(feedback, LoCo) else Rows(compressor, feedback)


def _ranks(model: Any, process_group: Any, backend: Backend | None, params: Sequence[Tensor]) -> Backend:
    if isinstance(model, DistributedDataParallel) and process_group is None and backend is None:
        return TorchBackend(model.process_group)
    return resolve_backend(process_group, backend, params)


def _check(
    model: Any,
    compressor: Any,
    feedback: Any,
    params: Sequence[Tensor],
    topology: Topology,
    bucket_mb: float | None,
    reduction: str,
) -> None:
    """Raises ValueError for what this rank alone can see."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(compressor, (Compressor, LowRank, TopBlocks)):
        raise ValueError(f"compressor must be a commopt.compress.Compressor such as Sign(), got {compressor!r}")
    if not isinstance(feedback, bool) and not (isinstance(feedback, LoCo) and isinstance(compressor, Compressor)):
        raise ValueError(f"feedback must be True, False or, with a compressor of rows, LoCo(), got {feedback!r}")
    if not params:
        raise ValueError(f"the {type(model).__name__} has no trainable parameters: there is nothing to average")
    if model in _HANDLES:
        raise ValueError("the gradients of this model are compressed already; call remove() on the handle first")
    checks.check_common(None, bucket_mb, overlap=False)
    checks.check_reduction(reduction)
    checks.check_params(params, sends_from(topology.backend), topology.is_sharded)
    if isinstance(model, DistributedDataParallel):
        _check_ddp(model, topology, reduction)
    if topology.is_sharded:
        _check_mesh(params, topology)


def _check_ddp(model: DistributedDataParallel, topology: Topology, reduction: str) -> None:
    if reduction == "sum":
        raise ValueError("reduction='sum' and DistributedDataParallel exclude each other: it averages gradients")
    mine = ranks_of(topology.backend)
    theirs = dist.get_process_group_ranks(model.process_group)
    if mine != theirs:
        raise ValueError(f"the model is of ranks {theirs}, its gradients would be those of {mine or 'another backend'}")


def _check_mesh(params: Sequence[Tensor], topology: Topology) -> None:
    for p in params:
        topology.check(p)
    if len(set(topology.stages)) > 1:
        raise ValueError("stages of a pipeline are not supported: give each stage's module the group of its replicas")
    mesh = getattr(topology.backend, "mesh", None)
    if mesh is not None and any(is_sharded(p) and p.device_mesh.ndim == mesh.ndim for p in params):  # type: ignore[attr-defined]
        raise ValueError(
            "the model is sharded over all dimensions of the mesh: FSDP averages over the replicas by itself (HSDP), "
            "and nothing is left to compress. Shard over the inner dimension only, "
            'fully_shard(model, mesh=mesh["shard"])'
        )


def _agree(topology: Topology, params: Sequence[Tensor], error: Exception | None, settings: str) -> None:
    """Raises, on every rank, if any of them has found an error, or if they differ."""
    devices = sorted({p.device.type for p in params})
    facts = {
        **versions(devices),
        "parameter lists": str([(tuple(p.shape), p.dtype, p.device.type) for p in params]),
        "settings or kernel providers": f"{settings} {ops.providers(devices)}",
    }
    counts = f"{len(params)} parameters with {sum(p.numel() for p in params)} elements"
    agree_on_setup(topology.world, message_device(topology.backend), facts, error, counts)


def _ddp_door(model: DistributedDataParallel, mean: GradientMean) -> DDPHook:
    free = [state for _, state in model._comm_hooks if isinstance(state, DDPHook) and state.mean is None]
    if not free:
        return DDPHook(model, mean)
    free[0].serve(mean)  # DDP keeps its hook for good
    return free[0]

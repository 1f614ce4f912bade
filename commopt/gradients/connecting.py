"""compress_gradients: any model, any optimizer."""

from __future__ import annotations

import logging
import weakref
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commopt import ops
from commopt.agreement.setup import LISTS, THREADS, agree_on_setup, counts_of, describe, equalize, versions
from commopt.comm import (
    Backend,
    MeshBackend,
    NoReceipt,
    Topology,
    TorchBackend,
    gather_number,
    message_device,
    resolve_backend,
)
from commopt.compress import Compressor, TopBlocks
from commopt.compress.low_rank import LowRank
from commopt.gradients.all_gather import Differences
from commopt.gradients.checks import (
    NeverWrapped,
    check_exchanges,
    check_model,
    check_warmup,
    fsdp_groups,
    is_cut_whole,
)
from commopt.gradients.ddp import DDPHook
from commopt.gradients.fsdp import Groups
from commopt.gradients.handle import HANDLES, CompressedGradients, handles_of
from commopt.gradients.hooks import ParameterHooks
from commopt.gradients.loco import LoCo, LoCoRows
from commopt.gradients.loss_scale import LossScale, check_scaler
from commopt.gradients.low_rank import Thin
from commopt.gradients.mean import GradientMean
from commopt.gradients.method import Method, OfGradients
from commopt.gradients.rows import Rows
from commopt.gradients.sharded import ShardedDoor
from commopt.gradients.top_blocks import AgreedBlocks
from commopt.gradients.watching import check_interval
from commopt.hsdp import TakenReplicas, give_back, look_anew, take_replicas
from commopt.ops.checks import REAL
from commopt.sharding import is_sharded, local

logger = logging.getLogger("commopt")


def compress_gradients(
    model: nn.Module,
    compressor: OfGradients,
    *,
    process_group: Any = None,
    backend: Backend | None = None,
    feedback: bool | LoCo = True,
    inside: Compressor | None = None,
    weights: Compressor | Differences | None = None,
    bucket_mb: float | None = None,
    reduction: str = "mean",
    scaler: torch.amp.GradScaler | None = None,
    check_every: int | None = 100,
    warmup_steps: int = 0,
) -> CompressedGradients:
    """Averages the gradients of ``model`` over the ranks, compressed, in every ``backward()``; whatever optimizer
    follows.

    ::

        model = DistributedDataParallel(model)      # or fully_shard(model, mesh=mesh), or as it is
        handle = commopt.compress_gradients(model, Sign())

    After ``backward()`` every rank has the same gradients, to the bit, so that clipping, a GradScaler, schedulers and
    any optimizer work as they do with exact means. Where the means are inf or NaN on any rank, they are so on all of
    them, in the same elements, and residuals stay as they were. A message that did not come as it was sent is an error
    on all ranks in the next backward, :class:`commopt.comm.MessageDamaged`; so are parameters that differ,
    :class:`commopt.optim.ReplicasDiffer`.

    ================================  ==================================================================================
    model                             what is averaged
    ================================  ==================================================================================
    ``DistributedDataParallel``       in its stead; ``no_sync()``, ``find_unused_parameters``, ... as always
    sharded by FSDP2 over all ranks   by its reduce-scatters, in one phase
    sharded by FSDP2 inside replicas  over the replicas, in FSDP2's stead: ``fully_shard(model, mesh=mesh)`` (HSDP)
    sharded, ``process_group=mesh``   over the dimensions that its parameters lack (``docs/sharding.md``)
    any other                         all gradients. Parameters start as rank 0's; buffers are each rank's own
    ================================  ==================================================================================

    Memory of a rank, for N elements of gradients that it holds: residuals of 4 N bytes and 4 N / W (8 for float64), and
    while means are taken (on a CPU always) as much again. Without ``feedback`` nothing is kept, and while means are
    taken it is 8 N bytes and 8 N / W. With LoCo: N bytes, N more while means are taken, 4 N / W, and 8 bytes an element
    of the largest bucket. By FSDP2's reduce-scatters N is all of the model: a rank's residual is of what it compresses,
    gradients before they are cut.

    Args:
        model: before the first backward; its parameters where they will stay.
        compressor: the same on every rank: a :class:`commopt.compress.Compressor` such as ``Sign()``, or
            :class:`commopt.compress.PowerSGD`, :class:`commopt.compress.ACP` or :class:`commopt.compress.TopBlocks`.
        process_group: a ProcessGroup or a DeviceMesh; of a DistributedDataParallel model its own, by default. In a mesh
            of (nodes, ranks of a node) only what goes between nodes is compressed, also of a model that FSDP2 cuts over
            all ranks.
        backend: in its place, a :class:`commopt.comm.Backend`.
        feedback: whether what compression loses is kept, and sent with the next gradients (error feedback). Without it
            biased compressors, such as Sign, need not converge. Or :class:`commopt.gradients.LoCo`, which keeps it in
            one byte an element; not with PowerSGD, ACP and TopBlocks.
        inside: another compressor for gradients inside a machine, without feedback: those that the ranks of a node send
            each other before ``compressor`` takes their part of the mean, or FSDP2's reduce-scatters, if ``compressor``
            goes between replicas, or their part inside a node. With one node of a NodesBackend all is in full
            precision; a mesh of (1, L) is L nodes of one rank.
        weights: a compressor for FSDP2's all-gathers, in forward and in backward, such as ``Int8()``; or
            :class:`commopt.gradients.Differences`, to those gathered last: in forward only, but a rank holds the whole
            model in the dtype that FSDP gathers. The optimizer's weights stay exact.
        bucket_mb: most MB (2**20 bytes) of a bucket; None chooses.
        reduction: "sum" where a step goes by the sum of all ranks' gradients; not for DistributedDataParallel. Of
            replicas of pieces it is the sum over the replicas, of what FSDP2 makes of the pieces.
        scaler: the GradScaler of the loss: residuals follow its scale. None: the one that has scaled a loss when the
            first backward comes; where several have, that is an error which asks for it. One that is not enabled
            stands for none.
        check_every: before the first mean, and every such one after it, the ranks compare digests of the parameters,
            which every rank has changed alike, >= 1; None: never. Not of a sharded model. It reads them once.
        warmup_steps: how many means are in full precision, >= 0, before the first compressed one: an Adam has seen
            gradients as they are then, and coarse compressors learn more. Not where FSDP2's reduce-scatters are
            compressed.

    Raises:
        ValueError: on every rank, for an argument that is not allowed on any of them, a model without trainable
            parameters, one whose gradients something else averages or compresses, or ranks that differ.
        RuntimeError: from DDP, if it has one of torch's built-in communication hooks.
    """
    scaled = None if scaler is None else "given"
    given = _Given(compressor, feedback, inside, weights, bucket_mb, reduction, scaled, check_every, warmup_steps)
    taken: list[TakenReplicas] = []
    error: Exception | None = None
    try:
        if isinstance(model, nn.Module):
            look_anew(model)
            taken = take_replicas(model, "compress_gradients()", reduction)
    except ValueError as caught:
        error = caught
    try:
        return _connected(model, given, process_group, backend, taken, error, scaler)
    except BaseException:
        give_back(taken)
        raise


@dataclass
class _Given:
    """Arguments of :func:`compress_gradients`, the same on all ranks."""

    compressor: OfGradients
    feedback: bool | LoCo
    inside: Compressor | None
    weights: Compressor | Differences | None
    bucket_mb: float | None
    reduction: str
    scaler: str | None
    check_every: int | None
    warmup_steps: int


def _connected(
    model: nn.Module,
    given: _Given,
    process_group: Any,
    backend: Backend | None,
    taken: Sequence[TakenReplicas],
    error: Exception | None,
    scaler: torch.amp.GradScaler | None,
) -> CompressedGradients:
    params = _trained(model)
    grouped = process_group is not None or backend is not None  # else dimensions of a mesh need not be machines
    backend = _ranks(model, process_group, backend, params)
    # of a sharded model gathered weights are sent in evaluations, too: nobody would confirm them
    topology = Topology(backend, receipt=NoReceipt() if any(map(is_sharded, params)) else None)
    groups = Groups()
    try:
        if error is not None:
            raise error
        check_scaler(scaler)
        groups = _checked(model, given, params, topology, grouped)
    except ValueError as caught:
        error = caught
    settings = ", ".join(f"{field.name}={getattr(given, field.name)!r}" for field in fields(given))
    _agree(topology, params, error, settings, isinstance(given.compressor, LowRank))
    elsewhere = {id(p) for group in groups.over_all for p in group.params}
    method = _method(given.compressor, given.feedback, given.inside)
    mean = GradientMean(
        params, topology, method, given.bucket_mb, given.reduction, elsewhere, LossScale(scaler), given.check_every,
        given.warmup_steps,
    )  # fmt: skip
    sharded: ShardedDoor | None = None
    if isinstance(model, DistributedDataParallel):
        door: DDPHook | ParameterHooks = _ddp_door(model, mean)
    else:
        rest = [p for p in params if id(p) not in elsewhere]
        _start_equal(model, rest, params, topology)
        unseen = [p for p in model.parameters() if not p.requires_grad and not is_cut_whole(p, topology)]
        door = ParameterHooks(model, rest, mean, unseen, [NeverWrapped(rest, topology), *(t.check for t in taken)])
        exchanged = groups.over_all or (groups.replicated and given.inside)
        if exchanged or ((groups.replicated or groups.frozen) and given.weights):
            sharded = ShardedDoor(
                model, topology, groups, given.compressor, given.feedback, given.inside, given.weights, door.begin,
                grouped,
            )  # fmt: skip
            mean.parts.append(sharded)
    handle = CompressedGradients(model, given.compressor, mean, door, sharded, taken)
    topology.traffic.leave_out()
    if sharded is None:
        for module in [model] if isinstance(model, DistributedDataParallel) else [model, *_owners(model, params)]:
            HANDLES[module] = lambda: handle  # strongly: it lives as long as the module
    else:  # weakly: the hooks of the model keep the door, and this the handle
        sharded.handle, HANDLES[model] = handle, weakref.ref(handle)
    return handle


def _checked(model: nn.Module, given: _Given, params: Sequence[Tensor], topology: Topology, grouped: bool) -> Groups:
    """The groups of FSDP2 in ``model``. Raises ValueError for what is not allowed on this rank."""
    check_interval(given.check_every)
    check_model(model, given.compressor, given.feedback, params, topology, given.bucket_mb, given.reduction)
    if handles_of(params):
        kind = type(model).__name__
        raise ValueError(f"gradients of this {kind} are compressed already; call remove() on the handle first")
    groups = fsdp_groups(model, params, topology)
    check_warmup(given.warmup_steps, given.inside, groups)
    check_exchanges(given.compressor, given.inside, given.weights, groups, params, topology, given.reduction, grouped)
    return groups


def _start_equal(model: nn.Module, rest: Sequence[Tensor], params: Sequence[Tensor], topology: Topology) -> None:
    """Makes the parameters ``rest``, of all the trained ``params``, those of the first rank that holds the same, and
    frozen ones if all ranks have the same."""
    held = [(of.world, [p for p in rest if topology.held(p)[0] is of]) for of in topology.replicas]
    for ranks, same in [*held, (topology.world, _frozen_alike(model, topology, {p.device for p in params}))]:
        if equalize(ranks, message_device(topology.backend), [local(p) for p in same]) and ranks.rank == 0:
            logger.warning("compress_gradients: parameters differed between ranks; all have those of rank 0 now")


def _frozen_alike(model: nn.Module, topology: Topology, devices: Collection[torch.device]) -> list[Tensor]:
    """The frozen parameters that are plain tensors of floats beside those that are trained, if all ranks have the same
    ones; else none."""
    if topology.is_sharded and not isinstance(topology.backend, MeshBackend):
        return []  # ranks may hold other parts of them
    plain: list[Tensor] = [
        p
        for p in model.parameters()
        if not p.requires_grad and type(p) is nn.Parameter and type(p.data) is Tensor and p.dtype in REAL
        and p.device in devices and p.is_contiguous()
    ]  # fmt: skip
    layout = zlib.crc32(str([(tuple(p.shape), p.dtype) for p in plain]).encode())
    return plain if len(set(gather_number(topology.backend, layout))) == 1 else []


def _trained(model: nn.Module) -> list[Tensor]:
    """The parameters whose gradients are averaged; of what is no model none. DDP has been told to leave some alone."""
    if not isinstance(model, nn.Module):
        return []
    if not isinstance(model, DistributedDataParallel):
        return [p for p in model.parameters() if p.requires_grad]
    modules = model.module.named_modules()  # by the names that DDP's reducer goes by
    named = ((f"{name}.{own}", p) for name, m in modules for own, p in m.named_parameters(recurse=False))
    found = {id(p): p for name, p in named if p.requires_grad and name not in model.parameters_to_ignore}
    return list(found.values())


def _owners(model: nn.Module, params: Sequence[Tensor]) -> list[nn.Module]:
    """The modules that have ``params``: they may outlive ``model``, which may be a list of them, or a compiled one."""
    ids = {id(p) for p in params}
    return [module for module in model.modules() if any(id(p) in ids for p in module._parameters.values())]


def _method(compressor: OfGradients, feedback: bool | LoCo, inside: Compressor | None) -> Method:
    if isinstance(compressor, LowRank):
        return Thin(compressor, bool(feedback))
    if isinstance(compressor, TopBlocks):
        return AgreedBlocks(compressor, bool(feedback))
    if isinstance(feedback, LoCo):
        return LoCoRows(compressor, feedback, inside)
    return Rows(compressor, feedback, inside)


def _ranks(model: Any, process_group: Any, backend: Backend | None, params: Sequence[Tensor]) -> Backend:
    if isinstance(model, DistributedDataParallel) and process_group is None and backend is None:
        return TorchBackend(model.process_group)
    return resolve_backend(process_group, backend, params)


def _agree(
    topology: Topology, params: Sequence[Tensor], error: Exception | None, settings: str, multiplies: bool
) -> None:
    """Raises, on every rank, if any of them has found an error, or if they differ. ``multiplies``: each makes the same
    products of matrices, which torch rounds by the number of its threads."""
    devices = sorted({p.device.type for p in params})
    facts = {
        **versions(devices),
        **({THREADS: str(torch.get_num_threads())} if multiplies and "cpu" in devices else {}),
        LISTS: "\n".join(describe(0, i, p) for i, p in enumerate(params)),
        "settings or kernel providers": f"{settings} {ops.providers(devices)}",
    }
    agree_on_setup(topology.world, message_device(topology.backend), facts, error, counts_of(params))


def _ddp_door(model: DistributedDataParallel, mean: GradientMean) -> DDPHook:
    free = [state for _, state in model._comm_hooks if isinstance(state, DDPHook) and state.mean is None]
    if not free:
        return DDPHook(model, mean)
    free[0].serve(mean)  # DDP keeps its hook for good
    return free[0]

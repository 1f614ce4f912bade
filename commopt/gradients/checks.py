"""Checks of what compress_gradients allows, each rank for itself: ValueError before anything is communicated."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from commopt.agreement import checks
from commopt.comm import MeshBackend, NodesBackend, Topology, sends_from
from commopt.comm.torch import ranks_of
from commopt.compress import Compressor
from commopt.ddp_models import ddp_models_around
from commopt.gradients.all_gather import Differences
from commopt.gradients.ddp import CopiedHook, DDPHook
from commopt.gradients.fsdp import Group, Groups, groups_of
from commopt.gradients.loco import LoCo
from commopt.gradients.method import OfGradients
from commopt.sharding import covers, is_sharded, left_dims
from commopt.state.wrapped import ddp_may_average


def fsdp_groups(model: nn.Module, params: Sequence[Tensor], topology: Topology) -> Groups:
    """Those of ``model``."""
    trained = {id(p) for p in params}
    found = groups_of(model) if topology.is_sharded else []
    ours = [group for group in found if group.params and id(group.params[0]) in trained]
    replicated = [group for group in ours if all(_has_replicas(p, topology) for p in group.params)]
    frozen = [group for group in found if not group.params]
    return Groups([group for group in ours if group not in replicated], replicated, frozen)


def _has_replicas(p: Tensor, topology: Topology) -> bool:
    return bool(left_dims(p)) or p.device_mesh.size() < topology.world_size  # type: ignore[attr-defined]


def check_warmup(warmup_steps: object, inside: Any, groups: Groups) -> None:
    """Raises ValueError unless ``warmup_steps`` is allowed, of a model that has ``groups`` of FSDP2."""
    checks.check_int("warmup_steps", warmup_steps, 0)
    if warmup_steps and (groups.over_all or (groups.replicated and inside is not None)):
        raise ValueError(
            f"warmup_steps={warmup_steps!r} is for means of whole gradients: FSDP2's reduce-scatters are compressed "
            "from the first one; allowed is 0"
        )


def check_exchanges(
    compressor: OfGradients,
    inside: Any,
    weights: Any,
    groups: Groups,
    params: Sequence[Tensor],
    topology: Topology,
    reduction: str,
    grouped: bool,
) -> None:
    """Raises ValueError for what does not go with how the model is held; ``grouped``: see
    :class:`commopt.gradients.sharded.ShardedDoor`."""
    whole, replicated, frozen = groups
    if topology.is_sharded:
        _check_mesh(groups, params, topology)
    if inside is not None and not isinstance(inside, Compressor):
        raise ValueError(f"inside must be None or a commopt.compress.Compressor such as Int8(), got {inside!r}")
    if weights is not None and not isinstance(weights, (Compressor, Differences)):
        raise ValueError(f"weights must be None, a commopt.compress.Compressor or Differences(), got {weights!r}")
    alone = topology.world_size == 1 and any(map(is_sharded, params))  # nothing is gathered there
    if weights is not None and not (whole or replicated or frozen or alone):
        raise ValueError(f"weights={weights!r} is for models sharded by FSDP2: no other gathers weights")
    for group in [*whole, *(replicated if inside or weights else []), *(frozen if weights else [])]:
        group.check()
    for group in [*whole, *replicated] if weights is not None else []:
        group.check_dtypes()
    if whole and not isinstance(compressor, Compressor):
        raise ValueError(
            f"{compressor!r} goes by all ranks having the same of a gradient, and of this model each gets other rows: "
            'allowed are compressors of rows such as Int4(), or replicas, fully_shard(model, mesh=mesh["shard"]), '
            "process_group=mesh"
        )
    if whole and reduction == "sum":
        raise ValueError(
            "reduction='sum' is FSDP's to make here: leave it away, and call set_gradient_divide_factor(1.0) on its "
            "modules"
        )
    nodes = _has_nodes(whole, params, topology, grouped) and isinstance(compressor, Compressor)
    if inside is not None and not replicated and not nodes:
        raise ValueError(
            f"inside={inside!r} is for machines of several ranks: process_group=mesh of (machines, ranks of each), the "
            "model whole, with a compressor of rows, or sharded by FSDP2 over the second dimension, or over both as one"
        )


def check_model(
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
    if not isinstance(compressor, OfGradients):
        got = checks.no_compressor(compressor)
        raise ValueError(f"compressor must be a commopt.compress.Compressor such as Sign(), got {got}")
    if not isinstance(feedback, bool) and not (isinstance(feedback, LoCo) and isinstance(compressor, Compressor)):
        raise ValueError(f"feedback must be True, False or, with a compressor of rows, LoCo(), got {feedback!r}")
    if not params:
        raise ValueError(f"the {type(model).__name__} has no trainable parameters: there is nothing to average")
    checks.check_common(None, bucket_mb, overlap=False)
    checks.check_reduction(reduction)
    checks.check_params(params, sends_from(topology.backend), topology.is_sharded)
    if isinstance(model, DistributedDataParallel):
        _check_ddp(model, topology, reduction)
    elif _is_wrapped(params, topology):
        raise ValueError(
            f"a DistributedDataParallel around this {type(model).__name__} averages its gradients already: give "
            "compress_gradients() that one"
        )


def _is_wrapped(params: Sequence[Tensor], topology: Topology) -> bool:
    """True if a DistributedDataParallel averages gradients of ``params``. Takes a while."""
    if not ddp_may_average(topology) or not ddp_models_around(params):
        return False
    gc.collect()  # one that nobody has any more may be in a cycle
    return bool(ddp_models_around(params))


class NeverWrapped:
    """Raises RuntimeError at its first call if a DistributedDataParallel was made around ``params`` since."""

    def __init__(self, params: Sequence[Tensor], topology: Topology) -> None:
        self._params: Sequence[Tensor] = params
        self._topology = topology

    def __call__(self) -> None:
        params, self._params = self._params, ()
        if params and _is_wrapped(params, self._topology):
            raise RuntimeError(
                "the model was compressed first and given to DistributedDataParallel then, which averages its "
                "gradients in full precision, too: make that first, and give it to compress_gradients()"
            )


def _check_ddp(model: DistributedDataParallel, topology: Topology, reduction: str) -> None:
    if reduction == "sum":
        raise ValueError("reduction='sum' and DistributedDataParallel exclude each other: it averages gradients")
    if getattr(model, "skip_all_reduce_unused_params", False):  # torch 2.13 and later
        raise ValueError(
            "skip_all_reduce_unused_params=True and compressed gradients exclude each other: DistributedDataParallel "
            "would not say when a backward has ended. Leave it away: what has no gradient anywhere takes no part anyway"
        )
    if any(not isinstance(state, (DDPHook, CopiedHook)) for _, state in model._comm_hooks):
        raise ValueError(
            "this DistributedDataParallel has a communication hook already, which it keeps for good: of an optimizer "
            "of commopt (attach(), or its first step), or by register_comm_hook(). Wrap the module once more"
        )
    mine = ranks_of(topology.backend)
    theirs = dist.get_process_group_ranks(model.process_group)
    if mine != theirs:
        raise ValueError(f"the model is of ranks {theirs}, its gradients would be those of {mine or 'another backend'}")


def _check_mesh(groups: Groups, params: Sequence[Tensor], topology: Topology) -> None:
    ours = {id(p) for group in groups.over_all for p in group.params}
    for p in params:
        topology.check(p, elsewhere=id(p) in ours)
    if len(set(topology.stages)) > 1:
        raise ValueError(
            "stages of a pipeline are not supported on one mesh: wrap each stage's module in DistributedDataParallel "
            "over the group of its replicas, and give compress_gradients() that"
        )
    for group in groups.over_all:
        if group.world_size < topology.world_size:
            raise ValueError(
                f"{group.name}: FSDP2 cuts it over {group.world_size} of {topology.world_size} ranks, tensor "
                "parallelism cuts too, and there are no replicas. What ranks of tensor parallelism hold alike, such as "
                "norms, would be compressed beside what they do not, and not stay alike: compress between replicas "
                "only, on a mesh of (replicate, shard, tensor)"
            )
    cut = [p for p in params if is_cut_whole(p, topology) and id(p) not in ours]
    if topology.world_size > 1 and cut:
        mesh = cut[0].device_mesh  # type: ignore[attr-defined]
        if mesh.size() > topology.world_size:
            raise ValueError(
                f"process_group= has {topology.world_size} of the {mesh.size()} ranks that the parameters are on, "
                f"{mesh}: leave it out, or give all of that mesh"
            )
        raise ValueError(
            "a parameter is on all dimensions of the mesh, and FSDP2 does not average it over any: nothing is left to "
            'compress. Put it on the inner dimension only, such as mesh["shard"]'
        )


def is_cut_whole(p: Tensor, topology: Topology) -> bool:
    """True if ``p`` is on all dimensions of the mesh of the ranks."""
    return covers(p, getattr(topology.backend, "mesh", None))


def _has_nodes(whole: Sequence[Group], params: Sequence[Tensor], topology: Topology, grouped: bool) -> bool:
    """True if parameters are averaged over nodes of several ranks."""
    backend = topology.backend
    if isinstance(backend, MeshBackend):
        if whole:
            return grouped and any(backend.has_nodes(group.ranks) for group in whole)
        return any(backend.mesh.ndim - len(backend.dims_of(p)) > 1 for p in params)
    return isinstance(backend, NodesBackend)

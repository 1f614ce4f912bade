"""HSDP, FSDP2 on a mesh of (replicas, shards): who averages over the replicas.

FSDP2 does, after each of its reduce-scatters, in full precision, and has no setting for who else should: after
``set_requires_all_reduce(False)`` it keeps the gradients to itself. But it goes by what a group of parameters knows of
its mesh. A group that knows the shards alone reduces over these, and leaves the replicas to whoever averages then:
:func:`commopt.compress_gradients`, or an optimizer (:func:`commopt.attach`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import nn

from commopt.sharding import leave_dims


def without_replicas(model: nn.Module) -> Callable[[], None] | None:
    """Has FSDP2 average the gradients of ``model`` over the shards alone, from the next backward on. All ranks must
    call it; it communicates nothing. ``set_requires_all_reduce()`` has no effect then.

    Returns:
        what gives the replicas back to FSDP2; None, and nothing is changed, if it averages no module over any.

    Raises:
        ValueError: the replicas are along several dimensions of a parameter's mesh.
    """
    left = {group: _dims_left(group) for group in _groups_with_replicas(model)}
    if not left:
        return None
    undo = [_without(group, dims) for group, dims in left.items()]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def has_replicas(model: nn.Module) -> bool:
    """Whether FSDP2 averages gradients of ``model`` over replicas."""
    return bool(_groups_with_replicas(model))


def modules_of(model: nn.Module) -> list[Any]:
    """The FSDPModules in ``model``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever has such a model has imported it; it takes a second
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def groups_in(module: Any) -> list[Any]:
    """FSDP's own groups of parameters of an FSDPModule: before torch 2.13 one at most."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def averages_over_replicas(group: Any) -> bool:
    """Whether FSDP cuts this group of its own over some ranks, and averages it over others."""
    return {"FSDPMeshInfo", "DDPMeshInfo"} <= {kind.__name__ for kind in type(group.mesh_info).__mro__}


def _groups_with_replicas(model: nn.Module) -> list[Any]:
    groups = dict.fromkeys(group for module in modules_of(model) for group in groups_in(module))
    return [group for group in groups if averages_over_replicas(group)]


def _dims_left(group: Any) -> dict[Any, tuple[int, ...]]:
    """Of each parameter of FSDP's in ``group`` the dimension of its own mesh, which tensor parallelism may have given
    more, that its replicas are along."""
    ranks = dist.get_process_group_ranks(group.mesh_info.replicate_process_group)
    out: dict[Any, tuple[int, ...]] = {}
    for p in group.fsdp_params:
        mesh = p.sharded_param.device_mesh
        dims = [i for i in range(mesh.ndim) if dist.get_process_group_ranks(mesh.get_group(i)) == ranks]
        if not dims:
            raise ValueError(f"FSDP2 averages over ranks {ranks}, which are not those along a dimension of {mesh}")
        out[p] = (dims[0],)
    return out


def _without(group: Any, left: dict[Any, tuple[int, ...]]) -> Callable[[], None]:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    before, before_backward = group.mesh_info, group.post_forward_mesh_info
    known = {field.name: getattr(before, field.name) for field in fields(before) if field.init}
    shards = FSDPMeshInfo(**{**known, "replicate_mesh_dim": None})
    if getattr(before, "reduce_scatter_process_group", None) is not None:  # a group of its own for the reduce-scatter
        shards.reduce_scatter_process_group = before.reduce_scatter_process_group
    group.mesh_info = shards
    if before_backward == before:  # gathered from the same ranks in backward, which FSDP sees by their being equal
        group.post_forward_mesh_info = shards
    for p, dims in left.items():
        leave_dims(p.sharded_param, dims)
    here = weakref.ref(group)  # whoever may undo it need not keep the model

    def undo() -> None:
        if (group := here()) is not None:
            group.mesh_info, group.post_forward_mesh_info = before, before_backward
            for p in group.fsdp_params:
                leave_dims(p.sharded_param, ())

    return undo

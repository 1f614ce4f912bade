"""HSDP, FSDP2 on a mesh of (replicas, shards): who averages over the replicas.

FSDP2 does, after each of its reduce-scatters, in full precision, and has no setting for who else should: after
``set_requires_all_reduce(False)`` it keeps the gradients to itself. But it goes by what a group of parameters knows of
its mesh. A group that knows the shards alone reduces over these, and leaves the replicas to whoever averages then:
:func:`commopt.compress_gradients`, or an optimizer (:func:`commopt.attach`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from commopt.ddp_models import instances_of, with_subclasses
from commopt.sharding import is_sharded, leave_dims, notes_dims

_TAKEN: weakref.WeakKeyDictionary[Any, TakenReplicas] = weakref.WeakKeyDictionary()
"""By FSDP's group of parameters, who averages over its replicas in FSDP2's stead."""


class TakenReplicas:
    """The average over the replicas of one of FSDP's groups of parameters, which is not FSDP2's any more.

    Attributes:
        by: whose it is: what a user has called.
        holders: objects that average, of which any may go; the last one that goes should give it back.
    """

    def __init__(self, group: Any, left: Mapping[Tensor, int], by: str, reduction: str) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        if not hasattr(group, "gradient_divide_factor"):  # before torch 2.8
            group.gradient_divide_factor = None
        before = group.mesh_info
        known = {field.name: getattr(before, field.name) for field in fields(before) if field.init}
        shards = FSDPMeshInfo(**{**known, "replicate_mesh_dim": None})
        if getattr(before, "reduce_scatter_process_group", None) is not None:  # a group of its own for that
            shards.reduce_scatter_process_group = before.reduce_scatter_process_group
        self.by, self.holders = by, weakref.WeakSet[Any]()
        self._group = weakref.ref(group)  # whoever may give it back need not keep the model
        self._before = before, group.post_forward_mesh_info, group.gradient_divide_factor
        group.mesh_info = shards
        if group.post_forward_mesh_info == before:  # gathered from the same ranks in backward: FSDP compares them
            group.post_forward_mesh_info = shards
        if group.gradient_divide_factor is not None and reduction == "mean":  # it is one of the sum over all ranks
            group.gradient_divide_factor /= before.replicate_mesh_size
        self._factor = group.gradient_divide_factor
        self._left = list(left.values())
        self.note()
        _TAKEN[group] = self

    def note(self) -> None:
        """Notes of the parameters over which dimension FSDP2 does not average them."""
        group = self._group()
        for p, dim in zip([] if group is None else _params_of(group), self._left):
            leave_dims(p, (dim,))

    def give_back(self) -> None:
        """FSDP2 averages over the replicas, from the next backward on."""
        group = self._group()
        if group is not None and _TAKEN.get(group) is self:
            group.mesh_info, group.post_forward_mesh_info, group.gradient_divide_factor = self._before
            for p in _params_of(group):
                leave_dims(p, ())
            del _TAKEN[group]

    def trained(self) -> list[Tensor]:
        """The trainable parameters."""
        group = self._group()
        return [] if group is None else [p for p in _params_of(group) if p.requires_grad]

    def check(self) -> None:
        """Raises RuntimeError if FSDP2's factor was set since: it would be off by the number of replicas."""
        group = self._group()
        if group is not None and group.gradient_divide_factor != self._factor:
            raise RuntimeError(
                f"set_gradient_divide_factor({group.gradient_divide_factor}) was called after {self.by} had taken the "
                "average over the replicas from FSDP2: call it before that"
            )


@notes_dims
def _note_all() -> None:
    for taken in list(_TAKEN.values()):
        taken.note()


def take_replicas(model: nn.Module, by: str, reduction: str, of: Collection[int] | None = None) -> list[TakenReplicas]:
    """Has FSDP2 average the gradients of ``model`` over the shards alone, from the next backward on. All ranks must
    call it; it communicates nothing. ``set_requires_all_reduce()`` has no effect then.

    Args:
        model: of its groups of parameters those are taken that FSDP2 averages over replicas.
        by: what a user has called.
        reduction: whether that takes the "mean" over the replicas, or the "sum".
        of: ids of parameters: the groups without any of these stay FSDP2's. None for all groups.

    Returns:
        what was taken, now or before by the same call for others, its holders. FSDP2 has it again by ``give_back()``.

    Raises:
        ValueError: they are taken, and not to be shared, or are along several dimensions of a parameter's mesh.
    """
    groups = [g for g in _groups(model) if of is None or any(id(p) in of for p in _params_of(g))]
    mine = [_TAKEN[group] for group in groups if group in _TAKEN]
    for taken in mine:
        if taken.by != by or not list(taken.holders):
            raise ValueError(
                f"{taken.by} averages the gradients of this model over its replicas already, so {by} cannot: end that "
                "first (remove() on the handle, or delete the optimizer)"
            )
    left = {group: _dims_left(group) for group in groups if averages_over_replicas(group)}
    return mine + [TakenReplicas(group, dims, by, reduction) for group, dims in left.items()]


def give_back(taken: Sequence[TakenReplicas]) -> None:
    """Gives FSDP2 back what nobody holds any more."""
    for one in taken:
        if not list(one.holders):  # its length counts one that goes at this moment
            one.give_back()


def has_replicas(model: nn.Module) -> bool:
    """True if FSDP2 averages gradients of ``model`` over replicas."""
    return any(map(averages_over_replicas, _groups(model)))


def modules_of(model: nn.Module) -> list[Any]:
    """The FSDPModules in ``model``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever has such a model has imported it; it takes a second
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def modules_around(params: Sequence[Tensor]) -> list[Any]:
    """The FSDPModules that cut any of ``params``. Looks at all objects: seldom."""
    mine = {id(p) for p in params}
    return [m for m in _all_modules() if any(id(p) in mine for group in groups_in(m) for p in _params_of(group))]


def _all_modules() -> list[Any]:
    """All FSDPModules that there are. Looks at all objects, unless ``fully_shard()`` has made no class of them yet."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = set() if fsdp is None else with_subclasses(fsdp.FSDPModule) - {fsdp.FSDPModule}
    return instances_of(kinds) if kinds else []


def gather_anew(modules: Sequence[Any]) -> None:
    """Has FSDP2 gather the weights of ``modules`` anew, which have changed: what it has gathered for a forward without
    a backward, of the outermost module at least, it would go on with. Until then these, and not the pieces of this
    rank, are the parameters of the modules."""
    for module in modules:
        module.reshard()


def look_anew(model: nn.Module) -> None:
    """Has FSDP2 see which parameters ``model`` has. After an evaluation it would have whole weights for parameters; and
    FSDP2 looks by itself at ``fully_shard()`` and in the first forward, where a framework that loads a model in between
    may have put others there."""
    modules = modules_of(model)
    gather_anew(modules)
    for p in [p for module in modules for group in groups_in(module) for p in group.fsdp_params]:
        if getattr(p._module_info.module, p._module_info.param_name) is not p.sharded_param:
            p.reset_sharded_param()


def refuse_gathered(params: Sequence[Tensor]) -> None:
    """Raises ValueError if any of ``params`` are weights that FSDP2 has gathered, whose memory it frees. Looks at all
    objects where there are models of FSDP2, and plain tensors among ``params``: those of tensor parallelism that were
    gathered are not seen."""
    if all(map(is_sharded, params)):
        return
    groups = [group for module in _all_modules() for group in groups_in(module)]
    whole = {id(getattr(p, "_unsharded_param", None)) for group in groups for p in group.fsdp_params}
    gathered = [p for p in params if id(p) in whole]
    if gathered:
        raise ValueError(
            f"{len(gathered)} of the parameters, such as one of shape {tuple(gathered[0].shape)}, are whole weights "
            "that FSDP2 has gathered for a forward without a backward, such as an evaluation, and not the pieces that "
            "are trained: call reshard() of the modules that fully_shard() was called on, and then give parameters()"
        )


def groups_in(module: Any) -> list[Any]:
    """FSDP's own groups of parameters of an FSDPModule: before torch 2.13 one at most."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def averages_over_replicas(group: Any) -> bool:
    """True if FSDP cuts this group of its own over some ranks, and averages it over others."""
    return {"FSDPMeshInfo", "DDPMeshInfo"} <= {kind.__name__ for kind in type(group.mesh_info).__mro__}


def _groups(model: nn.Module) -> Iterator[Any]:
    yield from dict.fromkeys(group for module in modules_of(model) for group in groups_in(module))


def _params_of(group: Any) -> list[Tensor]:
    return [p.sharded_param for p in group.fsdp_params]


def _dims_left(group: Any) -> dict[Tensor, int]:
    """By parameter the dimension of its own mesh, which tensor parallelism may have given more, that its replicas are
    along."""
    ranks = dist.get_process_group_ranks(group.mesh_info.replicate_process_group)
    out: dict[Tensor, int] = {}
    for p in _params_of(group):
        mesh = p.device_mesh  # type: ignore[attr-defined]
        dims = [i for i in range(mesh.ndim) if dist.get_process_group_ranks(mesh.get_group(i)) == ranks]
        if not dims:
            raise ValueError(f"FSDP2 averages over ranks {ranks}, which are not those along a dimension of {mesh}")
        out[p] = dims[0]
    return out

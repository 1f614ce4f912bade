"""Connects an optimizer to a DistributedDataParallel model, so that DDP averages gradients only while that is asked
for. The first step of an optimizer does it by itself, if it finds such a model around its parameters. And to one that
FSDP2 shards and averages over replicas (HSDP), so that the optimizer does the latter."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commopt.comm.counting import all_reduce_bytes
from commopt.comm.torch import ranks_of
from commopt.ddp_attachment import Attachment, Ours, strangers
from commopt.ddp_models import ddp_models_around, ddp_models_in
from commopt.gradients.ddp import CopiedHook, DDPHook
from commopt.hsdp import has_replicas
from commopt.hsdp_attachment import average_over_replicas
from commopt.sharding import left_dims
from commopt.state.packed import PackedOptimizer
from commopt.state.wrapped import Attach, Obstacle, look_with

logger = logging.getLogger("commopt")


def attach(model: nn.Module, optimizer: Any) -> None:
    """Lets ``optimizer`` decide when ``model`` averages gradients.

    The first ``step()`` does it, if it finds the model around the optimizer's parameters, and says so; after
    ``load_state_dict()`` the first backward. To call this is to be certain, and to do it before the first backward.

    While the optimizer wants exact averages (warm-up), DDP averages gradients and overlaps that with backward, as
    always. In the compressed phase, and in local steps, it leaves them local and sends nothing. ``no_sync()`` and
    gradient accumulation work as always. Evaluating the model while replicas differ is reported once. When the
    optimizer is deleted, DDP averages all gradients again, and another one may be attached.

    Parameters of the model that are another optimizer's get their averages always. Clip these by their own norm: that
    of all gradients differs between ranks where some are local, and what it scales drifts apart.

    Within ``model.join()`` step() raises RuntimeError, unless it is ``join(throw_on_early_termination=True)``.

    Of a model that FSDP2 shards inside replicas and averages over them, ``fully_shard(model, mesh=mesh)`` with a mesh
    of two dimensions (HSDP), the optimizer takes over the average over the replicas: all of it, from the next backward
    on. That is not left to the first step, which comes after a backward: call this on all ranks before that. Gradients
    add up over several passes after ``set_requires_gradient_sync(False)``; ``set_requires_all_reduce()`` has no effect.

    Args:
        model: a DDP model without a communication hook of its own, or a module with one inside, such as a compiled or
            a Fabric module; or what ``replicate()`` was applied to, after its first forward; or a sharded one.
        optimizer: a commopt optimizer of its parameters, over the same ranks; or a framework's wrapper around it, that
            has it as ``.optimizer``.

    Raises:
        ValueError: if ``model`` is or has no DDP model, or optimizer and model have no parameter in common or different
            ranks.
        RuntimeError: if the model has a communication hook of its own already, by whomever.
    """
    ours = unwrapped(optimizer)
    if not isinstance(ours, Ours):
        swapped = isinstance(unwrapped(model), Ours)
        hint = "the model comes first" if swapped else "any other has commopt.compress_gradients(model, compressor)"
        raise ValueError(f"attach() connects a commopt optimizer, got {type(optimizer).__name__}; {hint}")
    if isinstance(model, nn.Module) and (has_replicas(model) or any(map(left_dims, model.parameters()))):
        average_over_replicas(model, ours)
    else:
        _connect(_ddp_of(model, ours), ours)


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that frameworks have wrapped, that is the one of commopt where there is one inside; also where the
    class of the wrapper is derived from the optimizer's, as Lightning's and Fabric's are."""
    while hasattr(optimizer, "optimizer") and (not isinstance(optimizer, Ours) or "_optimizer" in vars(optimizer)):
        optimizer = optimizer.optimizer
    return optimizer


def _ddp_of(model: nn.Module, optimizer: Ours) -> DistributedDataParallel:
    """The DDP model that ``model`` is, or has inside, or that averages what it holds."""
    inside = ddp_models_in(model)
    if not inside and isinstance(model, nn.Module):
        params = {id(p) for p in model.parameters()}
        inside = [m for m in ddp_models_around(optimizer.params) if any(id(p) in params for p in m._module_parameters)]
    if len(inside) == 1:
        return inside[0]
    if inside:
        raise ValueError(f"{type(model).__name__} has {len(inside)} DistributedDataParallel models: attach one of them")
    if isinstance(model, nn.Module) and any(map(_is_replicated, model.modules())):
        raise ValueError(
            "replicate() makes its DistributedDataParallel in the first forward: call attach() after that, or leave it "
            "to the first step, which finds it"
        )
    raise ValueError(f"attach() connects a DistributedDataParallel; a bare {type(model).__name__} needs no attaching")


def _is_replicated(module: nn.Module) -> bool:
    """True for what the composable ``replicate()`` was applied to."""
    return any(cls.__module__ == "torch.distributed._composable.replicate" for cls in type(module).__mro__)


def _why_not(model: DistributedDataParallel, optimizer: Ours) -> str | None:
    """Why ``optimizer`` cannot decide when ``model`` averages."""
    if optimizer.reduction == "sum":
        return "reduction='sum' and DistributedDataParallel exclude each other: it averages gradients"
    mine = ranks_of(optimizer.topology.backend)
    theirs = dist.get_process_group_ranks(model.process_group)
    if mine != theirs:
        return f"the model averages over ranks {theirs}, the optimizer over {mine or 'another backend'}"
    if not {id(p) for p in model.parameters()} & set(optimizer.group_of()):
        return strangers(model)
    return None


def _connect(model: DistributedDataParallel, optimizer: Ours) -> None:
    reason = _why_not(model, optimizer)
    if reason is not None:
        raise ValueError(reason)
    free = _free(model)
    if free:  # DDP keeps its hook for good
        free[0].serve(optimizer)
        optimizer._attachment = free[0]
    else:
        attachment = Attachment(model, optimizer)
        if _hooks_of(model):
            raise RuntimeError(_whose_hook(model, optimizer))
        try:
            model.register_comm_hook(attachment, Attachment.hook)
        except RuntimeError as error:  # it has one that its list lacks
            del model._comm_hooks[:]  # what DDP has written down before it refused
            raise RuntimeError(_whose_hook(model, optimizer)) from error
        optimizer._attachment = attachment
    optimizer._obstacle = None
    optimizer.warn_in_evaluation(model.module)


_LEAVE_OUT = (
    "leave that out (register_comm_hook(), mixed_precision=; accelerate's comm_hook; Lightning's ddp_comm_hook), and "
    "call commopt.attach(ddp_model, optimizer), or have the first step do so"
)


def _whose_hook(model: DistributedDataParallel, optimizer: Ours) -> str:
    """Advice about the communication hook that ``model`` has: it takes one."""
    hooks = _hooks_of(model)
    if not hooks:
        return f"it has a communication hook of its own, one of those built in; {_LEAVE_OUT}"
    hook, state = hooks[0]
    if isinstance(state, Attachment):
        if state is optimizer._attachment:
            return "its communication hook is that of this optimizer already: once is enough"
        return "its communication hook is that of another optimizer of commopt: give that one all parameters"
    if isinstance(state, DDPHook) and not _compresses(state):
        return (
            "compress_gradients() has averaged its gradients before, and DistributedDataParallel keeps that hook for "
            "good: wrap the module once more"
        )
    if isinstance(state, DDPHook):
        return (
            "compress_gradients() compresses the averages already, for any optimizer: take one of torch with it, or "
            "leave it out"
        )
    return f"it has a communication hook of its own, {getattr(hook, '__qualname__', hook)}; {_LEAVE_OUT}"


def _hooks_of(model: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """The communication hooks that DDP has written down, and their states, but for those of the model that ``model`` is
    a copy of: they are not there."""
    return [(hook, state) for hook, state in model._comm_hooks if not isinstance(state, CopiedHook)]


def _free(model: DistributedDataParallel) -> list[Attachment]:
    return [state for _, state in model._comm_hooks if isinstance(state, Attachment) and state.is_free()]


def _look(optimizer: PackedOptimizer) -> Attach | Obstacle | None:
    """The function that attaches ``optimizer``, at its first step, to the one model that averages its gradients; or why
    it cannot be."""
    models = ddp_models_around(optimizer.params)
    if not models or not isinstance(optimizer, Ours):
        return None
    if len(models) > 1:
        return _obstacle(models, _why_several(models))
    why_not = _why_not(models[0], optimizer)
    if why_not is None and _hooks_of(models[0]) and not _free(models[0]):
        why_not = _whose_hook(models[0], optimizer)
    if why_not is not None:
        return _obstacle(models, why_not)
    return functools.partial(_connect_late, models[0], optimizer)


def _why_several(models: list[DistributedDataParallel]) -> str:
    params = [{id(p) for p in model._module_parameters} for model in models]
    if len(set[int]().union(*params)) < sum(map(len, params)):
        remedy = "around the same parameters; keep one (del the others), or call commopt.attach(ddp_model, optimizer)"
    else:
        remedy = "around its parameters: make an optimizer for each"
    return f"there are {len(models)} {remedy}"


def _obstacle(models: list[DistributedDataParallel], why: str) -> Obstacle:
    there = [weakref.ref(model) for model in models]

    def nbytes() -> int:
        return sum(_bytes_of(model) for ref in there if (model := ref()) is not None)

    return Obstacle(why, nbytes)


def _bytes_of(model: DistributedDataParallel) -> int:
    """Bytes that this rank sends if ``model`` all-reduces its gradients once, in their dtype; 0 where that is counted
    by who has its hook."""
    if any(isinstance(state, Attachment) or _compresses(state) for _, state in model._comm_hooks):
        return 0
    nbytes = sum(p.nbytes for p in model._module_parameters if p.requires_grad)
    return all_reduce_bytes(nbytes, dist.get_world_size(model.process_group))


def _compresses(state: Any) -> bool:
    return isinstance(state, DDPHook) and state.mean is not None


def _connect_late(model: DistributedDataParallel, optimizer: Ours, in_backward: bool) -> Obstacle | None:
    try:
        _connect(model, optimizer)
    except RuntimeError as error:  # it has a hook that it does not know of: one of those built in
        return _obstacle([model], str(error))
    if in_backward:
        optimizer._attachment.agreed = False
    else:
        optimizer._attachment.came_late()
    if optimizer.topology.rank == 0:
        logger.warning(
            "%s: attached to the DistributedDataParallel around its parameters, which from now on averages gradients "
            "only when they are to be averaged in full precision",
            type(optimizer).__name__,
        )
    return None


look_with(_look)

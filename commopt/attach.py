"""Connects an optimizer to a DistributedDataParallel model, so that DDP averages gradients only while that is asked
for. The first step of an optimizer does it by itself, if it finds such a model around its parameters. And to one that
FSDP2 shards and averages over replicas (HSDP), so that the optimizer does the latter."""

# No postponed annotations in this file: DDP reads the annotations of the hook and wants the classes, not their names.

import functools
import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from commopt import ops
from commopt.comm.counting import all_reduce_bytes
from commopt.comm.torch import ranks_of
from commopt.ddp_models import ddp_models_around, ddp_models_in
from commopt.exchanged import refuse_assign
from commopt.gradients.ddp import CopiedHook, DDPHook, joining
from commopt.hsdp import TakenReplicas, give_back, has_replicas, take_replicas
from commopt.optim import binding
from commopt.optim.arrival import remove_all
from commopt.optim.base import CommOptimizer
from commopt.optim.packed import PackedOptimizer
from commopt.optim.rules import square_norm
from commopt.optim.wrapped import Attach, Obstacle, look_with
from commopt.outer import OuterOptimizer
from commopt.sharding import left_dims

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
        _take_replicas(model, ours)
    else:
        _connect(_ddp_of(model, ours), ours)


def _take_replicas(model: nn.Module, optimizer: Ours) -> None:
    now = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not now & {id(p) for p in model.parameters()}:
        raise ValueError(_strangers(model))
    taken = take_replicas(model, "attach()", optimizer.reduction, now)
    if all(optimizer in one.holders for one in taken) and taken:
        return
    try:
        binding.take_replicas(optimizer)
    except BaseException:
        give_back(taken)
        raise
    for one in taken:
        one.holders.add(optimizer)
    if optimizer.rows_merged > 1 and optimizer.topology.rank == 0:
        logger.warning(
            "%s: its state was loaded before attach(), so that of what each of %d replicas had of its own (residuals; "
            "with local steps parameters and momenta) all have the mean now. Attach first, then load, to go on exactly",
            type(optimizer).__name__, optimizer.rows_merged,
        )  # fmt: skip
    optimizer.rows_merged = 0
    params = {id(p) for one in taken for p in one.trained()}
    why = "nobody would average the gradients of the new ones; load it before attach(), or without assign=True"
    handles = refuse_assign(model, params, why)
    handles[id(optimizer)] = optimizer.register_step_pre_hook(_BeforeStep(taken))
    weakref.finalize(optimizer, _let_go, taken, handles).atexit = False
    optimizer.warn_in_evaluation(model)


def _let_go(taken: list[TakenReplicas], handles: dict[int, Any]) -> None:
    remove_all(handles)
    give_back(taken)


class _BeforeStep:
    """A hook before each step of an optimizer that averages over replicas in FSDP2's stead."""

    def __init__(self, taken: list[TakenReplicas]) -> None:
        self._taken, self._looked_at = taken, list[tuple[int, ...]]()

    def __call__(self, *_: Any) -> None:
        for one in self._taken:
            one.check()
        now = [(len(one.holders), *map(id, one.trained())) for one in self._taken]
        if now != self._looked_at:  # parameters were frozen or unfrozen since, or an optimizer has gone
            self._check_held()
            self._looked_at = now

    def _check_held(self) -> None:
        """Makes sure that somebody averages all that FSDP2 does not.

        Raises:
            ValueError: an optimizer that is not attached has some of it.
        """
        for one in self._taken:
            held = {id(p) for holder in one.holders for group in holder.param_groups for p in group["params"]}
            others = [p for p in one.trained() if id(p) not in held]
            if others:
                raise ValueError(
                    f"{len(others)} trainable parameters, such as one of shape {tuple(others[0].shape)}, are in one of "
                    "FSDP2's groups with parameters of an attached optimizer, and in no attached optimizer themselves: "
                    "nobody would average them over the replicas. Give them to one, freeze them, or give their module "
                    "a fully_shard() of its own, which leaves their average to FSDP2"
                )


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
        return _strangers(model)
    return None


def _strangers(model: nn.Module) -> str:
    return (
        f"the optimizer holds none of the {len(list(model.parameters()))} parameters of this {type(model).__name__}: "
        "make it of this model's, after whatever replaces them"
    )


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

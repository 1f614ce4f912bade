"""torchtitan (0.3): a container of optimizers, for models that FSDP2 shards.

    spec.parallelize_fn = within_a_replica(spec.parallelize_fn)  # config.model_spec of a Trainer.Config
    config.optimizer = optimizers(commopt.OneBitAdam, lr=8e-4, freeze_step=2000, max_grad_norm=1.0)
    config.parallelism.spmd_backend = "partial_dtensor"

FSDP then shards inside a replica (``data_parallel_shard_degree``), tensor parallelism too, and the optimizer averages
over the replicas (``data_parallel_replicate_degree``). Set ``training.max_norm`` so high that it never clips: what
torchtitan takes is the norm of one replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

import commopt
from commopt.hsdp import has_replicas
from commopt.integrations import means
from commopt.integrations.common import frame_of
from commopt.integrations.shards import OneReplica
from commopt.state.packed import PackedOptimizer

_meshes: WeakKeyDictionary[nn.Module, DeviceMesh] = WeakKeyDictionary()
"""Of models that were sharded within a replica: all ranks."""


class Optimizers(OptimizersContainer):
    """A container of optimizers of commopt, by name. Its checkpoints keep residuals, and what else is a rank's own, and
    load on any mesh. While replicas differ, a Trainer validates and saves their mean. Raises ValueError for a model
    that :func:`within_a_replica` has not sharded, and for an optimizer that is not commopt's or does not communicate.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """As torchtitan's. What is of a whole optimizer, such as ``freeze_step``, is in
        ``optimizer_factory_kwargs_by_name``; ``reduction`` is "sum" if left out, because torchtitan divides the loss by
        the tokens of all ranks. ``implementation`` may be any of those that compute the same."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        _take("implementation", config.implementation, "fused", "foreach", "for-loop")
        if model_parts[0] not in _meshes:
            raise ValueError(
                "commopt's optimizers in torchtitan take a model that is sharded within a replica: set "
                "model_spec.parallelize_fn = within_a_replica(model_spec.parallelize_fn). For "
                "checkpoint.create_seed_checkpoint torchtitan shards nothing, and the checkpoint has the model alone: "
                "make it with torchtitan's own config.optimizer"
            )
        self._mesh = _meshes[model_parts[0]]
        super().__init__(config, model_parts=model_parts)
        self._loaded: dict[str, Any] | None = None  # until the model has been loaded, too
        self._connected = False
        model_parts[0].register_load_state_dict_post_hook(lambda *_: self._load_again())
        self.register_step_pre_hook(lambda *_: self._begin_step())
        for optimizer in self.optimizers:
            optimizer.warn_in_evaluation(model_parts[0])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave; once more behind the model, which torchtitan loads last: between two rounds
        each replica's own parameters are in it."""
        super().load_state_dict(state_dict)
        self._loaded = state_dict if any(optimizer.ever_rank_local for optimizer in self.optimizers) else None

    def _load_again(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            super().load_state_dict(loaded)

    def _begin_step(self) -> None:
        self._loaded = None
        if not self._connected and any(optimizer.takes_local_steps for optimizer in self.optimizers):
            self._connect()
        self._connected = True

    def _connect(self) -> None:
        """Has the Trainer that takes the first step validate and save the mean of all replicas."""
        found = frame_of(object, lambda frame: getattr(frame.f_locals.get("self"), "optimizers", None) is self)
        trainer = None if found is None else found.f_locals["self"]
        ours = {"optimizers": self.optimizers, "model": self.model_parts[0], "buffers": "mean"}
        if (validator := getattr(trainer, "validator", None)) is not None:
            validator.validate = means.of_the_mean(validator.validate, **ours)
        if (checkpointer := getattr(trainer, "checkpointer", None)) is not None:
            save = means.of_the_mean(_saving(checkpointer), **ours)
            # torchtitan's own manager says when it saves
            saves = getattr(checkpointer, "_should_save", lambda *_, **__: checkpointer.enable)
            checkpointer.save = lambda *when, **last: saves(*when, **last) and save(*when, **last)

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., Any]:
        made: Any = getattr(commopt, name, None)
        communicates = isinstance(made, type) and issubclass(made, PackedOptimizer)
        if not communicates:
            raise ValueError(f"optimizer_name: commopt's optimizers that communicate are taken, got {name!r}")
        return lambda groups, **settings: made(groups, process_group=self._mesh, **{"reduction": "sum"} | settings)

    @staticmethod
    def _build_impl_kwargs(config: Any) -> dict[str, Any]:
        return {}


def _saving(checkpointer: BaseCheckpointManager) -> Callable[..., bool]:
    """Its ``save()``, which has read the model when it returns."""
    save = checkpointer.save

    def save_and_stage(*when: Any, **last: Any) -> bool:
        saved = save(*when, **last)
        checkpointer.maybe_wait_for_staging()
        return saved

    return save_and_stage


def optimizers(opt_class: type[PackedOptimizer], **settings: Any) -> Optimizers.Config:
    """A ``Trainer.Config.optimizer`` of one group, all parameters.

    Args:
        opt_class: one of commopt that communicates, such as :class:`commopt.OneBitAdam` or :class:`commopt.DiLoCo`.
        settings: its arguments, learning rate and all.
    """
    name = opt_class.__name__
    groups = [ParamGroupConfig(pattern=".*", optimizer_name=name)]
    return Optimizers.Config(param_groups=groups, optimizer_factory_kwargs_by_name={name: settings})


def _take(name: str, value: Any, *taken: Any) -> None:
    if value not in taken:
        allowed = " or ".join(map(repr, taken))
        raise ValueError(f"commopt's optimizers in torchtitan take {name}={allowed}, got {value!r}")


def within_a_replica(parallelize_fn: Callable[..., Any]) -> Callable[..., Any]:
    """``parallelize_fn`` of a model of torchtitan, which shards over the ranks of a replica only: with replicas in its
    mesh, FSDP itself would average over them, in full precision, and nothing would be left to compress.

    It raises ValueError for stages of a pipeline, for experts on a mesh of their own, for another ``spmd_backend``, and
    if FSDP averages over replicas nevertheless.
    """

    def parallelize(model: nn.Module, *, parallel_dims: Any, **settings: Any) -> nn.Module:
        _take("parallelism.pipeline_parallel_degree", parallel_dims.pp, 1)
        _take("parallelism.expert_parallel_degree", parallel_dims.ep, 1)
        _take("parallelism.spmd_backend", parallel_dims.spmd_backend, "partial_dtensor")
        sharded = parallelize_fn(model, parallel_dims=OneReplica(parallel_dims), **settings)
        if has_replicas(sharded):
            raise ValueError(
                "commopt's optimizers in torchtitan average over the replicas, but parallelize_fn has FSDP do that: it "
                "is to leave dp_replicate out of FSDP's mesh where parallel_dims.dp_replicate_enabled is False"
            )
        _meshes[sharded] = parallel_dims.get_activated_mesh(["dp_replicate", "fsdp", "tp"])
        return sharded

    return parallelize

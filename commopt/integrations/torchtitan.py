"""torchtitan: two functions of a TrainSpec (0.2), for models that FSDP2 shards.

    TrainSpec(
        parallelize_fn=within_a_replica(parallelize_llama),
        build_optimizers_fn=optimizers(commopt.OneBitAdam, freeze_step=2000, max_grad_norm=1.0),
        ...,
    )

FSDP then shards inside a replica (``data_parallel_shard_degree``), tensor parallelism too, and the optimizer averages
over the replicas (``data_parallel_replicate_degree``). Set ``training.max_norm`` so high that it never clips: what
torchtitan takes is the norm of one replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer


def optimizers(opt_class: Callable[..., torch.optim.Optimizer], **settings: Any) -> Callable[..., OptimizersContainer]:
    """A ``build_optimizers_fn`` that makes optimizers of commopt.

    Learning rate, betas, eps and weight decay are those of torchtitan's config; ``settings`` are all others, and go
    before these. Its checkpoints keep residuals, and what else is a rank's own: they are in the optimizer's state.
    ``reduction`` is "sum": torchtitan divides the loss by the tokens of all ranks.

    Args:
        opt_class: with Adam's hyper-parameters, such as :class:`commopt.OneBitAdam` or :class:`commopt.DiLoCo`.
        settings: its other arguments.

    Raises ValueError, when it is called, for what does not go together: stages of a pipeline, experts on a mesh of
    their own, ``early_step_in_backward``, torchft, a model that FSDP does not shard.
    """

    def build(model_parts: list[Any], config: Any, parallel_dims: Any, ft_manager: Any = None) -> OptimizersContainer:
        given = {
            "lr": config.lr,
            "betas": (config.beta1, config.beta2),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "reduction": "sum",
            **settings,
        }
        _refuse(
            {
                "stages of a pipeline": parallel_dims.pp > 1,
                "experts on a mesh of their own (expert_parallel_degree)": parallel_dims.ep > 1,
                "early_step_in_backward": config.early_step_in_backward,
                "torchft": ft_manager is not None and ft_manager.enabled,
                "a model that FSDP does not shard (data_parallel_shard_degree=1)": not _is_sharded(model_parts),
            }
        )
        names = ("dp_replicate", "fsdp", "tp")
        mesh = parallel_dims.get_mesh([name for name in names if parallel_dims.get_optional_mesh(name) is not None])
        return OptimizersContainer(model_parts, opt_class, {"process_group": mesh, **given})

    return build


def within_a_replica(parallelize_fn: Callable[..., Any]) -> Callable[..., Any]:
    """``parallelize_fn`` of a model of torchtitan, which shards over the ranks of a replica only: with replicas in its
    mesh, FSDP itself would average over them, in full precision, and nothing would be left to compress."""

    def parallelize(model: Any, parallel_dims: Any, *args: Any, **kwargs: Any) -> Any:
        return parallelize_fn(model, _OneReplica(parallel_dims), *args, **kwargs)

    return parallelize


class _OneReplica:
    """``parallel_dims`` as of a run without replicas; its meshes are the same."""

    dp_replicate, dp_replicate_enabled = 1, False

    def __init__(self, parallel_dims: Any) -> None:
        self._all = parallel_dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all, name)


def _is_sharded(model_parts: list[Any]) -> bool:
    return any(isinstance(p, DTensor) for part in model_parts for p in part.parameters())


def _refuse(cases: dict[str, bool]) -> None:
    for case, there in cases.items():
        if there:
            raise ValueError(f"commopt's optimizers in torchtitan take sharded models in one part, not {case}")

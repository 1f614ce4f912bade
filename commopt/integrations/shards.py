"""Models that a trainer shards: that there are replicas, or what is said where there are none."""

from __future__ import annotations

import logging
from typing import Any

from commopt.state.packed import PackedOptimizer

logger = logging.getLogger("commopt")


def has_no_replicas(optimizer: PackedOptimizer) -> bool:
    """True if parameters are sharded over so many ranks that no other one has the same piece of any of them."""
    buckets = optimizer.buckets
    alone = all(bucket.replicas.world_size == 1 for bucket in buckets)
    return optimizer.topology.world_size > 1 and alone and any(bucket.sharded for bucket in buckets)


def tell_of_shards(mesh: Any, optimizer: PackedOptimizer) -> None:
    """Warns, on rank 0, of a model whose replicas would be the ranks of Lightning's own ``mesh`` that it is sharded
    over."""
    names = getattr(mesh, "mesh_dim_names", None)
    if optimizer.topology.rank == 0 and names == ("data_parallel", "tensor_parallel"):
        logger.warning(
            "%s has nothing to average, so it compresses nothing: configure_model() shards the model over "
            'self.device_mesh["data_parallel"], all %d ranks, and FSDP2 averages in full precision. For one bit '
            'between replicas: fully_shard(..., mesh=self.device_mesh["tensor_parallel"]) in configure_model(), and '
            "ModelParallelStrategy(data_parallel_size=replicas, tensor_parallel_size=ranks that share one). Or "
            "commopt.compress_gradients(model, ...) with an optimizer of torch compresses FSDP2's own exchanges.",
            type(optimizer).__name__, mesh.size(0),
        )  # fmt: skip


class OneReplica:
    """torchtitan's ``parallel_dims`` as of a run without replicas, so that FSDP averages over none; its other meshes
    are the same."""

    dp_replicate, dp_replicate_enabled = 1, False

    def __init__(self, parallel_dims: Any) -> None:
        self._all = parallel_dims

    def get_activated_mesh(self, axes: list[str]) -> Any:
        return self._all.get_activated_mesh([axis for axis in axes if axis != "dp_replicate"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._all, name)

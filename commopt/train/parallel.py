"""Models that several ranks hold together: the device mesh of a run, and how a model is cut over it.

    (replicate, shard, tensor)    rank = (replica * shards + shard) * tensors + tensor

Over ``tensor``, ranks compute each layer together (:func:`tensor_style`); over ``shard``, FSDP2 cuts what each of them
has, block by block; over ``replicate``, a commopt optimizer exchanges what it compresses. With a torch optimizer, FSDP2
has both of the others (HSDP). The model is built whole, from the same seed on every rank, and then cut: it starts from
the same weights on any mesh.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from commopt.sharding import local
from commopt.train.config import Config, ParallelConfig
from commopt.train.errors import ConfigError
from commopt.train.models import Cut
from commopt.train.world import World

MESH = ("replicate", "shard", "tensor")


def mesh_shape(config: ParallelConfig, ranks: int) -> tuple[int, int, int]:
    """Number of ranks along each dimension. Raises ConfigError if they do not make up all ranks."""
    inside = config.shard * config.tensor
    replicas = config.replicate or ranks // inside
    if replicas * inside != ranks or not replicas:
        given = "" if config.replicate is None else f"parallel.replicate={config.replicate}, "
        raise ConfigError(
            f"{given}parallel.shard={config.shard}, parallel.tensor={config.tensor} is not allowed with {ranks} ranks: "
            + ("their product must divide them" if config.replicate is None else "their product must be that number")
        )
    return replicas, config.shard, config.tensor


@contextlib.contextmanager
def open_mesh(config: Config, world: World) -> Iterator[World]:
    """``world`` with the mesh that the config asks for; as it is, where it asks for none."""
    if not config.parallel.on_mesh:
        yield world
        return
    shape = mesh_shape(config.parallel, world.size)
    if config.comm.ranks_per_node != 1 and shape[1] < world.size:
        raise ConfigError(
            f"comm.ranks_per_node={config.comm.ranks_per_node} is not allowed with parallel.shard={shape[1]} and "
            f"{world.size} ranks: FSDP2 must cut the model over all of them, or the replicas are the nodes (1)"
        )
    alone = not dist.is_initialized()
    if alone:  # a mesh is of process groups, even of one rank
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield replace(world, mesh=make_mesh(shape, MESH, world.device, timedelta(seconds=config.comm.timeout)))
    finally:
        if alone:
            dist.destroy_process_group()


def make_mesh(shape: Sequence[int], names: Sequence[str], device: torch.device, timeout: timedelta) -> DeviceMesh:
    """A mesh of all ranks. The groups are made here, for init_device_mesh knows no timeout."""
    ranks, groups = torch.arange(math.prod(shape)).view(*shape), []
    for dim in range(len(shape)):
        rows = ranks.movedim(dim, -1).reshape(-1, shape[dim]).tolist()
        groups.append(dist.new_subgroups_by_enumeration(rows, timeout)[0])
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(names))


def shard(model: Any, mesh: DeviceMesh, hybrid: bool) -> None:
    """Cuts the model over the mesh, in place. With ``hybrid``, FSDP2 averages over the replicas too."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import parallelize_module

    if mesh["tensor"].size() > 1:
        plan = {name: tensor_style(across) for name, across in model.cuts.items()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
    over = mesh["replicate", "shard"] if hybrid else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=over)
    # FSDP2 would keep the root's weights after a forward without backward, and the next step would be on old ones
    fully_shard(model, mesh=over, reshard_after_forward=True)


def share_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives all ranks of a tensor group the first one's gradient of what each of them has, such as norms: kernels that
    add in no fixed order give each of them another, and the copies would drift apart."""
    if mesh["tensor"].size() == 1:
        return
    group = mesh["tensor"].get_group()
    first = dist.get_global_rank(group, 0)
    pieces = [local(p.grad) for p in model.parameters() if p.grad is not None and _is_copied(p)]
    works = [dist.broadcast(piece, first, group, async_op=True) for piece in pieces if piece.numel()]
    for work in works:
        work.wait()


def _is_copied(p: Any) -> bool:
    """True if the ranks of a tensor group have the same of ``p``: its mesh lacks them, or it is whole over them."""
    names = p.device_mesh.mesh_dim_names
    return "tensor" not in names or p.placements[names.index("tensor")].is_replicate()


def tensor_style(cut: Cut) -> Any:
    """A style for parallelize_module: as torch's ColwiseParallel ("out") and RowwiseParallel ("in"), and for the
    projections of GPT-2 as well (transformers' Conv1D, whose weight is transposed)."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle

    def partition(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        dim = int((cut == "in") == isinstance(module, nn.Linear))  # of the weight: Linear's is (out, in)
        for name, p in list(module.named_parameters(recurse=False)):
            whole = name == "bias" and cut == "in"
            place = Replicate() if whole else Shard(0 if name == "bias" else dim)
            piece = distribute_tensor(p.detach(), mesh, [place])
            module.register_parameter(name, nn.Parameter(piece, p.requires_grad))

    def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        place = Replicate() if cut == "out" else Shard(-1)
        return (DTensor.from_local(inputs[0], mesh, [place], run_check=False), *inputs[1:])

    def leave(_: nn.Module, out: Any, mesh: DeviceMesh) -> Tensor:
        result: Tensor = (out if cut == "out" else out.redistribute(placements=[Replicate()])).to_local()
        return result

    class Style(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            return distribute_module(module, device_mesh, partition, enter, leave)  # type: ignore[arg-type]

    return Style()

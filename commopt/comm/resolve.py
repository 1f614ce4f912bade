"""From the arguments of an optimizer to a backend."""

from __future__ import annotations

import logging
import os
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from commopt.comm.backend import Backend, LocalBackend, check_backend
from commopt.comm.mesh import MeshBackend
from commopt.comm.torch import TorchBackend
from commopt.sharding import is_sharded, left_dims, tensors_in

logger = logging.getLogger("commopt")


class NobodyElse(LocalBackend):
    """One rank alone because there was no process group, and not because somebody has asked for it."""

    told = False
    """True if it was said that a launcher has started others."""


def resolve_backend(process_group: Any = None, backend: Backend | None = None, params: Any = ()) -> Backend:
    """The backend that an optimizer's arguments stand for.

    ``backend`` as given; else the process group or mesh given; else the mesh that sharded ``params`` are on a slice of;
    else the default process group; else one rank alone, until :func:`refuse_if_left_out` finds a process group.

    Raises:
        ValueError: if both are given, ``backend`` lacks a collective, or sharded ``params`` are on slices of several
            meshes.
    """
    if backend is not None:
        if process_group is not None:
            raise ValueError(f"give either process_group or backend, not both: got {process_group!r} and {backend!r}")
        check_backend(backend)
        return backend
    if isinstance(process_group, DeviceMesh):
        return MeshBackend(process_group)
    if process_group is None and (mesh := _mesh_of(params)) is not None:
        return MeshBackend(mesh)
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return TorchBackend(process_group)
    return NobodyElse()


def _mesh_of(params: Any) -> DeviceMesh | None:
    """The mesh that the sharded ones of an optimizer's ``params`` are on a slice of, or those of the optimizer that an
    outer one is given; None if there are none. Of a model that FSDP2 has averaged over replicas, that of these and the
    shards."""
    if isinstance(params, torch.optim.Optimizer):
        params = params.param_groups
    cut = [p for p in tensors_in(params) if is_sharded(p)]
    meshes: list[DeviceMesh] = [_root_of(p.device_mesh) for p in cut]
    if all(left_dims(p) and p.device_mesh.size() < mesh.size() for p, mesh in zip(cut, meshes)):
        meshes = [p.device_mesh for p in cut]  # with the replicas that FSDP2 averaged over, and no further ranks
    if any(mesh != meshes[0] for mesh in meshes):
        raise ValueError(
            f"the parameters are on slices of several meshes, such as {meshes[0]} and "
            f"{next(mesh for mesh in meshes if mesh != meshes[0])}; give the one of all ranks, process_group=mesh, and "
            'parameter groups a "mesh" of their own'
        )
    return meshes[0] if meshes else None


def _root_of(mesh: Any) -> DeviceMesh:
    """The mesh that ``mesh`` is a slice of."""
    if hasattr(mesh, "_get_root_mesh"):
        return cast(DeviceMesh, mesh._get_root_mesh())
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.10

    return cast(DeviceMesh, _mesh_resources.get_root_mesh(mesh))


def refuse_if_left_out(backend: Backend, name: str) -> None:
    """Makes sure that no optimizer continues alone because it was made too early. Warns once if there is no process
    group, though a launcher such as torchrun has started several ranks.

    Raises:
        RuntimeError: ``backend`` is one rank alone because there was no process group when the optimizer ``name`` was
            made, and now there is one of several ranks.
    """
    if not isinstance(backend, NobodyElse):
        return
    if not (dist.is_available() and dist.is_initialized()):
        _tell_of_others(backend, name)
        return
    ranks = dist.get_world_size()
    if ranks > 1:
        raise RuntimeError(
            f"{name} was made before torch.distributed.init_process_group(), so it knows nothing of the other "
            f"{ranks - 1} ranks: make it after that call, or with backend=commopt.comm.LocalBackend() if each rank "
            "shall train alone"
        )


def _tell_of_others(backend: NobodyElse, name: str) -> None:
    if backend.told:
        return
    backend.told = True
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks.isdecimal() and int(ranks) > 1:
        logger.warning(
            "%s: this rank trains alone, though WORLD_SIZE is %s: call torch.distributed.init_process_group() before "
            "it is made, or give it backend=commopt.comm.LocalBackend() if each rank shall train alone",
            name, ranks,
        )  # fmt: skip

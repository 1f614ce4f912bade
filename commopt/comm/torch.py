"""The backend over torch.distributed: NCCL, Gloo and whatever else a process group has below it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from commopt.comm.backend import Backend, LocalBackend, Work

# torch 2.13 renames the function, and warns of the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchBackend:
    """The ranks of a ``torch.distributed`` process group.

    Args:
        group: a ProcessGroup, a 1-d DeviceMesh, or None for the default process group.

    Raises:
        ValueError: for a mesh of more than one dimension (slice it first: ``mesh["replicate"]``), for something that is
            neither a group nor a mesh, and on a rank that the group does not contain.
        RuntimeError: without an initialised process group.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("TorchBackend needs torch.distributed.init_process_group() first")
        self.group = _process_group(group)
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)

    def all_reduce(self, x: Tensor) -> Any:
        x.div_(self.world_size)
        return dist.all_reduce(x, group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Any:
        return dist.all_to_all_single(out, inp, group=self.group, async_op=True)

    def all_gather(self, out: Tensor, inp: Tensor) -> Any:
        return _all_gather(out.view(-1), inp, group=self.group, async_op=True)

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return dist.broadcast(x, dist.get_global_rank(self.group, src), group=self.group, async_op=True)


def _process_group(group: Any) -> dist.ProcessGroup:
    if group is None:
        default = dist.group.WORLD
        assert default is not None
        return default
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the device mesh must have 1 dimension, got {group.ndim} {group.mesh_dim_names or ''}; "
                'give the one over which replicas differ, such as mesh["replicate"]'
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} of the world is not a member of the process group given")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"process_group must be a ProcessGroup, a 1-d DeviceMesh or None, got {group!r}")
    return group


def resolve_backend(process_group: Any = None, backend: Backend | None = None) -> Backend:
    """The backend that an optimizer's arguments stand for.

    ``backend`` as given; else the process group or mesh given; else the default process group; else one rank alone.

    Raises:
        ValueError: if both are given, or ``backend`` lacks a verb.
    """
    if backend is not None:
        if process_group is not None:
            raise ValueError("give either process_group or backend, not both")
        missing = [name for name in _VERBS if not hasattr(backend, name)]
        if missing:
            raise ValueError(f"backend {backend!r} lacks {', '.join(missing)} (see commopt.comm.Backend)")
        return backend
    if process_group is not None or (dist.is_available() and dist.is_initialized()):
        return TorchBackend(process_group)
    return LocalBackend()


_VERBS = ("rank", "world_size", "all_reduce", "all_to_all", "all_gather", "broadcast")

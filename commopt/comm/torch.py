"""The backend over torch.distributed: NCCL, Gloo and whatever else a process group has below it."""

from __future__ import annotations

import atexit
import secrets
import threading
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from commopt.comm.backend import Work

# torch 2.13 renames the function, and warns of the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

AT_EXIT = 2.0
"""Seconds that a process waits at its end for collectives which other ranks have not joined."""

_holders: weakref.WeakSet[Any] = weakref.WeakSet()
"""What holds groups: a group ends, and its threads with it, when nothing holds it any more."""


@atexit.register
def _let_go() -> None:
    """Ends the groups while Python still runs.

    A thread of Gloo frees the tensors of a collective after that is done. If Python has begun to shut down by then,
    that ends the process with SIGABRT, after all its work.
    """

    def release() -> None:
        for holder in list(_holders):
            holder.group = None

    thread = threading.Thread(target=release, daemon=True)
    with suppress(RuntimeError):  # some versions of Python start no more threads here
        thread.start()
        thread.join(AT_EXIT)


class TorchBackend:
    """The ranks of a ``torch.distributed`` process group.

    Args:
        group: a ProcessGroup, a 1-d DeviceMesh, or None for the default process group.

    Raises:
        ValueError: for a mesh of more than one dimension (slice it first: ``mesh["replicate"]``; one of nodes is for
            :class:`NodesBackend`), for something that is neither a group nor a mesh, and on a rank that the group
            does not contain.
        RuntimeError: without an initialised process group.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("TorchBackend needs torch.distributed.init_process_group() first")
        self.group = _process_group(group)
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        _holders.add(self)

    @property
    def devices(self) -> tuple[str, ...]:
        """NCCL sends from GPUs only."""
        return tuple(sorted(device.type for device in self.group._device_types))

    def all_reduce(self, x: Tensor) -> Any:
        x.div_(self.world_size)
        return dist.all_reduce(x, group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Any:
        return dist.all_to_all_single(out, inp, group=self.group, async_op=True)

    def all_gather(self, out: Tensor, inp: Tensor) -> Any:
        return _all_gather(out.view(-1), inp, group=self.group, async_op=True)

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return dist.broadcast(x, dist.get_global_rank(self.group, src), group=self.group, async_op=True)

    def lines(self, n: int) -> list[GlooLine]:
        """``n`` lines of the same ranks and timeout; none unless this group is Gloo.

        NCCL has no use for them: waiting for it does not block, and groups whose collectives start in different orders
        on different ranks could block each other.
        """
        if self.world_size == 1 or dist.get_backend(self.group) != "gloo":
            return []
        name = torch.tensor([secrets.randbits(62)])  # not a count of groups: ranks may have different numbers of them
        self.broadcast(name).wait()
        store = dist.PrefixStore(f"commopt/{name.item()}", dist.distributed_c10d._get_process_group_store(self.group))
        timeout = self.group._get_backend(torch.device("cpu")).options._timeout
        return [GlooLine(dist.PrefixStore(str(i), store), self.rank, self.world_size, timeout) for i in range(n)]


class GlooLine:
    """Some of the ranks of a Gloo group once more, with connections of their own.

    Collectives that are in flight together take ten times as long in one Gloo group as in several.

    Args:
        store: where the ranks find each other; no other group uses it.
        rank, world_size: of this rank, and how many there are.
        timeout: of each collective.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self.group: Any = dist.ProcessGroupGloo(store, rank, world_size, timeout)
        self.rank = rank
        self.world_size = world_size
        _holders.add(self)

    def all_reduce(self, x: Tensor) -> Any:
        x.div_(self.world_size)
        return self.group.allreduce([x])

    def all_to_all(self, out: Tensor, inp: Tensor) -> Any:
        return self.group.alltoall_base(out, inp, [], [])

    def all_gather(self, out: Tensor, inp: Tensor) -> Any:
        # the same bytes as Gloo's own, which takes more than twice as long
        return self.group.alltoall_base(out, inp.expand(self.world_size, -1).contiguous(), [], [])

    def broadcast(self, x: Tensor, src: int = 0) -> Any:
        return self.group.broadcast(x, src)


def _process_group(group: Any) -> dist.ProcessGroup:
    if group is None:
        default = dist.group.WORLD
        assert default is not None
        return default
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the device mesh must have 1 dimension, or 2 for nodes of several ranks, got {group.ndim} "
                f'{group.mesh_dim_names or ""}; give the one over which replicas differ, such as mesh["replicate"]'
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} of the world is not a member of the process group given")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"process_group must be a ProcessGroup, a 1-d DeviceMesh or None, got {group!r}")
    return group

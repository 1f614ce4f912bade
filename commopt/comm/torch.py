"""The backend over torch.distributed: NCCL, Gloo and whatever else a process group has below it."""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from commopt.comm.backend import OfWorld, Work, message_device
from commopt.comm.gloo import GlooChannel, GlooWork, connect, exchange_sizes, holders
from commopt.comm.meeting import Meeting, StoreMeeting
from commopt.comm.pipeline import wait

logger = logging.getLogger("commopt")

# torch 2.13 renames the function, and warns of the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_opened: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of times that this process has opened connections for each process group."""
_twins: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Of each process group that is not Gloo, the one that we use in its place."""


class TorchBackend:
    """The ranks of a ``torch.distributed`` process group.

    Nothing is sent over the group itself but where connections of our own are opened, by the first collective: whatever
    else it is used for may come in any order relative to ours. Over Gloo each backend has a group of its own, over
    others all backends of a group share one.

    Args:
        group: a ProcessGroup, a 1-d DeviceMesh, or None for the default process group.

    Raises:
        ValueError: for a mesh of more than one dimension (that is for :class:`MeshBackend`), for something that is
            neither a group nor a mesh, and on a rank that the group does not contain.
        RuntimeError: without an initialised process group.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        _check_group(group)
        if not dist.is_initialized():
            raise RuntimeError("TorchBackend needs torch.distributed.init_process_group() first")
        self.group = _process_group(group)
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)
        self._own: GlooChannel | GroupChannel | None = None
        self._meeting: Meeting | None = None
        holders.add(self)

    @property
    def devices(self) -> tuple[str, ...]:
        """NCCL sends from GPUs only."""
        return tuple(sorted([device.type for device in self.group._device_types]))

    def all_reduce(self, x: Tensor) -> Any:
        return self.own().all_reduce(x)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Any:
        return self.own().all_to_all(out, inp)

    def all_gather(self, out: Tensor, inp: Tensor) -> Any:
        return self.own().all_gather(out, inp)

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return self.own().broadcast(x, src)

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Any:
        return self.own().exchange(out, inp, dst, src)

    def channels(self, n: int) -> list[GlooChannel]:
        """``n`` channels of the same ranks and timeout; none unless this group is Gloo.

        NCCL has no use for them: waiting for it does not block, and groups whose collectives start in different orders
        on different ranks could block each other.
        """
        if self.world_size == 1 or not self._is_gloo():
            return []
        return self._connect(n)

    def control(self) -> GlooChannel | TorchBackend:
        """The same ranks over a Gloo channel, for small messages on the CPU; itself where torch has no Gloo."""
        if self.world_size == 1 or not dist.is_gloo_available():
            return self
        return self._connect(1)[0]

    def own(self) -> GlooChannel | GroupChannel:
        """Group that the collectives go over. All ranks must call this, or a collective, at the same point the first
        time."""
        if self._own is None:
            if self.world_size == 1:
                self._own = GroupChannel(self.group)
            elif self._is_gloo():
                self._own = self._connect(1, _OverGroup(self))[0]
            else:
                self._own = _twin(self)
        return self._own

    def _is_gloo(self) -> bool:
        return dist.get_backend(self.group) == "gloo"

    def _connect(self, n: int, over: Any = None) -> list[GlooChannel]:
        """``n`` Gloo channels, on whose name the ranks agree ``over`` some connection there is."""
        # not a count of groups: ranks may have different numbers of them
        name = torch.tensor([secrets.randbits(62)], device=message_device(self))
        names = name.new_empty(self.world_size, 1)
        wait((over or self.own()).all_gather(names, name), "opening connections between the ranks")
        store = dist.PrefixStore(f"commopt/{names[0].item()}", _store(self.group))
        meeting = self._meeting or _meeting(self.group, dist.PrefixStore("at", store))
        self._meeting = meeting
        channels = [f"{names[0].item()}/{i}" for i in range(n)]
        return connect(dist.PrefixStore("commopt", _store(self.group)), meeting, channels, timeout_of(self.group))


class GroupChannel:
    """The collectives over a process group as it is."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group: Any = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        holders.add(self)

    def all_reduce(self, x: Tensor) -> Any:
        x.div_(self.world_size)
        return dist.all_reduce(x, group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Any:
        return dist.all_to_all_single(out, inp, group=self.group, async_op=True)

    def all_gather(self, out: Tensor, inp: Tensor) -> Any:
        return _all_gather(out.view(-1), inp, group=self.group, async_op=True)

    def broadcast(self, x: Tensor, src: int = 0) -> Any:
        return dist.broadcast(x, dist.get_global_rank(self.group, src), group=self.group, async_op=True)

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Any:
        # of NCCL one send and one receive, as it leaves out rows without elements; isend() and irecv() would need all
        # ranks the first time, also those that send to themselves, which they refuse
        sizes = exchange_sizes(inp.numel(), dst, src, self.world_size)
        return dist.all_to_all_single(out.view(-1), inp.view(-1), *sizes, group=self.group, async_op=True)


class _OverGroup(GroupChannel):
    """The Gloo group that a backend was given, for what opens connections of its own."""

    def __init__(self, backend: TorchBackend) -> None:
        super().__init__(backend.group)
        self._number = _opened.get(backend.group, 0)
        _opened[backend.group] = self._number + 1
        self._meeting = _meeting(backend.group, dist.PrefixStore("commopt/opening", _store(backend.group)))
        self._meeting.started["opening"] = self._number + 1

    def all_gather(self, out: Tensor, inp: Tensor) -> GlooWork:
        seconds = timeout_of(self.group).total_seconds()
        return GlooWork([super().all_gather(out, inp)], self._meeting, "opening", self._number, seconds)


def _meeting(group: dist.ProcessGroup, store: dist.Store) -> StoreMeeting:
    return StoreMeeting(store, dist.get_rank(group), dist.get_process_group_ranks(group))


def _store(group: dist.ProcessGroup) -> dist.Store:
    return dist.distributed_c10d._get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Time that a collective of ``group`` may take."""
    return _options(group)._timeout


def _options(group: dist.ProcessGroup) -> Any:
    kinds = {device.type: device for device in group._device_types}
    return group._get_backend(kinds.get("cuda") or next(iter(kinds.values()))).options


def _twin(backend: TorchBackend) -> GroupChannel:
    """Another process group of the same ranks, backend, timeout and options; made once for each group."""
    group = backend.group
    if group not in _twins:
        # torch names the new group by how many a process has; where that differs, the ranks would not meet
        count = torch.tensor([_groups_here()], device=message_device(backend))
        counts = count.new_empty(backend.world_size, 1)
        wait(GroupChannel(group).all_gather(counts, count), "opening connections between the ranks")
        if counts.unique().numel() > 1:
            if backend.rank == 0:
                logger.warning(
                    "the ranks have made different numbers of process groups, %s, so that no other can be made for the "
                    "optimizers' messages: use the group given for nothing else, or make groups on all ranks alike",
                    counts.flatten().tolist(),
                )
            return GroupChannel(group)
        _twins[group] = second_group(group)
    return GroupChannel(_twins[group])


def second_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another process group of the same ranks, in the same order, with the same backend, timeout and options; all of
    them, and nobody else, must call this at the same point."""
    options = _options(group)
    kind = getattr(dist, "ProcessGroupNCCL", None)
    mine = None
    if kind is not None and isinstance(options, kind.Options):
        mine = kind.Options(is_high_priority_stream=options.is_high_priority_stream)
        mine.config = options.config
        mine._timeout = options._timeout
    ranks = dist.get_process_group_ranks(group)
    # a torch that does not know this argument always sorts
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    with _of_its_ranks_alone():
        return dist.new_group(
            ranks,
            timeout=options._timeout,
            backend=dist.get_backend(group),
            pg_options=mine,
            use_local_synchronization=True,
            **order,
        )


@contextlib.contextmanager
def _of_its_ranks_alone() -> Iterator[None]:
    """A group that is made meanwhile needs its own ranks only. Of a default group that is bound to a device
    (``init_process_group(device_id=)``) torch would split it, which takes all ranks of that. From 2.14 on torch counts
    it among those that all ranks make, and names these by the count, so that they would not meet in the next one."""
    default, world = _process_group(None), dist.distributed_c10d._world
    bound, count = default.bound_device_id, world.group_count
    if bound is not None:
        default.bound_device_id = None
    world.group_count = -_groups_here()  # torch 2.14 has it in this one's name, where older ones have their groups here
    try:
        yield
    finally:
        world.group_count = count
        if bound is not None:
            default.bound_device_id = bound


def is_of_processes(backend: Any) -> bool:
    """True if ``backend`` is a process group's, or was one's that has been destroyed."""
    return isinstance(getattr(backend, "world", backend), TorchBackend)


def ranks_of(backend: Any) -> list[int] | None:
    """The ranks of the default process group that ``backend`` is of; None if it is no process group's."""
    return dist.get_process_group_ranks(getattr(backend, "world", backend).group) if is_of_processes(backend) else None


def numbers_in_world(backend: Any) -> Sequence[int]:
    """The numbers that a user knows the ranks of ``backend`` by: its ``numbers``, by rank, if it has such (over MPI
    those in ``COMM_WORLD``); those of the default process group, if it is a process group's, or a channel's of one;
    else its own."""
    size = backend.world_size
    while hasattr(backend, "inner") or isinstance(backend, OfWorld):
        backend = backend.world if isinstance(backend, OfWorld) else backend.inner
    numbers: Sequence[int] | None = getattr(backend, "numbers", None)
    if numbers is not None:
        return numbers
    if isinstance(backend, GlooChannel):
        return backend.meeting.ranks
    with contextlib.suppress(Exception):  # the group has been destroyed
        if isinstance(backend, GroupChannel):
            return dist.get_process_group_ranks(backend.group)
        return ranks_of(backend) or range(size)
    return range(size)


def group_of_ranks(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group of these ranks of the default one, with its backend and timeout; all of them, and nobody else,
    must call this at the same point.

    Raises:
        ValueError: on every rank that sees a difference, if they have made different numbers of process groups: torch
            names the new one by it, and they would not meet.
    """
    same_on_all(ranks, f"list of {_groups_here()} process groups (new_group() is for all ranks alike)")
    timeout = timeout_of(_process_group(None))
    with _of_its_ranks_alone():
        return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)


def _groups_here() -> int:
    """Number of process groups that this process has made, as torch counts them."""
    return len(dist.distributed_c10d._world.pg_names)


def same_on_all(ranks: Sequence[int], what: str) -> None:
    """Makes sure that all ``ranks`` say the same; they call this equally often of these ranks, and some of them may
    have called it of others.

    Raises:
        ValueError: on every rank that sees a difference.
        RuntimeError: a rank has not called it within the timeout of the store.
    """
    store, mine = dist.distributed_c10d._get_default_store(), dist.get_rank()
    those = f"commopt/same/{zlib.crc32(str(sorted(ranks)).encode())}"
    number = store.add(f"{those}/{mine}", 1)  # of this world: a process may have been in others before
    store.set(f"{those}/{number}/{mine}", what)
    for rank in ranks:
        theirs = store.get(f"{those}/{number}/{rank}").decode()
        if theirs != what:
            raise ValueError(f"ranks differ in what they were given: rank {mine} has a {what}, rank {rank} a {theirs}")


def _check_group(group: Any) -> None:
    """Raises ValueError unless ``group`` is what can stand for ranks, or None."""
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    if isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        return
    hint = ""
    if isinstance(group, str):
        hint = f": to choose what torch.distributed uses, call init_process_group({group!r})"
    elif hasattr(group, "all_reduce"):
        hint = ": give a backend as backend="
    elif isinstance(group, (int, list, tuple, range)):
        hint = ": the group of some ranks is torch.distributed.new_group([0, 1, ...]), which all ranks call"
    raise ValueError(f"process_group must be a ProcessGroup, a DeviceMesh or None, got {group!r}{hint}")


def _process_group(group: Any) -> dist.ProcessGroup:
    if group is None:
        default = dist.group.WORLD
        assert default is not None
        return default
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"the device mesh of a TorchBackend must have 1 dimension, got {group.ndim} "
                f"{group.mesh_dim_names or ''}; all of a mesh is for a MeshBackend"
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} of the world is not a member of the process group given")
    return group

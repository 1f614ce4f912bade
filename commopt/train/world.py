"""The ranks of a run, and how they agree.

Control messages (errors, stop flags, losses) go over a backend of their own (a Gloo group, or a communicator of MPI),
so that they never wait for the GPU and never mix with the optimizer's traffic. Every method is a collective: all ranks
call it, in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from commopt.comm import Backend, CollectiveError, MPIBackend, NodesBackend, TorchBackend, wait
from commopt.comm.mpi import load_mpi
from commopt.train import started
from commopt.train.backend import backend_class, make_backend, ranks_per_node
from commopt.train.background import Background
from commopt.train.config import CommConfig
from commopt.train.errors import ConfigError, RankError, UserError, explain
from commopt.train.join import join
from commopt.train.stop import Stopped, StopSignal

log = logging.getLogger(__name__)
T = TypeVar("T")
BEATS = (0.01, 1.0)
"""Seconds between two signs of life while rank 0 does what takes long: at first, and at most."""


@dataclass(frozen=True)
class World:
    """This process among the others: ``rank`` in [0, size), its device, what control messages go over (None when
    alone), what optimizers talk over (None for the default process group), and the mesh of ranks that hold models
    together (None where each holds a whole one)."""

    rank: int
    size: int
    device: torch.device
    control: Backend | None = None
    backend: Backend | None = None
    stop: StopSignal | None = None
    """True if this rank was told to stop."""
    mesh: DeviceMesh | None = None

    @property
    def same_samples(self) -> int:
        """Number of ranks that follow each other and get the same samples."""
        return 1 if self.mesh is None else self.mesh["tensor"].size()

    @property
    def readers(self) -> int:
        """Number of ranks, of those that get the same samples one."""
        return self.size // self.same_samples

    @property
    def reader(self) -> int:
        """This rank among them, in [0, readers)."""
        return self.rank // self.same_samples

    @property
    def wished(self) -> bool:
        """True if this rank was told to stop."""
        return self.stop is not None and self.stop.requested

    @property
    def is_main(self) -> bool:
        """True if this rank does what is done once."""
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """One (picklable) item per rank, in rank order, on every rank."""
        if self.control is None:
            return [item]
        data = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        sizes = [int(size) for size in self._rows(torch.tensor([data.numel()]))]
        rows = self._rows(torch.nn.functional.pad(data, (0, max(sizes) - data.numel())))
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes)]

    def table(self, values: list[float]) -> Tensor:
        """Table of every rank's values, a row each, in float64."""
        return self._rows(torch.tensor(values, dtype=torch.float64))

    def reduce(self, values: list[float]) -> list[float]:
        """Element-wise sum over ranks, in float64."""
        return self.table(values).sum(0).tolist()

    def any(self, flag: bool) -> bool:
        """True if the flag is set on any rank."""
        return bool(self._rows(torch.tensor([flag])).any())

    def _rows(self, x: Tensor) -> Tensor:
        """Every rank's x, one below the other."""
        rows = x.new_empty(self.size, *x.shape)
        if self.control is None:
            return rows.copy_(x)
        where = "a message between the ranks"
        try:
            work = self.control.all_gather(rows, x)
        except RuntimeError as error:
            raise CollectiveError(f"{where}: {error}") from error
        wait(work, where)
        return rows

    def together(self, work: Callable[[], T], name_rank: bool = True) -> T:
        """Run ``work`` on every rank and return its own result; if it fails anywhere, all raise, and none hangs.

        Where it fails on some ranks only, the error names the first, unless ``name_rank`` is off.
        """
        result, error = None, None
        try:
            result = work()
        except (CollectiveError, Stopped):
            raise  # there is nobody to tell, or all know
        except Exception as caught:
            error = caught
        reports = self.gather(_portable(error))
        if error is not None and not isinstance(error, (UserError, OSError)):
            raise error  # a bug: this rank shows its traceback (or the ranks have lost each other)
        failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if failed:
            rank, (kind, text) = failed[0]
            raise kind(text + (f" (rank {rank})" if name_rank and len(failed) < self.size else "")) from error
        return result  # type: ignore[return-value]

    def once(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 alone; every rank gets its (picklable) result or raises its error."""
        mine = self.together(lambda: work() if self.is_main else None, name_rank=False)
        return self.gather(mine)[0]  # type: ignore[return-value]

    def patiently(self, work: Callable[[Callable[[], None]], T]) -> T:
        """As :meth:`once`, for what may take longer than the timeout of a message: the ranks go on telling each other
        that they are there.

        ``work`` gets a function to call now and then, which raises when a rank was told to stop; that is then raised,
        as Stopped, on all ranks.
        """
        task, pause = (Background(work) if self.is_main else None), BEATS[0]
        while True:
            ready = task is None or task.wait(pause)
            rows = self._rows(torch.tensor([ready, self.wished]))
            if bool(rows[:, 1].any()):
                if task is not None:
                    task.cancel()
                raise Stopped("stopped by a signal, before the first step")
            if bool(rows[0, 0]):
                return self.once(lambda: task.result())  # type: ignore[union-attr]
            pause = min(2 * pause, BEATS[1])

    def heed(self) -> None:
        """Raise Stopped on all ranks if any was told to stop."""
        if self.any(self.wished):
            raise Stopped("stopped by a signal, before the first step")


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """Error that other ranks raise for an error here: the same for a user's mistake, RankError for anything else."""
    if error is None:
        return None
    if isinstance(error, UserError):
        return type(error), str(error)
    return RankError, explain(error)


def is_loss_of_contact(error: Exception) -> bool:
    """True if an error of torch says that another rank has gone or does not answer."""
    words = ("gloo/transport", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return not isinstance(error, (UserError, CollectiveError)) and (
        isinstance(error, dist.DistError) or any(word in str(error) for word in words)
    )


def _device(local_rank: int) -> torch.device:
    """This process' device."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ConfigError(f"LOCAL_RANK={local_rank}, but this machine has {count} GPUs: start one process per GPU")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def open_world(config: CommConfig | None = None, stop: StopSignal | None = None) -> Iterator[World]:
    """Join the other ranks: those of MPI where the config says so, else those of torchrun's environment.

    Raises:
        ConfigError: for a backend that cannot be had here, or that knows other ranks than the launcher.
        Stopped: on all ranks, if any of them was told to stop meanwhile.
        commopt.comm.CollectiveError: not all ranks have come within ``comm.timeout``.
    """
    config, stop = config or CommConfig(), stop or StopSignal()
    with _mpi_world(config) if config.backend == "mpi" else _torch_world(config, stop) as world:
        world = replace(world, stop=stop)
        world.heed()
        yield world


def _places(config: CommConfig, world: World) -> int:
    """Number of ranks that make a node."""
    local_sizes = world.gather(started.local_size())
    places = world.together(lambda: ranks_per_node(config, world.size, local_sizes))
    if places == world.size > 1 and world.is_main:
        log.warning(
            "comm.ranks_per_node=%d: all %d ranks are one node, so that nothing is compressed",
            config.ranks_per_node, world.size,
        )  # fmt: skip
    return places


@contextlib.contextmanager
def _torch_world(config: CommConfig, stop: StopSignal) -> Iterator[World]:
    """Without torchrun's environment, or with a world size of 1, be alone. A default process group that exists already
    is used and left open."""
    cls, others = backend_class(config), started.by_mpirun() or 1
    if others > 1 and started.by_torchrun() is None and not dist.is_initialized():
        raise ConfigError(
            f"mpirun has started {others} processes, but with comm.backend={config.backend} each would train alone: "
            "add --comm.backend=mpi, or start with torchrun"
        )
    device = _device(started.local_rank())
    kind = config.backend if config.backend in ("gloo", "nccl") else "nccl" if device.type == "cuda" else "gloo"
    if kind == "nccl" and device.type != "cuda":
        raise ConfigError("comm.backend=nccl is not allowed: there is no GPU; without one there are gloo and mpi")
    owned = not dist.is_initialized() and (started.by_torchrun() or 1) > 1
    if owned:
        join(kind, config.timeout, stop)
    elif dist.is_initialized() and kind == config.backend != dist.get_backend():
        raise ConfigError(f"comm.backend={kind} is not allowed: the process group there is has {dist.get_backend()}")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield World(0, 1, device)
        return
    try:
        control = TorchBackend(dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout)))
        world = World(control.rank, control.world_size, device, control)
        places = _places(config, world)
        if cls is not None:
            own: Backend = world.together(lambda: make_backend(cls, config, world.rank, world.size))
            world = replace(world, backend=own)
        elif places > 1:
            world = replace(world, backend=_nodes(world.size, places, config.timeout))
        yield world
    finally:
        if owned:
            dist.destroy_process_group()


def _nodes(size: int, places: int, timeout: float) -> NodesBackend:
    """Nodes of ``places`` ranks that follow each other, of the default process group."""
    rows = [list(range(first, first + places)) for first in range(0, size, places)]
    levels = (rows, [list(column) for column in zip(*rows)])
    groups = [dist.new_subgroups_by_enumeration(ranks, timedelta(seconds=timeout))[0] for ranks in levels]
    return NodesBackend(TorchBackend(), *map(TorchBackend, groups))


@contextlib.contextmanager
def _mpi_world(config: CommConfig) -> Iterator[World]:
    """The processes of MPI's COMM_WORLD. One that fails alone ends all of them, when it has said why: as MPI has it, it
    would else wait for the others until they end."""
    backend_class(config)
    try:
        mpi = load_mpi()
    except RuntimeError as error:
        raise ConfigError(f"comm.backend=mpi: {error}") from error
    from mpi4py.run import set_abort_status

    everyone = MPIBackend(mpi.COMM_WORLD.Dup(), config.timeout)
    rank, size = everyone.rank, everyone.world_size
    world = World(rank, size, torch.device("cpu"), everyone if size > 1 else None)

    def join() -> World:
        for name, here in (("WORLD_SIZE", size), ("RANK", rank)):
            if os.environ.get(name, str(here)) != str(here):
                raise ConfigError(
                    f"comm.backend=mpi: {name} is {os.environ[name]} in the environment and {here} in MPI: start with "
                    "mpirun -np N commopt train ..., and without torchrun"
                )
        here = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
        local_rank = here.rank
        here.Free()
        return replace(world, device=_device(local_rank), backend=make_backend(MPIBackend, config, rank, size))

    def group(world: World) -> World:
        places = _places(config, world)
        if places == 1:
            return world
        inside, between = (mpi.COMM_WORLD.Split(color) for color in (rank // places, rank % places))
        assert world.backend is not None
        levels = (MPIBackend(comm, timeout=config.timeout, **config.args) for comm in (inside, between))
        return replace(world, backend=NodesBackend(world.backend, *levels))

    try:
        yield group(world.together(join))
    except (UserError, Stopped):
        raise  # all ranks do
    except BaseException as error:
        set_abort_status(error)
        raise
    else:
        everyone.comm.Free()

"""Backends: an identity and a handful of collectives on tensors that the caller has allocated.

Each of these starts a collective and returns :class:`Work`; nothing blocks before ``wait()``. Until then the tensors
given belong to the backend. Every rank calls the same collectives in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Work(Protocol):
    """A collective in flight. One that can also say who has not joined it has more methods: see
    :mod:`commopt.comm.watch`."""

    def wait(self) -> Any:
        """Blocks (on CUDA: makes the current stream wait) until the result is there. Raises what went wrong.

        Once it has returned, it returns at once.
        """

    def is_completed(self) -> bool:
        """True only if ``wait()`` would return, or raise, at once. False may mean that this is not known before
        ``wait()``, but for a backend that has ``channels`` or ``control``: its work is asked until it is True."""


@runtime_checkable
class Backend(Protocol):
    """The ranks that train together, and how they talk. All tensors contiguous; the same shapes and dtypes on every
    rank. One that cannot send from every device says in ``devices``, a tuple of types such as "cuda", from which."""

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < world_size."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: Tensor) -> Work:
        """x <- mean of x over all ranks, in place, with the same bits on every rank."""

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        """Row r of ``inp`` goes to rank r; row r of ``out`` comes from rank r. Both (world_size, k)."""

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        """Row r of ``out`` (world_size, k) is rank r's ``inp`` (k,)."""

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        """x <- rank ``src``'s x, in place."""


@runtime_checkable
class ExchangingBackend(Backend, Protocol):
    """A backend whose ranks can also talk in pairs, as gossip needs it. All backends of commopt can."""

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Work:
        """``inp`` goes to rank ``dst``; ``out``, of its shape and dtype, comes from rank ``src``.

        Every rank calls it, with as many elements, at the same place in the order of collectives, and the rank that is
        one's ``dst`` has this rank as its ``src``: two ranks that name each other swap, and on a ring each sends to the
        right what comes from the left. A rank that has nobody to talk to gives its own number twice, and ``out`` is
        ``inp`` then. It may be done when the two others have come, whoever else has not.
        """


COLLECTIVES = ("all_reduce", "all_to_all", "all_gather", "broadcast")


def check_exchanges(backend: Any, who: str) -> None:
    """Raises ValueError, which says that ``who`` needs it, unless ``backend`` can exchange messages between pairs."""
    if not callable(getattr(backend, "exchange", None)):
        raise ValueError(
            f"{who} needs a backend whose ranks can talk in pairs, and {backend!r} lacks exchange "
            "(see commopt.comm.ExchangingBackend)"
        )


def lacking(backend: Any) -> list[str]:
    """Names that ``backend``, an object, lacks to be a :class:`Backend`; of a class, the collectives alone."""
    identity = [] if isinstance(backend, type) else ["rank", "world_size"]
    missing = [name for name in identity if not hasattr(backend, name)]
    return missing + [collective for collective in COLLECTIVES if not callable(getattr(backend, collective, None))]


def check_backend(backend: Any, name: str = "backend") -> None:
    """Raises ValueError, which calls it ``name``, unless ``backend`` has all of a :class:`Backend`."""
    if missing := lacking(backend):
        hint = ""
        if isinstance(backend, str):
            hint = f": to choose what torch.distributed uses, call init_process_group({backend!r})"
        elif isinstance(backend, (dist.ProcessGroup, DeviceMesh)):
            hint = ": give it as process_group="
        raise ValueError(f"{name} {backend!r} lacks {', '.join(missing)} (see commopt.comm.Backend){hint}")


def sends_from(backend: Any) -> tuple[str, ...] | None:
    """The types of devices that ``backend`` can send from; None: all."""
    return getattr(backend, "devices", None)


def message_device(backend: Any) -> torch.device:
    """A device that ``backend`` can send from: the CPU if it can, so that nothing waits for a GPU."""
    devices = sends_from(backend)
    return torch.device("cpu" if devices is None or "cpu" in devices else devices[0])


def common_devices(*backends: Any) -> tuple[str, ...] | None:
    """The types of devices that all of ``backends`` can send from; None: all."""
    each = [set(devices) for devices in map(sends_from, backends) if devices is not None]
    return tuple(sorted(set.intersection(*each))) if each else None


def open_channels(backend: Backend, n: int) -> list[Backend]:
    """``n`` backends of the same ranks, whose collectives do not wait for each other's: each needs its collectives
    started in one order on every rank, but any order between channels will do.

    Empty where ``backend`` has no method ``channels(n)`` that gives them. All ranks must call this at the same point;
    it may communicate.
    """
    make = getattr(backend, "channels", None)
    return make(n) if make is not None else []


def open_control(backend: Backend) -> Backend:
    """A backend of the same ranks for small messages, whose order does not depend on ``backend``'s other collectives.

    ``backend`` itself where it has no method ``control()`` that gives one. All ranks must call this at the same point;
    it may communicate.
    """
    make = getattr(backend, "control", None)
    return make() if make is not None else backend


class Done:
    """Work that has nothing left to do."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


class OfWorld:
    """Base of backends whose collectives are those of another one, their ``world``."""

    world: Backend

    def all_reduce(self, x: Tensor) -> Work:
        return self.world.all_reduce(x)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        return self.world.all_to_all(out, inp)

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        return self.world.all_gather(out, inp)

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return self.world.broadcast(x, src)

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Work:
        check_exchanges(self.world, f"exchange over a {type(self).__name__}")
        return self.world.exchange(out, inp, dst, src)  # type: ignore[attr-defined,no-any-return]

    def control(self) -> Backend:
        """The channel of all ranks for small messages."""
        return open_control(self.world)


class LocalBackend:
    """One rank alone: every collective is a copy."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: Tensor) -> Work:
        return Done()

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        out.copy_(inp)
        return Done()

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        out[0].copy_(inp)
        return Done()

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return Done()

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Work:
        out.copy_(inp)
        return Done()

"""Ranks whose collectives end as soon as one of them has given up, whatever their own timeout is.

A rank that misses another one in a collective knows it at once, as its connection to that breaks, or after the timeout;
a third one, that waits for what the two would have passed on, does not. So whoever waits for longer than ``LOOK``
seconds asks now and then whether the others have given up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from commopt.comm.backend import Backend, LocalBackend, Work, sends_from
from commopt.comm.gloo import connect
from commopt.comm.meeting import StoreMeeting
from commopt.comm.pipeline import CollectiveError
from commopt.comm.store import inside, until
from commopt.comm.watch import first_notice

logger = logging.getLogger("commopt")

T = TypeVar("T")

Connect = Callable[[dist.Store, str, int, int, float], Backend]
"""Makes a backend of some ranks, called by each of them at about the same time: of a store under whose keys nothing
is, a name that no other set of ranks has had, this rank's number, how many there are, and the seconds that a collective
may take. Work without ``wait_for`` is waited for in a thread, and must know when it has been that it is completed."""

Why = Callable[[], str | None]
"""Why the ranks have given up; None if they have not."""

LOOK = 1.0
"""Seconds between two questions whether the others have given up."""


def nobody_has() -> None:
    """The :data:`Why` of ranks that nobody asks."""
    return None


def over_gloo(store: dist.Store, name: str, rank: int, world_size: int, timeout: float) -> Backend:
    """A :data:`Connect` over a Gloo group of its own."""
    meeting = StoreMeeting(dist.PrefixStore("at", store), rank, range(world_size))
    (channel,) = connect(store, meeting, [name], timedelta(seconds=timeout))
    return channel


def connected(
    how: Connect, store: dist.Store, name: str, rank: int, world_size: int, timeout: float, patience: float, why: Why
) -> Backend:
    """The ranks of a :data:`Connect`, which has ``patience`` seconds for that; in a thread, as some block.

    Raises:
        CollectiveError: they are not there by then, or have given up.
    """
    if world_size == 1:
        return LocalBackend()
    made = _in_a_thread(lambda: how(store, name, rank, world_size, timeout))
    left, where = until(patience), "opening connections between the members"
    while not futures.wait([made], min(LOOK, left())).done:
        told = why() or (None if left() else f"not all have come within {patience:g} s")
        if told is not None and not made.done():
            raise CollectiveError(f"{where}: {told}")
    try:
        return GivenUp(made.result(), why, name)
    except (RuntimeError, TimeoutError) as error:
        raise CollectiveError(f"{where}: {error}") from error


def _in_a_thread(call: Callable[[], T]) -> Future[T]:
    """What ``call`` returns or raises; it has the current GPU of this thread, and whether gradients are on."""
    out: Future[T] = inside(Future())
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # -1: as it is
    gradients = torch.is_grad_enabled()

    def run() -> None:
        try:
            with torch.cuda.device(device), torch.set_grad_enabled(gradients):
                out.set_result(call())
        except BaseException as error:
            out.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return out


class GivenUp:
    """``inner``, whose collectives raise RuntimeError when ``why()`` says why."""

    def __init__(self, inner: Backend, why: Why, name: str) -> None:
        self.inner, self.rank, self.world_size = inner, inner.rank, inner.world_size
        self.why, self._name = why, name

    @property
    def devices(self) -> tuple[str, ...] | None:
        """Those that ``inner`` can send from; None: all."""
        return sends_from(self.inner)

    def _of(self, work: Work) -> Work:
        return _Work(work, self.why, self._name)

    def all_reduce(self, x: Tensor) -> Work:
        return self._of(self.inner.all_reduce(x))

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        return self._of(self.inner.all_to_all(out, inp))

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        return self._of(self.inner.all_gather(out, inp))

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        return self._of(self.inner.broadcast(x, src))


class _Work:
    def __init__(self, inner: Any, why: Why, name: str) -> None:
        self._inner, self._why, self._name = inner, why, name
        self.is_completed = inner.is_completed
        self._waited: Future[Any] | None = None  # inner.wait() in a thread

    def wait(self) -> Any:
        begin, told = time.monotonic(), False
        while not self._within(LOOK):
            why = self._why()
            if why is not None:
                raise RuntimeError(why)
            if not told and time.monotonic() - begin > first_notice():
                told = True
                logger.warning("members: a collective of %s takes %.3g s", self._name, time.monotonic() - begin)
        if self._waited is not None:
            self._waited.result()
        return self._inner.wait()  # again, after that in a thread: the current stream is a thread's own

    def _within(self, seconds: float) -> bool:
        """Waits at most so long; whether it is done, or has failed."""
        if hasattr(self._inner, "wait_for"):
            return bool(self._inner.wait_for(seconds))
        left = until(seconds)
        if self._waited is None:
            if self._inner.is_completed():
                return True
            self._waited = _in_a_thread(self._inner.wait)  # as others than NCCL may not know before
        if not futures.wait([self._waited], left()).done:
            return False
        if self._waited.exception() is not None:
            return True
        while not self._inner.is_completed() and left():  # NCCL's wait() has left it to the stream
            time.sleep(1e-3)
        return bool(self._inner.is_completed())

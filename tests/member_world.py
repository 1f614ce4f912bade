"""Members on threads: each view is a world of threads of its own, and a rank may die in any collective."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from worlds import on_one_core

from commopt import Guard, LocalSGD, Members
from commopt.comm import ThreadBackend, ThreadWorld


class Died(BaseException):
    """What a rank that is killed raises: nothing catches it."""


class Rendezvous:
    """``connect=`` of members that are threads of this process.

    Attributes:
        store: where they meet.
        fuse: of a rank, by name: after how many collectives it dies.
        cut: pairs of ranks between which the network is cut.
        refuses: ranks whose next collective fails on them alone.
    """

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.worlds: dict[str, ThreadWorld] = {}
        self.fuse: dict[Any, int] = {}
        self.cut: set[frozenset[Any]] = set()
        self.refuses: list[Any] = []
        self.lock = threading.Lock()

    def connect(self, who: Any) -> Callable[..., Any]:
        def of(store: Any, name: str, rank: int, world_size: int, timeout: float) -> Mortal:
            with self.lock:
                world = self.worlds.setdefault(name, ThreadWorld(world_size, timeout))
            return Mortal(world, rank, self, who)

        return of

    def members(self, name: Any, **settings: Any) -> Members:
        defaults: dict[str, Any] = {"patience": 30.0, "timeout": 30.0, "join_timeout": 60.0}
        return Members(self.store, name, connect=self.connect(name), **{**defaults, **settings})


class Mortal(ThreadBackend):
    """A rank that dies in a collective when its fuse is burnt: the others notice, as when a connection breaks."""

    def __init__(self, world: ThreadWorld, rank: int, meeting: Rendezvous, who: Any) -> None:
        super().__init__(world, rank)
        self.meeting, self.fuse, self.who = meeting, meeting.fuse, who
        vars(world).setdefault("here", set()).add(who)

    def _start(self, *args: Any, **kwargs: Any) -> Any:
        if self.who in self.fuse:
            self.fuse[self.who] -= 1
            if self.fuse[self.who] < 0:
                del self.fuse[self.who]
                self.fail()
                raise Died
        if self.who in self.meeting.refuses:
            self.meeting.refuses.remove(self.who)
            raise RuntimeError("out of buffers")
        if any(pair <= vars(self.world)["here"] for pair in self.meeting.cut):
            self.fail()
        return super()._start(*args, **kwargs)

    def fail(self) -> None:
        with self.world.changed:
            self.world.failed = ConnectionError("connection closed by peer")
            self.world.changed.notify_all()


def run_ranks(ranks: Sequence[Callable[[], Any]], seconds: float = 120.0) -> list[Any]:
    """What each returns, on a thread each; None of one that has died. Raises the first failure; fails if one hangs."""
    results: list[Any] = [None] * len(ranks)
    errors: list[BaseException] = []

    def main(i: int) -> None:
        try:
            results[i] = ranks[i]()
        except Died:
            pass
        except BaseException as error:
            errors.append(error)

    with on_one_core():
        threads = [threading.Thread(target=main, args=(i,), daemon=True) for i in range(len(ranks))]
        for thread in threads:
            thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end and not errors:
            thread.join(0.05)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def until(what: Callable[[], Any], seconds: float = 60.0) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.005)


def some_params() -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(s, generator=g, dtype=torch.float64)) for s in ((3, 4), (), (7,))]


def give_grads(params: Sequence[nn.Parameter], step: int, rank: int) -> list[float]:
    """Gives them gradients, which differ by step and rank; also as numbers."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64) + 0.3
    return [v for p in params for v in p.grad.flatten().tolist()]


def numbers(params: Sequence[nn.Parameter]) -> list[float]:
    return [v for p in params for v in p.detach().flatten().tolist()]


def averaging(
    world: Rendezvous,
    name: int,
    params: list[nn.Parameter] | None = None,
    guard: Guard | None = None,
    **settings: Any,
) -> tuple[Members, list[nn.Parameter], LocalSGD]:
    """Local SGD whose rank moves by name + 1 in each round of one step."""
    members = world.members(name, **settings)
    params = params or [nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    return members, params, LocalSGD(params, torch.optim.SGD, lr=1.0, period=1, members=members, guard=guard)


def go(params: Sequence[nn.Parameter], optimizer: LocalSGD, name: int, rounds: int = 1) -> float:
    """Takes rounds; where the first element is then."""
    for _ in range(rounds):
        for p in params:
            p.grad = torch.full_like(p, -(name + 1.0))
        optimizer.step()
    return float(params[0].tolist()[0])


def warm_up() -> None:
    """What torch does once in a process takes seconds, for which no rank here has the patience."""
    params = some_params()
    optimizer = LocalSGD(params, torch.optim.SGD, lr=0.1, period=1)
    give_grads(params, 0, 0)
    optimizer.step()


warm_up()

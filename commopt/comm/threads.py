"""Ranks as threads of one process: the world of unit tests, and of trying things out without a launcher.

    world = ThreadWorld(4)
    results = world.run(lambda backend: train(backend))     # one call per rank; the results by rank

A collective copies what a rank gives when it is called, and hands the copies out when it is waited for, so that it
behaves as one in flight. Sums are made in rank order. If a rank fails, the others do not wait for it: they raise as
well.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from commopt.comm.backend import Work

T = TypeVar("T")
Call = tuple[int, int]
"""A collective: the line, and its number on it."""


class ThreadWorld:
    """``world_size`` ranks in one process.

    Args:
        world_size: number of ranks, at least 1.
        timeout: seconds after which a rank that waits for the others gives up.
    """

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.posted: dict[Call, dict[int, tuple[str, Tensor]]] = {}
        self.taken: dict[Call, int] = {}
        self.failed: BaseException | None = None

    def run(self, fn: Callable[[ThreadBackend], T]) -> list[T]:
        """Calls ``fn(backend)`` on one thread per rank, and returns what each returned. Raises the first failure."""
        results: list[Any] = [None] * self.world_size

        def rank_main(rank: int) -> None:
            try:
                results[rank] = fn(ThreadBackend(self, rank))
            except BaseException as error:
                with self.changed:
                    if self.failed is None:
                        self.failed = error
                    self.changed.notify_all()

        threads = [threading.Thread(target=rank_main, args=(r,), daemon=True) for r in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed, self.failed = self.failed, None
        self.posted.clear()
        self.taken.clear()
        if failed is not None:
            raise failed
        return results

    def post(self, call: Call, rank: int, verb: str, x: Tensor) -> None:
        with self.changed:
            self.posted.setdefault(call, {})[rank] = (verb, x)
            self.changed.notify_all()

    def complete(self, call: Call) -> bool:
        """Whether every rank has posted its ``call``, or will not."""
        with self.changed:
            return self.failed is not None or len(self.posted.get(call, ())) == self.world_size

    def take(self, call: Call, deadline: float) -> list[Tensor]:
        """What every rank posted at its ``call``-th collective, by rank, once all have. Waits up to ``deadline``."""
        with self.changed:
            ready = self.changed.wait_for(
                lambda: self.failed is not None or len(self.posted.get(call, ())) == self.world_size,
                deadline - time.monotonic(),
            )
            if self.failed is not None:
                raise RuntimeError(f"another rank failed: {self.failed!r}") from self.failed
            if not ready:
                raise TimeoutError(f"collective {call[1]}: only ranks {sorted(self.posted.get(call, {}))} joined")
            posts = self.posted[call]
            verbs = {posts[rank][0] for rank in posts}
            if len(verbs) > 1:
                raise RuntimeError(f"collective {call[1]}: ranks called different verbs: {sorted(verbs)}")
            self.taken[call] = self.taken.get(call, 0) + 1
            if self.taken[call] == self.world_size:
                del self.posted[call], self.taken[call]
            return [posts[rank][1] for rank in range(self.world_size)]


class _ThreadWork:
    def __init__(self, world: ThreadWorld, call: Call, finish: Callable[[list[Tensor]], None]) -> None:
        self.world, self.call, self.finish = world, call, finish
        self.deadline = time.monotonic() + world.timeout
        self.done = False

    def wait(self) -> None:
        if not self.done:
            self.finish(self.world.take(self.call, self.deadline))
            self.done = True

    def is_completed(self) -> bool:
        return self.done or self.world.complete(self.call) or time.monotonic() > self.deadline


class ThreadBackend:
    """One rank of a :class:`ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int, line: int = 0) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        self.line = line
        self.calls = 0
        self._lines = itertools.count(line + 1)

    def lines(self, n: int) -> list[ThreadBackend]:
        """``n`` backends that count calls by themselves."""
        return [ThreadBackend(self.world, self.rank, next(self._lines)) for _ in range(n)]

    def _start(self, verb: str, give: Tensor, finish: Callable[[list[Tensor]], None]) -> Work:
        call, self.calls = (self.line, self.calls), self.calls + 1
        self.world.post(call, self.rank, verb, give.clone())
        return _ThreadWork(self.world, call, finish)

    def all_reduce(self, x: Tensor) -> Work:
        def finish(posts: list[Tensor]) -> None:
            total = posts[0] / self.world_size
            for other in posts[1:]:
                total += other / self.world_size
            x.copy_(total)

        return self._start("all_reduce", x, finish)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        return self._start("all_to_all", inp, lambda posts: _fill(out, [p[self.rank] for p in posts]))

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        return self._start("all_gather", inp, lambda posts: _fill(out, posts))

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        def finish(posts: list[Tensor]) -> None:
            x.copy_(posts[src])

        return self._start("broadcast", x, finish)


def _fill(out: Tensor, rows: list[Tensor]) -> None:
    torch.stack(rows, out=out)

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
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from commopt.comm.backend import Work
from commopt.comm.holding import ShardedBackend
from commopt.comm.nodes import NodesBackend
from commopt.comm.watch import Roll

T = TypeVar("T")
Call = tuple[tuple[int, ...], tuple[int, ...], int]
"""A collective: the ranks it is of, their channel, and its number on that."""


class _Posts(dict[int, tuple[str, Tensor]]):
    """By rank, the collective that it calls and what it gives to it; ``taken``: how many ranks have had them."""

    taken = 0


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
        self.posted: dict[Call, _Posts] = {}
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
        if failed is not None:
            raise failed
        return results

    def post(self, call: Call, rank: int, collective: str, x: Tensor) -> _Posts:
        """Gives ``x`` to ``call``. Returns what is given to it, now and later."""
        with self.changed:
            posts = self.posted.get(call)
            if posts is None:
                posts = self.posted[call] = _Posts()
            posts[rank] = (collective, x)
            if len(posts) == len(call[0]) or collective == "exchange":  # nobody else waits for less
                self.changed.notify_all()
        return posts

    def take(self, call: Call, posts: _Posts, needs: Sequence[int], deadline: float) -> list[Tensor]:
        """Everything that the ranks ``needs`` have posted at ``call``, in order, once they have. Waits up to
        ``deadline``."""
        with self.changed:
            ready = self.changed.wait_for(lambda: self.complete(posts, needs), deadline - time.monotonic())
            if self.failed is not None:
                raise RuntimeError(f"another rank failed: {self.failed!r}") from self.failed
            members, _, number = call
            if not ready:
                raise TimeoutError(f"collective {number}: only ranks {sorted(posts)} joined")
            collectives = {collective for collective, _ in posts.values()}
            if len(collectives) > 1:
                raise RuntimeError(f"collective {number}: ranks called different collectives: {sorted(collectives)}")
            posts.taken += 1
            if posts.taken == len(members):
                del self.posted[call]
            return [posts[rank][1] for rank in needs]

    def complete(self, posts: _Posts, needs: Sequence[int]) -> bool:
        """True if the ranks ``needs`` have posted theirs, or will not."""
        return self.failed is not None or all(map(posts.__contains__, needs))


class _ThreadWork:
    def __init__(
        self,
        world: ThreadWorld,
        call: Call,
        posts: _Posts,
        rank: int,
        needs: Sequence[int],
        finish: Callable[[list[Tensor]], None],
    ) -> None:
        self.world, self.call, self.posts, self.rank, self.needs, self.finish = world, call, posts, rank, needs, finish
        self.timeout = world.timeout
        self.deadline = time.monotonic() + world.timeout
        self.done = False

    def wait(self) -> None:
        if not self.done:
            self.finish(self.world.take(self.call, self.posts, self.needs, self.deadline))
            self.done = True

    def is_completed(self) -> bool:
        return self.done or self.world.complete(self.posts, self.needs) or time.monotonic() > self.deadline

    def wait_for(self, seconds: float) -> bool:
        """Waits at most so long; whether ``wait()`` would return, or raise, at once."""
        if self.is_completed():
            return True
        with self.world.changed:
            return self.world.changed.wait_for(self.is_completed, min(seconds, self.deadline - time.monotonic()))

    def overdue(self) -> bool:
        return time.monotonic() >= self.deadline

    def tell(self, state: str, where: str) -> None:
        """The world knows who has joined."""

    def leave(self) -> None:
        """Nothing was told."""

    def absent(self, states: Sequence[str]) -> Roll:
        here = set(self.posts)
        return Roll(sorted(set(self.needs) - here), self.rank == min(here, default=self.rank))


class ThreadBackend:
    """One rank of a :class:`ThreadWorld`, or of some of its ranks.

    Args:
        world: where it lives.
        rank: its number there.
        members: the ranks of the world that take part; all if None.
    """

    def __init__(
        self, world: ThreadWorld, rank: int, members: Sequence[int] | None = None, _channel: tuple[int, ...] = ()
    ) -> None:
        self.world = world
        self.members = tuple(range(world.world_size)) if members is None else tuple(members)
        if rank not in self.members:
            raise ValueError(f"rank {rank} of the world is not one of the ranks {list(self.members)}")
        self.rank = self.members.index(rank)
        self.world_size = len(self.members)
        self.channel = _channel
        self.calls = 0
        self._branches = itertools.count()

    def channels(self, n: int) -> list[ThreadBackend]:
        """``n`` backends that count calls by themselves."""
        return [self.part(range(self.world_size)) for _ in range(n)]

    def control(self) -> ThreadBackend:
        """A backend that counts calls by itself."""
        return self.part(range(self.world_size))

    def part(self, ranks: Sequence[int]) -> ThreadBackend:
        """Some of the ranks, this one among them, in the order given. All of them must call this equally often."""
        members = [self.members[rank] for rank in ranks]
        return type(self)(self.world, self.members[self.rank], members, (*self.channel, next(self._branches)))

    def nodes(self, ranks_per_node: int) -> NodesBackend:
        """The ranks as nodes of ``ranks_per_node`` that follow each other.

        Raises:
            ValueError: if they cannot be divided so.
        """
        return NodesBackend(self, *self._grid(ranks_per_node, f"nodes of {ranks_per_node!r} ranks"))

    def sharded(self, parts: int) -> ShardedBackend:
        """The ranks as replicas of a model in ``parts`` parts: ranks that follow each other hold one replica.

        Raises:
            ValueError: if they cannot be divided so.
        """
        return ShardedBackend(self, *self._grid(parts, f"replicas of {parts!r} parts"))

    def _grid(self, places: int, what: str) -> tuple[ThreadBackend, ThreadBackend]:
        """The row and the column of this rank, in rows of ``places`` ranks that follow each other."""
        if places < 1 or self.world_size % places:
            raise ValueError(f"{self.world_size} ranks cannot be {what} each")
        row, place = divmod(self.rank, places)
        return self.part(range(row * places, (row + 1) * places)), self.part(range(place, self.world_size, places))

    def _start(
        self, collective: str, give: Tensor, finish: Callable[[list[Tensor]], None], src: int | None = None
    ) -> Work:
        """``src``: the one rank that it needs something of; None for all."""
        call, self.calls = (self.members, self.channel, self.calls), self.calls + 1
        rank, needs = self.members[self.rank], self.members if src is None else (self.members[src],)
        posts = self.world.post(call, rank, collective, give.clone())
        return _ThreadWork(self.world, call, posts, rank, needs, finish)

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

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Work:
        """With another ``dst`` than the rank that has this one as its ``src``, that one gets what it has not asked for:
        the rank that notices raises RuntimeError."""
        address = torch.tensor([dst], dtype=torch.int64, device="cpu").view(torch.uint8)
        letter = torch.cat([address, inp.contiguous().view(-1).view(torch.uint8).cpu()])

        def finish(posts: list[Tensor]) -> None:
            to = int(posts[0][:8].view(torch.int64))
            if to != self.rank:
                raise RuntimeError(f"exchange: rank {self.rank} expects a message of rank {src}, which sends to {to}")
            out.copy_(posts[0][8:].view(inp.dtype).view(inp.shape))

        return self._start("exchange", letter, finish, src)


def _fill(out: Tensor, rows: list[Tensor]) -> None:
    torch.stack(rows, out=out)

"""A backend that counts what another one sends, and keeps a receipt of it.

What a rank sends, in bytes, with W ranks and N bytes given to the collective (what bandwidth-optimal algorithms move):

    all_reduce   2 (W-1) ceil(N / W)      reduce-scatter and all-gather of W equal pieces
    all_to_all     (W-1) N / W            every row but one's own
    all_gather     (W-1) N                one's own row, to every other rank
    broadcast    ceil((W-1) N / W)        the mean over the ranks: W-1 copies are sent in all
    exchange     N                        to one other rank, and as much comes from one; 0 to oneself

Where ranks are grouped by nodes, or hold a replica together, what stays inside is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from commopt.comm.backend import Backend, Work, check_exchanges, sends_from
from commopt.comm.receipt import Receipt, row_sums


@dataclass
class Tally:
    """Bytes sent and calls made, by collective; ``intra_node`` has those that stay inside a node, or a replica."""

    bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    intra_node: Tally | None = None

    def add(self, collective: str, nbytes: int, intra_node: bool = False) -> None:
        if intra_node:
            self.intra_node = self.intra_node or Tally()
            self.intra_node.add(collective, nbytes)
            return
        self.bytes[collective] = self.bytes.get(collective, 0) + nbytes
        self.calls[collective] = self.calls.get(collective, 0) + 1

    def merge(self, other: Tally) -> None:
        """Adds what another one has counted."""
        for mine, theirs in ((self.bytes, other.bytes), (self.calls, other.calls)):
            for collective, count in theirs.items():
                mine[collective] = mine.get(collective, 0) + count
        if other.intra_node is not None:
            self.intra_node = self.intra_node or Tally()
            self.intra_node.merge(other.intra_node)

    def summary(self) -> dict[str, Any]:
        """``{"bytes": int, "calls": int, "by_collective": {collective: {"bytes": int, "calls": int}}}``, and the same
        once more as ``"intra_node"`` if anything was sent inside a node, which the other figures leave out."""
        out: dict[str, Any] = {
            "bytes": sum(self.bytes.values()),
            "calls": sum(self.calls.values()),
            "by_collective": {
                collective: {"bytes": self.bytes[collective], "calls": self.calls[collective]}
                for collective in self.bytes
            },
        }
        return out if self.intra_node is None else out | {"intra_node": self.intra_node.summary()}


def all_reduce_bytes(nbytes: int, world_size: int) -> int:
    """Bytes that a rank sends to all-reduce ``nbytes`` with ``world_size`` ranks."""
    return 2 * (world_size - 1) * -(-nbytes // world_size)


class Traffic:
    """Bytes and calls counted: ``step`` (the last one that ended) and ``total``."""

    def __init__(self) -> None:
        self.step = Tally()
        self._running, self._before = Tally(), Tally()
        self.in_step = True
        """True if what is sent now is of a step; else it is in ``total`` only."""

    @property
    def total(self) -> Tally:
        """All that was ever counted."""
        total = Tally()
        total.merge(self._before)
        total.merge(self._running)
        return total

    def end_step(self) -> None:
        """Closes the count of a step: all since the last call."""
        self.step = self._running
        self.leave_out()

    def leave_out(self) -> None:
        """Leaves what was counted since the last step ended out of every step; it stays in ``total``."""
        self._before.merge(self._running)
        self._running = Tally()

    def go_on_from(self, other: Traffic) -> None:
        """Counts on from where another one, which is used no more, has come to."""
        self.step, self.in_step = other.step, other.in_step
        self._running, self._before = other._running, other._before

    def take_over(self, other: Traffic) -> None:
        """Counts now what another one has counted."""
        (self._running if self.in_step else self._before).merge(other.total)

    def add(self, collective: str, nbytes: int, intra_node: bool = False) -> None:
        (self._running if self.in_step else self._before).add(collective, nbytes, intra_node)


class CountingBackend:
    """``inner``, with what it sends counted, and a receipt kept of it.

    Args:
        inner: another backend.
        traffic: where it is counted; None for a count of its own.
        receipt: where it is entered; None for one of its own.
        intra_node: whether what is sent stays inside a node.
    """

    def __init__(
        self,
        inner: Backend,
        traffic: Traffic | None = None,
        receipt: Receipt | None = None,
        intra_node: bool = False,
    ) -> None:
        self.inner = inner
        self.rank, self.world_size = inner.rank, inner.world_size
        self.devices = sends_from(inner)
        self.traffic = traffic or Traffic()
        self.receipt = receipt or Receipt()
        order = self.receipt.new_order()
        self._order = order if self.world_size > 1 else None
        self._intra_node = intra_node

    def all_reduce(self, x: Tensor) -> Work:
        self.traffic.add("all_reduce", all_reduce_bytes(x.nbytes, self.world_size), self._intra_node)
        work = self.inner.all_reduce(x)
        if self._order is None:
            return work

        def sums() -> tuple[Tensor, Tensor]:
            result = row_sums(x, 1)
            return result.expand(self.world_size if self.rank == 0 else 0), result

        return self._order.watch("all_reduce", work, sums)

    def all_to_all(self, out: Tensor, inp: Tensor) -> Work:
        self.traffic.add("all_to_all", inp.nbytes // self.world_size * (self.world_size - 1), self._intra_node)
        if self._order is None:
            return self.inner.all_to_all(out, inp)
        sent = row_sums(inp, self.world_size)
        work = self.inner.all_to_all(out, inp)
        return self._order.watch("all_to_all", work, lambda: (sent, row_sums(out, self.world_size)))

    def all_gather(self, out: Tensor, inp: Tensor) -> Work:
        self.traffic.add("all_gather", inp.nbytes * (self.world_size - 1), self._intra_node)
        if self._order is None:
            return self.inner.all_gather(out, inp)
        sent = row_sums(inp, 1).expand(self.world_size)
        work = self.inner.all_gather(out, inp)
        return self._order.watch("all_gather", work, lambda: (sent, row_sums(out, self.world_size)))

    def broadcast(self, x: Tensor, src: int = 0) -> Work:
        self.traffic.add("broadcast", -(-x.nbytes * (self.world_size - 1) // self.world_size), self._intra_node)
        return self.inner.broadcast(x, src)

    def exchange(self, out: Tensor, inp: Tensor, dst: int, src: int) -> Work:
        check_exchanges(self.inner, "exchange")
        self.traffic.add("exchange", inp.nbytes if dst != self.rank else 0, self._intra_node)
        if self._order is None:
            return self.inner.exchange(out, inp, dst, src)  # type: ignore[attr-defined, no-any-return]
        sent = row_sums(inp, 1)
        work: Work = self.inner.exchange(out, inp, dst, src)  # type: ignore[attr-defined]

        def sums() -> tuple[Tensor, Tensor]:
            of_ranks = sent.new_zeros(2, self.world_size)
            of_ranks[0, dst], of_ranks[1, src] = sent[0], row_sums(out, 1)[0]
            return of_ranks[0], of_ranks[1]

        return self._order.watch("exchange", work, sums)

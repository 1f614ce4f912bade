"""NoLoCo, and averaging on a ring, on plain lists of Python floats, all ranks of a run at once.

Shares no code with commopt.
"""

from __future__ import annotations

from collections.abc import Callable

from oracle_outer import Local


def mean(vectors: list[list[float]]) -> list[float]:
    return [sum(column) / len(vectors) for column in zip(*vectors)]


class _Gossip:
    """
    Args:
        x: initial parameters, flat, in the order of the buffer.
        world: number of ranks.
        base: "sgd" or "adamw".
    """

    def __init__(self, x: list[float], world: int, period: int, base: str) -> None:
        self.world, self.period = world, period
        self.x = [list(x) for _ in range(world)]
        self.anchors = [list(x) for _ in range(world)]
        self.bases = [Local(base, len(x)) for _ in range(world)]
        self.taken = self.rounds = 0

    def step(self, grads: list[list[float]], lr: float) -> None:
        for x, base, grad in zip(self.x, self.bases, grads):
            base.step(x, grad, lr)
        self.taken += 1
        if self.taken % self.period == 0:
            self.end_round()
            self.rounds += 1
            self.x = [list(y) for y in self.anchors]

    def end_round(self) -> None:
        raise NotImplementedError


class NoLoCoOracle(_Gossip):
    """The paper's equation, as its authors' code has it.

    Args:
        pairs: of a round, the ranks in groups: of two, or of one that has no partner.
        lr, momentum: a and u.
    """

    def __init__(
        self, x: list[float], world: int, period: int, base: str, pairs: Callable[[int], list[list[int]]],
        lr: float = 0.7, momentum: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__(x, world, period, base)
        self.pairs, self.lr, self.u = pairs, lr, momentum
        self.m = [[0.0] * len(x) for _ in range(world)]

    def end_round(self) -> None:
        for group in self.pairs(self.rounds):
            ways = mean([[v - a for v, a in zip(self.x[r], self.anchors[r])] for r in group])
            centre = mean([self.anchors[r] for r in group])
            for r in group:
                y = self.anchors[r]
                pull = [c - a for c, a in zip(centre, y)]
                self.m[r] = [self.u * m + self.lr * d + self.lr * p for m, d, p in zip(self.m[r], ways, pull)]
                self.anchors[r] = [a + m for a, m in zip(y, self.m[r])]


def around(world: int, r: int) -> list[int]:
    """The ranks that r averages over: itself and its neighbours, each once."""
    return sorted({(r - 1) % world, r, (r + 1) % world})


class RingOracle(_Gossip):
    """Full precision: every rank takes the mean over its neighbourhood."""

    def end_round(self) -> None:
        self.anchors = [mean([self.x[j] for j in around(self.world, r)]) for r in range(self.world)]


class CompressedRingOracle(_Gossip):
    """Low precision. Here every rank has replicas of its neighbours of its own, which nobody else writes.

    Args:
        compress: what a vector decodes to.
    """

    def __init__(
        self, x: list[float], world: int, period: int, base: str, compress: Callable[[list[float]], list[float]]
    ) -> None:
        super().__init__(x, world, period, base)
        self.compress = compress
        self.replicas = [{j: list(x) for j in around(world, r) if j != r} for r in range(world)]

    def end_round(self) -> None:
        sent = []
        for r in range(self.world):
            y = self.anchors[r]
            centre = mean([self.replicas[r].get(j, y) for j in around(self.world, r)])
            sent.append(self.compress([v - a + c - a for v, a, c in zip(self.x[r], y, centre)]))
        for r in range(self.world):
            self.anchors[r] = [a + q for a, q in zip(self.anchors[r], sent[r])]
            for j, replica in self.replicas[r].items():
                self.replicas[r][j] = [a + q for a, q in zip(replica, sent[j])]

"""Streamed outer steps on plain lists of Python floats, all ranks of a run at once.

Shares no code with commopt.
"""

from __future__ import annotations

from oracle_gossip import mean
from oracle_outer import Local, OuterOracle
from oracle_sparse_loco import SparseLoCoOracle


class Piece:
    """Parameters that are sent together: of one fragment.

    Attributes:
        x: of each rank.
        outer: anchor and outer momentum of each rank; the same on all of them, unless it is eager.
        way: of compression: residuals.
        sent: of each rank, what it has sent; None if nothing is in flight.
        mean: of that.
    """

    def __init__(self, fragment, x, world, base, outer, way) -> None:
        self.fragment, self.world = fragment, world
        self.x = [list(x) for _ in range(world)]
        self.bases = [Local(base, len(x)) for _ in range(world)]
        self.outer, self.way = [outer(x) for _ in range(world)], way
        self.sent = self.mean = None

    def ways(self) -> list[list[float]]:
        return [[a - v for a, v in zip(o.anchor, x)] for o, x in zip(self.outer, self.x)]

    def mean_of(self, ways: list[list[float]]) -> list[float]:
        if isinstance(self.way, SparseLoCoOracle):
            if self.world == 1:
                return ways[0]
            return self.way.mean([self.way.message(i, d) for i, d in enumerate(ways)])
        if self.way.block and self.world > 1:
            return self.way._compressed(ways)
        return [sum(column) / self.world for column in zip(*ways)]

    def send(self) -> None:
        self.sent = self.ways()
        self.mean = self.mean_of(self.sent)

    def take(self, along: list[list[float]], lr: float) -> None:
        """Outer steps, of each rank along its own."""
        for o, d in zip(self.outer, along):
            if isinstance(self.way, SparseLoCoOracle):
                o.anchor = [a - self.way.lr * v for a, v in zip(o.anchor, d)]
            else:
                o._outer(d, lr)
            o.rounds += 1


class StreamingOracle:
    """
    Args:
        pieces: fragment, initial parameters and sizes of these, of each.
        method, h, block: as of OuterOracle; "sparse" with ``sparse`` for arguments.
        fragments, delay, merge, alpha: of the stream.
    """

    def __init__(
        self, pieces, method, world, period, base, h, block=0, fragments=1, delay=0, merge="mix", alpha=0.0,
        sparse=None,
    ) -> None:  # fmt: skip
        self.world, self.period, self.fragments = world, period, fragments
        self.delay, self.merge, self.alpha = delay, merge, alpha

        def outer(x):
            return OuterOracle("average" if method == "sparse" else method, x, 1, period, base, h)

        def way(x, sizes):
            if method == "sparse":
                return SparseLoCoOracle(x, sizes, world, period, base, **sparse)
            return OuterOracle(method, x, world, period, base, h, block)

        self.pieces = [Piece(p, x, world, base, outer, way(x, sizes)) for p, x, sizes in pieces]
        self.at = self.next = 0
        self.lrs = [[] for _ in range(fragments)]
        self.sent_lr = [None] * fragments

    def of(self, fragment: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece.fragment == fragment]

    def step(self, grads: list[list[list[float]]], lr: float) -> None:
        """grads: by piece, by rank."""
        for piece, of_ranks in zip(self.pieces, grads):
            for x, base, grad in zip(piece.x, piece.bases, of_ranks):
                base.step(x, grad, lr)
        self.at += 1
        for lrs in self.lrs:
            lrs.append(lr)
        if self.merge != "eager" and self.delay:
            for p in range(self.fragments):
                if self.sent_lr[p] is not None and len(self.lrs[p]) == self.delay:
                    self.merge_fragment(p)
        while self.at == (self.next + 1) * self.period // self.fragments:
            self.end(self.next)
            self.next += 1
            if self.next == self.fragments:
                self.next = self.at = 0
                break

    def end(self, p: int) -> None:
        lr = sum(self.lrs[p]) / len(self.lrs[p])
        if self.merge == "eager":
            for piece in self.of(p):
                now, before, mean = piece.ways(), piece.sent, piece.mean
                none = [0.0] * len(now[0])
                piece.send()
                along = []
                for r in range(self.world):
                    own, others = (none, none) if before is None else (before[r], mean)
                    along.append([(d - o) / self.world + m for d, o, m in zip(now[r], own, others)])
                piece.take(along, lr)
                piece.x = [list(o.anchor) for o in piece.outer]
            self.sent_lr[p] = lr
        else:
            for piece in self.of(p):
                piece.send()
            self.sent_lr[p] = lr
            if self.delay == 0:
                self.merge_fragment(p)
        self.lrs[p] = []

    def merge_fragment(self, p: int) -> None:
        for piece in self.of(p):
            y = [[a - d for a, d in zip(o.anchor, sent)] for o, sent in zip(piece.outer, piece.sent)]
            piece.take([piece.mean] * self.world, self.sent_lr[p])
            for r, (x, o) in enumerate(zip(piece.x, piece.outer)):
                if not self.lrs[p] or self.delay == 0:
                    piece.x[r] = list(o.anchor)
                elif self.merge == "mix":
                    piece.x[r] = [self.alpha * v + (1 - self.alpha) * a for v, a in zip(x, o.anchor)]
                else:
                    piece.x[r] = [a + v - w for a, v, w in zip(o.anchor, x, y[r])]
            piece.sent = piece.mean = None
        self.sent_lr[p] = None

    def synchronize(self) -> None:
        for p in range(self.fragments):
            if self.sent_lr[p] is None:
                continue
            if self.merge != "eager":
                self.merge_fragment(p)
                continue
            for piece in self.of(p):
                ways = piece.ways()
                piece.take(
                    [[m - d / self.world for m, d in zip(piece.mean, sent)] for sent in piece.sent], self.sent_lr[p]
                )
                piece.x = [[a - d for a, d in zip(o.anchor, way)] for o, way in zip(piece.outer, ways)]
                piece.sent = piece.mean = None
            self.sent_lr[p] = None
        for piece in self.pieces:
            ways = piece.ways()
            for name in ("anchor", "m"):
                mean = [sum(c) / self.world for c in zip(*(getattr(o, name) for o in piece.outer))]
                for o in piece.outer:
                    setattr(o, name, list(mean))
            if lrs := self.lrs[piece.fragment]:
                mean = piece.mean_of(ways)
                piece.take([mean] * self.world, sum(lrs) / len(lrs))
            piece.x = [list(o.anchor) for o in piece.outer]
        self.lrs = [[] for _ in range(self.fragments)]
        self.at = self.next = 0


class GossipPiece(Piece):
    """Its outer step is that of a few ranks: ``way`` is the oracle of a round that is waited for."""

    def send(self) -> None:
        self.sent, self.mean = self.ways(), [0.0] * len(self.x[0])  # of nobody

    def take(self, along: list[list[float]], lr: float) -> None:
        self.way.x = [[a - d for a, d in zip(o.anchor, sent)] for o, sent in zip(self.outer, self.sent)]
        self.way.end_round()
        self.way.rounds += 1
        self.keep()

    def make_equal(self) -> None:
        """All ranks have the mean of the anchors, and of the momenta."""
        centre = mean(self.way.anchors)
        self.way.anchors = [list(centre) for _ in range(self.world)]
        if hasattr(self.way, "m"):
            self.way.m = [mean(self.way.m)] * self.world
        if hasattr(self.way, "replicas"):
            self.way.replicas = [{j: list(centre) for j in of_rank} for of_rank in self.way.replicas]
        self.keep()

    def keep(self) -> None:
        for o, y in zip(self.outer, self.way.anchors):
            o.anchor = list(y)


class GossipStreamingOracle(StreamingOracle):
    """
    Args:
        pieces: fragment and initial parameters of each.
        way: fragment and parameters -> the oracle of a round.
    """

    def __init__(self, pieces, way, world, period, base, fragments, delay, merge, alpha) -> None:
        super().__init__([], "average", world, period, base, {}, 0, fragments, delay, merge, alpha)

        def outer(x):
            return OuterOracle("average", x, 1, period, base, {})

        self.pieces = [GossipPiece(p, x, world, base, outer, way(p, x)) for p, x in pieces]

    def synchronize(self) -> None:
        for p in range(self.fragments):
            if self.sent_lr[p] is not None:
                self.merge_fragment(p)
        for piece in self.pieces:
            if self.lrs[piece.fragment]:
                piece.send()
                piece.take([], 0.0)
                piece.sent = None
            piece.make_equal()
            piece.x = [list(o.anchor) for o in piece.outer]
        self.lrs = [[] for _ in range(self.fragments)]
        self.at = self.next = 0

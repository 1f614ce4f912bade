"""SparseLoCo on plain lists of Python floats, all ranks of a run at once.

Shares no code with commopt.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from oracle_outer import Local

Compress = Callable[[list[float]], list[float]]
"""What a row decodes to."""


class SparseLoCoOracle:
    """
    Args:
        x: initial parameters, flat, in the order of the buffer.
        sizes: elements of each parameter, in that order.
        world: number of ranks W.
        local: ranks of a node L; 1 without nodes.
        base: "sgd" or "adamw".
        compress: C; None on one node, which compresses nothing.
        over: "ranks" or "contributors".
        clip: whether messages are clipped to the median.
    """

    def __init__(
        self, x: list[float], sizes: list[int], world: int, period: int, base: str, compress: Compress | None,
        lr: float = 1.0, decay: float = 0.95, over: str = "ranks", clip: bool = False, local: int = 1,
    ) -> None:  # fmt: skip
        self.sizes, self.world, self.period, self.local = sizes, world, period, local
        self.compress, self.lr, self.decay, self.over, self.clip = compress, lr, decay, over, clip
        self.anchor, self.x = list(x), [list(x) for _ in range(world)]
        self.bases = [Local(base, len(x)) for _ in range(world)]
        self.padded = -(-len(x) // (world * 64)) * world * 64
        self.errors = [[0.0] * self.padded for _ in range(world // local)]
        self.taken = 0

    def step(self, grads: list[list[float]], lr: float) -> None:
        for x, base, grad in zip(self.x, self.bases, grads):
            base.step(x, grad, lr)
        self.taken += 1
        if self.taken % self.period == 0:
            self.synchronize()

    def synchronize(self) -> None:
        ways = [[a - v for a, v in zip(self.anchor, x)] for x in self.x]
        nodes = [ways[i : i + self.local] for i in range(0, self.world, self.local)]
        ways = [[sum(column) / self.local for column in zip(*node)] for node in nodes]
        mean = ways[0] if len(ways) == 1 else self.mean([self.message(i, d) for i, d in enumerate(ways)])
        self.anchor = [a - self.lr * d for a, d in zip(self.anchor, mean)]
        self.x = [list(self.anchor) for _ in range(self.world)]

    def message(self, i: int, d: list[float]) -> list[float]:
        """s_r, and e_r after it."""
        e = [self.decay * a + b for a, b in zip(self.errors[i], d + [0.0] * (self.padded - len(d)))]
        part = self.padded // self.local
        s = [v for k in range(self.local) for v in self.compress(e[k * part : (k + 1) * part])]
        self.errors[i] = [a - b for a, b in zip(e, s)]
        return s[: len(d)]

    def mean(self, messages: list[list[float]]) -> list[float]:
        sent = [[v != 0 for v in s] for s in messages]
        if self.clip:
            messages = self.clipped(messages)
        totals = [sum(column) for column in zip(*messages)]
        if self.over == "ranks":
            return [t / len(messages) for t in totals]
        return [t / max(sum(column), 1) for t, column in zip(totals, zip(*sent))]

    def clipped(self, messages: list[list[float]]) -> list[list[float]]:
        out, at = [list(s) for s in messages], 0
        for size in self.sizes:
            norms = [math.sqrt(sum(v * v for v in s[at : at + size])) for s in messages]
            there = sorted(n for n in norms if n > 0)
            for s, norm in zip(out, norms):
                if norm > 0 and norm > there[(len(there) - 1) // 2]:
                    factor = there[(len(there) - 1) // 2] / norm
                    s[at : at + size] = [v * factor for v in s[at : at + size]]
            at += size
        return out

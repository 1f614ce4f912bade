"""Local steps and outer steps on plain lists of Python floats, all ranks of a run at once.

Shares no code with commopt.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from oracle import compress


class Local:
    """A base optimizer of one rank: SGD with momentum, or AdamW."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.t = kind, 0
        self.m, self.v = [0.0] * size, [0.0] * size

    def step(self, x: list[float], grad: list[float], lr: float) -> None:
        self.t += 1
        for j, g in enumerate(grad):
            if self.kind == "sgd":
                self.m[j] = 0.9 * self.m[j] + g
                x[j] -= lr * self.m[j]
            else:
                self.m[j] = 0.9 * self.m[j] + 0.1 * g
                self.v[j] = 0.99 * self.v[j] + 0.01 * g * g
                x[j] *= 1 - lr * 0.1
                root = math.sqrt(self.v[j] / (1 - 0.99**self.t)) + 1e-8
                x[j] -= lr * self.m[j] / (1 - 0.9**self.t) / root


class OuterOracle:
    """
    Args:
        method: "average", "slowmo", "diloco" or "sign".
        x: initial parameters, flat, in the order of the buffer.
        world: number of ranks W.
        base: "sgd" or "adamw".
        h: outer hyper-parameters.
        block: of the sign compressor of the ways; 0 for full precision.
        sign: of the vector u in round k.
        state_period: rounds between two means of "m" and of "v" of the bases.
    """

    def __init__(
        self, method: str, x: list[float], world: int, period: int, base: str, h: dict[str, float], block: int = 0,
        sign: Callable[[list[float], int], list[float]] | None = None, state_period: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.method, self.world, self.period, self.h, self.block = method, world, period, h, block
        self.anchor, self.m = list(x), [0.0] * len(x)
        self.x = [list(x) for _ in range(world)]
        self.bases = [Local(base, len(x)) for _ in range(world)]
        self.lrs: list[float] = []
        self.rounds, self.state_period = 0, state_period or {}
        self.sign = sign or (lambda u, k: [(v > 0) - (v < 0) for v in u])
        row = -(-len(x) // (world * 64)) * 64
        self.worker = [[0.0] * (row * world) for _ in range(world)]
        self.server = [0.0] * (row * world)

    def step(self, grads: list[list[float]], lr: float) -> None:
        for x, base, grad in zip(self.x, self.bases, grads):
            base.step(x, grad, lr)
        self.lrs.append(lr)
        if len(self.lrs) == self.period:
            self.synchronize()

    def synchronize(self) -> None:
        ways = [[a - v for a, v in zip(self.anchor, x)] for x in self.x]
        if self.block and self.world > 1:
            d = self._compressed(ways)
        else:
            d = [sum(column) / self.world for column in zip(*ways)]
        lr = sum(self.lrs) / len(self.lrs)
        self._outer(d, lr)
        self.x = [list(self.anchor) for _ in range(self.world)]
        self.lrs = []
        self.rounds += 1
        for name, every in self.state_period.items():
            if self.rounds % every == 0:
                mean = [sum(column) / self.world for column in zip(*(getattr(base, name) for base in self.bases))]
                for base in self.bases:
                    setattr(base, name, list(mean))

    def _compressed(self, ways: list[list[float]]) -> list[float]:
        n, total = len(self.anchor), len(self.server)
        row = total // self.world
        active = [j < n for j in range(total)]
        cuts = [slice(r * row, (r + 1) * row) for r in range(self.world)]
        sent = []
        for way, error in zip(ways, self.worker):
            z = [a + b for a, b in zip(way + [0.0] * (total - n), error)]
            sent.append([q for cut in cuts for q in compress(z[cut], self.block, "l2", active[cut])])
            error[:] = [a - b for a, b in zip(z, sent[-1])]
        y = [sum(column) / self.world + e for column, e in zip(zip(*sent), self.server)]
        out = [q for cut in cuts for q in compress(y[cut], self.block, "l2", active[cut])]
        self.server = [a - b for a, b in zip(y, out)]
        return out[:n]

    def _outer(self, d: list[float], lr: float) -> None:
        x, m, h = self.anchor, self.m, self.h
        if self.method == "average" or (lr == 0 and self.method in ("slowmo", "sign")):
            self.anchor = [a - b for a, b in zip(x, d)]
        elif self.method == "slowmo":
            self.m = [h["momentum"] * u + v / lr for u, v in zip(m, d)]
            self.anchor = [a - h["lr"] * lr * u for a, u in zip(x, self.m)]
        elif self.method == "diloco":
            self.m = [h["momentum"] * b + v for b, v in zip(m, d)]
            self.anchor = [a - h["lr"] * (v + h["momentum"] * b) for a, v, b in zip(x, d, self.m)]
        else:
            u = [h["b1"] * a + (1 - h["b1"]) * v / lr for a, v in zip(m, d)]
            s = self.sign(u, self.rounds)
            self.anchor = [a - h["lr"] * lr * (b + h["wd"] * a) for a, b in zip(x, s)]
            self.m = [h["b2"] * a + (1 - h["b2"]) * v / lr for a, v in zip(m, d)]

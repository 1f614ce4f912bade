"""0/1 Adam on plain lists of Python floats. Slow, obvious, and shares no code with commopt.

Unlike the optimizer, it keeps the sum u of the paper and moves x_i step by step.
"""

from __future__ import annotations

import math

from oracle import compress


def refreshes(kappa: int, stop: int) -> set[int]:
    """T_v, by the recursion of the paper."""
    out, k, j = set(), 0, 0
    while k <= stop:
        k, j = k + 2 ** (j // kappa), j + 1
        out.add(k)
    return {k for k in out if k <= stop}


def rounds(stop: int, first: int, double_every: int | None, longest: int, steps: int) -> set[int]:
    """T_u up to ``steps``: every step up to ``stop``, then by recursion."""
    out, s = set(range(1, stop + 1)), 0
    while stop + s <= steps:
        out.add(stop + s)
        s += min(longest, first * 2 ** (s // double_every if double_every else 0))
    return {t for t in out if 1 <= t <= steps}


class ZeroOneAdamOracle:
    """All ranks of a run at once, on one flat buffer padded to one row for each rank.

    Args:
        x: initial parameters, flat, in the order of the buffer.
        ranks: how many.
        per_node: ranks of a node; what they send is averaged before it is compressed.
        exact, sync: T_v and T_u.
        row_multiple: the length of a row is a multiple of this.
        block, norm: of the sign compressor; ``norm=None`` sends the values themselves.
    """

    def __init__(
        self, x: list[float], ranks: int, exact: set[int], sync: set[int], *, b1: float, b2: float, eps: float,
        wd: float, row_multiple: int, block: int | None, norm: str | None, per_node: int = 1,
    ) -> None:  # fmt: skip
        self.size, self.ranks, self.per_node = len(x), ranks, per_node
        self.exact, self.sync = exact, sync
        self.row = -(-len(x) // (ranks * row_multiple)) * row_multiple
        total = self.row * ranks
        self.anchor = list(x)
        self.x = [list(x) for _ in range(ranks)]
        self.m, self.u = ([[0.0] * total for _ in range(ranks)] for _ in range(2))
        self.v = [0.0] * total
        self.worker = [[0.0] * total for _ in range(ranks // per_node)]
        self.server = [[0.0] * self.row for _ in range(ranks)]
        self.t = self.refreshed = 0
        self.first = 1  # step at which the interval began
        self.gamma = 0.0
        self.b1, self.b2, self.eps, self.wd, self.block, self.norm = b1, b2, eps, wd, block, norm

    def _send(self, z: list[float], live: list[bool]) -> list[float]:
        if self.norm is None:
            return [v if a else 0.0 for v, a in zip(z, live)]
        return compress(z, self.block, self.norm, live)

    def step(self, grads: list[list[float]], lr: float) -> None:
        """One step on the gradients of each rank, flat, each of ``size`` elements."""
        self.t += 1
        pad = [0.0] * (len(self.v) - self.size)
        grads = [list(g) + pad for g in grads]
        if self.t in self.exact:
            self._exact(grads, lr)
            return
        c = lr / (1 - self.b1**self.first)
        self.gamma += c
        before, self.anchor = self.anchor, [x * (1 - lr * self.wd) for x in self.anchor]
        for m, u, x, g in zip(self.m, self.u, self.x, grads):
            for j in range(len(m)):
                m[j] = self.b1 * m[j] + (1 - self.b1) * g[j]
                u[j] += c * m[j]
            for j in range(self.size):
                x[j] += self.anchor[j] - before[j]
                x[j] -= c * m[j] / self._d(j) if self.v[j] > 0 else 0.0
        if self.t in self.sync:
            self._round(c)

    def _d(self, j: int) -> float:
        return math.sqrt(self.v[j] / (1 - self.b2**self.refreshed)) + self.eps

    def _exact(self, grads: list[list[float]], lr: float) -> None:
        self.refreshed += 1
        m, c = self.m[0], lr / (1 - self.b1**self.t)
        for j in range(self.size):
            g = sum(grad[j] for grad in grads) / self.ranks
            m[j] = self.b1 * m[j] + (1 - self.b1) * g
            self.v[j] = self.b2 * self.v[j] + (1 - self.b2) * g * g
            self.anchor[j] = self.anchor[j] * (1 - lr * self.wd) - c * m[j] / self._d(j)
        self._begin()

    def _begin(self) -> None:
        """All ranks are where rank 0 is."""
        self.m = [list(self.m[0]) for _ in self.m]
        self.u = [[0.0] * len(self.v) for _ in self.u]
        self.x = [list(self.anchor) for _ in self.x]
        self.gamma, self.first = 0.0, self.t + 1

    def _round(self, c: float) -> None:
        live = [v != 0 for v in self.v]
        rows = [range(r * self.row, (r + 1) * self.row) for r in range(self.ranks)]
        mine = [[u / self.gamma for u in us] for us in self.u] if self.gamma else self.m
        nodes = [mine[i : i + self.per_node] for i in range(0, self.ranks, self.per_node)]
        sent = []
        for i, node in enumerate(nodes):
            z = [sum(column) / self.per_node + e for *column, e in zip(*node, self.worker[i])]
            z = [v if a else 0.0 for v, a in zip(z, live)]
            sent.append([self._send([z[j] for j in row], [live[j] for j in row]) for row in rows])
            flat = [q for part in sent[-1] for q in part]
            self.worker[i] = [a - b for a, b in zip(z, flat)]
        for r, row in enumerate(rows):
            alive = [live[j] for j in row]
            columns = zip(*(part[r] for part in sent))
            y = [sum(q / len(nodes) for q in column) + e for column, e in zip(columns, self.server[r])]
            y = [v if a else 0.0 for v, a in zip(y, alive)]
            q = self._send(y, alive)
            self.server[r] = [a - b for a, b in zip(y, q)]
            for j, value in zip(row, q):
                self.m[0][j] = value
        for j in range(self.size):
            self.anchor[j] -= self.gamma * self.m[0][j] / self._d(j) if live[j] else 0.0
        self._begin()

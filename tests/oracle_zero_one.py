"""0/1 Adam on plain lists of Python floats. Slow, obvious, and shares no code with commopt.

Unlike the optimizer, it keeps the sum u of the paper and moves x_i step by step.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from oracle import compress, raised


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
        coupled: wd x_i is a part of every rank's gradient.
        least: of the mean of its block, what an element of v is at least when it has moved; 0 in the paper.
        corrects: whether m and v are corrected for their start.
        lossy_refresh: (1 - b1) g is compressed at T_v: with the residuals where the step before was in T_v, too, else
            without them, and what is lost is added to them, unless the next step is in T_v, too: then they are 0.
    """

    def __init__(
        self, x: list[float], ranks: int, exact: set[int], sync: set[int], *, b1: float, b2: float, eps: float,
        wd: float, row_multiple: int, block: int | None, norm: str | None, per_node: int = 1,
        coupled: bool = False, least: float = 0.01, corrects: bool = True, lossy_refresh: bool = False,
    ) -> None:  # fmt: skip
        self.least, self.moved, self.corrects, self.lossy_refresh = least, False, corrects, lossy_refresh
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
        self.t = 0
        self.steps, self.refreshed = [0] * total, [0] * total  # of each element: how often m and v were updated
        self.taken, self.lr_sum = 0, 0.0  # in this interval
        self.owed = 1  # steps of the interval in whose mean the residuals are what they are
        self.b1, self.b2, self.eps, self.block, self.norm = b1, b2, eps, block, norm
        self.wd, self.pull = (0.0, wd) if coupled else (wd, 0.0)

    def _send(self, z: list[float], active: list[bool]) -> list[float]:
        if self.norm is None:
            return [v if a else 0.0 for v, a in zip(z, active)]
        return compress(z, self.block, self.norm, active)

    def step(self, grads: list[list[float | None]], lr: float, frozen: Collection[int] = ()) -> None:
        """One step on the gradients of each rank, flat, each of ``size`` elements; None where a rank has none. What no
        rank has one of stays as it is, unless there are local steps in the interval: then it is zeros, but of what was
        ``frozen`` when the interval began."""
        self.t += 1
        pad: list[float | None] = [None] * (len(self.v) - self.size)
        columns = list(zip(*(list(g) + pad for g in grads)))
        knows = self.t in self.exact or (self.t in self.sync and self.taken == 0)
        if self.taken == 0:
            self.frozen = frozenset(frozen)
            self.first = [t + 1 for t in self.steps]  # step of each element at which the interval began
        here = [j for j, g in enumerate(columns) if (g.count(None) < len(g) if knows else j not in self.frozen)]
        filled = [[g or 0.0 for g in (column[i] for column in columns)] for i in range(len(grads))]
        if self.t in self.exact:
            self._exact(filled, lr, here)
            self.moved = True
            return
        if self.moved:
            if self.norm is not None:
                self.v = raised(self.v, self.ranks, self.block, self.least)
            self.moved = False
        self.taken, self.lr_sum = self.taken + 1, self.lr_sum + lr
        moving = [j for j in here if self.refreshed[j]]
        before = list(self.anchor)
        for j in moving:
            self.steps[j] += 1
            self.anchor[j] *= 1 - lr * self.wd
        for m, u, x, g in zip(self.m, self.u, self.x, filled):
            for j in moving:
                m[j] = self.b1 * m[j] + (1 - self.b1) * (g[j] + self.pull * x[j])
                u[j] += lr * m[j]
            for j in moving:
                x[j] += self.anchor[j] - before[j]
                x[j] -= lr / self._c(j) * m[j] / self._d(j) if self.v[j] > 0 else 0.0
        if self.t in self.sync:
            self._round(set(here), moving)

    def synchronize(self) -> None:
        """All ranks go to the mean of where they are, and to the mean of their momenta. The residuals wait."""
        if not self.taken:
            return
        mine = [[u / self.lr_sum for u in us] for us in self.u] if self.lr_sum else self.m
        for j in range(len(self.v)):
            if j not in self.frozen and self.refreshed[j]:
                mean = sum(us[j] for us in mine) / self.ranks if self.v[j] != 0 else 0.0
                self.m[0][j] = mean
                self.anchor[j] -= self.lr_sum / self._c(j) * mean / self._d(j) if mean else 0.0
        self._begin()

    def _c(self, j: int) -> float:
        return 1 - self.b1 ** self.first[j] if self.corrects else 1

    def _d(self, j: int) -> float:
        return math.sqrt(self.v[j] / (1 - self.b2 ** self.refreshed[j] if self.corrects else 1)) + self.eps

    def _exact(self, grads: list[list[float]], lr: float, here: list[int]) -> None:
        m = self.m[0]
        means = [sum(column) / self.ranks for column in zip(*grads)]
        if self.lossy_refresh:
            shares = [[(1 - self.b1) * g for g in gs] for gs in grads]
            means = [q / (1 - self.b1) for q in self._lossy_mean(shares, here)]
            if self.t > 1 and self.t - 1 not in self.exact and self.t + 1 in self.exact:
                self.worker, self.server = ([[0.0] * len(errors) for errors in of] for of in (self.worker, self.server))
        for j in here:
            self.steps[j] += 1
            self.refreshed[j] += 1
            g = means[j] + self.pull * self.anchor[j]
            m[j] = self.b1 * m[j] + (1 - self.b1) * g
            self.v[j] = self.b2 * self.v[j] + (1 - self.b2) * g * g
            c = lr / (1 - self.b1 ** self.steps[j] if self.corrects else 1)
            self.anchor[j] = self.anchor[j] * (1 - lr * self.wd) - c * m[j] / self._d(j)
        self._begin()

    def _lossy_mean(self, zs: list[list[float]], here: list[int]) -> list[float]:
        """The mean of the ``zs`` of all ranks, compressed both ways; the residuals have what is lost."""
        active = [j in set(here) for j in range(len(self.v))]
        mean = [0.0] * len(self.v)
        for i, errors in enumerate(self.worker):
            node = [sum(column) / self.per_node for column in zip(*zs[i * self.per_node : (i + 1) * self.per_node])]
            node, kept = self._with(errors, node)
            for r in range(self.ranks):
                row = slice(r * self.row, (r + 1) * self.row)
                for j, q in zip(range(row.start, row.stop), self._send(node[row], active[row])):
                    mean[j] += q / len(self.worker)
                    errors[j] = kept[j] + (node[j] - q) / self.owed if active[j] else errors[j]
        for r, errors in enumerate(self.server):
            row = slice(r * self.row, (r + 1) * self.row)
            means, kept = self._with(errors, mean[row])
            sent = self._send(means, active[row])
            for k, q in enumerate(sent):
                errors[k] = kept[k] + (means[k] - q) / self.owed if active[row][k] else errors[k]
            mean[row] = sent
        return mean

    def _with(self, errors: list[float], z: list[float]) -> tuple[list[float], list[float]]:
        """What is sent of ``z`` at T_v, and what is left of the ``errors`` besides what is lost of that."""
        if self.t - 1 in self.exact:
            return [a + b for a, b in zip(z, errors)], [0.0] * len(z)
        return z, list(errors)

    def _begin(self) -> None:
        """All ranks are where rank 0 is."""
        self.m = [list(self.m[0]) for _ in self.m]
        self.u = [[0.0] * len(self.v) for _ in self.u]
        self.x = [list(self.anchor) for _ in self.x]
        self.taken, self.lr_sum = 0, 0.0

    def _round(self, here: set[int], moving: list[int]) -> None:
        active = [v != 0 and j in here for j, v in enumerate(self.v)]
        rows = [range(r * self.row, (r + 1) * self.row) for r in range(self.ranks)]
        mine = [[u / self.lr_sum for u in us] for us in self.u] if self.lr_sum else self.m
        for errors in (*self.worker, *self.server):
            errors[:] = [e * self.owed / max(self.owed, self.taken) for e in errors]
        self.owed = self.taken
        nodes = [mine[i : i + self.per_node] for i in range(0, self.ranks, self.per_node)]
        sent = []
        for i, node in enumerate(nodes):
            z = [sum(column) / self.per_node + e for *column, e in zip(*node, self.worker[i])]
            z = [v if a else 0.0 for v, a in zip(z, active)]
            sent.append([self._send([z[j] for j in row], [active[j] for j in row]) for row in rows])
            flat = [q for part in sent[-1] for q in part]
            for j in here:
                self.worker[i][j] = z[j] - flat[j]
        for r, row in enumerate(rows):
            is_active = [active[j] for j in row]
            columns = zip(*(part[r] for part in sent))
            y = [sum(q / len(nodes) for q in column) + e for column, e in zip(columns, self.server[r])]
            y = [v if a else 0.0 for v, a in zip(y, is_active)]
            q = self._send(y, is_active)
            for k, j in enumerate(row):
                if j in here:
                    self.server[r][k] = y[k] - q[k]
                    self.m[0][j] = q[k]
        for j in moving:
            self.anchor[j] -= self.lr_sum / self._c(j) * self.m[0][j] / self._d(j) if active[j] else 0.0
        self._begin()

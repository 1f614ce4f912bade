"""LAMB and 1-bit LAMB on plain lists of Python floats, tensor by tensor. Shares no code with commopt."""

from __future__ import annotations

import math
from collections import Counter

from oracle import compress


def norm(x: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in x))


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


class OneBitLambOracle:
    """All ranks of a run at once. Tensors lie end to end in one flat buffer, padded to ``rows`` equal rows.

    Args:
        x: initial parameters by tensor, in the order of the buffer.
        world: number of workers W: ranks, or nodes.
        freeze: T_w; None is LAMB for the whole run.
        rows: in how many rows the buffer is compressed; W if None.
        row_multiple: the length of a row is a multiple of this.
        block, norm: of the sign compressor; ``norm=None`` sends the values themselves.
        common: the magnitude that all momenta are brought to is "one", or, as in the paper, the "mean" over tensors.
        scaling: k is one of a "tensor", or each "element" has its own, that the signs are those of the update.
        debias: whether the averaged ratio is divided by 1 - b3^n; the paper does not.
        lossy_warmup: (1 - b1) g is compressed in the warm-up, with the same residuals.
        least: of the mean of its tensor, what an element of v stands as; 0 in the papers.

    Attributes:
        seen: how often each way through the bounds of r was taken, so that a test can say that it was.
    """

    def __init__(
        self, x: list[list[float]], world: int, freeze: int | None, *, lr: float, b1: float, b2: float, eps: float,
        wd: float, b3: float = 0.9, low: float = 0.01, high: float = 10.0, r_min: float = 0.5, r_max: float = 4.0,
        r_thr: float = 0.1, row_multiple: int = 1, block: int | None = None, norm: str | None = None,
        rows: int | None = None, common: str = "one", debias: bool = True, lossy_warmup: bool = False,
        scaling: str = "tensor", least: float = 0.01,
    ) -> None:  # fmt: skip
        self.x = [list(t) for t in x]
        self.world, self.freeze, self.rows = world, freeze, rows or world
        size = sum(len(t) for t in x)
        self.row = -(-size // (self.rows * row_multiple)) * row_multiple
        self.padding = self.row * self.rows - size
        self.m, self.v, self.f = ([[0.0] * len(t) for t in x] for _ in range(3))
        self.worker = [[0.0] * (self.row * self.rows) for _ in range(world)]
        self.server = [0.0] * (self.row * self.rows)
        self.c, self.n, self.r = [0.0] * len(x), [0] * len(x), [1.0] * len(x)
        self.k: list[list[float]] = []
        self.scaling, self.least = scaling, least
        self.t = 0
        self.lr, self.b1, self.b2, self.b3, self.eps, self.wd = lr, b1, b2, b3, eps, wd
        self.low, self.high, self.r_min, self.r_max, self.r_thr = low, high, r_min, r_max, r_thr
        self.block, self.norm, self.common, self.debias, self.lossy_warmup = block, norm, common, debias, lossy_warmup
        self.seen: Counter[str] = Counter()

    def step(self, given: list[list[list[float] | None]]) -> None:
        """One step on the gradients: given[rank][tensor][element], None for a tensor that has none there. What has none
        anywhere stays as it is."""
        self.t += 1
        here = [i for i in range(len(self.x)) if any(rank[i] is not None for rank in given)]
        grads = [[g or [0.0] * len(x) for g, x in zip(rank, self.x)] for rank in given]
        if self.freeze is None or self.t <= self.freeze:
            means = [[math.fsum(g) / self.world for g in zip(*(rank[i] for rank in grads))] for i in range(len(self.x))]
            if self.lossy_warmup:
                takes_part = self._takes_part(here)
                shares = [[(1 - self.b1) * g for g in self._flat(rank)] for rank in grads]
                q = self._mean(shares, [a > 0 for a in takes_part], here)
                means = self._cut([value / (1 - self.b1) for value in q])
            for i in here:
                self._lamb(i, means[i])
            return
        if not self.k:
            self._switch()
        before = [list(m) for m in self.m]
        self._exchange(grads, here)
        for i in here:
            self._frozen(i, before[i])

    def _ratio(self, x: list[float], u: list[float]) -> float | None:
        return clip(norm(x) / norm(u), self.low, self.high) if norm(x) > 0 and norm(u) > 0 else None

    def _average(self, i: int, ratio: float | None) -> None:
        if ratio is not None:
            self.c[i] = self.b3 * self.c[i] + (1 - self.b3) * ratio
            self.n[i] += 1

    def _lamb(self, i: int, grad: list[float]) -> None:
        m, v, x = self.m[i], self.v[i], self.x[i]
        for j, g in enumerate(grad):
            m[j] = self.b1 * m[j] + (1 - self.b1) * g
            v[j] = self.b2 * v[j] + (1 - self.b2) * g * g
        u = [a / (math.sqrt(b) + self.eps) + self.wd * c for a, b, c in zip(m, v, x)]
        ratio = self._ratio(x, u)
        self._average(i, ratio)
        self.x[i] = [a - self.lr * (1.0 if ratio is None else ratio) * b for a, b in zip(x, u)]

    def _switch(self) -> None:
        for v in self.v:
            there = [x for x in v if x > 0]
            floor = self.least * math.fsum(there) / len(there) if there and self.norm is not None else 0.0
            v[:] = [max(x, floor) if x > 0 else x for x in v]
        sizes = []
        for m, v in zip(self.m, self.v):
            active = [j for j in range(len(v)) if v[j] > 0]
            rms = math.sqrt(math.fsum(m[j] ** 2 for j in active) / len(active)) if active else 0.0
            usual = math.sqrt(math.fsum(v[j] for j in active) / len(active)) if active else 0.0
            sizes.append(max(rms, usual / 10))
        there = [s for s in sizes if s > 0]
        target = 1.0 if self.common == "one" else math.fsum(there) / len(there)
        self.k = [[target / s if s > 0 else 1.0] * len(t) for s, t in zip(sizes, self.x)]
        if self.scaling == "element":
            self.k = [[1 / (math.sqrt(b) + self.eps) for b in v] for v in self.v]
        self.f = [list(v) for v in self.v]
        if self.lossy_warmup:  # the residual is of the momentum, which is scaled from now on
            factors = self._flat(self.k)
            self.worker = [[f * e for f, e in zip(factors, residual)] for residual in self.worker]
            self.server = [f * e for f, e in zip(factors, self.server)]

    def _takes_part(self, here: list[int]) -> list[float]:
        return self._flat([[float(i in here)] * len(t) for i, t in enumerate(self.x)])

    def _cut(self, flat: list[float]) -> list[list[float]]:
        out, start = [], 0
        for t in self.x:
            out.append(flat[start : start + len(t)])
            start += len(t)
        return out

    def _flat(self, tensors: list[list[float]]) -> list[float]:
        return [v for t in tensors for v in t] + [0.0] * self.padding

    def _send(self, z: list[float], active: list[bool]) -> list[float]:
        if self.norm is None:
            return [v if a else 0.0 for v, a in zip(z, active)]
        return compress(z, self.block, self.norm, active)

    def _exchange(self, grads: list[list[list[float]]], here: list[int]) -> None:
        """m <- the compressed mean of k (b1 m + (1-b1) g_i), over k. Residuals are those of the scaled momentum."""
        active = [v > 0 and a > 0 for v, a in zip(self._flat(self.v), self._takes_part(here))]
        values = []
        for rank in grads:
            scaled = [
                [c * (self.b1 * a + (1 - self.b1) * b) for c, a, b in zip(k, m, g)]
                for k, m, g in zip(self.k, self.m, rank)
            ]
            values.append(self._flat(scaled))
        means = self._cut(self._mean(values, active, here))
        for i in here:
            self.m[i] = [value / c for value, c in zip(means[i], self.k[i])]

    def _mean(self, values: list[list[float]], active: list[bool], here: list[int]) -> list[float]:
        """The mean of what the workers have, compressed both ways with the residuals."""
        takes_part = self._takes_part(here)
        cuts = [slice(r * self.row, (r + 1) * self.row) for r in range(self.rows)]
        sent = []
        for i, own in enumerate(values):
            z = [(a + e) if is_active else 0.0 for a, e, is_active in zip(own, self.worker[i], active)]
            q = [value for cut in cuts for value in self._send(z[cut], active[cut])]
            self.worker[i] = [a - b if c else e for a, b, c, e in zip(z, q, takes_part, self.worker[i])]
            sent.append(q)
        mean = [sum(q / self.world for q in column) for column in zip(*sent)]
        y = [(a + e) if is_active else 0.0 for a, e, is_active in zip(mean, self.server, active)]
        q = [value for cut in cuts for value in self._send(y[cut], active[cut])]
        self.server = [a - b if c else e for a, b, c, e in zip(y, q, takes_part, self.server)]
        return q

    def _frozen(self, i: int, before: list[float]) -> None:
        m, v, x, f = self.m[i], self.v[i], self.x[i], self.f[i]
        for j in range(len(m)):
            g = (m[j] - self.b1 * before[j]) / (1 - self.b1)
            f[j] = self.b2 * f[j] + (1 - self.b2) * g * g
        u0 = [a / (math.sqrt(b) + self.eps) for a, b in zip(m, v)]
        u = [a + self.wd * b for a, b in zip(u0, x)]
        active = [(math.sqrt(a) + self.eps) / (math.sqrt(b) + self.eps) for a, b in zip(v, f) if a > 0]
        r = max(active, default=1.0)
        if self.wd > 0 and norm(u) > 0:
            w = min(1.0, norm(u0) / norm(u))
            r = w * r + (1 - w)
        bounded = clip(r, self.r_min, self.r_max)
        near = clip(bounded, self.r[i] * (1 - self.r_thr), self.r[i] * (1 + self.r_thr))
        if active:
            self.seen["low" if r < self.r_min else "high" if r > self.r_max else "within"] += 1
            self.seen["down" if near > bounded else "up" if near < bounded else "free"] += 1
        self.r[i] = near
        if self.n[i] == 0:
            self._average(i, self._ratio(x, u))
        c = self.c[i] / (1 - self.b3 ** self.n[i] if self.debias else 1.0) if self.n[i] else 1.0
        self.x[i] = [a - self.lr * c * near * b for a, b in zip(x, u)]

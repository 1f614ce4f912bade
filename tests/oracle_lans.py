"""LANS on plain lists of Python floats, tensor by tensor. Shares no code with commopt."""

from __future__ import annotations

import math


def norm(x: list[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in x))


class LansOracle:
    """One process. ``x``: initial parameters by tensor. ``low``, ``high``: bounds of the trust ratios."""

    def __init__(
        self, x: list[list[float]], *, lr: float, b1: float, b2: float, eps: float, wd: float, normalize: bool = True,
        low: float = 0.0, high: float = math.inf,
    ) -> None:  # fmt: skip
        self.x = [list(t) for t in x]
        self.m, self.v = ([[0.0] * len(t) for t in x] for _ in range(2))
        self.t = [0] * len(x)
        self.lr, self.b1, self.b2, self.eps, self.wd, self.normalize = lr, b1, b2, eps, wd, normalize
        self.low, self.high = low, high

    def step(self, given: list[list[float] | None]) -> None:
        """One step on the gradients, given[tensor][element]; None for a tensor that has none, which stays as it is."""
        for i, g in enumerate(given):
            if g is not None:
                self._block(i, [v / (norm(g) + self.eps) for v in g] if self.normalize else g)

    def _ratio(self, x: list[float], u: list[float]) -> float:
        if norm(x) == 0 or norm(u) == 0:
            return 1.0
        return max(self.low, min(self.high, norm(x) / norm(u)))

    def _block(self, i: int, g: list[float]) -> None:
        self.t[i] += 1
        x, t = self.x[i], self.t[i]
        self.m[i] = [self.b1 * a + (1 - self.b1) * b for a, b in zip(self.m[i], g)]
        self.v[i] = [self.b2 * a + (1 - self.b2) * b * b for a, b in zip(self.v[i], g)]
        m_hat = [a / (1 - self.b1**t) for a in self.m[i]]
        root = [math.sqrt(a / (1 - self.b2**t)) + self.eps for a in self.v[i]]
        r = [a / s + self.wd * b for a, s, b in zip(m_hat, root, x)]
        c = [a / s + self.wd * b for a, s, b in zip(g, root, x)]
        of_r, of_c = self.b1 * self._ratio(x, r), (1 - self.b1) * self._ratio(x, c)
        self.x[i] = [a - self.lr * (of_r * b + of_c * d) for a, b, d in zip(x, r, c)]

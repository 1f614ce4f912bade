"""Lion with one bit an element, on plain lists of Python floats. Slow, obvious, and shares no code with commopt.

Blocks and the layout of the flat buffer are part of the oracle, because scales depend on them.
"""

from __future__ import annotations

from oracle import compress


def sign(c: float) -> int:
    return (c > 0) - (c < 0)


def lion_step(x: float, m: float, g: float, lr: float, b1: float, b2: float, wd: float) -> tuple[float, float]:
    """x and m of one element after a step of Lion on its gradient, as in arXiv 2302.06675."""
    c = b1 * m + (1 - b1) * g
    return x - lr * (sign(c) + wd * x), b2 * m + (1 - b2) * g


class OneBitLionOracle:
    """All ranks of a run at once, on one flat buffer of ``size`` real elements padded to ``rows`` equal rows.

    Args:
        x: initial parameters, flat, in the order of the buffer.
        world: number of workers W: ranks, or nodes.
        rows: in how many rows the buffer is compressed, each averaged by a rank; W if None.
        row_multiple: the length of a row is a multiple of this.
        block, norm: of the sign compressor; ``norm=None`` sends the values themselves.
    """

    def __init__(
        self, x: list[float], world: int, *, lr: float, b1: float, b2: float, wd: float, row_multiple: int,
        block: int | None, norm: str | None, rows: int | None = None,
    ) -> None:  # fmt: skip
        self.size, self.world = len(x), world
        self.rows = rows or world
        self.row = -(-len(x) // (self.rows * row_multiple)) * row_multiple
        total = self.row * self.rows
        self.x, self.m = list(x), [0.0] * total
        self.worker = [[0.0] * total for _ in range(world)]
        self.server = [[0.0] * self.row for _ in range(self.rows)]
        self.lr, self.b1, self.b2, self.wd = lr, b1, b2, wd
        self.block, self.norm = block, norm

    def _send(self, z: list[float], here: list[bool]) -> list[float]:
        if self.norm is None:
            return [v if a else 0.0 for v, a in zip(z, here)]
        return compress(z, self.block, self.norm, here)

    def step(self, grads: list[list[float | None]]) -> None:
        """One step on the gradients of each rank, flat, each of ``size`` elements; None where a rank has none. What no
        rank has one of stays as it is."""
        columns = list(zip(*grads))
        here = [column.count(None) < self.world for column in columns]
        here += [False] * (len(self.m) - self.size)
        c = self._mean_of_c([[g or 0.0 for g in grad] + [0.0] * (len(self.m) - self.size) for grad in grads], here)
        for j in range(self.size):
            if here[j]:
                g = (c[j] - self.b1 * self.m[j]) / (1 - self.b1)  # what c says that the gradient was
                self.x[j] -= self.lr * (sign(c[j]) + self.wd * self.x[j])
                self.m[j] = self.b2 * self.m[j] + (1 - self.b2) * g

    def _mean_of_c(self, grads: list[list[float]], here: list[bool]) -> list[float]:
        """c, compressed on the way to each server and on the way back, with what was lost before."""
        cuts = [slice(r * self.row, (r + 1) * self.row) for r in range(self.rows)]
        sent = []
        for grad, error in zip(grads, self.worker):
            z = [self.b1 * m + (1 - self.b1) * g + e for m, g, e in zip(self.m, grad, error)]
            decoded = [q for cut in cuts for q in self._send([v * a for v, a in zip(z[cut], here[cut])], here[cut])]
            sent.append(decoded)
            error[:] = [v - q if a else e for v, q, e, a in zip(z, decoded, error, here)]
        out: list[float] = []
        for cut, error in zip(cuts, self.server):
            y = [sum(column) / self.world + e for column, e in zip(zip(*(q[cut] for q in sent)), error)]
            q = self._send([v * a for v, a in zip(y, here[cut])], here[cut])
            error[:] = [v - w if a else e for v, w, e, a in zip(y, q, error, here[cut])]
            out += q
        return out

"""1-bit Adam on plain lists of Python floats, straight from the paper. Slow, obvious, and shares no code with commopt.

Blocks, masks and the layout of the flat buffer are part of the oracle, because scales depend on them.
"""

from __future__ import annotations

import math
import struct


def float32(x: float) -> float:
    """``x`` rounded to the nearest float32."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def compress(z: list[float], block: int | None, norm: str, active: list[bool]) -> list[float]:
    """What the receiver of one row decodes: +-s by block, with s over the active elements of the block; else 0."""
    out: list[float] = []
    size = block or max(len(z), 1)
    for start in range(0, len(z), size):
        part, is_active = z[start : start + size], active[start : start + size]
        kept = [v for v, a in zip(part, is_active) if a]
        if not kept:
            scale = 0.0
        elif norm == "l2":
            scale = float32(math.sqrt(math.fsum(v * v for v in kept) / len(kept)))
        else:
            scale = float32(math.fsum(abs(v) for v in kept) / len(kept))
        out += [(scale if v >= 0 else -scale) if a else 0.0 for v, a in zip(part, is_active)]
    return out


def raised(v: list[float], rows: int, block: int | None, least: float) -> list[float]:
    """v of a flat buffer of ``rows`` rows as it stands: not below ``least`` of the mean in its block; zeros stay."""
    out: list[float] = []
    row = len(v) // rows
    for r in range(rows):
        roots = [math.sqrt(x) for x in v[r * row : (r + 1) * row]]
        means = compress(roots, block, "l2", [x > 0 for x in roots])
        out += [max(x, least * mean * mean) for x, mean in zip(v[r * row :], means)]
    return out


class OneBitAdamOracle:
    """All ranks of a run at once, on one flat buffer of ``size`` real elements padded to ``rows`` equal rows.

    Args:
        x: initial parameters, flat, in the order of the buffer.
        world: number of workers W: ranks, or nodes.
        rows: in how many rows the buffer is compressed, each averaged by a rank; W if None.
        freeze: T_w.
        row_multiple: the length of a row is a multiple of this.
        block, norm: of the sign compressor; ``norm=None`` sends the values themselves.
        lossy_warmup: (1 - b1) g is compressed in the warm-up, with the same residuals.
        coupled: wd x is a part of every rank's gradient; of the mean one in the warm-up.
        least: of the mean of its block, what an element of v stands as; 0 in the paper.
        corrects: whether m and v are corrected for their start.
    """

    def __init__(
        self, x: list[float], world: int, freeze: int, *, lr: float, b1: float, b2: float, eps: float, wd: float,
        row_multiple: int, block: int | None, norm: str | None, rows: int | None = None,
        lossy_warmup: bool = False, coupled: bool = False, least: float = 0.01, corrects: bool = True,
    ) -> None:  # fmt: skip
        self.least: float | None = least
        self.corrects = corrects
        self.size, self.world, self.freeze = len(x), world, freeze
        self.rows = rows or world
        self.row = -(-len(x) // (self.rows * row_multiple)) * row_multiple
        total = self.row * self.rows
        self.x = list(x)
        self.m, self.v = [0.0] * total, [0.0] * total
        self.worker = [[0.0] * total for _ in range(world)]
        self.server = [[0.0] * self.row for _ in range(self.rows)]
        self.t = 0
        self.steps, self.refreshed = [0] * total, [0] * total  # of each element: how often m and v were updated
        self.lr, self.b1, self.b2, self.eps, self.wd = lr, b1, b2, eps, wd
        self.block, self.norm, self.lossy_warmup, self.coupled = block, norm, lossy_warmup, coupled

    def _send(self, z: list[float], active: list[bool]) -> list[float]:
        if self.norm is None:
            return [v if a else 0.0 for v, a in zip(z, active)]
        return compress(z, self.block, self.norm, active)

    def step(self, grads: list[list[float | None]]) -> None:
        """One step on the gradients of each rank, flat, each of ``size`` elements; None where a rank has none. What no
        rank has one of stays as it is."""
        self.t += 1
        pad: list[float | None] = [None] * (len(self.m) - self.size)
        columns = list(zip(*(list(g) + pad for g in grads)))
        here = [j for j, column in enumerate(columns) if column.count(None) < len(column)]
        filled = [[g or 0.0 for g in (column[i] for column in columns)] for i in range(len(grads))]
        for j in here:
            self.steps[j] += 1
        present = set(here)
        if self.t <= self.freeze:
            means = [sum(column) / self.world for column in zip(*filled)]
            if self.lossy_warmup:
                shares = [[(1 - self.b1) * g for g in grad] for grad in filled]
                means = [
                    q / (1 - self.b1) for q in self._mean(shares, [j in present for j in range(len(self.m))], present)
                ]
            for j in here:
                self.refreshed[j] += 1
                g = means[j] + (self.wd * self.x[j] if self.coupled else 0.0)
                self.m[j] = self.b1 * self.m[j] + (1 - self.b1) * g
                self.v[j] = self.b2 * self.v[j] + (1 - self.b2) * g * g
        else:
            active = [v != 0 and j in present for j, v in enumerate(self.v)]
            if self.coupled:
                decays = [self.wd * x for x in self.x] + [0.0] * len(pad)
                filled = [[g + decay for g, decay in zip(grad, decays)] for grad in filled]
            locals_ = [[self.b1 * m + (1 - self.b1) * g for m, g in zip(self.m, grad)] for grad in filled]
            means = self._mean(locals_, active, present)
            for j in here:
                self.m[j] = means[j]
            self._raise()
        for j in here:
            self.x[j] *= 1 if self.coupled else 1 - self.lr * self.wd
            if self.v[j] > 0 or self.t <= self.freeze:
                c1, c2 = 1 - self.b1 ** self.steps[j], 1 - self.b2 ** self.refreshed[j]
                c1, c2 = (c1, c2) if self.corrects else (1, 1)
                self.x[j] -= self.lr / c1 * self.m[j] / (math.sqrt(self.v[j] / c2) + self.eps)

    def _raise(self) -> None:
        """Once, and where something is lost."""
        if self.least is not None and self.norm is not None:
            self.v = raised(self.v, self.rows, self.block, self.least)
        self.least = None

    def _mean(self, values: list[list[float]], active: list[bool], here: set[int]) -> list[float]:
        """The mean of what the workers have, compressed both ways with the residuals."""
        rows = [range(r * self.row, (r + 1) * self.row) for r in range(self.rows)]
        sent = []  # sent[i][r]: what rank r decodes of rank i's row r
        for i, own in enumerate(values):
            z = [x + e if a else 0.0 for x, e, a in zip(own, self.worker[i], active)]
            sent.append([self._send([z[j] for j in row], [active[j] for j in row]) for row in rows])
            flat = [q for part in sent[-1] for q in part]
            for j in here:
                self.worker[i][j] = z[j] - flat[j]
        out = []
        for r, row in enumerate(rows):
            is_active = [active[j] for j in row]
            columns = zip(*(part[r] for part in sent))
            y = [sum(q / self.world for q in column) + e for column, e in zip(columns, self.server[r])]
            y = [v if a else 0.0 for v, a in zip(y, is_active)]
            q = self._send(y, is_active)
            for k, j in enumerate(row):
                if j in here:
                    self.server[r][k] = y[k] - q[k]
            out += q
        return out

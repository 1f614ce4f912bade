"""CSER and its relatives on plain lists of Python floats, each straight from its own definition. Shares no code with
commopt: the random numbers that choose blocks are computed here once more.

Everything is a list over ranks of flat lists. A compressor is a function (v, step, reset, active) -> C(v), where v is 0
and C(v) too but for the ``active`` elements, as if the others were not there. A gradient is None where a rank has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from oracle import compress

Flat = list[float]
Given = list[float | None]
How = Callable[[Flat, int, bool, list[bool]], Flat]

_M64 = 2**64 - 1


def philox(seed: int, stream: int, step: int, count: int) -> list[int]:
    """``count`` numbers of Philox4x64-10 (Salmon et al., 2011): key (seed, 0), from counter (1, 0, stream, step)."""
    out: list[int] = []
    low = 0
    while len(out) < count:
        low += 1
        c, k = [low, 0, stream, step], [seed, 0]
        for r in range(10):
            if r:
                k = [(k[0] + 0x9E3779B97F4A7C15) & _M64, (k[1] + 0xBB67AE8584CAA73B) & _M64]
            a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [(b >> 64) ^ c[1] ^ k[0], b & _M64, (a >> 64) ^ c[3] ^ k[1], a & _M64]
        out += c
    return out[:count]


def kept_blocks(n: int, ratio: float, block: int, seed: int, step: int, stream: int) -> list[int]:
    """Which blocks of ``n`` elements are kept."""
    count = math.ceil(n / block)
    first, *numbers = philox(seed, stream, step, count + 1)
    wanted = count / ratio
    kept = int(wanted) + (first / 2**64 < wanted - int(wanted))
    return sorted(sorted(range(count), key=lambda i: (numbers[i], i))[:kept])


def blocks(ratio: float, block: int, seed: int = 0) -> How:
    """The first bucket's blocks."""

    def how(v: Flat, step: int, reset: bool, active: list[bool]) -> Flat:
        kept = set(kept_blocks(len(v), ratio, block, seed, step, int(reset)))
        return [a if i // block in kept else 0.0 for i, a in enumerate(v)]

    return how


def sign(block: int) -> How:
    return lambda v, step, reset, active: compress(v, block, "l2", active)


def everything(v: Flat, step: int, reset: bool, active: list[bool]) -> Flat:
    return list(v)


def nothing(v: Flat, step: int, reset: bool, active: list[bool]) -> Flat:
    return [0.0] * len(v)


def mean(vs: list[Flat]) -> Flat:
    return [math.fsum(column) / len(vs) for column in zip(*vs)]


def sub(a: Flat, b: Flat) -> Flat:
    return [x - y for x, y in zip(a, b)]


def add(a: Flat, b: Flat) -> Flat:
    return [x + y for x, y in zip(a, b)]


def whole(v: Flat) -> list[bool]:
    """All of it."""
    return [True] * len(v)


def psync(vs: list[Flat], how: How, step: int, reset: bool, active: list[bool]) -> tuple[list[Flat], list[Flat]]:
    """v'_i and r_i."""
    sent = [how(v, step, reset, active) for v in vs]
    rest = [sub(v, q) for v, q in zip(vs, sent)]
    average = mean(sent)
    return [add(average, r) for r in rest], rest


class Local:
    """The workers, with what all methods here share: p_i of SGD with momentum and weight decay."""

    def __init__(
        self, x: Flat, world: int, *, lr: float, momentum: float = 0.0, nesterov: bool = False, wd: float = 0.0
    ) -> None:
        self.x = [list(x) for _ in range(world)]
        self.e = [[0.0] * len(x) for _ in range(world)]
        self.m = [[0.0] * len(x) for _ in range(world)]
        self.t = 0
        self.lr, self.b, self.nesterov, self.wd = lr, momentum, nesterov, wd

    def updates(self, grads: list[Given]) -> list[Flat]:
        """p_i: 0, and no momentum is touched, where no rank has a gradient; ``self.here`` says where one has."""
        self.here = [any(g is not None for g in column) for column in zip(*grads)]
        out = []
        for i, grad in enumerate(grads):
            g = [(a or 0.0) + self.wd * b for a, b in zip(grad, self.x[i])]
            self.m[i] = [self.b * m + a if here else m for m, a, here in zip(self.m[i], g, self.here)]
            moved = [a + self.b * m for m, a in zip(self.m[i], g)] if self.nesterov else self.m[i]
            out.append([self.lr * a if here else 0.0 for a, here in zip(moved, self.here)])
        return out


class Cser(Local):
    """Algorithm 2 of the paper, with momentum; e_i stored."""

    def __init__(self, *args, c2: How, c1: How, period: int, **settings) -> None:
        super().__init__(*args, **settings)
        self.c2, self.c1, self.period = c2, c1, period

    def step(self, grads: list[Given]) -> None:
        moved, rest = psync(self.updates(grads), self.c2, self.t, False, self.here)
        self.x = [sub(x, p) for x, p in zip(self.x, moved)]
        self.e = [sub(e, r) for e, r in zip(self.e, rest)]
        if (self.t + 1) % self.period == 0:
            error, rest = psync(self.e, self.c1, self.t, True, whole(self.e[0]))
            self.x = [add(sub(x, e), f) for x, e, f in zip(self.x, self.e, error)]
            self.e = rest
        self.t += 1


class CserBlocks(Cser):
    """The paper's implementation II: no e_i; blocks of the models are averaged. ``c`` must be blocks."""

    def step(self, grads: list[Given]) -> None:
        moved, _ = psync(self.updates(grads), self.c2, self.t, False, self.here)
        self.x = [sub(x, p) for x, p in zip(self.x, moved)]
        if (self.t + 1) % self.period == 0:
            self.x, _ = psync(self.x, self.c1, self.t, True, whole(self.x[0]))
        self.t += 1


class SynchronousSGD(Local):
    def step(self, grads: list[Given]) -> None:
        update = mean(self.updates(grads))
        self.x = [sub(x, update) for x in self.x]


class LocalSGD(Local):
    def __init__(self, *args, period: int, **settings) -> None:
        super().__init__(*args, **settings)
        self.period = period

    def step(self, grads: list[Given]) -> None:
        self.x = [sub(x, p) for x, p in zip(self.x, self.updates(grads))]
        self.t += 1
        if self.t % self.period == 0:
            average = mean(self.x)
            self.x = [list(average) for _ in self.x]


class Csea(Local):
    """Error assimilation at every step: what is lost of the error so far and this update stays in the local model."""

    def __init__(self, *args, c: How, **settings) -> None:
        super().__init__(*args, **settings)
        self.c = c

    def step(self, grads: list[Given]) -> None:
        owed = [sub(e, p) for e, p in zip(self.e, self.updates(grads))]
        sent = [self.c(v, self.t, True, whole(v)) for v in owed]
        kept, average = [sub(v, q) for v, q in zip(owed, sent)], mean(sent)
        self.x = [add(add(sub(x, e), average), r) for x, e, r in zip(self.x, self.e, kept)]
        self.e = kept
        self.t += 1


class CserPL(Local):
    """Partial local SGD: local steps; every H of them, the part C of what the models have come apart by is averaged."""

    def __init__(self, *args, c: How, period: int, **settings) -> None:
        super().__init__(*args, **settings)
        self.c, self.period, self.common = c, period, list(self.x[0])

    def step(self, grads: list[Given]) -> None:
        self.x = [sub(x, p) for x, p in zip(self.x, self.updates(grads))]
        self.t += 1
        if self.t % self.period == 0:
            apart = [sub(x, self.common) for x in self.x]
            sent = [self.c(v, self.t - 1, True, whole(v)) for v in apart]
            self.common = add(self.common, mean(sent))
            self.x = [add(self.common, sub(v, q)) for v, q in zip(apart, sent)]


class EfSGD(Local):
    """What is owed counts as where x is to go. Its sign matters where it is 0, which is sent as plus."""

    def __init__(self, *args, c: How, **settings) -> None:
        super().__init__(*args, **settings)
        self.c = c

    def step(self, grads: list[Given]) -> None:
        owed = [sub(e, p) for e, p in zip(self.e, self.updates(grads))]
        sent = [self.c(v, self.t, True, whole(v)) for v in owed]
        self.e = [sub(v, q) for v, q in zip(owed, sent)]
        average = mean(sent)
        self.x = [add(x, average) for x in self.x]
        self.t += 1


class QSparse(Local):
    def __init__(self, *args, c: How, period: int, **settings) -> None:
        super().__init__(*args, **settings)
        self.c, self.period, self.anchor = c, period, list(self.x[0])

    def step(self, grads: list[Given]) -> None:
        self.x = [sub(x, p) for x, p in zip(self.x, self.updates(grads))]
        self.t += 1
        if self.t % self.period == 0:
            owed = [add(e, sub(x, self.anchor)) for e, x in zip(self.e, self.x)]
            sent = [self.c(v, self.t - 1, True, whole(v)) for v in owed]
            self.e = [sub(v, q) for v, q in zip(owed, sent)]
            self.anchor = add(self.anchor, mean(sent))
            self.x = [list(self.anchor) for _ in self.x]

"""Top-k by threshold on plain lists of floats: MSTopK's loop, from the text of ``commopt.ops.threshold`` alone."""

from __future__ import annotations

import math
import struct

import numpy as np

SEGMENT = 65536


def nbytes_of(n: int, k: int) -> int:
    """Bytes of a row, in closed form."""
    return -(-(4 * max(-(-n // SEGMENT) - 1, 0) + 4 * k) // 16) * 16


def total(values: list[float]) -> float:
    """The sum in 16 lanes, of chunks of 4096, and of what comes of these."""
    while len(values) > 1:
        sums = []
        for start in range(0, len(values), 4096):
            lanes = [0.0] * 16
            for i, v in enumerate(values[start : start + 4096]):
                lanes[i % 16] += v
            while len(lanes) > 1:
                half = len(lanes) // 2
                lanes = [a + b for a, b in zip(lanes[:half], lanes[half:])]
            sums.append(lanes[0])
        values = sums
    return values[0]


def taken(a: list[float], k: int, t1: float, t2: float) -> list[int]:
    """All that reach ``t1``, and of those that reach only ``t2`` the first."""
    sure = [i for i, v in enumerate(a) if v >= t1]
    between = [i for i, v in enumerate(a) if t2 <= v < t1]
    return sorted(sure + between[: k - len(sure)])


def chosen(z: list[float], k: int, rounds: int) -> list[int]:
    """Which elements are sent, ascending."""
    a = [abs(v) if abs(v) < 2.0**128 else math.inf for v in z]  # not so is NaN too
    wild = [i for i, v in enumerate(a) if v == math.inf]
    if wild:
        tame = [i for i, v in enumerate(a) if v != math.inf]
        return sorted(wild[:k] + tame[: max(k - len(wild), 0)])
    mu, u = total(a) / len(a), max(a)
    k1, t1, k2, t2 = 0, math.inf, len(a), 0.0
    base, top = mu, u
    c = sum(v >= mu for v in a)
    if c <= k:
        k1, t1, base, top = c, mu, 0.0, mu
    else:
        k2, t2 = c, mu
    left, right = 0.0, 1.0
    for _ in range(rounds):
        q = (left + right) / 2
        t = base + q * (top - base)
        c = sum(v >= t for v in a)
        if c <= k:
            right = q
            if c > k1:
                k1, t1 = c, t
        else:
            left = q
            if c < k2:
                k2, t2 = c, t
    return taken(a, k, t1, t2)


def bfloat16(v: float) -> int:
    """Its bits, of the nearest one to the nearest float32, ties to even."""
    with np.errstate(over="ignore"):
        bits = int(np.float32(v).view(np.uint32))
    return 0x7FC0 if math.isnan(v) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def encode(z: list[float], k: int, rounds: int) -> tuple[bytes, dict[int, float]]:
    """The payload row, and what its entries decode to."""
    sent = chosen(z, k, rounds)
    assert len(sent) == len(set(sent)) == k
    codes = [bfloat16(z[i]) for i in sent]
    starts = [sum(i < end for i in sent) for end in range(SEGMENT, len(z), SEGMENT)]
    row = struct.pack(f"<{len(starts)}I{k}H", *starts, *codes) + struct.pack(f"<{k}H", *(i % SEGMENT for i in sent))
    return row + bytes(-len(row) % 16), {i: float(np.uint32(c << 16).view(np.float32)) for i, c in zip(sent, codes)}

"""Top-k on plain lists of floats, from the text of ``commopt.ops.top_k`` alone."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

SCALES = {1: 1, 2: 2, 8: 1, 16: 0, 32: 0}


def group_of(k: int) -> int:
    """Chunks that share scales."""
    unit = 8 // math.gcd(k, 8)
    return max(256 // k // unit * unit, unit)


def nbytes_of(n: int, k: int, chunk: int, bits: int, itemsize: int = 4) -> int:
    """Bytes of a row, in closed form."""
    chunks, entries = -(-n // chunk), n // chunk * k + min(k, n % chunk)
    values = entries * itemsize if bits == 32 else -(-entries * bits // 8)
    total = 4 * SCALES[bits] * -(-chunks // group_of(k)) + values + values % 2 + entries * (1 if chunk <= 256 else 2)
    return -(-total // 16) * 16


def magnitude(v: float) -> float:
    """For sorting: NaN is above all."""
    return math.inf if math.isnan(v) else abs(v) if math.isfinite(v) else 1e300 * 1e9


def chosen(z: list[float], k: int) -> list[int]:
    """Of one chunk, which elements are sent, ascending."""
    order = sorted(range(len(z)), key=lambda i: (not math.isnan(z[i]), -magnitude(z[i]), i))
    return sorted(i for i in order[:k] if z[i] != 0)


def indices_of(sent: list[int], length: int, k: int) -> list[int]:
    """The indices as they are in the payload."""
    places = min(k, length)
    if sent:
        return sent + [sent[-1]] * (places - len(sent))
    return [length] if places == 1 else [1] + [0] * (places - 1)


def total(values: list[float]) -> float:
    """The sum in 32 lanes."""
    lanes = [0.0] * 32
    for i, v in enumerate(values):
        lanes[i % 32] += v
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:])]
    return lanes[0]


def mean(values: list[float]) -> float:
    """Of those that are not 0."""
    return total(values) / max(sum(v != 0 for v in values), 1)


def bfloat16(v: float) -> int:
    """Its bits, of the nearest one to a float32, ties to even."""
    bits = int(np.float32(v).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def group_values(v: list[float], bits: int, kind: Any) -> tuple[bytes, list[int], list[float]]:
    """The scales, the codes, and what the entries of one group decode to (those with 0 carry nothing)."""
    sizes = [abs(x) for x in v]
    if bits == 32:
        raw = np.array(v, kind)
        return b"", [int(x) for x in raw.view({4: np.uint32, 8: np.uint64}[raw.itemsize])], list(v)
    if bits == 16:
        codes = [bfloat16(x) for x in v]
        return b"", codes, [float(np.uint32(c << 16).view(np.float32)) for c in codes]
    if bits == 8:
        s = np.float32(max(sizes) / 127)
        steps = [float(np.rint(kind(x) / kind(s))) if s > 0 else 0.0 for x in v]
        q = [int(min(max(x, -127.0), 127.0)) for x in steps]
        return s.tobytes(), [x % 256 for x in q], [float(kind(x) * kind(s)) for x in q]
    border = mean(sizes)
    plus = [int(x > 0) for x in v]
    if bits == 1:
        s = np.float32(border)
        return s.tobytes(), plus, [float(s) if p else -float(s) for p in plus]
    high = [int(x != 0 and x >= border) for x in sizes]
    levels = [np.float32(mean([x if h == side else 0.0 for x, h in zip(sizes, high)])) for side in (0, 1)]
    out = [float(levels[h]) * (1 if p else -1) for h, p in zip(high, plus)]
    return levels[0].tobytes() + levels[1].tobytes(), [p + 2 * h for p, h in zip(plus, high)], out


def encode(z: list[float], k: int, chunk: int, bits: int, kind: Any = np.float32) -> tuple[bytes, list[float]]:
    """The payload row of finite numbers, and what it decodes to. kind: np.float32 or np.float64."""
    starts, group = list(range(0, len(z), chunk)), group_of(k)
    scales, codes, indices, out = b"", [], [], [0.0] * len(z)
    for first in range(0, len(starts), group):
        values, places = [], []
        for start in starts[first : first + group]:
            part = z[start : start + chunk]
            sent = chosen(part, k)
            indices += indices_of(sent, len(part), k)
            spare = min(k, len(part)) - len(sent)
            values += [part[i] for i in sent] + [0.0] * spare
            places += [start + i for i in sent] + [-1] * spare
        head, code, decoded = group_values(values, bits, kind)
        scales, codes = scales + head, codes + code
        for place, d in zip(places, decoded):
            if place >= 0:
                out[place] = d
    width = 64 if bits == 32 and kind is np.float64 else bits
    packed = sum(c << (i * width) for i, c in enumerate(codes)).to_bytes(-(-len(codes) * width // 8), "little")
    row = scales + packed + bytes(len(packed) % 2)
    row += struct.pack(
        f"<{len(indices)}{'B' if chunk <= 256 else 'H'}", *(i % (256 if chunk <= 256 else 65536) for i in indices)
    )
    return row + bytes(-len(row) % 16), out

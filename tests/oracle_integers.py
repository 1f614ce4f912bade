"""Integers with a scale a block, on plain lists of float64, from the text of ``commopt.ops.integers`` alone."""

from __future__ import annotations

import math
import struct

TOP = {8: 127.0, 4: 7.0, 2: 1.5}
WORD = 0xFFFFFFFF


def float32(x: float) -> float:
    """Rounded to float32; beyond its range inf."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def word(x: float) -> int:
    """The bits of x as float32."""
    return struct.unpack("<I", struct.pack("<f", float32(x)))[0]


def mix(h: int) -> int:
    h = ((h ^ h >> 16) * 0x85EBCA6B) & WORD
    h = ((h ^ h >> 13) * 0xC2B2AE35) & WORD
    return h ^ h >> 16


def hadamard(x: list[float]) -> list[float]:
    """Without the factor: of the halves, then butterflies between them."""
    if len(x) == 1:
        return x
    half = len(x) // 2
    low, high = hadamard(x[:half]), hadamard(x[half:])
    return [a + b for a, b in zip(low, high)] + [a - b for a, b in zip(low, high)]


def rotate(x: list[float]) -> list[float]:
    """A block, or a shorter one in pieces that are powers of two, the largest first."""
    out: list[float] = []
    while len(out) < len(x):
        size = 1 << (len(x) - len(out)).bit_length() - 1
        doublings = size.bit_length() - 1
        factor = 0.5 ** (doublings // 2) * (math.sqrt(0.5) if doublings % 2 else 1.0)
        out += [v * factor for v in hadamard(x[len(out) : len(out) + size])]
    return out


def scale_of(y: list[float], members: int, bits: int, stochastic: bool) -> float:
    if bits == 2 and not stochastic:
        s = math.sqrt(math.fsum(v * v for v in y) / members) if members else 0.0
    else:
        s = max(abs(v) for v in y) / TOP[bits]
    s = float32(s)
    return s if s >= 2.0**-126 else 0.0


def code_of(y: float, s: float, i: int, bits: int, stochastic: bool, seed: int) -> int:
    """A whole number; of 2 bits 0 to 3."""
    if s == 0:
        return 2 if bits == 2 else 0
    t = y * (1 / s)
    if stochastic:
        h = mix(((word(y) ^ mix(word(s) ^ seed)) + 0x9E3779B9 * i) & WORD)
        q = math.floor((t + 1.5 if bits == 2 else t) + (h >> 8) / 2**24)
    else:
        q = math.floor(t) + 2 if bits == 2 else round(t)  # Python rounds ties to even
    return min(max(q, 0), 3) if bits == 2 else int(min(max(q, -TOP[bits]), TOP[bits]))


def row(
    z: list[float], alive: list[bool], bits: int, block: int, stochastic: bool, rotated: bool, seed: int
) -> tuple[bytes, list[float]]:
    """The bytes of a row, and what they stand for."""
    z = [v if a else 0.0 for v, a in zip(z, alive)]
    scales, codes, sent = [], [], []
    for start in range(0, len(z), block):
        part = z[start : start + block]
        y = rotate(part) if rotated else part
        s = scale_of(y, len(y) if rotated else sum(alive[start : start + block]), bits, stochastic)
        q = [code_of(v, s, i, bits, stochastic, seed) for i, v in enumerate(y)]
        values = [(c - 1.5 if bits == 2 else c) * s for c in q]
        scales.append(s)
        codes += q
        sent += rotate(values) if rotated else values
    packed = 0
    for i, c in enumerate(codes):
        packed |= (c & (1 << bits) - 1) << bits * i
    out = struct.pack(f"<{len(scales)}f", *scales) + packed.to_bytes(-(-len(z) * bits // 8), "little")
    return out + bytes(-len(out) % 16), sent

"""Integers, and floats of 8 bits, with a scale a block, on plain lists of float64, from the text of
``commopt.ops.integers`` alone."""

from __future__ import annotations

import math
import struct

E4M3, E5M2 = 43, 52
TOP = {8: 127.0, 4: 7.0, 2: 1.5, E4M3: 448.0, E5M2: 57344.0}
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


def mantissa_and_bias(kind: int) -> tuple[int, int]:
    return (3, 7) if kind == E4M3 else (2, 15)


def value_of(code: int, bits: int) -> float:
    """What a code stands for, in scales."""
    if bits < 10:
        return code - 1.5 if bits == 2 else float(code)
    mantissa, bias = mantissa_and_bias(bits)
    exponent, digits = (code & 127) >> mantissa, (code & 127) % 2**mantissa
    size = (digits / 2**mantissa + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
    return -size if code & 128 else size


def float_code_of(t: float, h: int | None, kind: int) -> int:
    """Of a float of 8 bits: the nearest, of two the even one; with a hash ``h``, one of the two beside t."""
    t = float32(t)
    size, sign = min(abs(t), TOP[kind]), 128 if math.copysign(1, t) < 0 else 0
    below = max(c for c in range(128) if value_of(c, kind) <= size)
    low, high = value_of(below, kind), value_of(below + 1, kind)
    if h is None:
        up = size - low > high - size or (size - low == high - size and below % 2 == 1)
        return sign | below + up
    mantissa, bias = mantissa_and_bias(kind)
    if below < 2**mantissa:
        return sign | math.floor(float32(size * 2.0 ** (bias - 1 + mantissa) + (h >> 8) / 2**24))
    digits = 23 - mantissa
    return sign | below + ((size - low) / (high - low) * 2**digits + (h >> 32 - digits) >= 2**digits)


def code_of(y: float, s: float, i: int, bits: int, stochastic: bool, seed: int) -> int:
    """A whole number; of 2 bits 0 to 3, of floats 0 to 255."""
    if s == 0:
        return 2 if bits == 2 else 0
    t = y * (1 / s)
    h = mix(((word(y) ^ mix(word(s) ^ seed)) + 0x9E3779B9 * i) & WORD) if stochastic else None
    if bits > 8:
        return float_code_of(t, h, bits)
    if h is not None:
        q = math.floor((t + 1.5 if bits == 2 else t) + (h >> 8) / 2**24)
    else:
        q = math.floor(t) + 2 if bits == 2 else round(t)  # Python rounds ties to even
    return min(max(q, 0), 3) if bits == 2 else int(min(max(q, -TOP[bits]), TOP[bits]))


def row(
    z: list[float], is_active: list[bool], bits: int, block: int, stochastic: bool, rotated: bool, seed: int
) -> tuple[bytes, list[float]]:
    """The bytes of a row, and what they stand for."""
    z = [v if a else 0.0 for v, a in zip(z, is_active)]
    scales, codes, sent = [], [], []
    for start in range(0, len(z), block):
        part = z[start : start + block]
        y = rotate(part) if rotated else part
        s = scale_of(y, len(y) if rotated else sum(is_active[start : start + block]), bits, stochastic)
        q = [code_of(v, s, i, bits, stochastic, seed) for i, v in enumerate(y)]
        values = [value_of(c, bits) * s for c in q]
        scales.append(s)
        codes += q
        sent += rotate(values) if rotated else values
    packed, size = 0, min(bits, 8)
    for i, c in enumerate(codes):
        packed |= (c & (1 << size) - 1) << size * i
    out = struct.pack(f"<{len(scales)}f", *scales) + packed.to_bytes(-(-len(z) * size // 8), "little")
    return out + bytes(-len(out) % 16), sent

"""Numbers as people write them."""

from __future__ import annotations

import math


def figure(value: float, digits: int = 3, places: int = 6) -> str:
    """A number of so many significant digits, without exponent, and with so many places at most."""
    text = f"{float(f'{value:.{digits}g}'):.{places}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def rate(bits_per_second: float) -> str:
    """Bits per second with a unit."""
    if math.isinf(bits_per_second):
        return "not measurable"
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits_per_second >= unit:
            return f"{figure(bits_per_second / unit)} {name}"
    return f"{figure(bits_per_second / 1e3)} kbit/s"


def seconds(value: float) -> str:
    """Seconds with a unit."""
    return f"{figure(value)} s" if value >= 1 else f"{figure(value * 1e3)} ms"


def size(nbytes: int) -> str:
    """Bytes with a unit, in powers of 1024."""
    return f"{nbytes >> 20} MB" if nbytes >= 2**20 else f"{nbytes >> 10} KB"


def count(n: int) -> str:
    """A number of parameters with a unit."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= unit:
            return f"{figure(n / unit, 4)}{name}"
    return str(n)

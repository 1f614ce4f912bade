"""Whole numbers of 8, 4 or 2 bits, and one float32 scale a block.

Read first: tests/oracle_integers.py, the same on plain lists of floats.

    Int8, Int4:  C(x) = s q,  q in -Q..Q,  Q = 127 or 7,   s = max |x| / Q over the block
    Int2:        C(x) = s (q - 3/2),  q in 0..3,           s = sqrt(mean x^2)  ("nearest")  or  max |x| / 1.5

The four levels of ``Int2`` lie at +-0.5 and +-1.5 root mean squares, which is within 1 % of the best uniform quantiser
of a Gaussian; what lies beyond is cut off, and stays in the residual. With stochastic rounding nothing may be cut off,
or it would be biased: its scale is larger, and so is its error.

Rounding and rotation: :mod:`commopt.compress.scaled`. Formats and arithmetic: :mod:`commopt.ops.integers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from commopt.compress.scaled import Scaled


@dataclass(frozen=True)
class Int8(Scaled):
    """8 bits an element and a float32 scale a block: see :class:`commopt.compress.scaled.Scaled`."""

    bits: ClassVar[int] = 8  # type: ignore[misc]


@dataclass(frozen=True)
class Int4(Scaled):
    """4 bits an element and a float32 scale a block: see :class:`commopt.compress.scaled.Scaled`."""

    bits: ClassVar[int] = 4  # type: ignore[misc]


@dataclass(frozen=True)
class Int2(Scaled):
    """2 bits an element and a float32 scale a block: see :class:`commopt.compress.scaled.Scaled`."""

    bits: ClassVar[int] = 2  # type: ignore[misc]

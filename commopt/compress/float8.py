"""Floats of 8 bits, and one float32 scale a block.

    C(x) = s cast(x / s),   s = max |x| / Q,   Q = 448 (e4m3) or 57344 (e5m2), the largest number of the format

Rounding and rotation: :mod:`commopt.compress.scaled`. Formats and arithmetic: :mod:`commopt.ops.integers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from commopt.compress.scaled import Scaled
from commopt.ops.integers import E4M3, E5M2

_FORMATS = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class Float8(Scaled):
    """8 bits an element and a float32 scale a block: see :class:`commopt.compress.scaled.Scaled`.

    Small elements keep more digits beside large ones than with :class:`~commopt.compress.Int8`, large ones fewer.

    Args:
        format: "e4m3" (3 bits of mantissa, largest number 448) or "e5m2" (2 bits, 57344).

    Raises:
        ValueError: for a format that is neither.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in _FORMATS:
            raise ValueError(f"format must be 'e4m3' or 'e5m2', got {self.format!r}")

    @property
    def bits(self) -> int:
        return _FORMATS[self.format]

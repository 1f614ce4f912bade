"""The payload row of top-k: where its parts lie. Stated in :mod:`commopt.ops.top_k`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

BITS = (1, 2, 8, 16, 32)
SCALED_ENTRIES = 256
"""About how many entries share their scales."""
_SCALES = {1: 1, 2: 2, 8: 1, 16: 0, 32: 0}


@dataclass(frozen=True)
class TopKRow:
    """A row of ``n`` elements of ``dtype``, of which each chunk has ``k`` entries of ``bits`` bits.

    Attributes:
        n: elements, at least 0.
        k: entries of a chunk, 1 ... chunk; of a shorter last chunk, no more than it has elements.
        chunk: elements, a power of two from 16 to 65536.
        bits: one of :data:`BITS`.
        dtype: float32 or float64.

    Raises:
        ValueError: for any of them out of range.
    """

    n: int
    k: int
    chunk: int
    bits: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        k, chunk, bits = self.k, self.chunk, self.bits
        if self.n < 0:
            raise ValueError(f"n must be at least 0, got {self.n}")
        if not _is_int(chunk) or not 16 <= chunk <= 65536 or chunk & (chunk - 1):
            raise ValueError(f"chunk must be a power of two from 16 to 65536, got {chunk!r}")
        if not _is_int(k) or not 1 <= k <= chunk:
            raise ValueError(f"k must be an int with 1 <= k <= chunk = {chunk}, got {k!r}")
        if not _is_int(bits) or bits not in BITS:
            raise ValueError(f"bits must be 1, 2, 8, 16 or 32, got {bits!r}")
        if k == 1 and bits <= 2 and chunk in (256, 65536):
            raise ValueError(
                f"k must be at least 2 with bits={bits} and chunk={chunk}, got 1: a single index of that width has no "
                "way to say that there is nothing to send. Another chunk, or bits=8, has"
            )

    @cached_property
    def whole(self) -> int:
        """Chunks of full length."""
        return self.n // self.chunk

    @cached_property
    def chunks(self) -> int:
        """All of them."""
        return -(-self.n // self.chunk)

    @cached_property
    def entries(self) -> int:
        """Entries of the row."""
        return self.whole * self.k + min(self.k, self.n % self.chunk)

    @cached_property
    def group(self) -> int:
        """Chunks that share scales: of about 256 entries, whose values fill whole bytes."""
        unit = 8 // math.gcd(self.k, 8)
        return max(SCALED_ENTRIES // self.k // unit * unit, unit)

    @cached_property
    def groups(self) -> int:
        """Groups of chunks; the last may have fewer."""
        return -(-self.chunks // self.group)

    @cached_property
    def multiple(self) -> int:
        """Elements at whose multiples a row may be cut, and its pieces be compressed to the same values."""
        return self.chunk * (self.group if self.scales_of_group else 1)

    @property
    def scales_of_group(self) -> int:
        """float32 numbers of a group."""
        return _SCALES[self.bits]

    @cached_property
    def values_at(self) -> int:
        """Byte where the values start: after the scales."""
        return 4 * self.scales_of_group * self.groups

    @cached_property
    def values_nbytes(self) -> int:
        """Bytes of the values."""
        return self.entries * self.dtype.itemsize if self.bits == 32 else -(-self.entries * self.bits // 8)

    @cached_property
    def index_nbytes(self) -> int:
        """Bytes of an index."""
        return 1 if self.chunk <= 256 else 2

    @cached_property
    def indices_at(self) -> int:
        """Byte where the indices start: the next even one after the values."""
        return self.values_at + self.values_nbytes + self.values_nbytes % 2

    @cached_property
    def used(self) -> int:
        """Bytes before the zeros at the end."""
        return self.indices_at + self.entries * self.index_nbytes

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the row, a multiple of 16."""
        return -(-self.used // 16) * 16


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)

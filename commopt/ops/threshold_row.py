"""The payload row of top-k by threshold: where its parts lie. Stated in :mod:`commopt.ops.threshold`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

SEGMENT = 65536
"""Elements that indices count from the start of."""

MOST_ROUNDS = 32


@dataclass(frozen=True)
class ThresholdRow:
    """A row of ``n`` elements, of which ``k`` are sent.

    Attributes:
        n: elements, at least 0.
        k: entries, 1 ... n; 0 for n = 0.

    Raises:
        ValueError: for any of them out of range.
    """

    n: int
    k: int

    def __post_init__(self) -> None:
        n, k = self.n, self.k
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if not isinstance(k, int) or isinstance(k, bool) or not min(n, 1) <= k <= n:
            raise ValueError(f"k must be an int with {min(n, 1)} <= k <= n = {n}, got {k!r}")

    @cached_property
    def segments(self) -> int:
        """Segments of the row; the last one may be shorter."""
        return -(-self.n // SEGMENT)

    @cached_property
    def values_at(self) -> int:
        """Byte where the values start: after where the segments but the first do."""
        return 4 * max(self.segments - 1, 0)

    @cached_property
    def indices_at(self) -> int:
        """Byte where the indices start."""
        return self.values_at + 2 * self.k

    @cached_property
    def used(self) -> int:
        """Bytes before the zeros at the end."""
        return self.indices_at + 2 * self.k

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the row, a multiple of 16."""
        return -(-self.used // 16) * 16


def check_rounds(rounds: int) -> None:
    """Raises ValueError unless ``rounds`` is an int from 1 to :data:`MOST_ROUNDS`."""
    if not isinstance(rounds, int) or isinstance(rounds, bool) or not 1 <= rounds <= MOST_ROUNDS:
        raise ValueError(f"rounds must be an int from 1 to {MOST_ROUNDS}, got {rounds!r}")

"""The largest elements of a whole row, found by counting and not by sorting: MSTopK (arXiv 2010.10458).

Read first: tests/oracle_threshold.py, the same on plain lists of floats.

    C(x) = x where it is among the k largest in magnitude, as far as a threshold tells; else 0

A bisection between the mean magnitude and the largest finds two thresholds: no more than k elements reach the one, more
than k the other. All of the former are sent, and of those in between as many as are lacking. After 20 rounds nothing
of importance is in between. Each round counts, and counting needs no order, no memory and no scattered access.

Where this differs from the paper: what is lacking is taken from the first place on, and not from one drawn at random,
so that all ranks, and a resumed run, do the same. The mean itself is the first threshold, and where no more than k
elements reach it, the search goes on below it: the paper's would take the rest blindly, and with many zeros, as in the
gradient of an embedding, that is nothing. Values are bfloat16 and indices of 16 bits in segments of 65536 elements: 4
bytes an entry, for the paper's 8. What rounding loses is 0.17 % of what is sent, and stays in the residual with the
rest: the same bytes are worth more as twice as many entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt import ops
from commopt.compress.compressor import Compressor
from commopt.ops.threshold import ThresholdRow, check_rounds, threshold_is_sound


@dataclass(frozen=True)
class ThresholdTopK(Compressor):
    """The ``density`` n largest of a row of n elements, by magnitude, but for those that are equal up to the last
    threshold's precision: of these the first. Exactly so many of any row.

    A payload row is ``[starts of segments][bfloat16 values][16-bit indices]``, as :mod:`commopt.ops.threshold` states
    it: density times what the row has in float32. It is of the row as a whole, so that a bucket is sent in one piece.

    Of a row with inf or NaN, or magnitudes beyond bfloat16, something decodes to inf or NaN on every rank, and the row
    is not sound.

    Args:
        density: part of the elements that is sent, 0 < density <= 1; at least one.
        rounds: thresholds that are tried, 1 to 32.

    Raises:
        ValueError: for any of them out of range.
    """

    density: float = 0.01
    rounds: int = 20

    def __post_init__(self) -> None:
        density = self.density
        if not isinstance(density, (int, float)) or isinstance(density, bool) or not 0 < density <= 1:
            raise ValueError(f"density must be a number with 0 < density <= 1, got {density!r}")
        check_rounds(self.rounds)

    def entries(self, n: int) -> int:
        """Number of elements that are sent of ``n``: density n, rounded to nearest (ties to even), but at least 1."""
        return min(n, max(1, round(self.density * n)))

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return ops.threshold_nbytes(n, self.entries(n))

    def compress(self, x: Tensor, payload: Tensor) -> None:
        ops.threshold_compress(x, payload, self.entries(x.shape[1]), self.rounds)

    def is_sound(self, payload: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return threshold_is_sound(payload, ThresholdRow(n, self.entries(n)))

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        ops.threshold_decompress(payload, out, self.entries(out.shape[1]))

    def compress_with_feedback(
        self, x: Tensor, error: Tensor, payload: Tensor, active: Tensor | None = None, new_error: Tensor | None = None
    ) -> None:
        entries = self.entries(x.shape[1])
        ops.threshold_compress_with_feedback(x, error, payload, entries, self.rounds, active, new_error)

    def decompress_mean(self, payload: Tensor, out: Tensor) -> None:
        ops.threshold_decompress_mean(payload, out, self.entries(out.shape[0]))

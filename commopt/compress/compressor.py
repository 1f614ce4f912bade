"""What a compressor is: rows of floats <-> rows of bytes. A row is what one rank receives.

A compressor is stateless (a frozen dataclass): residuals belong to the caller. To add one, write ``nbytes``,
``compress`` and ``decompress`` in a file of its own; the other two methods have correct defaults and are overridden
only where a fused operator makes them faster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

WIRE_ALIGN = 16
"""Bytes of a wire row are a multiple of this, so that rows can be viewed as float32 and float64."""


def align(nbytes: int) -> int:
    """``nbytes`` rounded up to a whole number of wire units."""
    return -(-nbytes // WIRE_ALIGN) * WIRE_ALIGN


def unpack_bits(bits: Tensor, n: int) -> Tensor:
    """(..., ceil(n / 8)) uint8, least significant bit first -> (..., n) bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) >> shifts & 1).flatten(-2)[..., :n].bool()


class Compressor(ABC):
    """Rows of floats, shape (r, n), <-> rows of bytes, shape (r, nbytes(n)), each row decodable by itself.

    Everything a row needs (scales too) travels inside the row. Both directions write into tensors that the caller
    gives.
    """

    @abstractmethod
    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        """Exact size in bytes of the wire row of ``n`` values of ``dtype``; a multiple of 16."""

    @abstractmethod
    def compress(self, x: Tensor, wire: Tensor) -> None:
        """Writes C[x] to ``wire``. x: (r, n) float32 or float64, unchanged; wire: (r, nbytes(n)) uint8."""

    @abstractmethod
    def decompress(self, wire: Tensor, out: Tensor) -> None:
        """Writes to ``out`` (r, n) the values that ``wire`` (r, nbytes(n)) stands for; the same bits on every rank."""

    def compress_with_feedback(self, x: Tensor, error: Tensor, wire: Tensor, live: Tensor | None = None) -> None:
        """Sends C[x + error] and keeps what was lost: error <- (x + error) - C[x + error].

        Args:
            x: (r, n) float32 or float64, unchanged.
            error: (r, n) like x, the residual, updated in place.
            wire: (r, nbytes(n)) uint8, written.
            live: (r, ceil(n / 8)) uint8 bit mask, least significant bit first, or None for all. A dead element (bit 0)
                counts as absent: it enters as 0, and its residual stays 0 whatever the row decodes to at its place.
        """
        error.add_(x)
        if live is not None:
            error.mul_(unpack_bits(live, x.shape[1]))
        self.compress(error, wire)
        sent = torch.empty_like(error)
        self.decompress(wire, sent)
        if live is not None:
            sent.mul_(unpack_bits(live, x.shape[1]))
        error.sub_(sent)

    def decompress_mean(self, wire: Tensor, out: Tensor) -> None:
        """Writes to ``out`` (n,) the mean over the rows of ``wire`` (r, nbytes(n)), summed in row order."""
        row = torch.empty_like(out).unsqueeze(0)
        out.zero_()
        for i in range(wire.shape[0]):
            self.decompress(wire[i : i + 1], row)
            out.add_(row[0])
        out.div_(wire.shape[0])

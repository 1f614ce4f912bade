"""Codes of a few bits, and one float32 scale a block: what :mod:`commopt.compress.integers` and
:mod:`commopt.compress.float8` have in common.

**Stochastic rounding** rounds up or down at random, so that the mean of what is sent is what was to be sent. The noise
is a hash of the seed, the block's scale, the place in the block and the value itself: no generator and no state, equal
inputs give equal codes, and a resumed run is exact. So it is unbiased over elements and over inputs that change, but
not over repetitions of the very same input: there only the residual helps.

**Rotation** (SDP4Bit, arXiv 2410.15526) puts a normalised Walsh-Hadamard transform of the block before, and its inverse
behind. It spreads an element that is much larger than the rest over the whole block, so that the others need not share
its scale. Where all are of one size nothing is gained.

Formats and arithmetic: :mod:`commopt.ops.integers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from commopt import ops
from commopt.compress.compressor import Chunk, Compressor, Momentum, scales_are_sound
from commopt.ops.integers import LARGEST_BLOCK


@dataclass(frozen=True)
class Scaled(Compressor):
    """A code of ``bits`` for each element, and a scale for each block.

    A payload row is ``[float32 scales][codes, the first in the lowest bits][zeros up to a multiple of 16]``. A block
    that holds inf or NaN has the scale NaN, and decodes to NaN on every rank; one of zeros decodes to zeros.

    Args:
        block: elements that share a scale, a power of two from 8 to 8192. The last one of a row may be shorter.
        rounding: "nearest" or "stochastic".
        rotate: whether blocks are transformed first. A shorter last block is, in pieces that are powers of two.
        seed: of the noise of stochastic rounding, 0 <= seed < 2**32.

    Raises:
        ValueError: for any of them out of range.
    """

    block: int = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"
    rotate: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        block, seed = self.block, self.seed
        whole = isinstance(block, int) and not isinstance(block, bool)
        if not whole or not 8 <= block <= LARGEST_BLOCK or block & (block - 1):
            raise ValueError(f"block must be a power of two from 8 to {LARGEST_BLOCK}, got {block!r}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding must be 'nearest' or 'stochastic', got {self.rounding!r}")
        if not isinstance(self.rotate, bool):
            raise ValueError(f"rotate must be True or False, got {self.rotate!r}")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
            raise ValueError(f"seed must be an int with 0 <= seed < 2**32, got {seed!r}")

    @property
    def bits(self) -> int:
        """8, 4 or 2; or :data:`commopt.ops.integers.E4M3` or :data:`commopt.ops.integers.E5M2`."""
        raise NotImplementedError

    @property
    def chunk_multiple(self) -> int | None:
        return self.block

    @property
    def _coding(self) -> tuple[int, int, bool, bool, int]:
        return self.bits, self.block, self.rounding == "stochastic", self.rotate, self.seed

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return ops.int_nbytes(n, self.bits, self.block)

    def compress(self, x: Tensor, payload: Tensor) -> None:
        ops.int_compress(x, payload, *self._coding)

    def is_sound(self, payload: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scales_are_sound(payload, -(-n // self.block))

    def scales(self, payload: Tensor, n: int) -> Tensor:
        """The scales in ``payload``, (r, nbytes(n)) uint8, of ``n`` values a row: (r, nblocks) float32, a view."""
        return payload.view(torch.float32)[:, : -(-n // self.block)]

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        ops.int_decompress(payload, out, self.bits, self.block, self.rotate)

    def decompress_active(
        self, payload: Tensor, out: Tensor, active: Tensor | None, chunk: Chunk | None = None
    ) -> None:
        if chunk is None:
            ops.int_decompress(payload, out, self.bits, self.block, self.rotate, active)
        elif out.dtype == torch.float32:
            self.decompress_to(payload, [out], [0], out.view(-1), active, chunk)
        else:
            super().decompress_active(payload, out, active, chunk)

    def decompress_to(
        self,
        payload: Tensor,
        outs: Sequence[Tensor],
        offsets: Sequence[int],
        room: Tensor,
        active: Tensor | None,
        chunk: Chunk | None = None,
    ) -> None:
        if room.dtype == torch.float32:
            rows = self.bits, self.block, self.rotate, active
            ops.int_decompress_to(payload, outs, offsets, room.numel(), *rows, *(chunk or ()))
        else:
            super().decompress_to(payload, outs, offsets, room, active, chunk)

    def compress_with_feedback(
        self, x: Tensor, error: Tensor, payload: Tensor, active: Tensor | None = None, new_error: Tensor | None = None
    ) -> None:
        ops.int_compress_with_feedback(x, error, payload, *self._coding, active, new_error)

    def compress_momentum(
        self,
        momentum: Momentum | None,
        error: Tensor,
        payload: Tensor,
        active: Tensor | None,
        new_error: Tensor,
        chunk: Chunk | None = None,
    ) -> None:
        of = momentum or Momentum.nothing(error)
        ops.int_compress_momentum(
            of.m, of.grads, of.offsets, of.beta, of.alpha, error.view(-1), new_error.view(-1), payload, *self._coding,
            active, *(chunk or ()),
        )  # fmt: skip

    def decompress_mean(self, payload: Tensor, out: Tensor) -> None:
        ops.int_decompress_mean(payload, out, self.bits, self.block, self.rotate)

    def reduce(self, payloads: Tensor, error: Tensor, own: Tensor, active: Tensor | None, new_error: Tensor) -> None:
        ops.int_reduce(payloads, error, new_error, own, *self._coding, active)

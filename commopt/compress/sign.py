"""The scaled sign: one bit an element, and one scale a block.

    C(x) = s * sgn(x),  sgn(0) = +1;   s = ||x||_2 / sqrt(B)  (norm="l2")   or   ||x||_1 / B  (norm="l1")

over a block of B elements of a row. 1-bit Adam (arXiv 2102.02888) uses one scale for a whole buffer; ``block=None``
(one scale a row, that is one for what each rank receives) is the nearest to it. Scales by block take one pass over
memory instead of two, keep the residual smaller, and let a block of zeros decode to exact zeros.

The L2 scale keeps the norm, and keeps the residual bounded when a few elements are much larger than the rest; the L1
scale has the smaller error in one shot, but its residual grows with such inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from commopt import ops
from commopt.compress.compressor import Chunk, Compressor, FrozenAdam, Momentum, scales_are_sound

_NORMS = {"l1": 1, "l2": 2}


@dataclass(frozen=True)
class Sign(Compressor):
    """One bit an element and a float32 scale a block.

    A payload row is ``[float32 scales][sign bits, least significant first, 1 = not negative][zeros up to a multiple of
    16]``.

    Args:
        block: elements that share a scale, a positive multiple of 8; None for one scale a row.
        norm: "l2" (root mean square) or "l1" (mean absolute value).

    Raises:
        ValueError: for a block or norm out of range.
    """

    block: int | None = 2048
    norm: Literal["l1", "l2"] = "l2"

    def __post_init__(self) -> None:
        block = self.block
        if block is not None and (not isinstance(block, int) or isinstance(block, bool) or block < 8 or block % 8):
            raise ValueError(f"block must be None or a positive multiple of 8, got {block!r}")
        if self.norm not in _NORMS:
            raise ValueError(f"norm must be 'l1' or 'l2', got {self.norm!r}")

    @property
    def chunk_multiple(self) -> int | None:
        return self.block

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return ops.sign_nbytes(n, self.block or 0)

    def compress(self, x: Tensor, payload: Tensor) -> None:
        ops.sign_compress(x, payload, self.block or 0, _NORMS[self.norm])

    def is_sound(self, payload: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return scales_are_sound(payload, -(-n // (self.block or n or 1)))

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        ops.sign_decompress(payload, out, self.block or 0)

    def decompress_active(
        self, payload: Tensor, out: Tensor, active: Tensor | None, chunk: Chunk | None = None
    ) -> None:
        if chunk is None:
            ops.sign_decompress(payload, out, self.block or 0, active)
        else:  # no parameter moves along it
            flat = out.view(-1)
            ops.sign_decompress_adam_(payload, flat, flat, [], [], [], [], 0.0, 1.0, self.block or 0, active, *chunk)

    def compress_with_feedback(
        self, x: Tensor, error: Tensor, payload: Tensor, active: Tensor | None = None, new_error: Tensor | None = None
    ) -> None:
        ops.sign_compress_with_feedback(x, error, payload, self.block or 0, _NORMS[self.norm], active, new_error)

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
        ops.sign_compress_momentum(
            of.m, of.grads, of.offsets, of.beta, of.alpha, error.view(-1), new_error.view(-1), payload,
            self.block or 0, _NORMS[self.norm], active, *(chunk or ()),
        )  # fmt: skip

    def decompress_adam(
        self, payload: Tensor, m: Tensor, update: FrozenAdam, active: Tensor | None, chunk: Chunk | None = None
    ) -> None:
        ops.sign_decompress_adam_(
            payload, m, update.v, update.params, update.offsets, update.step_sizes, update.sqrt_bias_corrections2,
            update.eps, update.decay, self.block or 0, active, *(chunk or ()),
        )  # fmt: skip

    def decompress_mean(self, payload: Tensor, out: Tensor) -> None:
        ops.sign_decompress_mean(payload, out, self.block or 0)

    def reduce(self, payloads: Tensor, error: Tensor, own: Tensor, active: Tensor | None, new_error: Tensor) -> None:
        ops.sign_reduce(payloads, error, new_error, own, self.block or 0, _NORMS[self.norm], active)

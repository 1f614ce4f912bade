"""Two bytes an element: the cast to bfloat16. Payload rows: :mod:`commopt.ops.bfloat16`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from commopt import ops
from commopt.compress.compressor import Chunk, Compressor, Momentum


@dataclass(frozen=True)
class BFloat16(Compressor):
    """C(x) = x as bfloat16, rounded to nearest, ties to even; float64 by way of float32. No scales: it has the range of
    float32. What is beyond becomes inf, and NaN stays NaN."""

    @property
    def chunk_multiple(self) -> int | None:
        return 8

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return ops.bf16_nbytes(n)

    def compress(self, x: Tensor, payload: Tensor) -> None:
        n = x.shape[1]
        if n:  # in one pass, where a cast and a copy of its bytes take four times as long
            sent = payload.view(torch.bfloat16)
            sent[:, :n].copy_(x)
            sent[:, n:] = 0

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        if out.numel():
            out.copy_(payload.view(torch.bfloat16)[:, : out.shape[1]])

    def is_sound(self, payload: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return ops.all_finite(payload.view(torch.bfloat16)[:, :n]) if n else payload.new_ones((), dtype=torch.bool)

    def decompress_to(
        self,
        payload: Tensor,
        outs: Sequence[Tensor],
        offsets: Sequence[int],
        room: Tensor,
        active: Tensor | None,
        chunk: Chunk | None = None,
    ) -> None:
        ops.bf16_decompress_to(payload, outs, offsets, room.numel(), active, *(chunk or ()))

    def compress_with_feedback(
        self, x: Tensor, error: Tensor, payload: Tensor, active: Tensor | None = None, new_error: Tensor | None = None
    ) -> None:
        after = error if new_error is None else new_error
        ops.bf16_compress_momentum(x.reshape(-1), [], [], 1.0, 0.0, error.view(-1), after.view(-1), payload, active)

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
        ops.bf16_compress_momentum(
            of.m, of.grads, of.offsets, of.beta, of.alpha, error.view(-1), new_error.view(-1), payload, active,
            *(chunk or ()),
        )  # fmt: skip

    def reduce(self, payloads: Tensor, error: Tensor, own: Tensor, active: Tensor | None, new_error: Tensor) -> None:
        ops.bf16_reduce(payloads, error, new_error, own, active)

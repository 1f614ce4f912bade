"""The compressor that does nothing: for tests, for measuring what compression costs, and as a baseline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt import ops
from commopt.compress.compressor import Compressor, align


@dataclass(frozen=True)
class Identity(Compressor):
    """Sends the values as they are. Nothing is lost, so every residual stays 0."""

    def nbytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
        return align(n * dtype.itemsize)

    def compress(self, x: Tensor, payload: Tensor) -> None:
        used = x.shape[1] * x.element_size()
        payload[:, :used].copy_(x.view(torch.uint8))
        payload[:, used:] = 0

    def decompress(self, payload: Tensor, out: Tensor) -> None:
        out.view(torch.uint8).copy_(payload[:, : out.shape[1] * out.element_size()])

    def is_sound(self, payload: Tensor, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return ops.all_finite(payload.view(dtype)[:, :n] if n else payload.new_zeros(0, dtype=dtype))

    def compress_with_feedback(
        self, x: Tensor, error: Tensor, payload: Tensor, active: Tensor | None = None, new_error: Tensor | None = None
    ) -> None:
        rest = torch.add(x, error, out=error if new_error is None else new_error)
        self.compress(rest, payload)
        rest.zero_()

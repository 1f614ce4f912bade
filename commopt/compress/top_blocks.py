"""Blocks that matter most, the same on every rank: the structured sparsity of TASC (Dong, Liu and Keutzer). Not for
rows of bytes, which a rank makes alone: for gradients (:func:`commopt.compress_gradients`), whose ranks agree first.

    c_b = mean_i |a_i,b|^2 / |b|       a_i: the gradient of rank i, plus its residual; of block b, in a small all-reduce
    S   = the K blocks of the largest c_b
    the mean of gradients ~ mean_i a_i in the blocks of S, 0 elsewhere: an all-reduce, with no index and nothing lost
    residual of i <- a_i, with the blocks of S 0

Of TASC little is published: this is what its abstract says. It weighs c_b by a Hessian, which on small networks is no
better than without; and it plans all-reduces for the wires at hand, which here the backend does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commopt.compress.random_block import Blocks


@dataclass(frozen=True)
class TopBlocks:
    """Sends 1 of 1 / ``density`` blocks: those of the largest mean square over all ranks; of those that are equal, to
    the last bit of their roots, the first.

    A bucket of n elements has n // ``block`` of them, of which ``density`` times as many are sent, rounded to nearest,
    but at least one. The elements after the last of them, fewer than a block, are always sent.

    Args:
        density: part of the blocks that is sent, 0 < density <= 1.
        block: elements of a block, >= 1. A number for each block is sent too.

    Raises:
        ValueError: for an argument out of range.
    """

    density: float = 0.01
    block: int = 256

    def __post_init__(self) -> None:
        density, block = self.density, self.block
        if not isinstance(density, (int, float)) or isinstance(density, bool) or not 0 < density <= 1:
            raise ValueError(f"density must be a number with 0 < density <= 1, got {density!r}")
        if not isinstance(block, int) or isinstance(block, bool) or block < 1:
            raise ValueError(f"block must be an int >= 1, got {block!r}")

    def kept(self, n: int) -> int:
        """Number of blocks that are sent of ``n`` elements."""
        blocks = n // self.block
        return min(blocks, max(1, round(self.density * blocks)))

    def importance(self, a: Tensor, ranks: int) -> Tensor:
        """The mean square of each whole block of ``a`` (n,): (n // block,), like a. NaN of one that is not finite, and
        else such that the sum of those of ``ranks`` is finite."""
        whole = a[: a.numel() // self.block * self.block].view(-1, self.block)
        square = torch.linalg.vector_norm(whole, dim=1, dtype=torch.float64).square() / self.block
        most = torch.finfo(a.dtype).max / (2 * ranks)
        return square.clamp(max=most).where(square.isfinite(), torch.nan).to(a.dtype)

    def choose(self, importance: Tensor, n: int) -> Blocks:
        """The blocks of ``n`` elements that are sent. ``importance``: (n // block,), the same on every rank; NaN is
        above all."""
        order = importance.sort(descending=True, stable=True).indices
        whole = order[: self.kept(n)].sort().values
        return Blocks(whole, self.block, n // self.block * self.block, n)

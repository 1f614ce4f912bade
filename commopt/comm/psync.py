"""The mean over the ranks of a part of what each has (``PSync`` of CSER, arXiv 2007.13221), and the residual."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from commopt import ops
from commopt.comm.backend import Backend, Work
from commopt.compress.compressor import Compressor
from commopt.compress.random_block import Blocks


class PSync(Protocol):
    """C[v] of every rank under way, to be averaged.

    Attributes:
        residual: (n,), v - C[v]: what this rank has not sent.
        works: the collectives, started; when they are done, the mean is there.
    """

    residual: Tensor
    works: list[Work]

    def mean(self) -> Tensor:
        """mean_i C[v_i], (n,): a new tensor, with the same bits on every rank."""

    def is_sound(self) -> Tensor:
        """True if what was received can be right, 0-d bool."""


class BlockSync:
    """Of blocks that are the same on every rank: one all-reduce of their elements, none where there are none.

    Args:
        v: (n,), overwritten with the residual.
        blocks: what is sent.
        backend: the ranks.
    """

    def __init__(self, v: Tensor, blocks: Blocks, backend: Backend) -> None:
        self.blocks, self.residual = blocks, v
        self.values = blocks.gather(v)
        self.works = [backend.all_reduce(self.values)] if self.values.numel() else []
        blocks.zero_(v)

    def mean(self) -> Tensor:
        mean = torch.zeros_like(self.residual)
        self.blocks.scatter_(mean, self.values)
        return mean

    def is_sound(self) -> Tensor:
        return ops.all_finite(self.values)


class PayloadSync:
    """Of what any compressor makes of it: one all-gather of a payload row of each rank, (W - 1) nbytes(n) bytes sent.

    Nothing is lost between the ranks: the mean is that of what they have compressed.

    Args:
        v: (n,), overwritten with the residual.
        compressor: the same on every rank.
        backend: the ranks, W of them.
        active: (ceil(n / 8),) uint8 bit mask, least significant bit first, the same on every rank, or None for all. A
            inactive element is in no scale, and its residual is 0; what the mean has at its place means nothing.
    """

    def __init__(self, v: Tensor, compressor: Compressor, backend: Backend, active: Tensor | None = None) -> None:
        self.compressor, self.residual = compressor, v
        row = v.view(1, -1)
        own = torch.empty(1, compressor.nbytes(v.numel(), v.dtype), dtype=torch.uint8, device=v.device)
        self._own = own  # belongs to the collective until that is done
        if active is None:
            compressor.compress(row, own)
        else:
            compressor.compress_with_feedback(torch.zeros_like(row), row, own, active.view(1, -1))
        self.payload = own.new_empty(backend.world_size, own.shape[1])
        self.works = [backend.all_gather(self.payload, own[0])]
        if active is None:
            sent = torch.empty_like(row)
            compressor.decompress(own, sent)
            v.sub_(sent[0])

    def mean(self) -> Tensor:
        mean = torch.empty_like(self.residual)
        self.compressor.decompress_mean(self.payload, mean)
        return mean

    def is_sound(self) -> Tensor:
        return self.compressor.is_sound(self.payload, self.residual.numel(), self.residual.dtype)


def psync(v: Tensor, how: Compressor | Blocks, backend: Backend, active: Tensor | None = None) -> PSync:
    """Starts to average C[v] over the ranks.

    Args:
        v: (n,) float32 or float64, contiguous; overwritten with the residual.
        how: C; or the blocks that it keeps.
        backend: the ranks.
        active: as for :class:`PayloadSync`; blocks have no scales, and no use for it.
    """
    return BlockSync(v, how, backend) if isinstance(how, Blocks) else PayloadSync(v, how, backend, active)

"""Blocks chosen at random, the same on every rank: the globally random block sparsifier (CSER, arXiv 2007.13221).

A buffer is cut into blocks; at each step a few of them are kept as they are, and the rest counts as 0. Which ones is a
function of the seed, the step and the buffer, so every rank keeps the same ones: no index is sent, and the mean of what
the ranks keep is a plain all-reduce, exact and with nothing lost between the ranks. It keeps 1 / ratio of a buffer in
expectation (delta = 1 / ratio).

The random numbers come from Philox, a counter-based generator: nothing is drawn from any generator that a program may
also draw from (data, dropout), so ranks cannot come apart, and a resumed run chooses what the first one would have.

Where this differs from the paper's code: blocks are those of a whole buffer, not of each tensor, so a bias does not
cost a block of its own; and a number of blocks that is no integer is rounded at random to one of the two next to it, so
that the ratio holds for small buffers too (in most steps they keep nothing).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Some blocks of a flat buffer.

    Attributes:
        whole: (k,) int64, ascending: which of the blocks of full length; on the buffer's device.
        block: elements of a block.
        stop: where the blocks of full length end.
        end: of the shorter block after them, if that is one of the chosen; else ``stop``.
    """

    whole: Tensor
    block: int
    stop: int
    end: int

    @property
    def numel(self) -> int:
        """Elements in these blocks."""
        return self.whole.numel() * self.block + self.end - self.stop

    def gather(self, flat: Tensor) -> Tensor:
        """The elements of ``flat`` (n,) in these blocks, end to end: a new tensor (numel,)."""
        out = flat[: self.stop].view(-1, self.block).index_select(0, self.whole).view(-1)
        return out if self.end == self.stop else torch.cat([out, flat[self.stop : self.end]])

    def scatter_(self, flat: Tensor, values: Tensor) -> None:
        """Writes ``values``, as :meth:`gather` returns them, to these blocks of ``flat``."""
        whole = values[: self.whole.numel() * self.block]
        flat[: self.stop].view(-1, self.block).index_copy_(0, self.whole, whole.view(-1, self.block))
        flat[self.stop : self.end] = values[whole.numel() :]

    def zero_(self, flat: Tensor) -> None:
        """Sets these blocks of ``flat`` to 0."""
        flat[: self.stop].view(-1, self.block).index_fill_(0, self.whole, 0)
        flat[self.stop : self.end] = 0


@dataclass(frozen=True)
class RandomBlocks:
    """Keeps 1 of ``ratio`` blocks, chosen anew at each step, the same on every rank.

    Args:
        ratio: >= 1; 1 keeps all, ``math.inf`` nothing.
        block: elements of a block, >= 1. The last one of a buffer may be shorter.
        seed: 0 <= seed < 2**64. Another one chooses other blocks.

    Raises:
        ValueError: for any of them out of range.
    """

    ratio: float = 64
    block: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        ratio, block, seed = self.ratio, self.block, self.seed
        if not isinstance(ratio, (int, float)) or isinstance(ratio, bool) or math.isnan(ratio) or ratio < 1:
            raise ValueError(f"ratio must be a number >= 1, got {ratio!r}")
        if not isinstance(block, int) or isinstance(block, bool) or block < 1:
            raise ValueError(f"block must be an int >= 1, got {block!r}")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
            raise ValueError(f"seed must be an int with 0 <= seed < 2**64, got {seed!r}")

    def choose(self, n: int, step: int, stream: int, device: torch.device | str = "cpu") -> Blocks:
        """The blocks of a buffer of ``n`` elements that are kept at ``step``. Of B blocks these are B / ratio, rounded
        up or down at random, and each is as likely as any other.

        Args:
            n: elements of the buffer.
            step: from 0.
            stream: which buffer, and what for: other streams choose independently.
            device: of the buffer.
        """
        full = n // self.block
        count = -(-n // self.block)
        # the counter is 256 bits, lowest first; a buffer takes at most 2**64 of its values
        key, counter = np.array([self.seed, 0], np.uint64), np.array([0, 0, stream, step], np.uint64)
        numbers = np.random.Philox(key=key, counter=counter).random_raw(count + 1)
        wanted = count / self.ratio
        kept = math.floor(wanted) + (float(numbers[0]) / 2**64 < wanted - math.floor(wanted))
        # stable: equal numbers, should there ever be any, are in one order everywhere
        chosen = np.sort(np.argsort(numbers[1:], kind="stable")[:kept])
        tail = count > full and bool(kept) and int(chosen[-1]) == full
        whole = torch.from_numpy(chosen[: kept - tail].astype(np.int64)).to(device)
        stop = full * self.block
        return Blocks(whole, self.block, stop, n if tail else stop)

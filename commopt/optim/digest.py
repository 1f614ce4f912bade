"""Digests of tensors: whether two ranks hold the same bits, without sending these.

    digest(x) = sum_j w_j b_j  mod 2^64,      b: the bytes of x, 8 at a time;   w: fixed odd random numbers

A single flipped bit always changes it, wherever it is (w_j is odd); any other difference, a permutation too, escapes it
with a chance of about 2^-60. It is a sum of integers: every device and every number of threads gives the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Numbers of 8 bytes that are weighted at a time: what is in flight stays in the processor's cache."""

_PRIME = 1_000_003


@functools.cache
def _weights(device: torch.device) -> Tensor:
    drawn = torch.randint(-(2**62), 2**62, (CHUNK,), generator=torch.Generator().manual_seed(20210204), device="cpu")
    return (drawn * 2 + 1).to(device)


def digest(x: Tensor) -> Tensor:
    """The digest of a tensor of any shape and dtype, as 0-d int64 on its device."""
    data = x.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64) if data.data_ptr() % 8 == 0 else data[:whole].clone().view(torch.int64)
    weights = _weights(x.device)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, words.numel(), CHUNK):
        part = words[start : start + CHUNK]
        total = total * _PRIME + (part * weights[: part.numel()]).sum()
    if whole < data.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=x.device)
        rest[: data.numel() - whole] = data[whole:]
        total = total * _PRIME + rest.view(torch.int64)[0] * weights[0]
    return total


def digest_of_all(tensors: Sequence[Tensor | None]) -> int:
    """The digest of several tensors in their order, some of which may be missing; as an int64."""
    found = [digest(x) for x in tensors if x is not None]
    numbers = iter(torch.stack([d.to(found[0].device) for d in found]).tolist() if found else [])
    total = 0
    for x in tensors:
        total = (total * _PRIME + (1 if x is None else next(numbers))) % 2**64
    return total - 2**63

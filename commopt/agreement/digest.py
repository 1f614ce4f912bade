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

from commopt.comm import Backend, gather_number

CHUNK = 1 << 18
"""Numbers of 8 bytes that are weighted at a time: what is in flight stays in the processor's cache."""

_PRIME = 1_000_003


@functools.cache
def _weights(device: torch.device) -> Tensor:
    drawn = torch.randint(-(2**62), 2**62, (CHUNK,), generator=torch.Generator().manual_seed(20210204), device="cpu")
    return (drawn * 2 + 1).to(device)


def digest(x: Tensor) -> Tensor:
    """The digest of a tensor of any shape and dtype, as 0-d int64 on its device."""
    flat = x.detach().contiguous().view(-1)
    if flat.stride() != (1,):  # a single element has whatever stride it was cut out with
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8)
    if data.data_ptr() % 8 or data.storage_offset() % 8:  # an empty one is at 0, wherever it begins
        data = data.clone()
    weights, rest = _weights(x.device), data.numel() % 8
    pieces = list(data[: data.numel() - rest].view(torch.int64).split(CHUNK))
    if rest:
        pieces.append(torch.nn.functional.pad(data[-rest:], (0, 8 - rest)).view(torch.int64))
    total, *others = [(piece * weights[: piece.numel()]).sum() for piece in pieces]
    for other in others:
        total = total * _PRIME + other
    return total


def as_long_as_any(backend: Backend, digests: Tensor) -> Tensor:
    """``digests``, (n,), with -1 behind them, as many as the rank of ``backend`` has that has the most: ranks that hold
    parts of a model have different numbers. All ranks must call this at the same point; it communicates."""
    longest = max(gather_number(backend, digests.numel()))
    return torch.nn.functional.pad(digests, (0, longest - digests.numel()), value=-1)


def digest_of_all(tensors: Sequence[Tensor | None]) -> int:
    """The digest of several tensors in their order, some of which may be missing; as an int64."""
    found = [digest(x) for x in tensors if x is not None]
    numbers = iter(torch.stack([d.to(found[0].device) for d in found]).tolist() if found else [])
    total = 0
    for x in tensors:
        total = (total * _PRIME + (1 if x is None else next(numbers))) % 2**64
    return total - 2**63

"""What kernels are tested with: floats that have gone wrong somewhere before, masks, and payloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from commopt import ops

BLOCKS = [0, 8, 16, 24, 64, 2048]

FLAVOURS = ["normal", "zeros", "signed zeros", "denormal", "huge", "sparse"]


def values(flavour: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Inputs that have gone wrong somewhere before."""
    x = rng.standard_normal(shape)
    if flavour == "zeros":
        x = 0 * np.abs(x)
    elif flavour == "signed zeros":
        x = rng.choice([0.0, -0.0, 1.0, -1.0], shape)
    elif flavour == "denormal":
        x = x * 1e-43
    elif flavour == "huge":
        x = rng.uniform(-1.5e38, 1.5e38, shape)
    elif flavour == "sparse":
        x = x * (rng.random(shape) < 0.05)
    return torch.from_numpy(x.astype(np.float32))


def around_the_least_normal(shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    """Denormals, and numbers that are just none."""
    return values("normal", shape, rng) * torch.from_numpy(2.0 ** rng.integers(-148, -120, shape)).float()


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Arithmetic of this thread takes denormals for 0, and makes none."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def mask_bits(kind: str, rows: int, n: int, rng: np.random.Generator) -> Tensor | None:
    """An active mask, or None. "blocks" has runs of inactive elements longer than any vector."""
    if kind == "none":
        return None
    if kind == "blocks":
        is_active = np.repeat(rng.random((rows, n // 64 + 1)) < 0.5, 64, axis=1)[:, :n]
    else:
        is_active = rng.random((rows, n)) < {"some": 0.7, "all": 1.0, "inactive": 0.0}[kind]
    return torch.from_numpy(np.packbits(is_active, axis=1, bitorder="little"))


def unpacked(bits: Tensor, n: int) -> np.ndarray:
    return np.unpackbits(bits.numpy(), axis=-1, bitorder="little", count=n).astype(bool)


def new_payload(rows: int, n: int, block: int) -> Tensor:
    """A payload full of rubbish, every byte of which has to be written."""
    return torch.full((rows, ops.sign_nbytes(n, block)), 0xA5, dtype=torch.uint8)


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit: tells -0.0 from 0.0."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, wherever they are, but for the bits of NaN: a GPU and an x86 make different ones."""
    # not contiguous(): a single element that has a stride counts as contiguous, and cannot be viewed as bytes
    a, b = (x.cpu().clone(memory_format=torch.contiguous_format).flatten() for x in (a, b))
    if not a.is_floating_point():
        return bits_equal(a, b)
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and bits_equal(a.where(~nan, 0), b.where(~nan, 0))


def tensors_in(total: int, sizes: Sequence[int], dtypes: list[torch.dtype], rng: Any) -> tuple[list[Tensor], list[int]]:
    """Tensors of many sizes, dtypes and layouts that lie in ``total`` elements, with gaps between them."""
    xs, offsets, at = [], [], 0
    while at < total:
        size = min(int(rng.choice(sizes)), total - at)
        x = values("normal", (size,), rng).to(dtypes[rng.integers(len(dtypes))])
        if rng.random() < 0.8:
            xs.append(x.repeat_interleave(2)[::2] if rng.random() < 0.2 else x)
            offsets.append(at)
        at += size
    return xs, offsets

"""Arguments of native functions: where tensors are, and how their rows lie."""

from __future__ import annotations

import ctypes
from array import array
from typing import Any

import torch
from torch import Tensor

_P, _I64 = ctypes.c_void_p, ctypes.c_longlong

Served = Any
"""What a provider returns: what the operator does, or ``NotImplemented`` for arguments that it leaves to the reference,
having done nothing."""

SENT_AND_LEFT: list[tuple[str, Any]] = [(name, _P) for name in ("x", "error", "new_error", "payload", "active")]
"""Fields of what is compressed with entries that have indices, see :mod:`commopt.ops.top_k`."""
STRIDES: list[tuple[str, Any]] = [
    (name, _I64) for name in ("rows", "x_stride", "error_stride", "new_error_stride", "active_stride")
]
"""Fields of how that lies."""
RECEIVED: list[tuple[str, Any]] = [
    *((name, _P) for name in ("payload", "out", "active")),
    *((name, _I64) for name in ("rows", "ranks", "out_stride", "active_stride")),
]
"""Fields of what is decompressed."""


def pointer(x: Tensor | None) -> int | None:
    """Address of the elements of ``x``; None for no tensor."""
    return None if x is None else x.data_ptr()


def strides(*tensors: Tensor | None) -> list[int]:
    """Distances between the rows of each; 0 where there is one row, or no tensor."""
    return [0 if x is None or x.dim() == 1 else x.stride(0) for x in tensors]


def serves(x: Tensor, *payloads: Tensor) -> bool:
    """True if CUDA kernels can read ``x``, and the numbers in ``payloads`` where they lie."""
    return x.dtype == torch.float32 and all(payload.data_ptr() % 4 == 0 for payload in payloads)


def layout(kind: type[ctypes.Structure], row: Any) -> ctypes.Structure:
    """``row`` as a struct that has fields of the names of its attributes."""
    return kind(*(getattr(row, name) for name, _ in kind._fields_))  # type: ignore[misc]


def address(values: array[Any]) -> int:
    """Address of the numbers."""
    return values.buffer_info()[0]


def runs_of(tensors: list[Tensor], offsets: list[int]) -> array[int] | None:
    """Each tensor as ``struct Run`` in runs.hpp has it; None if the kernels cannot read one of them."""
    numbers: list[int] = []
    for x, offset in zip(tensors, offsets):
        dtype = x.dtype
        if (dtype is not torch.float32 and dtype is not torch.bfloat16) or not x.is_contiguous():
            return None
        numbers += (offset, x.numel(), dtype is torch.bfloat16, x.data_ptr())
    return array("q", numbers)


def gradient_runs(m: Tensor, grads: list[Tensor], offsets: list[int]) -> tuple[array[int], list[Tensor]] | None:
    """The runs of ``grads``, and the tensors that they point into; None where the arithmetic is not in float32.

    If the kernels cannot read them, for their layout or as float16, they are copied to float32, which is exact.
    """
    if m.dtype != torch.float32:
        return None
    runs = runs_of(grads, offsets)
    if runs is None:
        if any(g.dtype == torch.float64 for g in grads):
            return None
        grads = [g.to(torch.float32).contiguous() for g in grads]
        runs = runs_of(grads, offsets)
        assert runs is not None
    return runs, grads

"""Arguments of native functions: where tensors are, and how their rows lie."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

_P, _I64 = ctypes.c_void_p, ctypes.c_longlong

SENT_AND_LEFT: list[tuple[str, Any]] = [(name, _P) for name in ("x", "error", "new_error", "wire", "live")]
"""Fields of what is compressed with entries that have indices, see :mod:`commopt.ops.top_k`."""
STRIDES: list[tuple[str, Any]] = [
    (name, _I64) for name in ("rows", "x_stride", "error_stride", "new_error_stride", "live_stride")
]
"""Fields of how that lies."""
RECEIVED: list[tuple[str, Any]] = [
    *((name, _P) for name in ("wire", "out", "live")),
    *((name, _I64) for name in ("rows", "ranks", "out_stride", "live_stride")),
]
"""Fields of what is decompressed."""


def pointer(x: Tensor | None) -> int | None:
    """Where the elements of ``x`` are; None for no tensor."""
    return None if x is None else x.data_ptr()


def strides(*tensors: Tensor | None) -> list[int]:
    """Distances between the rows of each; 0 where there is one row, or no tensor."""
    return [0 if x is None or x.dim() == 1 else x.stride(0) for x in tensors]


def serves(x: Tensor, *wires: Tensor) -> bool:
    """True if CUDA kernels can read ``x``, and the numbers in ``wires`` where they lie."""
    return x.dtype == torch.float32 and all(wire.data_ptr() % 4 == 0 for wire in wires)


def layout(kind: type[ctypes.Structure], row: Any) -> ctypes.Structure:
    """``row`` as a struct that has fields of the names of its attributes."""
    return kind(*(getattr(row, name) for name, _ in kind._fields_))  # type: ignore[misc]

"""Native CPU providers of top-k by threshold: ``kernels/cpu/threshold.cpp``. See :mod:`commopt.ops.native`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commopt.ops.arguments import Served, pointer, strides

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
SIGNATURES: dict[str, list[Any]] = {
    "threshold_compress": [_P] * 5 + [_I64] * 8 + [_I32],
    "threshold_decompress": [_P] * 3 + [_I64] * 5 + [_I32],
    "threshold_decompress_mean": [_P] * 2 + [_I64] * 3 + [_I32],
}


def kernels(call: Callable[..., None]) -> dict[str, Callable[..., Any]]:
    """The operators, with ``call(name, *arguments)`` for a function of the library."""

    def compress(
        x: Tensor,
        error: Tensor | None,
        new_error: Tensor | None,
        payload: Tensor,
        k: int,
        rounds: int,
        active: Tensor | None,
    ) -> None:
        pointers = x.data_ptr(), pointer(error), pointer(new_error), payload.data_ptr(), pointer(active)
        pitches = strides(x, error, new_error, active)
        call("threshold_compress", *pointers, *x.shape, *pitches, k, rounds)

    def threshold_compress(x: Tensor, payload: Tensor, k: int, rounds: int, active: Tensor | None = None) -> Served:
        if x.dtype != torch.float32:
            return NotImplemented
        compress(x, None, None, payload, k, rounds, active)

    def threshold_compress_with_feedback(
        x: Tensor, error: Tensor, new_error: Tensor, payload: Tensor, k: int, rounds: int, active: Tensor | None = None
    ) -> Served:
        if x.dtype != torch.float32:
            return NotImplemented
        compress(x, error, new_error, payload, k, rounds, active)

    def threshold_decompress(payload: Tensor, out: Tensor, k: int, active: Tensor | None = None) -> Served:
        if out.dtype != torch.float32:
            return NotImplemented
        pointers = payload.data_ptr(), out.data_ptr(), pointer(active)
        call("threshold_decompress", *pointers, *out.shape, *strides(out, active), k)

    def threshold_decompress_mean(payload: Tensor, out: Tensor, k: int) -> Served:
        if out.dtype != torch.float32:
            return NotImplemented
        call("threshold_decompress_mean", payload.data_ptr(), out.data_ptr(), payload.shape[0], out.shape[0], k)

    return {
        "threshold_compress": threshold_compress,
        "threshold_compress_with_feedback": threshold_compress_with_feedback,
        "threshold_decompress": threshold_decompress,
        "threshold_decompress_mean": threshold_decompress_mean,
    }

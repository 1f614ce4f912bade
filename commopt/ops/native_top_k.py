"""Native CPU providers of top-k: ``kernels/cpu/top_k.cpp``. See :mod:`commopt.ops.native`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commopt.ops.arguments import Served, pointer, strides

_P, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
SIGNATURES: dict[str, list[Any]] = {
    "topk_compress": [_P] * 5 + [_I64] * 9 + [_I32],
    "topk_decompress": [_P] * 3 + [_I64] * 7 + [_I32],
    "topk_decompress_mean": [_P] * 2 + [_I64] * 5 + [_I32],
    "topk_find_unsound": [_P] * 2 + [_I64] * 5 + [_I32],
}


def kernels(call: Callable[..., None]) -> dict[str, Callable[..., Any]]:
    """The operators, with ``call(name, *arguments)`` for a function of the library."""

    def compress(
        x: Tensor,
        error: Tensor | None,
        new_error: Tensor | None,
        payload: Tensor,
        k: int,
        chunk: int,
        bits: int,
        active: Tensor | None,
    ) -> None:
        pointers = x.data_ptr(), pointer(error), pointer(new_error), payload.data_ptr(), pointer(active)
        pitches = strides(x, error, new_error, active)
        call("topk_compress", *pointers, *x.shape, *pitches, k, chunk, bits)

    def topk_compress(
        x: Tensor, payload: Tensor, k: int, chunk: int, bits: int, active: Tensor | None = None
    ) -> Served:
        if x.dtype != torch.float32:
            return NotImplemented
        compress(x, None, None, payload, k, chunk, bits, active)

    def topk_compress_with_feedback(
        x: Tensor,
        error: Tensor,
        new_error: Tensor,
        payload: Tensor,
        k: int,
        chunk: int,
        bits: int,
        active: Tensor | None = None,
    ) -> Served:
        if x.dtype != torch.float32:
            return NotImplemented
        compress(x, error, new_error, payload, k, chunk, bits, active)

    def topk_decompress(
        payload: Tensor, out: Tensor, k: int, chunk: int, bits: int, active: Tensor | None = None
    ) -> Served:
        if out.dtype != torch.float32:
            return NotImplemented
        pointers = payload.data_ptr(), out.data_ptr(), pointer(active)
        call("topk_decompress", *pointers, *out.shape, *strides(out, active), k, chunk, bits)

    def topk_decompress_mean(payload: Tensor, out: Tensor, k: int, chunk: int, bits: int) -> Served:
        if out.dtype != torch.float32:
            return NotImplemented
        call("topk_decompress_mean", payload.data_ptr(), out.data_ptr(), payload.shape[0], out.shape[0], k, chunk, bits)

    return {
        "topk_compress": topk_compress,
        "topk_compress_with_feedback": topk_compress_with_feedback,
        "topk_decompress": topk_decompress,
        "topk_decompress_mean": topk_decompress_mean,
        "topk_find_unsound": _find_unsound(call),
    }


def _find_unsound(call: Callable[..., None]) -> Callable[..., Any]:
    def topk_find_unsound(
        payload: Tensor, sound: Tensor, n: int, k: int, chunk: int, bits: int, dtype: torch.dtype = torch.float32
    ) -> Served:
        if dtype != torch.float32 or not payload.is_contiguous():
            return NotImplemented
        if n and payload.shape[0]:
            call("topk_find_unsound", payload.data_ptr(), sound.data_ptr(), payload.shape[0], n, k, chunk, bits)

    return topk_find_unsound

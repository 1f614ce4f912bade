"""Native CPU providers of :mod:`commopt.ops.bfloat16`: ``kernels/cpu/bfloat16.cpp``. See :mod:`commopt.ops.native`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commopt.ops.arguments import Served, address, gradient_runs, pointer, runs_of

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
SIGNATURES: dict[str, list[Any]] = {
    "bf16_compress_momentum": [_P, _P, _I64, _F32, _F32, _P, _P, _P, _P, _I64, _I64, _I64, _I64, _I32],
    "bf16_reduce": [_P, _P, _P, _P, _P, _I64, _I64, _I32],
    "bf16_decompress_to": [_P, _P, _I64, _P, _I64, _I64, _I64, _I64, _I32],
}


def kernels(call: Callable[..., None]) -> dict[str, Callable[..., Any]]:
    """The operators, with ``call(name, *arguments)`` for a function of the library."""

    def bf16_compress_momentum(
        m: Tensor,
        grads: list[Tensor],
        offsets: list[int],
        beta: float,
        alpha: float,
        error: Tensor,
        new_error: Tensor,
        payload: Tensor,
        active: Tensor | None,
        start: int,
        stop: int,
    ) -> Served:
        gradients = gradient_runs(m, grads, offsets)
        if gradients is None:
            return NotImplemented
        (runs, _), rows = gradients, payload.shape[0]
        pointers = error.data_ptr(), new_error.data_ptr(), payload.data_ptr(), pointer(active)
        shape = rows, m.shape[0] // rows, start, stop
        call("bf16_compress_momentum", m.data_ptr(), address(runs), len(grads), beta, alpha, *pointers, *shape)

    def bf16_reduce(
        payloads: Tensor, error: Tensor, new_error: Tensor, own: Tensor, active: Tensor | None = None
    ) -> Served:
        if error.dtype != torch.float32:
            return NotImplemented
        pointers = payloads.data_ptr(), error.data_ptr(), new_error.data_ptr(), own.data_ptr(), pointer(active)
        call("bf16_reduce", *pointers, payloads.shape[0], error.shape[0])

    def bf16_decompress_to(
        payload: Tensor,
        outs: list[Tensor],
        offsets: list[int],
        numel: int,
        active: Tensor | None,
        start: int,
        stop: int,
    ) -> Served:
        runs = runs_of(outs, offsets)
        if runs is None:
            return NotImplemented
        shape = payload.shape[0], numel // payload.shape[0], start, stop
        call("bf16_decompress_to", payload.data_ptr(), address(runs), len(outs), pointer(active), *shape)
        torch.autograd.graph.increment_version(outs)  # as in native.py

    functions = bf16_compress_momentum, bf16_reduce, bf16_decompress_to
    return {function.__name__: function for function in functions}

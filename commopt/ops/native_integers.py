"""Native CPU providers of :mod:`commopt.ops.integers`, for :mod:`commopt.ops.native`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from commopt.ops.arguments import Served, address, gradient_runs, pointer, runs_of

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_CODING = [_I64, _I32, _I32, _I32, _I64]  # block, bits, stochastic, rotated, seed
SIGNATURES: dict[str, list[Any]] = {
    "int_compress": [_P, _P, _P, _P, _P, _I64, _I64, *_CODING, _I32],
    "int_compress_momentum": [_P, _P, _I64, _F32, _F32, _P, _P, _P, _P, _I64, _I64, _I64, _I64, *_CODING, _I32],
    "int_reduce": [_P, _P, _P, _P, _P, _I64, _I64, *_CODING, _I32],
    "int_decompress": [_P, _P, _P, _I64, _I64, _I64, _I32, _I32, _I32],
    "int_decompress_to": [_P, _P, _I64, _P, _I64, _I64, _I64, _I64, _I64, _I32, _I32, _I32],
    "int_decompress_mean": [_P, _P, _I64, _I64, _I64, _I32, _I32, _I32],
}


def kernels(call: Callable[..., None]) -> dict[str, Callable[..., Any]]:
    """The providers by operator. call: runs a function of the library, by name, with its arguments but for threads."""
    return _encoders(call) | _decoders(call)


def _encoders(call: Callable[..., None]) -> dict[str, Callable[..., Any]]:
    def int_compress(
        x: Tensor,
        payload: Tensor,
        bits: int,
        block: int,
        stochastic: bool,
        rotated: bool,
        seed: int,
        active: Tensor | None = None,
    ) -> Served:
        if x.dtype != torch.float32:
            return NotImplemented
        coding = block, bits, stochastic, rotated, seed
        call("int_compress", x.data_ptr(), None, None, payload.data_ptr(), pointer(active), *x.shape, *coding)

    def int_compress_with_feedback(
        x: Tensor,
        error: Tensor,
        new_error: Tensor,
        payload: Tensor,
        bits: int,
        block: int,
        stochastic: bool,
        rotated: bool,
        seed: int,
        active: Tensor | None = None,
    ) -> Served:
        if x.dtype != torch.float32:
            return NotImplemented
        pointers = x.data_ptr(), error.data_ptr(), new_error.data_ptr(), payload.data_ptr(), pointer(active)
        call("int_compress", *pointers, *x.shape, block, bits, stochastic, rotated, seed)

    def int_compress_momentum(
        m: Tensor,
        grads: list[Tensor],
        offsets: list[int],
        beta: float,
        alpha: float,
        error: Tensor,
        new_error: Tensor,
        payload: Tensor,
        bits: int,
        block: int,
        stochastic: bool,
        rotated: bool,
        seed: int,
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
        coding = block, bits, stochastic, rotated, seed
        call("int_compress_momentum", m.data_ptr(), address(runs), len(grads), beta, alpha, *pointers, *shape, *coding)

    def int_reduce(
        payloads: Tensor,
        error: Tensor,
        new_error: Tensor,
        own: Tensor,
        bits: int,
        block: int,
        stochastic: bool,
        rotated: bool,
        seed: int,
        active: Tensor | None = None,
    ) -> Served:
        if error.dtype != torch.float32:
            return NotImplemented
        pointers = payloads.data_ptr(), error.data_ptr(), new_error.data_ptr(), own.data_ptr(), pointer(active)
        shape = payloads.shape[0], error.shape[0]
        call("int_reduce", *pointers, *shape, block, bits, stochastic, rotated, seed)

    functions = int_compress, int_compress_with_feedback, int_compress_momentum, int_reduce
    return {function.__name__: function for function in functions}


def _decoders(call: Callable[..., None]) -> dict[str, Callable[..., Any]]:
    def int_decompress(
        payload: Tensor, out: Tensor, bits: int, block: int, rotated: bool, active: Tensor | None = None
    ) -> Served:
        if out.dtype != torch.float32:
            return NotImplemented
        call("int_decompress", payload.data_ptr(), out.data_ptr(), pointer(active), *out.shape, block, bits, rotated)

    def int_decompress_mean(payload: Tensor, out: Tensor, bits: int, block: int, rotated: bool) -> Served:
        if out.dtype != torch.float32:
            return NotImplemented
        shape = payload.shape[0], out.shape[0]
        call("int_decompress_mean", payload.data_ptr(), out.data_ptr(), *shape, block, bits, rotated)

    def int_decompress_to(
        payload: Tensor,
        outs: list[Tensor],
        offsets: list[int],
        numel: int,
        bits: int,
        block: int,
        rotated: bool,
        active: Tensor | None,
        start: int,
        stop: int,
    ) -> Served:
        runs = runs_of(outs, offsets)
        if runs is None:
            return NotImplemented
        rows = payload.shape[0]
        shape = rows, numel // rows, start, stop, block, bits, rotated
        call("int_decompress_to", payload.data_ptr(), address(runs), len(outs), pointer(active), *shape)
        torch.autograd.graph.increment_version(outs)  # as in native.py

    functions = int_decompress, int_decompress_mean, int_decompress_to
    return {function.__name__: function for function in functions}

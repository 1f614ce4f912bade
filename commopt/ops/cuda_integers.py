"""Native CUDA providers of :mod:`commopt.ops.integers`: ``kernels/cuda/integers.cu``, for :mod:`commopt.ops.cuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from commopt.ops import tiles as t
from commopt.ops.arguments import Served, pointer, serves, strides
from commopt.ops.reference import write_columns
from commopt.ops.tiles import Layout, Tiling

_P, _I64 = ctypes.c_void_p, ctypes.c_longlong


# As in the source, field by field.
class Coding(Structure):
    _fields_ = [("kind", _I64), ("stochastic", _I64), ("rotated", _I64), ("seed", _I64)]


class Compression(Structure):
    _fields_ = [
        ("at", Layout), ("how", Coding), ("error", _P), ("new_error", _P), ("payload", _P), ("active", _P),
        ("stride", _I64), ("active_stride", _I64),
    ]  # fmt: skip


class CompressRows(Structure):
    _fields_ = [("to", Compression), ("x", _P), ("stride", _I64)]


class CompressMomentum(Structure):
    _fields_ = [("to", Compression), ("of", t.Momentum)]


class Reduce(Structure):
    _fields_ = [("to", Compression), ("payloads", _P), ("ranks", _I64)]


class Decompression(Structure):
    _fields_ = [("at", Layout), ("how", Coding), ("payload", _P), ("out", _P), ("active", _P)]


class Mean(Structure):
    _fields_ = [("at", Layout), ("how", Coding), ("payloads", _P), ("out", _P), ("ranks", _I64)]


def _launch(name: str, x: Tensor, block: int, nbytes: int, argument: Callable[[Structure], Structure]) -> None:
    """Runs a kernel on all blocks of the rows of x, each a tile; its argument is made of ``struct Layout``."""
    if x.numel():
        tiling = Tiling(x.numel() // x.shape[-1], x.shape[-1], block, block, nbytes)
        tiling.launch(_of_block(name, block), argument(tiling.layout(0, tiling.tiles)), x.device, 0, tiling.tiles)


def _of_block(name: str, block: int) -> str:
    return name + ("_128" if block <= 128 else "_256" if block <= 256 else "")


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
    if not serves(x, payload):
        return NotImplemented
    _compress_rows(x, None, None, payload, block, Coding(bits, stochastic, rotated, seed), active)


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
    if not serves(x, payload):
        return NotImplemented
    _compress_rows(x, error, new_error, payload, block, Coding(bits, stochastic, rotated, seed), active)


def _compress_rows(
    x: Tensor,
    error: Tensor | None,
    new_error: Tensor | None,
    payload: Tensor,
    block: int,
    how: Coding,
    active: Tensor | None,
) -> None:
    pointers = [pointer(t) for t in (error, new_error, payload, active)]
    apart = strides(error, active)

    def argument(at: Structure) -> Structure:
        return CompressRows(Compression(at, how, *pointers, *apart), x.data_ptr(), strides(x)[0])

    _launch("int_compress", x, block, payload.shape[1], argument)


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
    rows, n = payload.shape[0], stop - start
    if n == 0:
        return
    mine = t.contiguous(grads) if serves(m, payload) else None
    if mine is None:
        return NotImplemented
    m, error, new_error = (t.columns(x, rows, start, stop) for x in (m, error, new_error))
    active = None if active is None else t.columns(active, rows, start, stop, 8)
    offsets, stride, how = [o - start for o in offsets], m.stride(0), Coding(bits, stochastic, rotated, seed)
    tiling = Tiling(rows, n, block, block, payload.shape[1])
    pieces = t.pieces(tiling, stride, mine, offsets, [(0, 0)] * len(mine))
    if pieces is None:  # too many tensors in a block to do it in one pass
        x = m.new_empty((rows, n))
        t.momentum_rows(tiling, m, stride, mine, offsets, beta, alpha, x)
        return _compress_rows(x, error, new_error, payload, block, how, active)
    pointers = [pointer(x) for x in (error, new_error, payload, active)]
    for first, last, runs in pieces:
        to = Compression(tiling.layout(first, last), how, *pointers, stride, *strides(active))
        argument = CompressMomentum(to, t.Momentum(m.data_ptr(), stride, beta, alpha, runs))
        tiling.launch(_of_block("int_compress_momentum", block), argument, payload.device, first, last)


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
    if not serves(error, payloads, own):
        return NotImplemented
    how, pointers = Coding(bits, stochastic, rotated, seed), [pointer(t) for t in (error, new_error, own, active)]

    def argument(at: Structure) -> Structure:
        return Reduce(Compression(at, how, *pointers, 0, 0), payloads.data_ptr(), payloads.shape[0])

    _launch("int_reduce", error, block, payloads.shape[1], argument)


def int_decompress(
    payload: Tensor, out: Tensor, bits: int, block: int, rotated: bool, active: Tensor | None = None
) -> Served:
    if not serves(out, payload):
        return NotImplemented
    how, pointers = Coding(bits, False, rotated, 0), [pointer(t) for t in (payload, out, active)]
    _launch("int_decompress", out, block, payload.shape[1], lambda at: Decompression(at, how, *pointers))


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
) -> None:
    values = torch.empty(payload.shape[0], stop - start, dtype=torch.float32, device=payload.device)
    mask = None if active is None else t.columns(active, payload.shape[0], start, stop, 8).contiguous()
    int_decompress(payload, values, bits, block, rotated, mask)
    write_columns(values, outs, offsets, numel // payload.shape[0], start)


def int_decompress_mean(payload: Tensor, out: Tensor, bits: int, block: int, rotated: bool) -> Served:
    if not serves(out, payload):
        return NotImplemented
    how, pointers = Coding(bits, False, rotated, 0), [pointer(t) for t in (payload, out)]

    def argument(at: Structure) -> Structure:
        return Mean(at, how, *pointers, payload.shape[0])

    _launch("int_decompress_mean", out, block, payload.shape[1], argument)


KERNELS: dict[str, Callable[..., Any]] = {
    "int_compress": int_compress,
    "int_compress_with_feedback": int_compress_with_feedback,
    "int_compress_momentum": int_compress_momentum,
    "int_reduce": int_reduce,
    "int_decompress": int_decompress,
    "int_decompress_mean": int_decompress_mean,
    "int_decompress_to": int_decompress_to,
}

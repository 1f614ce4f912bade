"""Native CUDA providers of :mod:`commopt.ops.integers`: ``kernels/cuda/integers.cu``, for :mod:`commopt.ops.cuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure
from typing import Any

from torch import Tensor

from commopt.ops import reference_integers as reference
from commopt.ops.arguments import pointer, serves
from commopt.ops.tiles import Layout, Tiling

_P, _I64 = ctypes.c_void_p, ctypes.c_longlong


# As in the source, field by field.
class Coding(Structure):
    _fields_ = [("bits", _I64), ("stochastic", _I64), ("rotated", _I64), ("seed", _I64)]


class Compression(Structure):
    _fields_ = [("at", Layout), ("how", Coding), ("error", _P), ("new_error", _P), ("wire", _P), ("live", _P)]


class CompressRows(Structure):
    _fields_ = [("to", Compression), ("x", _P)]


class Reduce(Structure):
    _fields_ = [("to", Compression), ("wires", _P), ("ranks", _I64)]


class Decompression(Structure):
    _fields_ = [("at", Layout), ("how", Coding), ("wire", _P), ("out", _P), ("live", _P)]


class Mean(Structure):
    _fields_ = [("at", Layout), ("how", Coding), ("wires", _P), ("out", _P), ("ranks", _I64)]


def _launch(name: str, x: Tensor, block: int, nbytes: int, argument: Callable[[Structure], Structure]) -> None:
    """Runs a kernel on all blocks of the rows of x, each a tile; its argument is made of ``struct Layout``."""
    if x.numel():
        tiling = Tiling(x.numel() // x.shape[-1], x.shape[-1], block, block, nbytes)
        name += "_128" if block <= 128 else "_256" if block <= 256 else ""
        tiling.launch(name, argument(tiling.layout(0, tiling.tiles)), x.device, 0, tiling.tiles)


def int_compress(
    x: Tensor,
    wire: Tensor,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    seed: int,
    live: Tensor | None = None,
) -> None:
    if not serves(x, wire):
        return reference.int_compress(x, wire, bits, block, stochastic, rotated, seed, live)
    _compress_rows(x, None, None, wire, block, Coding(bits, stochastic, rotated, seed), live)


def int_compress_with_feedback(
    x: Tensor,
    error: Tensor,
    new_error: Tensor,
    wire: Tensor,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    seed: int,
    live: Tensor | None = None,
) -> None:
    if not serves(x, wire):
        return reference.int_compress_with_feedback(
            x, error, new_error, wire, bits, block, stochastic, rotated, seed, live
        )
    _compress_rows(x, error, new_error, wire, block, Coding(bits, stochastic, rotated, seed), live)


def _compress_rows(
    x: Tensor,
    error: Tensor | None,
    new_error: Tensor | None,
    wire: Tensor,
    block: int,
    how: Coding,
    live: Tensor | None,
) -> None:
    pointers = [pointer(t) for t in (error, new_error, wire, live)]

    def argument(at: Structure) -> Structure:
        return CompressRows(Compression(at, how, *pointers), x.data_ptr())

    _launch("int_compress", x, block, wire.shape[1], argument)


def int_reduce(
    wires: Tensor,
    error: Tensor,
    new_error: Tensor,
    own: Tensor,
    bits: int,
    block: int,
    stochastic: bool,
    rotated: bool,
    seed: int,
    live: Tensor | None = None,
) -> None:
    if not serves(error, wires, own):
        return reference.int_reduce(wires, error, new_error, own, bits, block, stochastic, rotated, seed, live)
    how, pointers = Coding(bits, stochastic, rotated, seed), [pointer(t) for t in (error, new_error, own, live)]

    def argument(at: Structure) -> Structure:
        return Reduce(Compression(at, how, *pointers), wires.data_ptr(), wires.shape[0])

    _launch("int_reduce", error, block, wires.shape[1], argument)


def int_decompress(wire: Tensor, out: Tensor, bits: int, block: int, rotated: bool, live: Tensor | None = None) -> None:
    if not serves(out, wire):
        return reference.int_decompress(wire, out, bits, block, rotated, live)
    how, pointers = Coding(bits, False, rotated, 0), [pointer(t) for t in (wire, out, live)]
    _launch("int_decompress", out, block, wire.shape[1], lambda at: Decompression(at, how, *pointers))


def int_decompress_mean(wire: Tensor, out: Tensor, bits: int, block: int, rotated: bool) -> None:
    if not serves(out, wire):
        return reference.int_decompress_mean(wire, out, bits, block, rotated)
    how, pointers = Coding(bits, False, rotated, 0), [pointer(t) for t in (wire, out)]

    def argument(at: Structure) -> Structure:
        return Mean(at, how, *pointers, wire.shape[0])

    _launch("int_decompress_mean", out, block, wire.shape[1], argument)


KERNELS: dict[str, Callable[..., Any]] = {
    "int_compress": int_compress,
    "int_compress_with_feedback": int_compress_with_feedback,
    "int_reduce": int_reduce,
    "int_decompress": int_decompress,
    "int_decompress_mean": int_decompress_mean,
}

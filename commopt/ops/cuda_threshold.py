"""Native CUDA providers of top-k by threshold: ``kernels/cuda/threshold.cu`` through CuPy. See
:mod:`commopt.ops.cuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from commopt.ops import reference_threshold as reference
from commopt.ops.arguments import RECEIVED, SENT_AND_LEFT, STRIDES, Served, layout, pointer, serves, strides
from commopt.ops.cuda_module import launch
from commopt.ops.threshold_row import ThresholdRow

TEAMS = 8
"""Warps of a block, each with a chunk."""
WARPS = 32
"""Of a block that has a row."""
LEVELS = 5
"""Rounds of the search that one pass over the elements serves."""
THREADS = 256
"""Of a block that has a segment."""

_P, _I64 = ctypes.c_void_p, ctypes.c_longlong
_NAMES = ("n", "k", "segments", "values_at", "indices_at", "used", "nbytes")


class Layout(Structure):
    """``struct ThresholdLayout``."""

    _fields_ = [(name, _I64) for name in _NAMES]


class Search(Structure):
    """``struct ThresholdSearch``, of which the device has one for each row."""

    _fields_ = [
        *((name, ctypes.c_double) for name in ("base", "top", "left", "right", "low", "high")),
        ("sampled", ctypes.c_double * 32),
        ("least", ctypes.c_uint * 32),
        *((name, _I64) for name in ("above", "wild")),
        *((name, ctypes.c_uint) for name in ("largest", "none", "low_bits", "high_bits")),
        ("lacking", _I64),
    ]


class Compression(Structure):
    """``struct ThresholdCompression``."""

    _fields_ = [
        ("at", Layout),
        *SENT_AND_LEFT,
        *((name, _P) for name in ("search", "sums", "extremes", "counts", "before")),
        *STRIDES,
        *((name, _I64) for name in ("levels", "next")),
    ]


class Decompression(Structure):
    """``struct ThresholdDecompression``."""

    _fields_ = [
        ("at", Layout),
        *RECEIVED,
    ]


def _compress(
    x: Tensor,
    error: Tensor | None,
    new_error: Tensor | None,
    payload: Tensor,
    k: int,
    rounds: int,
    active: Tensor | None,
) -> None:
    rows, device = x.shape[0], x.device
    if x.numel() == 0:
        return
    chunks = rows * -(-x.shape[1] // reference.CHUNK)
    kinds = [(rows * ctypes.sizeof(Search), torch.uint8), (chunks, torch.float64), (2 * chunks, torch.int32)]
    kinds += [(32 * chunks, torch.int32), (2 * chunks, torch.int64)]
    scratch = [torch.empty(size, dtype=dtype, device=device) for size, dtype in kinds]
    pointers = [pointer(t) for t in (x, error, new_error, payload, active, *scratch)]
    argument = Compression(
        layout(Layout, ThresholdRow(x.shape[1], k)), *pointers, rows, *strides(x, error, new_error, active), 0, 0
    )
    teams = -(-chunks // TEAMS)
    launch("threshold_measure", teams, (32, TEAMS), argument, device)
    launch("threshold_begin", rows, (32, WARPS), argument, device)
    passes = [0, *([LEVELS] * (rounds // LEVELS)), *([rounds % LEVELS] if rounds % LEVELS else [])]
    for levels, after in zip(passes, [*passes[1:], 0]):
        argument.levels, argument.next = levels, after
        launch("threshold_count", teams, (32, TEAMS), argument, device)
        launch("threshold_step", rows, (32, WARPS), argument, device)
    launch("threshold_tally", teams, (32, TEAMS), argument, device)
    launch("threshold_places", rows, (32, WARPS), argument, device)
    launch("threshold_encode", teams, (32, TEAMS), argument, device)


def _threshold_compress(x: Tensor, payload: Tensor, k: int, rounds: int, active: Tensor | None = None) -> Served:
    if not serves(x, payload):
        return NotImplemented
    _compress(x, None, None, payload, k, rounds, active)


def _threshold_compress_with_feedback(
    x: Tensor, error: Tensor, new_error: Tensor, payload: Tensor, k: int, rounds: int, active: Tensor | None = None
) -> Served:
    if not serves(x, payload):
        return NotImplemented
    _compress(x, error, new_error, payload, k, rounds, active)


def _decompress(payload: Tensor, out: Tensor, row: ThresholdRow, rows: int, ranks: int, active: Tensor | None) -> None:
    if out.numel():
        pointers = payload.data_ptr(), out.data_ptr(), pointer(active)
        argument = Decompression(layout(Layout, row), *pointers, rows, ranks, *strides(out, active))
        launch("threshold_decompress", rows * row.segments, (THREADS, 1), argument, out.device)


def _threshold_decompress(payload: Tensor, out: Tensor, k: int, active: Tensor | None = None) -> Served:
    if not serves(out, payload):
        return NotImplemented
    _decompress(payload, out, ThresholdRow(out.shape[1], k), out.shape[0], 1, active)


def _threshold_decompress_mean(payload: Tensor, out: Tensor, k: int) -> Served:
    if not serves(out, payload):
        return NotImplemented
    _decompress(payload, out, ThresholdRow(out.shape[0], k), 1, payload.shape[0], None)


KERNELS: dict[str, Callable[..., Any]] = {
    "threshold_compress": _threshold_compress,
    "threshold_compress_with_feedback": _threshold_compress_with_feedback,
    "threshold_decompress": _threshold_decompress,
    "threshold_decompress_mean": _threshold_decompress_mean,
}

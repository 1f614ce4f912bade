"""Native CUDA providers of top-k: ``kernels/cuda/top_k.cu`` through CuPy. See :mod:`commopt.ops.cuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure
from typing import Any

import torch
from torch import Tensor

from commopt.ops.arguments import RECEIVED, SENT_AND_LEFT, STRIDES, Served, layout, pointer, serves, strides
from commopt.ops.cuda_module import launch
from commopt.ops.top_k_row import TopKRow

TEAMS = 8
"""Warps of a block, each with a chunk or a group."""
ITEMS = 8
"""Elements of a chunk that a thread has in registers."""
OCTETS = 256
"""Threads of a block, each with 8 entries."""

_P, _I64 = ctypes.c_void_p, ctypes.c_longlong
_NAMES = (
    "n", "k", "chunk", "bits", "chunks", "entries", "group", "groups", "scales_of_group", "values_at", "values_nbytes",
    "index_nbytes", "indices_at", "used", "nbytes",
)  # fmt: skip


class Layout(Structure):
    """``struct TopKLayout``."""

    _fields_ = [(name, _I64) for name in _NAMES]


class Compression(Structure):
    """``struct TopKCompression``."""

    _fields_ = [
        ("at", Layout),
        *SENT_AND_LEFT,
        *((name, _P) for name in ("kept", "means")),
        *STRIDES,
    ]


class Decompression(Structure):
    """``struct TopKDecompression``."""

    _fields_ = [
        ("at", Layout),
        *RECEIVED,
    ]


def _compress(
    x: Tensor, error: Tensor | None, new_error: Tensor | None, payload: Tensor, row: TopKRow, active: Tensor | None
) -> None:
    rows, device = x.shape[0], x.device
    if x.numel() == 0:
        return
    kept = torch.empty((rows, row.entries), dtype=torch.float32, device=device)
    means = torch.empty((rows, row.groups), dtype=torch.float64, device=device)
    pointers = [pointer(t) for t in (x, error, new_error, payload, active, kept, means)]
    argument = Compression(layout(Layout, row), *pointers, rows, *strides(x, error, new_error, active))
    threads = min(row.chunk // ITEMS, 1024)
    if threads <= 32:
        launch("topk_select", -(-rows * row.chunks // TEAMS), (32, TEAMS), argument, device)
    else:
        name = "topk_select_block" if row.chunk <= threads * ITEMS else "topk_select_large"
        launch(name, rows * row.chunks, (threads, 1), argument, device)
    if row.scales_of_group:
        launch("topk_scales", -(-rows * row.groups // TEAMS), (32, TEAMS), argument, device)
    launch("topk_encode", -(-rows * -(-row.entries // 8) // OCTETS), (OCTETS, 1), argument, device)


def _topk_compress(x: Tensor, payload: Tensor, k: int, chunk: int, bits: int, active: Tensor | None = None) -> Served:
    if not serves(x, payload):
        return NotImplemented
    _compress(x, None, None, payload, TopKRow(x.shape[1], k, chunk, bits), active)


def _topk_compress_with_feedback(
    x: Tensor,
    error: Tensor,
    new_error: Tensor,
    payload: Tensor,
    k: int,
    chunk: int,
    bits: int,
    active: Tensor | None = None,
) -> Served:
    if not serves(x, payload):
        return NotImplemented
    _compress(x, error, new_error, payload, TopKRow(x.shape[1], k, chunk, bits), active)


def _decompress(payload: Tensor, out: Tensor, row: TopKRow, rows: int, ranks: int, active: Tensor | None) -> None:
    if out.numel():
        pointers = payload.data_ptr(), out.data_ptr(), pointer(active)
        argument = Decompression(layout(Layout, row), *pointers, rows, ranks, *strides(out, active))
        launch("topk_decompress", -(-rows * row.chunks // TEAMS), (32, TEAMS), argument, out.device)


def _topk_decompress(
    payload: Tensor, out: Tensor, k: int, chunk: int, bits: int, active: Tensor | None = None
) -> Served:
    if not serves(out, payload):
        return NotImplemented
    _decompress(payload, out, TopKRow(out.shape[1], k, chunk, bits), out.shape[0], 1, active)


def _topk_decompress_mean(payload: Tensor, out: Tensor, k: int, chunk: int, bits: int) -> Served:
    if not serves(out, payload):
        return NotImplemented
    _decompress(payload, out, TopKRow(out.shape[0], k, chunk, bits), 1, payload.shape[0], None)


class Soundness(Structure):
    """``struct TopKSoundness``."""

    _fields_ = [("at", Layout), ("payload", _P), ("sound", _P), ("rows", _I64)]


def _topk_find_unsound(
    payload: Tensor, sound: Tensor, n: int, k: int, chunk: int, bits: int, dtype: torch.dtype = torch.float32
) -> Served:
    if dtype != torch.float32 or not payload.is_contiguous() or payload.data_ptr() % 4:
        return NotImplemented
    row = TopKRow(n, k, chunk, bits)
    if n and payload.shape[0]:
        argument = Soundness(layout(Layout, row), payload.data_ptr(), sound.data_ptr(), payload.shape[0])
        launch("topk_find_unsound", -(-payload.shape[0] * row.chunks // TEAMS), (32, TEAMS), argument, payload.device)


KERNELS: dict[str, Callable[..., Any]] = {
    "topk_compress": _topk_compress,
    "topk_compress_with_feedback": _topk_compress_with_feedback,
    "topk_decompress": _topk_decompress,
    "topk_decompress_mean": _topk_decompress_mean,
    "topk_find_unsound": _topk_find_unsound,
}

"""Checks of the arguments of operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

REAL = (torch.float32, torch.float64)


def describe(x: Tensor) -> str:
    """Layout, shape, dtype and device, for messages."""
    layout = "" if x.is_contiguous() else "strided "
    return f"{layout}{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}"


def check_real(name: str, x: Tensor, dim: int) -> None:
    """Raises ValueError unless ``x`` is float32 or float64, contiguous, of ``dim`` dimensions."""
    if x.dtype not in REAL or x.dim() != dim or not x.is_contiguous():
        raise ValueError(f"{name} must be float32 or float64, contiguous, of {dim} dimensions, got {describe(x)}")


def check_like(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError unless ``x`` is contiguous and all else is as given."""
    if x.shape != shape or x.dtype != dtype or x.device != device or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {tuple(shape)} {dtype} on {device}, got {describe(x)}")


def check_rows(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """As :func:`check_like`, of rows that may lie apart: columns of a larger tensor."""
    rows_apart = (
        x.dim() == 2 and (x.shape[1] <= 1 or x.stride(1) == 1) and (x.shape[0] <= 1 or x.stride(0) >= x.shape[1])
    )
    if x.shape != shape or x.dtype != dtype or x.device != device or not rows_apart:
        raise ValueError(f"{name} must be {tuple(shape)} {dtype} on {device}, rows contiguous, got {describe(x)}")


def check_sent(name: str, x: Tensor, payload: Tensor, nbytes: Callable[[int], int], active: Tensor | None) -> None:
    """Raises ValueError unless ``x`` has rows of float32 or float64, and ``payload`` those that they are sent as, of
    ``nbytes(n)`` bytes for n elements; ``active``: None, or a mask."""
    if x.dtype not in REAL or x.dim() != 2:
        raise ValueError(f"{name} must be float32 or float64, of 2 dimensions, got {describe(x)}")
    rows, n = x.shape
    check_rows(name, x, (rows, n), x.dtype, x.device)
    check_like("payload", payload, (rows, nbytes(n)), torch.uint8, x.device)
    if active is not None:
        check_rows("active", active, (rows, (n + 7) // 8), torch.uint8, x.device)


def check_gathered(out: Tensor, payload: Tensor, nbytes: Callable[[int], int]) -> None:
    """Raises ValueError unless ``out`` is a row of float32 or float64, and ``payload`` has one of each of several
    ranks, as for :func:`check_sent`."""
    if out.dim() != 1 or payload.dim() != 2 or payload.shape[0] == 0:
        raise ValueError(
            "out must be of 1 dimension, and payload have a row for each of at least one rank, got "
            f"{describe(out)} and {describe(payload)}"
        )
    check_sent("out", out.unsqueeze(0), payload[:1], nbytes, None)
    if not payload.is_contiguous():
        raise ValueError(f"payload must be contiguous, got {describe(payload)}")


def check_shared_rows(
    payload: Tensor,
    numel: int,
    device: torch.device,
    nbytes: Callable[[int], int],
    active: Tensor | None,
    start: int,
    stop: int | None,
) -> int:
    """Raises ValueError unless ``payload`` has rows that are columns [start, stop) of ``numel`` elements on ``device``
    seen as as many rows.

    Args:
        payload, nbytes, active: as for :func:`check_sent`.
        start, stop: multiples of 8, but that stop may be n.

    Returns:
        ``stop``, which is all columns if None.
    """
    if payload.dim() != 2 or payload.shape[0] == 0 or numel % payload.shape[0]:
        raise ValueError(f"payload must have rows that share the {numel} elements equally, got {describe(payload)}")
    rows, n = payload.shape[0], numel // payload.shape[0]
    stop = n if stop is None else stop
    if not 0 <= start <= stop <= n or start % 8 or (stop % 8 and stop < n):
        raise ValueError(f"start and stop must be multiples of 8 with 0 <= start <= stop <= {n}, got {start}, {stop}")
    check_like("payload", payload, (rows, nbytes(stop - start)), torch.uint8, device)
    if active is not None:
        check_like("active", active, (rows, (n + 7) // 8), torch.uint8, device)
    return stop


def check_runs(name: str, tensors: Sequence[Tensor], offsets: Sequence[int], numel: int, device: torch.device) -> None:
    """Raises ValueError unless ``tensors`` are floating, on ``device``, and lie at ``offsets``, ascending and without
    overlap, within ``numel`` elements."""
    if len(tensors) != len(offsets):
        raise ValueError(f"{name} and offsets must have the same length, got {len(tensors)} and {len(offsets)}")
    end = 0
    for x, offset in zip(tensors, offsets):
        if not x.is_floating_point() or x.device != device:
            raise ValueError(f"{name} must be floating and on {device}, got {describe(x)}")
        if offset < end:
            raise ValueError(f"offsets must ascend without overlap, got {offset} after a tensor that ends at {end}")
        end = offset + x.numel()
    if end > numel:
        raise ValueError(f"{name} must lie within the {numel} elements of the buffer, got one that ends at {end}")

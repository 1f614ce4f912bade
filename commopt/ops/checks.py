"""Checks of the arguments of operators."""

from __future__ import annotations

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

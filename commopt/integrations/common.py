"""Common parts of the doors: who the optimizer is, its DDP model, and who has called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch import nn

from commopt.attach import attach, unwrapped
from commopt.ddp_models import ddp_models_in
from commopt.hsdp import has_replicas
from commopt.state import following
from commopt.state.packed import PackedOptimizer


def bare(optimizer: Any) -> PackedOptimizer:
    """The optimizer of commopt that a framework has wrapped, or that is given itself.

    Raises:
        ValueError: if it is another one.
    """
    found = unwrapped(optimizer)
    if not isinstance(found, PackedOptimizer):
        raise ValueError(
            f"this connects an optimizer of commopt that communicates (OneBitAdam, DiLoCo, ...), got "
            f"{type(found).__name__}; for any other there is commopt.compress_gradients()"
        )
    return found


def take_over(model: Any, optimizer: PackedOptimizer) -> None:
    """Takes over what a framework has put in place of the optimizer's parameters, and averages over replicas that FSDP2
    takes of ``model``."""
    if isinstance(model, nn.Module) and has_replicas(model):
        attach(model, optimizer)
    elif following.exchanged(optimizer):
        optimizer.rebind()


def attach_once(model: Any, optimizer: PackedOptimizer) -> None:
    """:func:`take_over`; and attaches ``model`` if it is a DDP model, or has one inside, that is not attached yet. Any
    other needs no attaching."""
    take_over(model, optimizer)
    attachment = optimizer._attachment
    if any(attachment is None or not attachment.is_of(ddp) for ddp in ddp_models_in(model)):
        attach(model, optimizer)


def frame_of(kind: type, fits: Callable[[FrameType], bool]) -> FrameType | None:
    """The frame of a method of a ``kind`` that has called us, and ``fits``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind) and fits(frame):
            return frame
        frame = frame.f_back
    return None


def numbers(stats: Mapping[str, Any], prefix: str = "commopt") -> dict[str, float]:
    """What a logger takes of ``comm_stats()``: traffic of the last step and of all, and the residual of compression, as
    far as they are defined."""
    found = {
        "bytes": stats["step"]["bytes"],
        "bytes_total": stats["total"]["bytes"],
        "ratio": stats["ratio"],
        "residual_ratio": stats.get("residual_ratio"),
    }
    return {f"{prefix}/{name}": value for name, value in found.items() if value is not None}

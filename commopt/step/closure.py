"""The closure that ``step()`` takes, as torch has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The result of ``closure``, called once, with gradients enabled; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()

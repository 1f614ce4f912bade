"""What the host reads of tensors. Each read waits for the device they are on, so several are read at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def numbers_of(scalars: Sequence[Tensor]) -> list[Any]:
    """The numbers, or truth values, in 0-d tensors of one dtype, of any devices."""
    return torch.stack([s.to(scalars[0].device) for s in scalars]).tolist() if scalars else []


def as_number(value: Any) -> Any:
    """A hyper-parameter as ranks compare it: what is in a tensor of one element, wherever that is; else ``value``."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

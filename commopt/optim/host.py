"""What the host reads of tensors. Each read waits for the device they are on, so several are read at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def numbers_of(scalars: Sequence[Tensor]) -> list[Any]:
    """The numbers, or truth values, in 0-d tensors of one dtype, of any devices."""
    return torch.stack([s.to(scalars[0].device) for s in scalars]).tolist() if scalars else []


def as_numbers(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of the hyper-parameters ``names`` that are in ``group``, in order, as ranks compare them: a tensor of one
    element is the number in it, wherever that is."""
    values = {name: group[name] for name in names if name in group}
    return {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in values.items()}

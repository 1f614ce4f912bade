"""What the host reads of tensors. Each read waits for the device they are on, so several are read at once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from commopt import ops


def numbers_of(scalars: Sequence[Tensor]) -> list[Any]:
    """The numbers, or truth values, in 0-d tensors of one dtype, of any devices."""
    return torch.stack([s.to(scalars[0].device) for s in scalars]).tolist() if scalars else []


def as_numbers(group: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Those of the hyper-parameters ``names`` that are in ``group``, in order, as ranks compare them: a tensor of one
    element is the number in it, wherever that is."""
    values = {name: group[name] for name in names if name in group}
    return {k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for k, v in values.items()}


def square_norm(tensors: list[Tensor]) -> float:
    """Sum of squares over ``tensors``, of any devices; finite if and only if all elements are."""
    return sum([float(ops.square_sum([tensors[i] for i in here])) for here in _by_device(tensors)], 0.0)


def square_sums(tensors: list[Tensor]) -> list[float]:
    """The sum of squares of each tensor, of any devices, in float64; equal on ranks that have other numbers of
    threads."""
    out = [0.0] * len(tensors)
    for here in _by_device(tensors):
        for i, square in zip(here, ops.square_sums([tensors[i] for i in here]).tolist()):
            out[i] = square
    return out


def _by_device(tensors: Sequence[Tensor]) -> Collection[list[int]]:
    """The indices of ``tensors``, apart for each device."""
    out: dict[torch.device, list[int]] = {}
    for i, t in enumerate(tensors):
        out.setdefault(t.device, []).append(i)
    return out.values()

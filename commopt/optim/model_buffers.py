"""Buffers of a model, such as BatchNorm's running statistics, which every rank has of its own data: made the same on
all ranks for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from commopt.comm import Topology, wait

HowBuffers = Literal["mean", "broadcast"]


@contextlib.contextmanager
def same_buffers(topology: Topology, model: nn.Module | None, how: HowBuffers) -> Iterator[None]:
    """Context in which the buffers of ``model`` are the same on all ranks: the ``"mean"`` of those of floats, or
    rank 0's, by ``"broadcast"``; afterwards they are each rank's own again. All ranks must enter it at the same point,
    with the same buffers. Numbers of steps and the like are rank 0's in any case.

    Raises:
        ValueError: for another ``how``, or if ranks hold parts of the model.
    """
    if how not in ("mean", "broadcast"):
        raise ValueError(f"buffers must be 'mean' or 'broadcast', got {how!r}")
    buffers = [] if model is None else [b for b in model.buffers() if b.numel()]
    if buffers and topology.is_sharded:
        raise ValueError("buffers of a sharded model are each rank's own: call averaged() without the model")
    own = [b.detach().clone() for b in buffers]
    try:
        with torch.no_grad():
            for number, b in enumerate(buffers if topology.world_size > 1 else []):
                _make_same(topology, b, how, f"averaged(), buffer {number} of {len(buffers)} of the model")
        topology.traffic.leave_out()
        yield
    finally:
        with torch.no_grad():
            for b, value in zip(buffers, own):
                b.copy_(value)


def _make_same(topology: Topology, b: Tensor, how: HowBuffers, where: str) -> None:
    """The mean is rank 0's buffer plus the mean of how far the others are from it: of what is the same everywhere, such
    as a mask of -inf, it is that, to the bit."""
    mine, first = b.contiguous().clone(), b.contiguous().clone()
    flat = first.view(-1) if not first.is_complex() else torch.view_as_real(first).view(-1)
    wait(topology.world.broadcast(flat.view(torch.uint8)), where)
    if how == "mean" and b.is_floating_point():
        away = torch.where(mine == first, 0.0, mine.to(torch.float64) - first.to(torch.float64)).view(-1)
        wait(topology.world.all_reduce(away), where)
        first = (first.to(torch.float64) + away.view(first.shape)).to(b.dtype)
    b.copy_(first)

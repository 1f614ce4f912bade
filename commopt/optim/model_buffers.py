"""Buffers of a model, such as BatchNorm's running statistics, which every rank has of its own data: made the same on
all ranks for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
            for device in dict.fromkeys(b.device for b in buffers) if topology.world_size > 1 else ():
                _make_same(topology, [b for b in buffers if b.device == device], how)
        topology.traffic.leave_out()
        yield
    finally:
        with torch.no_grad():
            for b, value in zip(buffers, own):
                b.copy_(value)


def _make_same(topology: Topology, buffers: Sequence[Tensor], how: HowBuffers) -> None:
    """The mean is rank 0's buffer plus the mean of how far the others are from it: of what is the same everywhere, such
    as a mask of -inf, it is that, to the bit. Two collectives for all."""
    where = f"averaged(), {len(buffers)} buffers of the model"
    as_bytes = [b.flatten().view(torch.uint8) for b in buffers]
    sent = torch.cat(as_bytes)
    wait(topology.world.broadcast(sent), where)
    pieces = sent.split([piece.numel() for piece in as_bytes])
    firsts = [piece.clone().view(b.dtype).view(b.shape) for piece, b in zip(pieces, buffers)]
    floats = [i for i, b in enumerate(buffers) if how == "mean" and b.is_floating_point()]
    if floats:
        away = torch.cat([_distance(buffers[i], firsts[i]) for i in floats])
        wait(topology.world.all_reduce(away), where)
        for i, x in zip(floats, away.split([buffers[i].numel() for i in floats])):
            firsts[i] = firsts[i].to(torch.float64) + x.view(firsts[i].shape)
    for b, first in zip(buffers, firsts):
        b.copy_(first)


def _distance(x: Tensor, other: Tensor) -> Tensor:
    """x - other, flat, in float64; 0 where they are equal, as infinities may be."""
    return torch.where(x == other, 0.0, x.to(torch.float64) - other.to(torch.float64)).flatten()

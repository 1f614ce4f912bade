"""What a model has beside the parameters of its optimizer, such as BatchNorm's running statistics, which every rank
has of its own data, or a moving average of the parameters: made the same on all ranks for a while."""

from __future__ import annotations

import contextlib
import gc
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from commopt.comm import Topology, gather_rows, message_device, wait
from commopt.optim.digest import digest

logger = logging.getLogger("commopt")

HowBuffers = Literal["mean", "broadcast"]


def check_how(how: HowBuffers) -> None:
    """Raises ValueError for another word."""
    if how not in ("mean", "broadcast"):
        raise ValueError(f"buffers must be 'mean' or 'broadcast', got {how!r}")


@contextlib.contextmanager
def same_buffers(
    topology: Topology, model: nn.Module | None, how: HowBuffers, held: Collection[int] = ()
) -> Iterator[None]:
    """Context in which the buffers of ``model`` are the same on all ranks: the ``"mean"`` of those of floats, or
    rank 0's, by ``"broadcast"``; afterwards they are each rank's own again. All ranks must enter it at the same point,
    with the same buffers. Numbers of steps and the like are rank 0's in any case. Parameters that are not ``held`` (by
    their ids) are their mean over the ranks, where they differ.

    Raises:
        ValueError: for another ``how``, or if ranks hold parts of the model.
    """
    check_how(how)
    buffers = [] if model is None else [b for b in model.buffers() if b.numel()]
    if buffers and topology.is_sharded:
        raise ValueError("buffers of a sharded model are each rank's own: call averaged() without the model")
    copies = _differing(topology, [] if model is None else [p for p in model.parameters() if id(p) not in held])
    own = [x.detach().clone() for x in [*buffers, *copies]]
    try:
        with torch.no_grad():
            for device in dict.fromkeys(b.device for b in buffers) if topology.world_size > 1 else ():
                _make_same(topology, [b for b in buffers if b.device == device], how)
            for device in dict.fromkeys(p.device for p in copies):
                _make_same(topology, [p for p in copies if p.device == device], "mean")
        topology.traffic.leave_out()
        yield
    finally:
        with torch.no_grad():
            for x, value in zip([*buffers, *copies], own):
                x.copy_(value)


@torch._disable_dynamo
def _differing(topology: Topology, params: Sequence[Tensor]) -> list[Tensor]:
    """Those of ``params`` that differ between ranks. Sends 8 bytes for each."""
    params = [p for p in params if p.numel()]
    if topology.world_size == 1 or not params:
        return []
    if topology.is_sharded:
        if any(p.requires_grad for p in params):
            raise ValueError(
                "the model has parameters that the optimizer does not hold, and ranks hold parts of it: call "
                "averaged() without the model"
            )
        return []
    device = message_device(topology.backend)
    mine = torch.stack([digest(p).to(device) for p in params])
    table = gather_rows(topology.world, mine, f"averaged(), {len(params)} parameters that the optimizer does not hold")
    return [p for p, same in zip(params, (table == mine).all(0).tolist()) if not same]


def warn_of_copies(name: str, params: Sequence[Tensor], model: nn.Module | None) -> None:
    """Says that moving averages of ``params`` are each rank's own, if there are such, and ``model`` is not or has not
    all of them. Looks at all objects there are. ``name`` is the optimizer's."""
    shapes = Counter(tuple(p.shape) for p in params)
    known = set() if model is None else {id(module) for module in model.modules()}
    for x in gc.get_objects():
        if not issubclass(type(x), nn.Module) or id(x) in known or not _is_average(x):
            continue
        if shapes <= Counter(tuple(p.shape) for p in x.parameters()):  # frozen ones are in it, and may all be
            logger.warning(
                "%s: %s of parameters like these is each rank's own, because replicas differ between two "
                "rounds: evaluate and save it within `with optimizer.averaged(averaged_model):`, on all ranks",
                name,
                f"an {type(x).__name__}" if isinstance(x, AveragedModel) else f"a {type(x).__name__}",
            )
            return


def _is_average(module: nn.Module) -> bool:
    """Whether it is a moving average of a model that has begun, as far as its class tells: torch's, or one that is
    called so, such as timm's ModelEma. One that another thread is making has not begun."""
    if "_modules" not in vars(module):
        return False
    if isinstance(module, AveragedModel):
        return bool(getattr(module, "n_averaged", False))
    return bool(re.search("Ema|EMA|MovingAverage", type(module).__name__))


def _make_same(topology: Topology, buffers: Sequence[Tensor], how: HowBuffers) -> None:
    """The mean is rank 0's buffer plus the mean of how far the others are from it: of what is the same everywhere, such
    as a mask of -inf, it is that, to the bit. Two collectives for all."""
    where = f"averaged(), {len(buffers)} tensors of the model"
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

"""The rest of a model beside the parameters of its optimizer, such as BatchNorm's running statistics, which every rank
has of its own data, or a moving average of the parameters: made the same on all ranks for a while."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from commopt.agreement.digest import digest
from commopt.comm import Topology, gather_rows, message_device, sends_from, wait
from commopt.ddp_models import instances_of, with_subclasses
from commopt.sharding import is_sharded

logger = logging.getLogger("commopt")

HowBuffers = Literal["mean", "broadcast"]

_AVERAGE = re.compile("Ema|EMA|MovingAverage")
"""In the name of a class of moving averages that is not torch's, such as timm's ModelEma."""


def check_how(how: HowBuffers) -> None:
    """Raises ValueError for another word."""
    if how not in ("mean", "broadcast"):
        raise ValueError(f"buffers must be 'mean' or 'broadcast', got {how!r}")


class Rest:
    """The rest of ``model`` beside the parameters of its optimizer: its buffers, and parameters not ``held`` (by their
    ids). Made the same on all ranks: buffers of floats their ``"mean"``, or rank 0's, by ``"broadcast"``; numbers
    of steps and the like rank 0's in any case; parameters their mean, where they differ. All ranks must do so at the
    same point, with the same ``layout``.

    Attributes:
        layout: what of the model is made the same, in words that ranks compare.

    Raises:
        ValueError: for what is no model, for another ``how``, or if ranks hold parts of the model.
    """

    def __init__(
        self, topology: Topology, model: nn.Module | None, how: HowBuffers, held: Collection[int] = ()
    ) -> None:
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model must be a torch.nn.Module or None, got {model!r}")
        check_how(how)
        self._topology, self._how = topology, how
        tensors = [] if model is None else [*model.parameters(), *model.buffers()]
        whole = topology.holds_whole and not any(map(is_sharded, tensors))
        named = [] if model is None else [(name, b) for name, b in model.named_buffers() if b.numel()]
        self._buffers = [_without_repeats(b) for _, b in named]
        if self._buffers and not whole:
            raise ValueError(
                f"the {len(self._buffers)} buffers of a sharded model are each rank's own: leave the model out"
            )
        every = [] if model is None else model.named_parameters()
        more = [(name, p) for name, p in every if id(p) not in held and p.numel()]
        others = [p for _, p in more]
        if not whole and any(p.requires_grad for p in others):
            shapes = [tuple(p.shape) for p in others if p.requires_grad]
            raise ValueError(
                f"the model has {len(shapes)} trained parameters that the optimizer does not hold, such as one of "
                f"shape {shapes[0]}, and ranks hold parts of it: leave it out"
            )
        self._others = others if whole else []
        self.layout = [
            f"{_bare(name)} ({str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)})"
            for name, x in ([*named, *more] if whole else [])
        ]

    @contextlib.contextmanager
    def same(self) -> Iterator[None]:
        """Context in which it is the same on all ranks; afterwards it is each rank's own again."""
        copies = _differing(self._topology, self._others)
        own = [x.detach().clone() for x in [*self._buffers, *copies]]
        try:
            self._make_same(copies)
            yield
        finally:
            with torch.no_grad():
                for x, value in zip([*self._buffers, *copies], own):
                    x.copy_(value)

    def make_same(self) -> None:
        """Makes it the same on all ranks, for good."""
        self._make_same(_differing(self._topology, self._others))

    @torch.no_grad()
    def _make_same(self, copies: Sequence[Tensor]) -> None:
        for device in dict.fromkeys(b.device for b in self._buffers) if self._topology.world_size > 1 else ():
            _make_same(self._topology, [b for b in self._buffers if b.device == device], self._how)
        for device in dict.fromkeys(p.device for p in copies):
            _make_same(self._topology, [p for p in copies if p.device == device], "mean")
        self._topology.traffic.leave_out()


def _bare(name: str) -> str:
    """``name`` in the model itself, and not in what was put around it."""
    return name.replace("_orig_mod.", "").removeprefix("module.")


def _without_repeats(x: Tensor) -> Tensor:
    """A view of ``x`` that has what repeats along a dimension, as of an expanded tensor, once: it can be written."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


@torch._disable_dynamo
def _differing(topology: Topology, params: Sequence[Tensor]) -> list[Tensor]:
    """Those of ``params`` that differ between ranks. Sends 8 bytes for each."""
    if topology.world_size == 1 or not params:
        return []
    device = message_device(topology.backend)
    mine = torch.stack([digest(p).to(device) for p in params])
    where = f"the rest of the model, {len(params)} parameters that the optimizer does not hold"
    table = gather_rows(topology.world, mine, where)
    return [p for p, same in zip(params, (table == mine).all(0).tolist()) if not same]


def warn_of_copies(name: str, params: Sequence[Tensor], models: Iterable[nn.Module]) -> bool:
    """Says that moving averages of ``params`` are each rank's own, if there are such, and not all of them are in
    ``models``; returns whether it did. Looks at all objects there are. ``name`` is the optimizer's."""
    shapes = Counter(tuple(p.shape) for p in params)
    known = {id(module) for model in models for module in model.modules()}
    averages = with_subclasses(AveragedModel)
    kinds = {cls for cls in with_subclasses(nn.Module) if cls in averages or _AVERAGE.search(cls.__name__)}
    for x in instances_of(kinds):
        if id(x) in known or not _has_begun(x):
            continue
        if shapes <= Counter(tuple(p.shape) for p in x.parameters()):  # frozen ones are in it, and may all be
            logger.warning(
                "%s: %s of parameters like these is each rank's own, because replicas differ between two "
                "rounds: evaluate and save it within `with optimizer.averaged(averaged_model):`, on all ranks",
                name,
                f"an {type(x).__name__}" if isinstance(x, AveragedModel) else f"a {type(x).__name__}",
            )
            return True
    return False


def _has_begun(average: nn.Module) -> bool:
    """True if a moving average has averaged anything, as far as it tells. One that another thread is making has not."""
    if "_modules" not in vars(average):
        return False
    return not isinstance(average, AveragedModel) or bool(getattr(average, "n_averaged", False))


def _make_same(topology: Topology, buffers: Sequence[Tensor], how: HowBuffers) -> None:
    """The mean is rank 0's buffer plus the mean of how far the others are from it: of what is the same everywhere, such
    as a mask of -inf, it is that, to the bit. Two collectives for all, which are on one device: another one is what is
    sent from if the backend cannot from there."""
    where = f"the rest of the model, {len(buffers)} tensors"
    here, devices = buffers[0].device, sends_from(topology.backend)
    over = here if devices is None or here.type in devices else message_device(topology.backend)
    as_bytes = [b.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for b in buffers]
    sent = torch.cat(as_bytes).to(over)
    wait(topology.world.broadcast(sent), where)
    pieces = sent.to(here).split([piece.numel() for piece in as_bytes])
    firsts = [piece.clone().view(b.dtype).view(b.shape) for piece, b in zip(pieces, buffers)]
    floats = [i for i, b in enumerate(buffers) if how == "mean" and b.is_floating_point()]
    if floats:
        away = torch.cat([_distance(buffers[i], firsts[i]) for i in floats]).to(over)
        wait(topology.world.all_reduce(away), where)
        for i, x in zip(floats, away.to(here).split([buffers[i].numel() for i in floats])):
            firsts[i] = firsts[i].to(torch.float64) + x.view(firsts[i].shape)
    for b, first in zip(buffers, firsts):
        b.copy_(first)


def _distance(x: Tensor, other: Tensor) -> Tensor:
    """x - other, flat, in float64; 0 where they are equal, as infinities may be."""
    return torch.where(x == other, 0.0, x.to(torch.float64) - other.to(torch.float64)).flatten()

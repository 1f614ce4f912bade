"""The ranks of a run, and how they agree.

Control messages (errors, stop flags, losses) go over a Gloo group of their own, so that they never wait for the GPU and
never mix with the optimizer's traffic. Every method but ``open`` is a collective: all ranks call it, in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commopt.train.errors import ConfigError, RankError, UserError

log = logging.getLogger(__name__)
T = TypeVar("T")
PATIENCE = timedelta(hours=2)  # rank 0 may tokenise a large corpus while the others wait


@dataclass(frozen=True)
class World:
    """This process among the others: ``rank`` in [0, size), its device, and the control group (None when alone)."""

    rank: int
    size: int
    device: torch.device
    control: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this rank does what is done once."""
        return self.rank == 0

    def gather(self, item: T) -> list[T]:
        """One item per rank, in rank order, on every rank."""
        if self.control is None:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.control)
        return items

    def reduce(self, values: list[float], op: Any = dist.ReduceOp.SUM) -> list[float]:
        """Element-wise sum (or ``op``) over ranks, in float64."""
        if self.control is None:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self.control)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self.reduce([float(flag)], dist.ReduceOp.MAX)[0] > 0

    def together(self, work: Callable[[], T], name_rank: bool = True) -> T:
        """Run ``work`` on every rank and return its own result; if it fails anywhere, all raise, and none hangs.

        Where it fails on some ranks only, the error names the first, unless ``name_rank`` is off.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        reports = self.gather(_portable(error))
        if error is not None and not isinstance(error, (UserError, OSError)):
            raise error  # a bug: this rank shows its traceback
        failed = [(rank, report) for rank, report in enumerate(reports) if report is not None]
        if failed:
            rank, (kind, text) = failed[0]
            raise kind(text + (f" (rank {rank})" if name_rank and len(failed) < self.size else "")) from error
        return result  # type: ignore[return-value]

    def once(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 alone; every rank gets its (picklable) result or raises its error."""
        mine = self.together(lambda: work() if self.is_main else None, name_rank=False)
        return self.gather(mine)[0]  # type: ignore[return-value]


def _portable(error: Exception | None) -> tuple[type[Exception], str] | None:
    """What other ranks raise for an error here: the same for a user's mistake, RankError for anything else."""
    if error is None:
        return None
    if isinstance(error, UserError):
        return type(error), str(error)
    return RankError, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _place() -> tuple[torch.device, str]:
    """This process' device and the backend for its traffic."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"LOCAL_RANK={index}, but this machine has {count} GPUs: start one process per GPU")
    torch.cuda.set_device(index)
    return torch.device("cuda", index), "nccl"


@contextlib.contextmanager
def open_world() -> Iterator[World]:
    """Join the other ranks as torchrun's environment says; without it, or with a world size of 1, be alone.

    NCCL where there is a GPU, else Gloo. A default process group that exists already is used and left open.
    """
    device, backend = _place()
    owned = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if owned:
        dist.init_process_group(backend)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield World(0, 1, device)
        return
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device, dist.new_group(backend="gloo", timeout=PATIENCE))
    finally:
        if owned:
            dist.destroy_process_group()

"""A model that the ranks of a machine hold together: who measures with whom, and what FSDP2 moves among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from commopt.probe.fit import Line
from commopt.probe.measure import Sample, Stand, every_second, finish, links, sizes_up_to
from commopt.probe.options import Options

ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Collective of FSDP2, by its name in this torch: older ones do not know the first, newer ones warn of the second."""
GATHERS = 2
"""All-gathers of a parameter in a step: for forward, and for backward."""


@dataclass(frozen=True)
class Inside:
    """Costs of what FSDP2 does among the ranks of a machine, in float32.

    Attributes:
        nbytes: bytes that a rank sends to the others of its machine in a step.
        seconds: of a step, for these bytes, if no computing hid them; they are part of ``step_time``.
        samples: times by collective, "all_gather" and "reduce_scatter".
        link: by collective, the seconds of a message as a line in the bytes that a rank sends.
    """

    nbytes: int
    seconds: float
    samples: dict[str, list[Sample]]
    link: dict[str, Line]


def rows(ranks: int, machine: int) -> tuple[list[list[int]], list[list[int]]]:
    """The ranks of each machine, and those that have each place in them: rank = number of the machine * ``machine`` +
    place."""
    machines = [list(range(first, first + machine)) for first in range(0, ranks, machine)]
    return machines, [list(place) for place in zip(*machines)]


def grouped(
    ranks: int, machine: int, options: Options, timeout: timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Process groups of the ranks of this machine, and of those with this one's place in the machines. All ranks call
    this together."""
    machines, places = rows(ranks, machine)
    mine, _ = dist.new_subgroups_by_enumeration(machines, timeout, options.backend)
    place, _ = dist.new_subgroups_by_enumeration(places, timeout, options.backend)
    return mine, place


def measure_inside(stand: Stand, options: Options, group: dist.ProcessGroup) -> Inside:
    """Times FSDP2's collectives, in all machines at once; ``group``: the ranks of this one."""
    sizes = every_second(sizes_up_to(options.max_mb))
    samples = {verb: collectives(stand, verb, sizes, group) for verb in ("all_gather", "reduce_scatter")}
    link = links(samples)
    once = 4 * options.params * (options.shard - 1) // options.shard
    seconds = GATHERS * link["all_gather"](once) + link["reduce_scatter"](once)
    return Inside((GATHERS + 1) * once, seconds, samples, link)


def collectives(stand: Stand, verb: str, sizes: Sequence[int], group: dist.ProcessGroup) -> list[Sample]:
    """All-gathers to, or reduce-scatters of, ``size`` bytes of float32."""
    ranks = dist.get_world_size(group)

    def prepare(size: int) -> tuple[int, Callable[[], object]]:
        part = torch.zeros(size // 4 // ranks, device=stand.device)
        whole = torch.zeros(ranks * part.numel(), device=stand.device)
        do: dict[str, Callable[[], object]] = {
            "all_gather": lambda: finish([ALL_GATHER(whole, part, group=group, async_op=True)]),
            "reduce_scatter": lambda: finish([REDUCE_SCATTER(part, whole, group=group, async_op=True)]),
        }
        return (ranks - 1) * part.nbytes, do[verb]

    return stand.sweep(sizes, prepare)

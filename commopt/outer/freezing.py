"""Parameters that all ranks have frozen, where fragments are merged eagerly: functions of an outer optimizer.

A rank's own share of a fragment goes into its anchor by one outer step, and out by the next one: what it does to the
anchor ends as outer momentum does, and a frozen parameter takes part in no outer step. So when the ranks learn, from
the rows that travel with a fragment, that all have frozen one, they take the mean of its anchors and of its momenta,
once. It has one value on all of them from then on, as the share of each waits for those of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from commopt.comm import Pipeline, Receipt, Traffic, confirm, mean_over_all
from commopt.comm.topology import channel_of
from commopt.outer.flight import Flight
from commopt.outer.means import Entry
from commopt.outer.streaming import FROZEN
from commopt.state.replicas import reaching_others
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer


def known(optimizer: OuterOptimizer) -> set[int]:
    """The ids of the parameters that all ranks have frozen, as far as they know."""
    return {id(group["params"][i]) for group in optimizer.param_groups for i in group[FROZEN]}


def told(optimizer: OuterOptimizer, flight: Flight | None) -> set[int]:
    """The same, as a flight tells that counts; of None, those that are known."""
    return known(optimizer) if flight is None else _ids(optimizer, flight.frozen)


def know(optimizer: OuterOptimizer, frozen: Collection[int], entries: Sequence[Entry]) -> None:
    """Takes over which parameters of ``entries`` all ranks have ``frozen``, by their ids."""
    here = {id(p) for bucket, _ in entries for p in bucket.params}
    now = (known(optimizer) - here) | here.intersection(frozen)
    for group in optimizer.param_groups:
        group[FROZEN] = tuple(i for i, p in enumerate(group["params"]) if id(p) in now)


def begin(optimizer: OuterOptimizer, frozen: Sequence[int]) -> None:
    """Takes over which parameters all ranks have ``frozen``, by their numbers, while all replicas are equal."""
    know(optimizer, _ids(optimizer, frozen), optimizer.entries())


def without(bucket: StateBucket, flat: Tensor, ids: Collection[int]) -> Tensor:
    """``flat`` with zeros in the place of the parameters with these ids; itself where there are none."""
    indices = _indices(bucket, ids)
    if indices:
        flat = flat.clone()
        for i in indices:
            bucket.views(flat)[i].zero_()
    return flat


def means(
    optimizer: OuterOptimizer, entries: Sequence[Entry], along: Sequence[Tensor], new: Collection[int], where: str
) -> list[tuple[Tensor, Tensor]]:
    """Anchors and outer momenta of the parameters with the ids ``new``, and what they become: the means over the ranks,
    of the anchors when they have moved ``along``. Nothing has changed yet. All ranks that hold them call it.

    Raises:
        commopt.comm.CollectiveError: a collective failed; begins with ``where``.
    """
    out: list[tuple[Tensor, Tensor]] = []
    for (bucket, _), d in zip(entries, along):
        indices = _indices(bucket, new)
        if not indices or bucket.world_size == 1:
            continue
        moved = {"anchor": bucket.buffers["anchor"] - d, "outer_momentum": bucket.buffers["outer_momentum"].clone()}
        for name, flat in moved.items():
            with reaching_others(optimizer.topology, where):
                _average(bucket, flat, optimizer.topology.traffic, f"{where}, {name} of what was frozen")
            mean = bucket.views(flat)
            out += [(x, mean[i]) for x, i in zip(bucket.tensors(name, indices), indices)]
    return out


def _average(bucket: StateBucket, flat: Tensor, traffic: Traffic, where: str) -> None:
    """``flat`` <- its mean over the ranks that hold the bucket, who confirm it among themselves: those that hold other
    parts of the model may have frozen nothing."""
    channel, pipeline = channel_of(bucket.replicas.backend, traffic, Receipt()), Pipeline()
    pipeline.start(mean_over_all(flat, channel, channel), where)
    pipeline.finish()
    confirm(channel.world, True, where)


def _ids(optimizer: OuterOptimizer, numbers: Sequence[int]) -> set[int]:
    """The ids of parameters by their numbers; none where no outer step has a momentum, which needs nothing of this."""
    params = optimizer.params
    return {id(params[i]) for i in numbers} if optimizer.momentum else set()


def _indices(bucket: StateBucket, ids: Collection[int]) -> list[int]:
    return [i for i, p in enumerate(bucket.params) if id(p) in ids]

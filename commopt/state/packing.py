"""Which parameters are in which bucket: how buckets are made, and made anew, with the state of their parameters.
Functions of an optimizer."""

from __future__ import annotations

import sys
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt.bucket import partition
from commopt.state import saving
from commopt.state.own import Origin
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer

Runs = Sequence[Sequence[Tensor]]
"""Parameters of buckets, in order."""


def pack_new(optimizer: PackedOptimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Packs the trainable parameters of ``groups`` that are in no bucket yet, and makes their state, all zeros."""
    runs, optimizer._kept_runs = optimizer._kept_runs, ()
    _pack_runs(optimizer, runs)
    packed, kept, known = optimizer.packed(), optimizer._kept_packed, len(optimizer.buckets)
    for group in groups:
        new = [p for p in group["params"] if (p.requires_grad or id(p) in kept) and id(p) not in packed]
        if new:
            _pack_group(optimizer, new)
            packed.update(map(id, new))
    if len(optimizer.buckets) > known:
        refresh_own_tensors(optimizer)


def _pack_group(optimizer: PackedOptimizer, new: list[Tensor]) -> None:
    """Packs ``new``, of one group."""
    capacity, known = optimizer.capacity_of(new), len(optimizer.buckets)
    waiting = {p: dict(optimizer.state[p]) for p in new if optimizer.state.get(p)}
    if waiting:  # as a state was loaded while they were frozen
        frozen = {i: (p, waiting[p]) for i, p in enumerate(optimizer.params) if p in waiting}
        saving.check_waiting(frozen, optimizer.buckets)
    _pack(optimizer, new, capacity, capacity)
    if waiting:
        saving.take_up(optimizer.buckets[known:], waiting)


def _pack(optimizer: PackedOptimizer, params: Sequence[Tensor], most: int, capacity: int) -> None:
    """Makes buckets of at most ``most`` bytes of ``params``, of one group; those of more than ``capacity`` are sent in
    chunks."""
    topology = optimizer.topology
    held = {id(p): topology.held(p) for p in params}
    runs = partition(params, most, lambda p: held[id(p)])
    for run in sorted(runs, key=lambda run: held[id(run[0])][1].inside is not None):  # these cannot start early
        replicas, holding = held[id(run[0])]
        share = topology.world_size / holding.copies
        inside, adds_up = holding.inside, optimizer.reduction == "sum"
        bucket = StateBucket(run, replicas.world_size, replicas, share, holding.pieces, inside, adds_up, holding.alike)
        bucket.add_numbers(dict.fromkeys(optimizer.step_counters, 0.0), torch.float32)
        bucket.add_numbers(optimizer.scalars, torch.float64)
        optimizer.init_messages(bucket, capacity)
        optimizer.init_bucket(bucket)
        optimizer.buckets.append(bucket)
        for p, entry in zip(bucket.params, bucket.state()):
            optimizer.state[p].update(entry)
    optimizer._seen, optimizer._layout = (), None


def _pack_runs(optimizer: PackedOptimizer, runs: Runs) -> None:
    """Makes a bucket of each of ``runs``; where parameters of one are in several groups now, of those of each."""
    if not runs:
        return
    kept = {id(p) for run in runs for p in run}
    of_groups = [[p for p in group["params"] if id(p) in kept] for group in optimizer.param_groups]
    capacities = [optimizer.capacity_of(params) for params in of_groups]
    numbers = {id(p): i for i, params in enumerate(of_groups) for p in params}
    for run in runs:
        for i in dict.fromkeys(numbers[id(p)] for p in run if id(p) in numbers):
            params = [p for p in reversed(run) if numbers.get(id(p)) == i]
            _pack(optimizer, params, sys.maxsize, capacities[i])


def pack_anew(optimizer: PackedOptimizer, runs: Runs) -> None:
    """Makes all buckets anew, without state: one of each of ``runs``, and no others."""
    optimizer.state = defaultdict(dict)
    optimizer.buckets = []
    _pack_runs(optimizer, runs)
    refresh_own_tensors(optimizer)
    note_groups(optimizer)


def note_groups(optimizer: PackedOptimizer) -> None:
    """Takes down which parameters are in which group; the layout goes by that."""
    optimizer._registered = [(group, list(group["params"])) for group in optimizer.param_groups]
    optimizer._layout = None


def pack_as_saved(optimizer: PackedOptimizer, given: Mapping[str, Any]) -> None:
    """Makes the buckets, which lose their state, as they were where the state ``given`` was saved, if they are others,
    though of one ``bucket_mb``: parameters were frozen, unfrozen or put into other groups since that run began, and
    residuals fit its buckets alone. What is trainable beside is packed by the next step, as it would be in that run.
    All ranks load one state, and find the same."""
    params, part = optimizer.params, given.get("residuals") or {}
    if optimizer.own_in_state or part.get("bucket_mb", -1) != optimizer.bucket_mb:
        return
    numbers = saving.buckets_of(part, len(params), optimizer.topology)
    if numbers and numbers != saving.numbers_in(optimizer.buckets, registered(optimizer)):
        pack_anew(optimizer, [[params[i] for i in run] for run in numbers])
        optimizer.watch_buckets()


def runs_of(optimizer: PackedOptimizer) -> list[list[Tensor]]:
    """The parameters of each bucket, in order."""
    return [bucket.params for bucket in optimizer.buckets]


def registered(optimizer: PackedOptimizer) -> list[Tensor]:
    """The parameters that the ranks have agreed on, by number."""
    return [p for _, params in optimizer._registered for p in params]


def layout(optimizer: PackedOptimizer) -> int:
    """A checksum of which parameters are in which bucket: the same on all ranks that hold the same part of a model."""
    if optimizer._layout is None:
        numbers = saving.numbers_in(optimizer.buckets, registered(optimizer))
        optimizer._layout = zlib.crc32(str(numbers).encode())
    return optimizer._layout


def origin_here(optimizer: PackedOptimizer, buckets: Sequence[StateBucket] | None = None) -> Origin:
    """Whose the residuals of this rank's ``buckets`` are; of all if it is None."""
    buckets = optimizer.buckets if buckets is None else buckets
    return saving.origin_here(buckets, registered(optimizer), optimizer.topology)


def origin_with_runs(optimizer: PackedOptimizer, origin: Origin | None, runs: Runs) -> Origin | None:
    """``origin`` of a state from before buckets were made anew of ``runs``, and others behind them, of what has become
    trainable since; which changes nothing of what is that rank's own."""
    before = origin_here(optimizer, optimizer.buckets[: len(runs)])
    return origin_here(optimizer) if runs and origin == before else origin


def refresh_state(optimizer: PackedOptimizer) -> None:
    """Makes ``state`` views of the buffers."""
    for bucket in optimizer.buckets:
        for p, entry in zip(bucket.params, bucket.state()):
            optimizer.state[p].update(entry)
    refresh_own_tensors(optimizer)


def refresh_own_tensors(optimizer: PackedOptimizer) -> None:
    """Puts what is a rank's own into ``state``, where that is its place."""
    if optimizer.own_in_state:
        for bucket, group in optimizer.grouped_buckets():
            for p, own in zip(bucket.params, optimizer.own_tensors(bucket, group)):
                optimizer.state[p].update(own)

"""Loaded state -> an optimizer's buffers, and what is said of what cannot be. Functions of an optimizer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt.agreement.diagnostics import by_a_door
from commopt.state import packing, saving
from commopt.state.own import Origin, belongs, cloned, describe, why_left_out
from commopt.state.own_tensor import OwnTensor
from commopt.state.saving import Entries
from commopt.state.split import RANK_LOCAL

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer

logger = logging.getLogger("commopt")

OWN = "own_"
"""Begins the names of what is a rank's own now and then, where that is in ``state``."""


def read(optimizer: PackedOptimizer, given: Mapping[str, Any]) -> tuple[Entries, Origin | None]:
    """Loaded state, by parameter, and whose own part is in it."""
    entries, origin = saving.read(given, optimizer.params, optimizer.topology.rank, optimizer.topology.world_size)
    return _placed(optimizer, entries, origin)


def _placed(optimizer: PackedOptimizer, entries: Entries, origin: Origin | None) -> tuple[Entries, Origin | None]:
    """``entries`` with what this rank gets of the tensors that know their places in place of these. If there are any,
    they are this rank's own: all of them, or none, where one is of another place."""
    here: dict[Any, dict[str, OwnTensor]] = {}
    if optimizer.own_in_state:
        for bucket, group in optimizer.grouped_buckets():
            here.update(zip(bucket.params, optimizer.own_tensors(bucket, group)))
    shared: Entries = {}
    from_rank_0 = False
    own: dict[Any, dict[str, OwnTensor]] = {}
    for p, entry in entries.items():
        own[p] = {name: value for name, value in entry.items() if isinstance(value, OwnTensor)}
        # those that are plain tensors now have come from rank 0; residuals are plain in a part of a rank's own, too
        sent = here.get(p, {}).keys() - set(RANK_LOCAL if origin is not None else ())
        shared[p] = {name: value for name, value in entry.items() if name not in own[p] and name not in sent}
        # what is zero, or the same on all ranks, is lost on none
        from_rank_0 |= any(not here[p][name].place.alike and bool(entry[name].any()) for name in sent & entry.keys())
    optimizer.rows_merged = max((len(t.read) for tensors in own.values() for t in tensors.values()), default=0)
    if not any(own.values()):
        if from_rank_0:
            _report_not_in_place(optimizer)
        return shared, origin
    placed = {p: dict(entry) for p, entry in shared.items()}
    for p, tensors in here.items():
        for name in (name for name in own.get(p, {}) if name in tensors):  # in order: that of what is saved next
            place = tensors[name].place
            value = own[p][name].value(place)
            if value is None:
                _report_not_in_place(optimizer)
                return shared, None
            placed[p][name.removeprefix(OWN)] = value if name in RANK_LOCAL else value.view(place.piece)
    return placed, packing.origin_here(optimizer)


def _report_not_in_place(optimizer: PackedOptimizer) -> None:
    """Warns that a state has what is another rank's own. One rank speaks for those that have not saved it, which is
    mostly rank 0's, where it is in place."""
    if optimizer.topology.rank == 1:
        logger.warning(
            "%s: what is each rank's own (residuals; with local steps parameters, momenta and the state of the base) "
            "is another rank's in the loaded state, and left out where it is not in place: a full_state_dict=True has "
            "that of rank 0 alone. Save and load with torch.distributed.checkpoint to go on exactly, or call "
            "synchronize() before you take such a state",
            type(optimizer).__name__,
        )  # fmt: skip


@torch.no_grad()
def fill(
    optimizer: PackedOptimizer,
    entries: Entries,
    origin: Origin | None,
    owed: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Copies ``entries``, of ``origin``, into the buffers of ``optimizer``, and gives its groups what they lack.
    ``owed``: the worker's residual of each parameter on this rank, in place of those in ``entries``."""
    for group in optimizer.param_groups:
        for key, default in optimizer.defaults.items():
            group.setdefault(key, group.get(key.removeprefix("local_"), default))  # what a local step had: the group's
        group.update({name: int(group[name]) for name in optimizer.group_counters})  # of another library, also a tensor
    entries = optimizer.prepare(entries, origin)
    saving.fill(optimizer.buckets, entries, optimizer.scalars)
    here = packing.origin_here(optimizer)
    expected, fold = optimizer.residual_expected, optimizer.fold_residual_into
    if owed is not None:
        for p, mine in optimizer.residuals.items():
            if p in owed:
                mine["worker_error"].copy_(owed[p].view(mine["worker_error"].shape))
    elif saving.fill_residuals(optimizer.buckets, entries, origin, here, expected, fold):
        _report_left_out(optimizer, origin, here)
    optimizer.loaded(entries, origin)


def take_over(
    optimizer: PackedOptimizer,
    state: Mapping[Any, Any],
    origin: Origin | None,
    owed: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Copies ``state``, by parameter and of ``origin``, into buckets that were made anew, and puts back what users have
    added to it; ``owed``: as of :func:`fill`."""
    fill(optimizer, saving.without_values(state), origin, owed)
    keep_users(optimizer, saving.added_by_users(state, our_names(optimizer)))


def _report_left_out(optimizer: PackedOptimizer, origin: Origin | None, here: Origin) -> None:
    """Warns that residuals of ``origin`` were left out."""
    keeps = origin is not None and origin[0] == 0 and origin[1:] == here[1:]  # rank 0, given its own
    if optimizer.topology.world_size > 1 and optimizer.topology.rank == int(keeps):  # one rank speaks for all
        logger.warning(
            "%s: the residuals in the loaded state are %s.%s",
            type(optimizer).__name__, why_left_out(origin, here), by_a_door(),
        )  # fmt: skip


def report_not_own(optimizer: PackedOptimizer, origin: Origin | None, what: str, consequence: str) -> None:
    """Warns that ``what`` ranks have of their own was not loaded as what this one saved: one rank speaks for all."""
    world_size = optimizer.topology.world_size
    strangers = (rank for rank in range(world_size) if not belongs(origin, rank, world_size))
    if optimizer.topology.rank == next(strangers, None):
        logger.warning(
            "%s: what is each rank's own (%s) is %s in the loaded state, not that of rank %d of %d; %s. Save that "
            "of every rank (commopt.optim.split_state_dict) to go on exactly.%s",
            type(optimizer).__name__, what, describe(origin), optimizer.topology.rank, world_size, consequence,
            by_a_door(),
        )  # fmt: skip


def tell_of_other_ranks(optimizer: PackedOptimizer, origin: Origin) -> None:
    """Warns that an optimizer, unpickled, has another number of ranks than the one of ``origin`` that was pickled. Each
    rank for itself: of a process group's, the others may be no part of it."""
    before, now = origin[1], optimizer.topology.world_size
    if before != now:
        logger.warning(
            "%s: pickled as one of %d ranks, unpickled as one of %d: a pickle does not hold which ranks they were, and "
            "now they are those of the parameters' mesh, or of the default process group. To go on over others, save "
            "state_dict(), and load that into an optimizer with process_group= or backend=",
            type(optimizer).__name__, before, now,
        )  # fmt: skip


def our_names(optimizer: PackedOptimizer) -> dict[Tensor, tuple[str, ...]]:
    """Names of the state of each parameter that is in a bucket, without what users have added."""
    return {p: (*bucket.numbers, *bucket.buffers) for bucket in optimizer.buckets for p in bucket.params}


def forget_users(optimizer: PackedOptimizer, given: dict[str, Any]) -> dict[Any, Any]:
    """Drops what users have added to ``state``; returns what they have added to the state that is loaded. As in
    torch, a tensor goes where its parameter is; but it keeps its dtype."""
    names = our_names(optimizer)
    optimizer.state = defaultdict(dict)
    packing.refresh_state(optimizer)
    users = cloned(saving.added_by_users(saving.by_parameter(given, given["state"], optimizer.params), names))
    for p in (p for p in users if isinstance(p, Tensor)):
        users[p] = {k: v.to(p.device) if isinstance(v, Tensor) else v for k, v in users[p].items()}
    return users


def keep_users(optimizer: PackedOptimizer, users: Mapping[Any, Any]) -> None:
    """Puts what users have added to ``state`` there again."""
    for key, entry in users.items():
        if isinstance(key, Tensor):
            optimizer.state[key].update(entry)
        else:
            optimizer.state[key] = entry

"""What was done to the parameters of an optimizer since it was made, and what becomes of their buckets: they were moved
or cast, unfrozen, put into other groups, or exchanged. Functions of an optimizer."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from commopt.state import assigned, loading, packing
from commopt.state.own import Origin

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer


def same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """True if both have the same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


# moved, cast, unfrozen ------------------------------------------------------------------------------------------------


def stale(optimizer: PackedOptimizer) -> bool:
    """True if parameters were moved, cast or put into other groups, so that buckets are to be made anew."""
    return _have_moved(optimizer) or regrouped(optimizer)


def _have_moved(optimizer: PackedOptimizer) -> bool:
    return True in [bucket.stale() for bucket in optimizer.buckets]


def follow_parameters(optimizer: PackedOptimizer) -> bool:
    """Moves state after parameters that were moved or cast (``model.to(...)`` after construction) or put into other
    groups, takes over what was assigned to it, and packs parameters that have become trainable. Returns whether all
    buckets were made anew.

    Raises:
        ValueError: some of the state was deleted, or does not fit; see :func:`commopt.state.assigned.check`.
    """
    moved, others = _have_moved(optimizer), regrouped(optimizer)
    if others or moved:
        assigned.check(optimizer)
    if others:  # which makes all buckets anew, also of what was moved or cast
        regroup(optimizer)
    elif moved:
        runs = packing.runs_of(optimizer) if optimizer.has_stepped() else ()  # else they may be of another device
        rebuild(optimizer, optimizer.all_state(), packing.origin_here(optimizer), runs)
    else:
        assigned.follow(optimizer)
    optimizer.make_buckets(optimizer.param_groups)
    return moved or others


def rebuild(
    optimizer: PackedOptimizer,
    state: Mapping[Any, Any],
    origin: Origin | None,
    runs: packing.Runs = (),
    owed: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Makes all buckets anew, with ``state``, by parameter and of ``origin``: one of each of ``runs``, whatever is
    trainable now, so that residuals fit, and then of what else is. ``owed``: worker's residuals in place of those in
    ``state``, where buckets are others."""
    packing.pack_anew(optimizer, runs)
    optimizer.make_buckets(optimizer.param_groups)
    loading.take_over(optimizer, state, packing.origin_with_runs(optimizer, origin, runs), owed)


# put into other groups ------------------------------------------------------------------------------------------------


def regrouped(optimizer: PackedOptimizer) -> bool:
    """True if somebody has put parameters into other groups, so that a bucket has some of several; where replicas
    differ, or a step under way has sent them, and would not by the new group, whole buckets too."""
    now = [group["params"] for group in optimizer.param_groups]
    known = [params for _, params in optimizer._registered]
    if len(now) == len(known) and all(map(same_objects, now, known)):
        if not same_objects([group for group, _ in optimizer._registered], optimizer.param_groups):
            packing.note_groups(optimizer)  # somebody has made them anew
        return False
    groups = optimizer.group_of()
    if _divided(optimizer, groups):
        return True
    if exchanged(optimizer):
        return False
    was = _groups_before(optimizer)
    if optimizer.replicas_differ and any(was.get(i, groups[i]) is not groups[i] for i in optimizer.packed()):
        return True
    if optimizer.sent_as_another_kind(was, groups):
        return True
    register(optimizer)  # whole buckets were moved, or a group has got a parameter that is in none yet
    return False


def _divided(optimizer: PackedOptimizer, groups: Mapping[int, dict[str, Any]]) -> bool:
    """True if a bucket has parameters of several of the ``groups``, by the id of a parameter."""
    return any(len({id(groups.get(id(p))) for p in bucket.params}) > 1 for bucket in optimizer.buckets)


def _groups_before(optimizer: PackedOptimizer) -> dict[int, dict[str, Any]]:
    """The group that each parameter was in, by its id; where somebody has made all groups anew, the one in the place
    of that."""
    known, now = [group for group, _ in optimizer._registered], optimizer.param_groups
    if len(known) <= len(now) and {*map(id, known)}.isdisjoint(map(id, now)):
        known = now
    return {id(p): group for group, (_, params) in zip(known, optimizer._registered) for p in params}


def register(optimizer: PackedOptimizer) -> None:
    """Takes the parameters that are in the groups now for those that are known, and notes of groups to which some have
    come from other ones that the variance of these may not be raised."""
    was = _groups_before(optimizer)
    for group in optimizer.param_groups:
        come = [p for p in group["params"] if was.get(id(p), group) is not group]
        if "raised" in group and come:
            group["raised"] = ""
        for old in {id(was[id(p)]): was[id(p)] for p in come}.values():
            optimizer.put_in_group([p for p in come if was[id(p)] is old], old, group)
    packing.note_groups(optimizer)


def take_groups(optimizer: PackedOptimizer) -> None:
    """Takes the groups as they are now for those that a state which is about to be loaded is of: what somebody has
    moved before is nothing that its residuals are still to be weighed for."""
    if exchanged(optimizer):  # rebind() looks for the ones before
        return
    if _divided(optimizer, optimizer.group_of()):
        packing.pack_anew(optimizer, packing.runs_of(optimizer))
        optimizer.watch_buckets()
    packing.note_groups(optimizer)


def regroup(optimizer: PackedOptimizer) -> None:
    """Gives parameters that were put into other groups buckets of those, with their state, and what this rank owes of
    each."""
    state, origin, runs = optimizer.all_state(), packing.origin_here(optimizer), packing.runs_of(optimizer)
    register(optimizer)
    buckets = [bucket for bucket in optimizer.buckets if bucket.feedback is not None]
    owed: dict[Tensor, Tensor] | None = None
    if all(bucket.local_world_size == 1 for bucket in buckets):  # else a rank has a part, which is another one then
        owed = {p: x for b in buckets for p, x in zip(b.params, b.views(b.owed(b.world_size)))}
    rebuild(optimizer, state, origin, runs, owed)


def regroup_between_steps(optimizer: PackedOptimizer) -> None:
    """As :func:`regroup`, where parameters were put into other groups; unless a step is to refuse that, or has
    begun."""
    may = optimizer._in_flight is None and not optimizer.replicas_differ and optimizer.why_not_synchronize() is None
    if may and regrouped(optimizer):
        regroup(optimizer)
        optimizer.watch_buckets()


def layout_of_all(optimizer: PackedOptimizer) -> int:
    """The layout of the buckets, of the groups as they are now, where all ranks have the same; else 0: some hold other
    parts of the model."""
    regroup_between_steps(optimizer)
    return packing.layout(optimizer) if len({*optimizer.topology.stages}) == 1 else 0


def refuse_moved(optimizer: PackedOptimizer, params: Sequence[Tensor]) -> None:
    """Raises ValueError if some of ``params``, of a new group, were taken out of another one between two rounds."""
    packed = optimizer.packed()
    if any(id(p) in packed for p in params):
        _refuse_between_rounds(optimizer)


def refuse_regrouped(optimizer: PackedOptimizer) -> None:
    """Raises ValueError if parameters were put into other groups between two rounds."""
    if regrouped(optimizer):
        _refuse_between_rounds(optimizer)


def _refuse_between_rounds(optimizer: PackedOptimizer) -> None:
    if optimizer.replicas_differ:
        raise ValueError(
            "a parameter was put into another group between two rounds, where replicas differ: put it back, call "
            "synchronize() on all ranks, and then move it"
        )


# exchanged ------------------------------------------------------------------------------------------------------------


def exchanged(optimizer: PackedOptimizer) -> bool:
    """True if some parameters in buckets are not in the parameter groups any more: somebody has exchanged them."""
    return not optimizer.packed() <= optimizer.group_of().keys()


def refuse_exchanged(optimizer: PackedOptimizer) -> None:
    """Raises ValueError if somebody has exchanged parameters in the groups, or taken some away."""
    if exchanged(optimizer):
        known = {id(p) for p in packing.registered(optimizer)}
        gone = len(known) - len(optimizer.params)
        if gone > 0 and known.issuperset(map(id, optimizer.params)):
            raise ValueError(
                f"{gone} of {len(known)} parameters are gone from the parameter groups, which is not allowed; "
                "freeze them (requires_grad_(False)), or make another optimizer"
            )
        raise ValueError(
            "the parameters in the groups are not those that the optimizer was made with: something (such as FSDP, "
            "or a framework that wraps it) has exchanged them; call optimizer.rebind() after that, on all ranks"
        )

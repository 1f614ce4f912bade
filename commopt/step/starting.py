"""When the buckets of a step start: in ``step()``, or in backward, and over which channels. Functions of an
optimizer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from commopt.agreement import calls
from commopt.comm import Channel, CollectiveError, Work
from commopt.state import following, wrapped
from commopt.state.state_bucket import StateBucket
from commopt.step.in_flight import Starter, StepContext, StepInFlight
from commopt.step.overlap import Overlap

if TYPE_CHECKING:
    from commopt.step.base import CommOptimizer


def new_step(optimizer: CommOptimizer) -> StepInFlight:
    """A step that begins."""
    number = max((group["step"] for group in optimizer.param_groups), default=0) + 1
    return StepInFlight(type(optimizer).__name__, number, optimizer.buckets, _starter(optimizer))


def _starter(optimizer: CommOptimizer) -> Starter:
    groups, registered = optimizer.group_of(), optimizer._registered

    def group_of(bucket: StateBucket) -> dict[str, Any]:
        nonlocal groups, registered
        if registered is not optimizer._registered:  # parameters were put into other groups since
            groups, registered = optimizer.group_of(), optimizer._registered
        key = id(bucket.params[0])
        if key not in groups:  # added since, or exchanged: then the step is refused
            known = zip(registered, optimizer.param_groups)
            groups.update({id(p): group for (_, params), group in known for p in params})
            groups.update(optimizer.group_of())
        return groups.get(key, optimizer.param_groups[0])

    def task(bucket: StateBucket, ctx: StepContext) -> Iterator[Work]:
        group = group_of(bucket)
        rests = bucket.rests(ctx.absent(bucket)) and not optimizer.touches_absent(group)
        return (optimizer.idle if rests else optimizer.bucket_step)(bucket, group, ctx)

    def has_stages(bucket: StateBucket) -> bool:  # without nodes an average is one collective
        return bucket.local_world_size > 1 or not optimizer.wants_average(group_of(bucket))

    def channels(index: int) -> tuple[Channel, Channel]:
        return optimizer.buckets[index].replicas.pair(index)

    return Starter(
        task=task,
        factor=lambda bucket: -bucket.factor if group_of(bucket)["maximize"] else bucket.factor,
        has_stages=has_stages,
        channels=channels,
        stale=functools.partial(following.stale, optimizer),
    )


def in_backward(optimizer: CommOptimizer) -> bool:
    """True if buckets of the next step start in backward: not where DDP averages the gradients first, be it attached or
    not, nor in the first step of a copy, which has no channels yet, nor where the agreement would share their order."""
    opened = None not in [ranks.channels for ranks in optimizer.topology.replicas]
    if not optimizer._made_to_overlap or optimizer.topology.copies == 1 or not opened:
        return False
    if all_on_one_channel(optimizer) or optimizer.steps_locally():
        return False
    averages = any(map(optimizer.wants_average, optimizer.param_groups))
    if optimizer._attachment is None:
        return not (wrapped.may_average(optimizer) and (averages or not optimizer._looked))
    return not optimizer._attachment.joining() and not averages


def watch(optimizer: CommOptimizer) -> None:
    """Watches all parameters, if their gradients start buckets."""
    if optimizer._made_to_overlap and optimizer.topology.world_size > 1:
        optimizer._watching = optimizer._watching or Overlap(optimizer)
        optimizer._watching.follow(optimizer.buckets)


def give_up(optimizer: CommOptimizer) -> None:
    """Starts all of a step that has begun in backward, on any rank, and stops it at the barrier. All ranks must call
    it: from the first step on, with ``overlap=True``, they tell each other whether one has."""
    if not _begun_anywhere(optimizer):
        return
    step = optimizer.step_in_flight()
    try:
        step.abort(begun=True)
    except CollectiveError:
        step.pipeline.abandon()
        raise
    finally:
        optimizer._in_flight = None
        optimizer.topology.receipt.clear()
        watch(optimizer)
        optimizer.topology.traffic.leave_out()


def _begun_anywhere(optimizer: CommOptimizer) -> bool:
    """True if a step has begun in backward on some rank: one whose gradients are all missing has begun none. Before the
    first step, as in a resume, which may fail on one rank alone, nobody is asked."""
    begun, ranks = optimizer._in_flight is not None, optimizer._control
    may_begin = optimizer._made_to_overlap and optimizer.topology.copies > 1 and not all_on_one_channel(optimizer)
    if ranks is None or not may_begin or not optimizer._looked:
        return begun
    return any(calls.begin(ranks.inner, calls.GIVING_UP, int(begun)))


def open_channels(optimizer: CommOptimizer) -> None:
    """Opens the channels, if that has not been done. Never in backward: it communicates, and a rank whose first bucket
    waits for a gradient would by then have started the agreement instead."""
    topology = optimizer.topology
    topology.open()
    if optimizer._control is None:
        channels = [ranks.channels for ranks in topology.replicas if ranks.world_size > 1]
        # where buckets have channels, nothing else is under way on the world's when the ranks agree
        optimizer._control = topology.world if all(channels) else topology.control()


def all_on_one_channel(optimizer: CommOptimizer) -> bool:
    """True if buckets and the agreement of the ranks share one order."""
    world = optimizer.topology.world
    return optimizer._control is world and not all(r.channels for r in optimizer.topology.replicas if r.world is world)

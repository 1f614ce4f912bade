"""Replicas that may differ between two rounds of an algorithm with local steps: their mean, and what to do when ranks
cannot be reached. Functions of the topology and the buckets."""

from __future__ import annotations

import contextlib
import logging
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from commopt import hsdp
from commopt.agreement import calls
from commopt.agreement.calls import OTHER_BUCKETS, OutOfStep, StepRefused
from commopt.agreement.diagnostics import by_a_door, worth_a_line
from commopt.agreement.setup import first_lines_apart, gather_texts
from commopt.comm import (
    CollectiveError,
    CountingBackend,
    MessageDamaged,
    Pipeline,
    Topology,
    confirm,
    gather_rows,
    mean_over_all,
    message_device,
    numbers_in_world,
)
from commopt.state import binding, following
from commopt.state.model_buffers import HowBuffers, Rest, warn_of_copies
from commopt.state.state_bucket import StateBucket

if TYPE_CHECKING:
    from commopt.state.packed import PackedOptimizer

logger = logging.getLogger("commopt")

_REMEDY = (
    "nothing is lost: every rank still has its own parameters and state. Go on over the ranks that are left with "
    "state = optimizer.state_dict(), a new optimizer over them, and its load_state_dict(state)"
)
"""Advice for when a rank has gone between two rounds."""


@torch._disable_dynamo
def agree(
    topology: Topology,
    over: CountingBackend,
    error: Exception | None,
    what: str,
    layout: str = "",
    buckets: int = 0,
) -> None:
    """Makes sure that all ranks can take the mean now, which ``what`` is called in; ``error`` is what forbids it on
    this one. They say so ``over`` the channel on which they agree on a step.

    Args:
        layout: lines that must be the same on all ranks: of what they make the same besides.
        buckets: a checksum of the buckets, which must be so, too.

    Raises:
        error: on the rank that has one; the others raise StepRefused.
        ValueError: on all ranks, if they differ in ``layout``.
        commopt.agreement.calls.OutOfStep: on all ranks, if they differ in ``buckets``.
        commopt.agreement.calls.CallsDiffer: on all ranks, if one is in another call.
        commopt.comm.CollectiveError: the other ranks could not be reached.
    """
    with reaching_others(topology, what):
        table = calls.tell(over, what, zlib.crc32(layout.encode(), buckets), cannot=error is not None)
    topology.traffic.leave_out()
    calls.refuse_other_calls(table, over, what)
    if error is not None:
        raise error
    if (failed := calls.first_that_cannot(table, over)) is not None:
        raise StepRefused(f"{what}: rank {failed} cannot take part; its own error says why")
    if any(row[1] != table[0][1] for row in table):
        if len(set(gather_texts(over.inner, str(buckets)))) > 1:
            raise OutOfStep(f"{what}: {OTHER_BUCKETS}")
        texts = gather_texts(over.inner, layout)
        rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
        theirs, first = first_lines_apart(texts[rank], texts[0])
        there, here = (numbers_in_world(over)[r] for r in (rank, 0))
        raise ValueError(
            f"{what}: ranks have other buffers, or other parameters that the optimizer does not hold: rank {there} has "
            f"{theirs or 'no model'}, rank {here} has {first or 'no model'}; give the same model on all ranks, or none"
        )


def agree_inside(
    topology: Topology, square: float, error: Exception | None, where: str
) -> tuple[float, Exception | None]:
    """Agreement on a local step, where ranks hold a replica together: they take it alike, and tell no other replica.

    Args:
        topology: the ranks.
        square: sum of squares of this rank's gradients, weighted by :meth:`PackedOptimizer.square_norm_of`.
        error: why this rank cannot take the step.
        where: begins errors.

    Returns:
        that sum of the whole replica; and why the step cannot be taken.
    """
    inside = topology.inside
    if inside.world_size == 1:
        return square, error
    mine = torch.tensor([square, float(error is not None)], dtype=torch.float64, device=message_device(inside))
    rows: list[list[float]] = gather_rows(inside, mine, f"{where}, agreement of the ranks of a replica").tolist()
    refused = [rank for rank, (_, failed) in zip(numbers_in_world(inside), rows) if failed]
    if refused and error is None:
        error = StepRefused(f"{where}: rank {refused[0]} of this replica cannot take this step; its own error says why")
    return sum(one for one, _ in rows) / len(rows), error


@contextlib.contextmanager
def averaged(optimizer: PackedOptimizer, model: nn.Module | None, buffers: HowBuffers) -> Iterator[None]:
    """``optimizer.averaged()``."""
    rest = begin_with(optimizer, model, buffers, "averaged()")
    with rest.same(), _averaged_parameters(optimizer):
        yield


def begin_with(optimizer: PackedOptimizer, model: nn.Module | None, buffers: HowBuffers, call: str) -> Rest:
    """The rest of ``model`` beside the parameters. Where there is a model, all ranks begin ``call`` here, and make sure
    that they have the same of it."""
    error, layout = None, ["a model"]
    try:
        rest = Rest(optimizer.topology, model, buffers, frozenset(id(p) for p in optimizer.params))
        layout += rest.layout
    except ValueError as caught:
        error = caught
    if model is not None and optimizer.topology.world_size > 1:
        buckets = following.layout_of_all(optimizer)
        agree(optimizer.topology, optimizer.agrees_over, error, call, "\n".join(layout), buckets)
    if error is not None:
        raise error
    tell_of_copies(optimizer, model)
    return rest


@torch._disable_dynamo
def tell_of_copies(optimizer: PackedOptimizer, model: nn.Module | None = None) -> None:
    """Warns once of moving averages of the parameters that neither ``model`` has, nor one that was given before it,
    where ranks have taken local steps. Looks for them now and then, as that takes a while."""
    if model is not None:
        optimizer._models = weakref.WeakSet() if optimizer._models is None else optimizer._models
        optimizer._models.add(model)
    if optimizer.has_parted and optimizer.topology.rank == 0 and optimizer._copies_looked_for is not None:
        optimizer._copies_looked_for += 1
        trained = [p for p in optimizer.params if p.requires_grad]
        known = optimizer._models or ()
        if worth_a_line(optimizer._copies_looked_for) and warn_of_copies(type(optimizer).__name__, trained, known):
            optimizer._copies_looked_for = None


@contextlib.contextmanager
def _averaged_parameters(optimizer: PackedOptimizer) -> Iterator[None]:
    if optimizer._own_values is not None:
        yield
        return
    binding.rebind_if_new(optimizer)
    following.refuse_exchanged(optimizer)
    optimizer.adopt_values()  # inside it could not tell the mean from what somebody has put there
    own: dict[Tensor, Tensor] = {}
    modules: Sequence[Any] = ()
    differ = optimizer.replicas_differ  # the same on all ranks, also on one that trains nothing
    if differ:
        optimizer.agree_to("averaged()")
        with torch.no_grad():
            own = {p: p.detach().clone() for bucket in optimizer.buckets for p in bucket.params}
        modules = fsdp_modules(optimizer)
    optimizer._own_values = own
    try:
        if differ:
            optimizer.take_mean()
            hsdp.gather_anew(modules)
        yield
    finally:
        optimizer._own_values = None
        with torch.no_grad():
            for p, value in own.items():
                p.copy_(value)
        hsdp.gather_anew(modules)


def fsdp_modules(optimizer: PackedOptimizer) -> list[Any]:
    """FSDP2's modules around its parameters."""
    return hsdp.modules_around(optimizer.params) if optimizer.topology.is_sharded else []


@torch._disable_dynamo
@torch.no_grad()
def take_mean(topology: Topology, buckets: Sequence[StateBucket]) -> None:
    """Makes the parameters the mean of all replicas, and nothing else. Takes their memory once more."""
    flats = [bucket.pack_params() for bucket in buckets]
    average_exactly(topology, buckets, flats, "mean of the replicas")
    for bucket, flat in zip(buckets, flats):
        bucket.unpack_params(flat)
    topology.traffic.leave_out()


def average_exactly(topology: Topology, buckets: Sequence[StateBucket], flats: Sequence[Tensor], where: str) -> None:
    """``flats``, shape (padded,) of each bucket, <- their means over the replicas; ``where`` says in an error what it
    was."""
    for i, (bucket, flat) in enumerate(zip(buckets, flats)):
        pipeline, channel = Pipeline(), bucket.replicas.channel
        what = f"{where}, bucket {i} of {len(buckets)} ({bucket.describe()})"
        pipeline.start(mean_over_all(flat, channel, channel), what)
        pipeline.finish()
    if topology.world_size > 1:
        confirm(topology.world, True, where)


@contextlib.contextmanager
def reaching_others(topology: Topology, where: str) -> Iterator[None]:
    """Context of collectives before whose end nothing changes that lasts. If the other ranks cannot be reached, the
    error says that nothing is lost, and how to continue.

    Raises:
        commopt.comm.CollectiveError: begins with ``where``, or with where in it the collective was.
    """
    now, had = topology.backend.world_size, topology.world_size
    if now != had:
        raise CollectiveError(f"{where}: the backend has {now} ranks now, it had {had}; {_REMEDY}")
    try:
        yield
    except MessageDamaged:
        raise
    except CollectiveError as error:
        remedy = "nothing is lost" if error.calls_differ else _REMEDY
        raise CollectiveError(f"{error}; {remedy}", error.calls_differ) from error
    except (RuntimeError, ValueError, TimeoutError) as error:  # of a group that is gone when one is started
        raise CollectiveError(f"{where}: {error}; {_REMEDY}") from error


def warn_in_evaluation(optimizer: PackedOptimizer, model: nn.Module) -> None:
    """``optimizer.warn_in_evaluation(model)``, for one whose replicas may differ. The hook goes with the optimizer."""
    handle = model.register_forward_pre_hook(_EvaluationWatch(optimizer))
    weakref.finalize(optimizer, handle.remove).atexit = False


class _EvaluationWatch:
    """A forward pre-hook that reports once that a model is evaluated while replicas differ: one that has computed in
    training mode before, as some train in the other mode, in which a library has loaded the model.

    Holds the optimizer weakly, and is empty in a copy of the model.
    """

    def __init__(self, optimizer: PackedOptimizer | None = None) -> None:
        self._optimizer = (lambda: None) if optimizer is None else weakref.ref(optimizer)
        self._has_trained = False

    def __reduce__(self) -> tuple[type[_EvaluationWatch], tuple[()]]:
        return type(self), ()

    def __call__(self, module: nn.Module, _: Sequence[Any]) -> None:
        if module.training:
            self._has_trained = True  # set without a look at it: torch.compile would compile once more when it changes
            return
        optimizer = self._optimizer()
        if optimizer is None or not self._has_trained or optimizer._warned_in_evaluation:
            return
        if optimizer._own_values is not None or not optimizer.replicas_differ:
            return
        optimizer._warned_in_evaluation = True
        whole = optimizer.topology.holds_whole and getattr(optimizer, "members", None) is None
        if optimizer.topology.rank == 0:
            logger.warning(
                "%s: the model is evaluated between two rounds, and every rank's differs. Evaluate it within `with "
                "optimizer.averaged(%s):`, or call optimizer.synchronize() first (on all ranks).%s",
                type(optimizer).__name__,
                "model" if whole else "",  # with its buffers
                by_a_door(),
            )

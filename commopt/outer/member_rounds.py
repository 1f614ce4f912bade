"""Rounds of an outer optimizer whose ranks come and go: functions of it, and of its :class:`Members`.

Read first: tests/oracle_members.py, what comes of them on plain lists of floats.

    meet:      who is there, and what each says of its round
    exchange:  the weighted mean of their pseudo-gradients, over connections of these ranks alone; all confirm
    verdict:   one has had all -> all apply it; one has failed -> nobody does, and they meet again, without who has
               gone; from the second time on, they try whom each of them reaches, and go on without who keeps them apart
    apply:     the outer step; and the first rank gives those that join the state

Nothing that lasts changes before the verdict. It is "done" only if a rank has had the confirmations of all, each of
which was given when its rank had all that it needs: so whoever learns of it can apply it, even if what it waits for
itself has failed meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from commopt import ops
from commopt.agreement.calls import StepRefused
from commopt.agreement.digest import digest_of_all
from commopt.comm import Backend, CollectiveError, MessageDamaged, Topology, confirm
from commopt.comm.store import StoreLost
from commopt.outer import ending, joining, rounds
from commopt.outer.flight import Flights
from commopt.outer.means import receive_means
from commopt.outer.members import Members
from commopt.outer.rounds import RoundReport, pseudo_gradient
from commopt.outer.view import REMEDY, LeftOut, Report, View
from commopt.sharding import is_sharded, tensors_in
from commopt.state import guard, packing
from commopt.state.host import numbers_of, square_norm
from commopt.state.packed import PackedOptimizer
from commopt.state.replicas import average_exactly, reaching_others

if TYPE_CHECKING:
    from commopt.outer.base import OuterOptimizer

logger = logging.getLogger("commopt")

ATTEMPTS = 5
"""Times that members meet for one round, at most: each time that an exchange fails, somebody should be missing then."""


def check_members(
    members: object, params: Any, streaming: object, state_period: object, process_group: object, backend: object
) -> None:
    """Raises ValueError if ``members`` are none, or do not fit the other arguments of an outer optimizer."""
    if members is None:
        return
    if not isinstance(members, Members):
        raise ValueError(f"members must be None or a commopt.Members, got {members!r}")
    others = {
        "streaming": streaming, "state_period": state_period, "process_group": process_group, "backend": backend,
    }  # fmt: skip
    for name, value in others.items():
        if value:
            raise ValueError(f"{name}={value!r} does not fit members=; with it, it must be None")
    if any(map(is_sharded, tensors_in(params))):
        raise ValueError("sharded parameters (DTensors) do not fit members=: each rank must hold the whole model")


def refuse(optimizer: OuterOptimizer, what: str) -> None:
    """Raises ValueError where ranks come and go: they would have to be there together for ``what``."""
    if optimizer.members is not None:
        raise ValueError(f"{what} does not fit members=: ranks that come and go cannot all be there for it")


def end_round(optimizer: OuterOptimizer, members: Members, error: Exception | None) -> None:
    """Ends a round, with those that are there.

    Raises:
        error: after the others were told to go on without this rank; so is what else this rank alone has met.
        NotEnoughMembers, StepRefused: see :meth:`commopt.outer.roster.Roster.meet`.
        LeftOut: the others have gone on without this rank, and it shall not join them anew, or cannot.
        commopt.comm.CollectiveError: the store is lost and does not come back, or members cannot reach each other, time
            after time.
    """
    if error is not None:
        members.give_up()
        raise error
    try:
        _end_round(optimizer, members)
    except LeftOut as left:
        joining.join_anew(optimizer, members, left)
    except (CollectiveError, StepRefused):
        raise  # it may come to the next meeting
    except Exception:
        members.give_up()
        raise


def _end_round(optimizer: OuterOptimizer, members: Members) -> None:
    exchange, where = None, ending.where_of(optimizer, None)
    unreached: list[int] = []
    for _ in range(ATTEMPTS):
        report = _report(optimizer, members, unreached)
        exchange = Exchange(optimizer, members.answered(partial(members.meet, report)))
        failed = exchange.run(members, where)
        state = members.answered(partial(members.verdict, "failed" if failed else exchange.state))
        if state != "failed":
            break
        tell_of(members, failed)
        unreached = members.unreached() if exchange.view.failures else []
    else:
        raise CollectiveError(
            f"{where}: {ATTEMPTS} exchanges have failed, though members are there: they reach the store, but not each "
            f"other; {REMEDY}"
        ) from failed
    if state == "kept":
        ending.skip(optimizer, exchange.broken, exchange.not_finite())
        return
    exchange.apply()
    members.round_ended()
    if exchange.view.joiners and members.roster.rank == 0:
        try:
            joining.serve(optimizer, members)
        except StoreLost as lost:  # the round has ended: the next meeting looks for the store
            logger.warning("members: ranks that would join have not: %s", lost)


class Exchange:
    """Exchange of members at the end of a round.

    Args:
        optimizer: whose.
        view: the members.

    Attributes:
        broken: ranks whose parameters are inf or NaN, and so are those of all.
        state: "done", or "kept" if all skip the round for that.
    """

    def __init__(self, optimizer: OuterOptimizer, view: View) -> None:
        self.optimizer, self.view = optimizer, view
        found = zip(view.members, view.reports)
        self.broken = [i for i, (t, r) in enumerate(found) if not r.finite and t not in view.excluded]
        self.state = "kept" if self.broken else "done"
        self._means: Sequence[Tensor] | None = None
        self._frozen: Sequence[int] = ()

    def run(self, members: Members, where: str) -> Exception | None:
        """Exchanges; changes nothing that lasts. Returns why that has failed.

        Raises:
            Exception: what has gone wrong on this rank alone, or must end all; the others are told.
        """
        try:
            reach(self.optimizer, members)
            self._run(where)
        except (CollectiveError, MessageDamaged) as error:
            return error
        except Exception:
            members.give_up()
            raise
        return None

    def _run(self, where: str) -> None:
        optimizer, view = self.optimizer, self.view
        topology = optimizer.topology
        table = [
            RoundReport(i not in self.broken, r.square_norm, r.step, r.number, r.terms, r.moved, False, None, r.frozen)
            for i, r in enumerate(view.reports)
        ]
        decision = rounds.decide(topology, [report.row for report in table], table[topology.rank], where)
        if decision.broken:
            return
        if decision.moved:
            device = optimizer.control_device([p for bucket in optimizer.buckets for p in bucket.params])
            optimizer.anchors_moved(device, where)
        ending.follow(optimizer, decision, where)
        self._frozen = ending.frozen_of(optimizer) if decision.alike_frozen else ()
        entries, factor = optimizer.entries(), view.factors()[topology.rank]
        flats = [pseudo_gradient(bucket) for bucket, _ in entries]
        scale(flats, factor)
        means = optimizer.means_of(entries, flats)
        sound = receive_means(topology, means, where)
        self._means = means.flats
        if topology.world_size > 1:
            with reaching_others(topology, where):
                confirm(topology.world, sound, where)

    def apply(self) -> None:
        """Takes the outer step."""
        assert self._means is not None
        optimizer, view = self.optimizer, self.view
        entries = optimizer.entries()
        squares = ending.squares_of(entries, self._means)
        ending.take_steps(optimizer, entries, self._means, lambda _, entry: ending.to_anchor(entry), self._frozen)
        optimizer.count_round([0], True, squares)
        optimizer._moved = False
        if not view.reports[optimizer.topology.rank].finite:
            _forget_what_is_not_finite(optimizer.base)

    def not_finite(self) -> str:
        """Describes what is not finite, in words that are the same on all ranks, also on one that reaches no other."""
        who = self.view.named([self.view.members[i] for i in self.broken])
        return f"not finite are parameters of {who}. {guard.REMEDY}"


def scale(flats: Sequence[Tensor], factor: float) -> None:
    """Multiplies ``flats`` by ``factor``; by 0 also what is not finite."""
    for flat in flats:
        if factor == 0:
            flat.zero_()
        elif factor != 1:
            flat.mul_(factor)


def tell_of(members: Members, failed: Exception | None) -> None:
    """Says that an exchange has failed, and that members meet again."""
    why = str(failed).partition(";")[0] if failed else "another member has not had all"
    logger.warning("members, meeting %d: %s: they meet again", members.epoch, why)


def reach(optimizer: OuterOptimizer, members: Members) -> None:
    """Goes on over the members of the last view.

    Raises:
        commopt.comm.CollectiveError: they have not reached each other.
    """
    backend, view = members.backend(), members.roster.view
    assert view is not None
    if optimizer.topology.backend is not backend:
        move(optimizer, backend, members.among == list(view.members))
        members.among = list(view.members)


def _report(optimizer: OuterOptimizer, members: Members, unreached: Sequence[int]) -> Report:
    """Report of this rank on its round."""
    mine, compared = ending.report(optimizer, None, checks=False), optimizer.guard.check_every is not None
    return Report(
        kind="round",
        step=mine.step,
        number=mine.number,
        terms=mine.terms,
        weight=members.weight,
        norm=_norm(optimizer, mine),
        square_norm=mine.square_norm,
        moved=mine.moved,
        digest=_digest(optimizer) if compared else None,
        intact=_is_intact(optimizer) if compared else True,
        frozen=mine.frozen,
        packed=mine.packed,
        unreached=list(unreached),
    )


def _digest(optimizer: OuterOptimizer) -> int:
    """Digest of what all members hold alike of the parameters in buckets, however these are cut into buckets."""
    alike = {
        id(p): [views[i] for views in map(bucket.tensors, bucket.buffers)]
        for bucket in optimizer.buckets
        for i, p in enumerate(bucket.params)
    }
    return digest_of_all([t for p in optimizer.params for t in alike.get(id(p), ())])


def _is_intact(optimizer: OuterOptimizer) -> bool:
    """True if what all members hold alike is finite."""
    return all(numbers_of([ops.all_finite(x) for bucket in optimizer.buckets for x in bucket.buffers.values()]))


def _norm(optimizer: OuterOptimizer, mine: RoundReport) -> float:
    """2-norm of the pseudo-gradient of this rank, NaN if its parameters are not finite."""
    norm = sum(square_norm([pseudo_gradient(bucket)]) for bucket in optimizer.buckets) ** 0.5
    return norm if mine.finite else float("nan")


def move(optimizer: OuterOptimizer, backend: Backend, same_ranks: bool) -> None:
    """Goes on over other ranks, or over the ``same_ranks`` anew. Makes the buckets anew, whose length is a multiple of
    the number of ranks; takes the memory of anchors and momenta once more meanwhile. They have the same parameters,
    also those that were frozen since: other ranks may not have frozen them."""
    residuals = _residuals(optimizer, backend.world_size, same_ranks)
    topology = Topology(backend)
    topology.traffic.go_on_from(optimizer.topology.traffic)
    optimizer.topology, optimizer.flights = topology, Flights(topology)
    optimizer._diagnostics.rank, optimizer._diagnostics.numbers = topology.rank, topology.numbers
    joining.pack_anew(optimizer, optimizer.packed(), packing.runs_of(optimizer) if same_ranks else ())
    for bucket in optimizer.buckets:
        if bucket.feedback is None:
            continue
        for p, mine in zip(bucket.params, bucket.residuals()):
            for name, value in residuals.get(p, {}).items():
                mine[name].copy_(value.view(mine[name].shape))


def _residuals(optimizer: OuterOptimizer, world_size: int, same_ranks: bool) -> dict[Tensor, dict[str, Tensor]]:
    """The residuals of this rank as it has them among ``world_size`` ranks, by parameter.

    Which shard of a mean a rank compresses is another then: its residual of that goes into that of what the rank
    sends, times the ranks, by which the mean is divided, so that nothing of it is lost.
    """
    out: dict[Tensor, dict[str, Tensor]] = {}
    for bucket in optimizer.buckets:
        if bucket.feedback is None:
            continue
        if same_ranks:
            out.update((p, {k: t.clone() for k, t in r.items()}) for p, r in zip(bucket.params, bucket.residuals()))
            continue
        owed = bucket.views(bucket.owed(world_size))
        out.update((p, {"worker_error": mine}) for p, mine in zip(bucket.params, owed))
    return out


@torch.no_grad()
def take_mean(optimizer: OuterOptimizer, members: Members) -> None:
    """Makes the parameters the mean of those of the members that are there, which all are not to go on from. Without
    those that are not finite, as in a round, and without weights."""
    where = f"{type(optimizer).__name__}, averaged()"
    mine = ending.report(optimizer, None, checks=False)
    failed: Exception | None = None
    for _ in range(ATTEMPTS):
        view = members.meet(
            Report("mean", mine.step, mine.number, mine.terms, norm=_norm(optimizer, mine), packed=mine.packed)
        )
        flats: list[Tensor] = []
        try:
            reach(optimizer, members)
            flats = [bucket.pack_params() for bucket in optimizer.buckets]
            scale(flats, view.factors()[optimizer.topology.rank])
            with reaching_others(optimizer.topology, where):
                average_exactly(optimizer.topology, optimizer.buckets, flats, where)
            failed = None
        except (CollectiveError, MessageDamaged) as error:
            failed = error
        if members.verdict("failed" if failed else "kept") != "failed":
            break
        tell_of(members, failed)
    else:
        raise CollectiveError(f"{where}: {ATTEMPTS} exchanges have failed; {REMEDY}") from failed
    for bucket, flat in zip(optimizer.buckets, flats):
        bucket.unpack_params(flat)
    optimizer.topology.traffic.leave_out()


@torch.no_grad()
def _forget_what_is_not_finite(base: torch.optim.Optimizer) -> None:
    """Lets the base begin anew with parameters of which it has inf or NaN in its state."""
    for entry in list(base.state.values()):
        tensors = [t for t in entry.values() if isinstance(t, Tensor) and t.is_floating_point()]
        if not all(bool(ops.all_finite(t)) for t in tensors):
            if isinstance(base, PackedOptimizer):  # state of buckets is never made anew
                for name, t in entry.items():
                    if isinstance(t, Tensor):
                        t.fill_(base.scalars.get(name, 0.0))
            else:
                entry.clear()

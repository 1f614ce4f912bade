"""Fragments in flight: what was sent of each, on channels of their own, while training goes on.

A flight is a row by which the ranks agree, the exchanges of the buckets, and a row by which they confirm that all has
come right. The first two start when it is launched. What follows starts when what it waits for is there, oldest flight
first: in :meth:`Flights.progress`, which every step calls, and every gradient that arrives in backward, or at the
latest in :meth:`Flights.land`, which waits. So the order of collectives on each channel is the same on every rank,
whatever has arrived. Where a backend has no channels, there is one order for all, and nothing but the first collectives
starts before a flight is waited for.

Nothing that lasts is written before a flight has landed, but for residuals to come. So what a rank has sent is all that
has to be saved of it: sent once more, it comes to the same bits.

Nobody waits at the end of a run: a rank may have landed its last fragment, and be gone, while another has still to land
that. What is in flight behind it will fail there, and is nothing to that one: so a failure is raised where what has
failed is to be landed, and not before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from commopt.comm import (
    STARTED,
    Backend,
    CollectiveError,
    CountingBackend,
    Pipeline,
    Receipt,
    Topology,
    Traffic,
    Work,
    confirm,
    confirmation,
    message_device,
    open_control,
    refuse_damaged,
)
from commopt.outer.means import Means
from commopt.outer.rounds import Comparison, RoundDecision, RoundReport, decide, tell
from commopt.state.replicas import reaching_others
from commopt.step.arrival import Arrivals


@dataclass
class Flight:
    """A fragment in flight.

    Attributes:
        fragment: its number.
        means: the means of its buckets, on their way.
        sent: of each bucket, what this rank has sent, (padded,).
        report: of this rank, as the flight was launched.
        frozen: the numbers of the parameters that were frozen then.
        where: begins errors.
        joined: the ids of the parameters of which nothing was sent, as they have become trainable since it first was.
        skipped: how many rounds this rank had skipped in all when the flight was launched.
        traffic, receipt: of what it has sent and received; counted when it is done, as that is the same in every run.
        table: the reports of all ranks, by rank, when they have come.
        confirmed: what all ranks say about what they have received, when that has come.
        landed: whether all has.
        refused: whether all ranks have raised what one of them had met: what was sent never counts.
    """

    fragment: int
    means: Means
    sent: list[Tensor]
    report: RoundReport
    frozen: Sequence[int]
    where: str
    joined: Collection[int] = ()
    skipped: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    receipt: Receipt = field(default_factory=Receipt)
    table: list[list[float]] | None = None
    confirmed: list[list[int]] | None = None
    landed: bool = False
    refused: bool = False

    def agree(self, backend: CountingBackend) -> Iterator[Work]:
        """Tells the ranks what they decide by."""
        received, work = tell(backend, message_device(backend), self.report)
        yield work
        self.table = received.tolist()

    def confirm(self, backend: CountingBackend) -> Iterator[Work]:
        """Tells the ranks what has come, when it has; behind the other tasks of the flight."""
        yield STARTED
        if not self.means.blocks:
            sound = self.means.finish(self.where)
            if backend.world_size > 1:
                mine = confirmation(backend, sound)
                received = mine.new_empty(backend.world_size, mine.numel())
                yield backend.all_gather(received, mine)
                self.confirmed = received.tolist()
        self.landed = True


class Flights:
    """All fragments in flight, oldest first.

    Args:
        topology: the ranks.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._flights: dict[int, Flight] = {}
        self._pipeline = Pipeline()
        self._comparison: Comparison | None = None
        self._control: Sequence[Backend] | None = None
        self._failed: Exception | None = None
        self._by_itself = False
        self._arrivals = Arrivals(self)

    def __contains__(self, fragment: int) -> bool:
        return fragment in self._flights

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights.values())

    def follow(self, params: Sequence[Tensor]) -> None:
        """Looks whenever the gradient of one of ``params`` is there, and not in steps alone."""
        self._arrivals.follow([p for p in params if p.requires_grad])

    @torch.no_grad()
    def arrived(self, _: Tensor) -> None:
        """A gradient is there."""
        self.progress()

    def launch(self, flight: Flight) -> None:
        """Starts ``flight``, unless an earlier one has failed: then landing it will say so. All ranks call this at the
        same point.

        Raises:
            commopt.comm.CollectiveError: it cannot be started.
        """
        self._flights[flight.fragment] = flight
        if self._failed is not None:
            return
        topology, pipeline, traffic, receipt = self._topology, self._pipeline, flight.traffic, flight.receipt
        with reaching_others(topology, flight.where), self._under_way(flight.where):
            first, last = (CountingBackend(b, traffic, receipt) for b in self._open())
            pipeline.start(flight.agree(first), f"{flight.where}, agreement of the ranks", early=True)
            flight.means.start(
                lambda bucket, i: bucket.replicas.pair_with(i, traffic, receipt), pipeline, flight.where, True
            )
            pipeline.start(flight.confirm(last), f"{flight.where}, confirmation of what was received", early=True)

    def progress(self) -> None:
        """Starts what can be started: never waits, and raises nothing; :meth:`land` does."""
        if self._by_itself and self._flights and self._failed is None:
            where = next(iter(self._flights.values())).where
            with contextlib.suppress(Exception), self._under_way(where):
                self._pipeline.progress()

    def land(self, fragment: int) -> Flight:
        """Waits for all of a fragment; it stays in flight until it is :meth:`done`. All ranks call this at the same
        point.

        Raises:
            commopt.comm.CollectiveError: a collective of it, or of one before it, has failed; begins with where.
        """
        flight = self._flights[fragment]
        if flight.landed:
            return flight
        with reaching_others(self._topology, flight.where):
            if self._failed is not None:
                raise CollectiveError(str(self._failed)) from self._failed
            with self._under_way(flight.where):
                self._pipeline.run_until(lambda: flight.landed)
        return flight

    @contextlib.contextmanager
    def _under_way(self, where: str) -> Iterator[None]:
        """Context of what takes flights on. What fails there is the end of all: landing says so, of this and of those
        that come after it."""
        try:
            yield
        except Exception as error:
            self._failed = error
            raise
        except BaseException as error:  # KeyboardInterrupt
            self._failed = CollectiveError(f"{where}: {type(error).__name__} while this rank was sending")
            self._pipeline.abandon()
            raise

    def decide(self, flight: Flight) -> RoundDecision:
        """Decision of the ranks about a flight that has landed; if it is that it counts, its means are there.

        Raises:
            as :func:`commopt.outer.rounds.agree`, and as :func:`commopt.comm.confirm`.
        """
        topology = self._topology
        assert flight.table is not None
        decision = decide(topology, flight.table, flight.report, flight.where)
        if decision.broken or topology.world_size == 1:
            if flight.means.blocks and not decision.broken:
                flight.means.finish(flight.where)
            return decision
        world = CountingBackend(topology.backend, flight.traffic, flight.receipt)
        if flight.confirmed is not None:
            refuse_damaged(world, flight.confirmed, flight.where)
        else:
            with reaching_others(topology, flight.where):
                sound = flight.means.finish(flight.where)
            confirm(world, sound, flight.where)
        return decision

    def done(self, flight: Flight) -> None:
        """Counts what a flight that has landed has sent, and forgets it."""
        self._topology.traffic.take_over(flight.traffic)
        del self._flights[flight.fragment]

    def compare(self, digests: Sequence[int], where: str) -> None:
        """Sends digests of what must be the same on all ranks; :meth:`compared` has what comes of it. All ranks call
        this at the same point, when nothing is under way of that kind.

        Raises:
            commopt.comm.CollectiveError: that cannot be started.
        """
        self._comparison = Comparison(self._topology, self._open()[0], digests, where)

    def compared(self) -> Comparison | None:
        """Digests that are under way, or have come, once; None if there are none."""
        found, self._comparison = self._comparison, None
        return found

    def land_all(self) -> None:
        """Waits for all, and keeps them. All ranks call this at the same point."""
        for fragment in list(self._flights):
            self.land(fragment)

    def drop_all(self) -> None:
        """Waits for all, digests too, and forgets them."""
        self.land_all()
        if (comparison := self.compared()) is not None:
            comparison.table()
        self._flights.clear()

    def _open(self) -> Sequence[Backend]:
        """Opens the channels, if that has not been done: for the rows at the beginning of flights, and at their end."""
        topology = self._topology
        topology.open()  # there may be new replicas
        if self._control is None:
            self._control = [open_control(topology.backend) for _ in range(2)]
        several = [ranks for ranks in topology.replicas if ranks.world_size > 1]
        apart = topology.backend not in self._control and all(ranks.channels for ranks in several)
        self._by_itself = apart or topology.world_size == 1
        return self._control

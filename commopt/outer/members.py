"""Ranks that come and go between two rounds, without a restart: who is a member, over a store (:mod:`.roster`)."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commopt.agreement import checks
from commopt.comm import Backend, CollectiveError, LocalBackend, gather_rows
from commopt.comm.given_up import Connect, connected, nobody_has, over_gloo
from commopt.comm.store import StoreAnother, StoreClient, StoreLost, until
from commopt.outer import lobby
from commopt.outer.roster import Roster
from commopt.outer.view import CutOff, Name, Report, Ticket, View

logger = logging.getLogger("commopt")

T = TypeVar("T")

ANSWER = 20.0
"""Most seconds within which the store has to answer."""
TRY = 5.0
"""Most seconds within which one member reaches another, where all have failed to reach all: more than that by which
they learn of it at different times."""
AGAIN = 1.0
"""Seconds between two questions to a store that does not answer."""
CALL = 5.0
"""Most seconds that joiners are waited for, when they are called."""
TOO_LONG = "it takes longer than timeout= of the members allows"
"""Why a joiner is not given the state."""


class Members:
    """The ranks of a run that others may join, and that may leave, or be lost, between two rounds.

    ::

        store = torch.distributed.TCPStore(host, port, is_master=False)
        members = commopt.Members(store, name=3, ranks=4, patience=60)
        optimizer = commopt.DiLoCo(model.parameters(), lr=4e-4, period=100, members=members)

    It takes the place of a process group in one outer optimizer. The first ``ranks`` ranks begin the run together; one
    that makes its optimizer later waits there until a round of the others ends, and has their parameters, outer state
    and counters then. At the end of a round those that are there go on: one that does not come within ``patience``
    seconds of the first has lost that round, and no more; it joins anew when it comes.

    Args:
        store: any store that all ranks reach and that outlives them, or at least the run; the keys under a prefix are
            ours. None is that of the default process group, of which ``name`` and ``ranks`` are then taken, too.
        name: of this rank, an int or a str; means are summed in the order of names. Should differ between ranks.
        ranks: how many begin the run, those that come within ``timeout`` seconds; where there is a run, this rank joins
            that. None: it joins the run that others begin.
        patience: seconds > 0 that members that are there wait for those that are not, at the end of a round, from when
            the first of them is there: more than the time by which one is slower than another.
        timeout: seconds > 0 that a collective may take, and each joiner until it has the state: over a slow network,
            more than its bytes take. One that takes longer is given up.
        join_timeout: seconds > 0 that a rank waits to be taken in: more than a round takes.
        reconnect: seconds >= 0 that a rank which is cut off goes on trying. From the store: it asks that again; if it
            answers, the rank joins anew (``rejoin``), unless the others have waited. From other members: it joins anew
            after a pause, of ``patience`` seconds at first, and of twice as many each time that it is cut off again.
            After so many seconds, and at once with 0, ``step()`` raises StoreLost, or :class:`commopt.outer.CutOff`.
        quorum: how many must be there to go on, of the members of the last round and of those that wait to join,
            >= 1. None is more than half of the members of the last round; those that have called :meth:`leave` do not
            count. With 1, the last one goes on alone.
        max_z: most robust z-score, > 0, of the norm of a rank's pseudo-gradient among the ranks'; one above it does not
            count in its round (of less than three, none is left out). None: all count, unless inf or NaN.
        rejoin: whether a rank that was left out joins anew by itself, in ``step()``. If not, that raises
            :class:`commopt.outer.LeftOut`.
        fetch_base: whether one that joins has the state of the base of a member, too, and not an empty one. One that
            joins anew keeps its own.
        on_join: called with the optimizer when this rank has joined, also anew: to set the data and a schedule to
            ``optimizer.param_groups[0]["rounds"]``.
        connect: how members reach each other (:data:`commopt.comm.given_up.Connect`); None is Gloo.

    Raises:
        ValueError: for an argument out of range; without a store and a process group.
    """

    def __init__(
        self,
        store: dist.Store | None = None,
        name: Name | None = None,
        *,
        ranks: int | None = None,
        patience: float = 60.0,
        timeout: float = 300.0,
        join_timeout: float = 3600.0,
        reconnect: float = 600.0,
        quorum: int | None = None,
        max_z: float | None = 6.0,
        rejoin: bool = True,
        fetch_base: bool = True,
        on_join: Callable[[Any], None] | None = None,
        connect: Connect | None = None,
    ) -> None:
        if store is None:
            if not dist.is_initialized():
                raise ValueError("Members needs a store of torch.distributed, or init_process_group() before it")
            store = dist.distributed_c10d._get_default_store()
            name = dist.get_rank() if name is None else name
            ranks = dist.get_world_size() if ranks is None else ranks
        _check_who(store, name)
        _check_numbers({"ranks": ranks, "quorum": quorum}, max_z)
        for what, seconds in (("patience", patience), ("timeout", timeout), ("join_timeout", join_timeout)):
            if not checks.is_number(seconds) or not 0 < seconds < math.inf:
                raise ValueError(f"{what} must be a number of seconds > 0, got {seconds!r}")
        if not checks.is_number(reconnect) or not 0 <= reconnect < math.inf:
            raise ValueError(f"reconnect must be a number of seconds >= 0, got {reconnect!r}")
        checks.check_bool("rejoin", rejoin)
        checks.check_bool("fetch_base", fetch_base)
        for what, called in (("on_join", on_join), ("connect", connect)):
            if called is not None and not callable(called):
                raise ValueError(f"{what} must be None or a function, got {called!r}")
        assert name is not None
        self.name, self.ranks, self.quorum = name, ranks, quorum
        self.patience, self.timeout, self.join_timeout = float(patience), float(timeout), float(join_timeout)
        self.reconnect = float(reconnect)
        self.rejoin, self.fetch_base, self.on_join = rejoin, fetch_base, on_join
        self._store: dist.Store = dist.PrefixStore("commopt/members", store)
        if not self._makes_connections:
            logger.warning(
                "members: torch before 2.8, here %s, has one connection to the store: a rank that loses it cannot join "
                "anew, and what others say there while connections are opened is heard late", torch.__version__,
            )  # fmt: skip
        self._connect = connect or over_gloo
        client = StoreClient(self._store, min(ANSWER, self.timeout))
        self.roster = Roster(client, name, self._needed, max_z)
        self.among: list[Ticket] = []  # those over which the optimizer has its buckets
        self._weight: float | None = None
        self._taken = False
        self._pauses = 0  # since the last round
        self._tries = 0.0  # most seconds by which one member has tried to reach others for longer than another
        self._channel: tuple[list[Ticket], Backend] | None = None

    # what users call --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of times that members have met; -1 before the run has begun."""
        return self.roster.epoch

    @property
    def names(self) -> list[Name]:
        """The names of the members at the last meeting, by rank."""
        view = self.roster.view
        return [] if view is None else [view.names[ticket] for ticket in view.members]

    def add_weight(self, amount: float) -> None:
        """Adds to what this rank's pseudo-gradient counts in the mean of its round, such as the tokens of a batch:
        the mean is sum_i w_i D_i / sum_i w_i. All ranks call it, or none: then all count alike.

        Raises:
            ValueError: unless it is a finite number >= 0.
        """
        if not checks.is_number(amount) or not 0 <= amount < math.inf:
            raise ValueError(f"amount must be a finite number >= 0, got {amount!r}")
        self._weight = (self._weight or 0.0) + float(amount)

    def leave(self) -> None:
        """Leaves the run: nobody waits for this rank any more, at the end of the round or later."""
        self.roster.leave()
        self._channel = None

    def give_up(self) -> None:
        """Leaves because of an error, which whatever goes wrong here does not hide."""
        with suppress(CollectiveError):
            self.leave()

    # what an optimizer calls ------------------------------------------------------------------------------------------

    @property
    def weight(self) -> float | None:
        """Weight that was added since the last round; None if none was."""
        return self._weight

    @property
    def counts(self) -> bool:
        """True unless this rank's pseudo-gradient was left out at the last meeting."""
        view = self.roster.view
        return view is None or self.roster.ticket not in view.excluded

    def round_ended(self) -> None:
        """The weight begins anew."""
        self._weight = None

    def begin(self) -> Backend:
        """The ranks that begin the run, this one among them; this one alone if it has begun, and it is to join.

        Raises:
            ValueError: if another optimizer has these members.
            NotEnoughMembers: too few have come.
            commopt.comm.CollectiveError: they have not reached each other.
        """
        if self._taken:
            raise ValueError(
                "members= must be of one optimizer alone: make other Members, over a PrefixStore, for each"
            )
        begins = self.ranks is not None and lobby.found(self.roster, self.ranks, self.timeout)
        self._taken = True  # and not where that has raised: it may be tried again
        if not begins:
            return LocalBackend()
        assert self.roster.view is not None
        self.among = list(self.roster.view.members)
        try:
            return self.backend()
        except Exception:
            self.give_up()
            raise

    def meet(self, report: Report) -> View:
        """The view of all that come; see :meth:`commopt.outer.roster.Roster.meet`."""
        report = replace(report, unconnected=self._channel is None)
        view = self.roster.meet(report, self.patience + self._tries, self.timeout)
        self._tries = 0.0
        return view

    def backend(self) -> Backend:
        """The members of the last view: the same connections as before, if they are the same, none has failed, and all
        still have theirs.

        Raises:
            commopt.comm.CollectiveError: they have not reached each other.
        """
        view = self.roster.view
        assert view is not None
        if self.roster.state == "failed":
            raise CollectiveError("another member has given up")
        apart = view.failures or any(report.unconnected for report in view.reports)
        if self._channel is None or self._channel[0] != view.members or apart:
            self._channel = None
            self._channel = (list(view.members), self._reach("round", self.roster.rank, len(view.members)))
        return self._channel[1]

    def unreached(self) -> list[Ticket]:
        """The members of the last view that this rank does not reach, each alone; none where the store does not answer,
        over which they meet. All of them call it together."""
        view, mine = self.roster.view, self.roster.rank
        assert view is not None
        size = len(view.members) + len(view.members) % 2
        others = [other for turn in range(size - 1) if (other := _partner(mine, turn, size)) < len(view.members)]
        self._tries = 2 * TRY  # to open a connection, and to use it
        # All at once: a rank that waits for one that it does not reach is not there for the next one.
        with ThreadPoolExecutor(max(1, len(others)) if self._makes_connections else 1) as pool:
            reached = list(pool.map(self._reaches, others))
        missed = [view.members[other] for other, can in zip(others, reached) if not can]
        if missed:
            try:
                self.roster.look()
            except StoreLost as lost:
                logger.warning("members: %s; whom this rank reaches is not known", lost)
                return []
        return missed

    def _reaches(self, other: int) -> bool:
        """True if this rank and another one of the last view can send each other something."""
        mine, now = self.roster.rank, self.roster.now.replace(" ", "-")
        name = f"try {min(mine, other)} {max(mine, other)} of {now}"
        try:
            store = dist.PrefixStore(name, self._connection())
            pair = connected(self._connect, store, name, int(mine > other), 2, TRY, TRY, nobody_has)
            gather_rows(pair, torch.zeros(1, device="cpu"), name)
        except (CollectiveError, RuntimeError):
            return False
        return True

    def answered(self, question: Callable[[], T]) -> T:
        """The answer to ``question()``, which is asked again until the store answers: it may have taken down what a
        rank has said, and what that has received of the others must not be lost meanwhile.

        Raises:
            StoreLost: it does not answer for too long.
        """
        while True:
            try:
                return question()
            except StoreLost as lost:
                self.find_store(lost)

    def verdict(self, state: str) -> str:
        """The outcome of the meeting for all; see :meth:`commopt.outer.roster.Roster.verdict`."""
        if state == "failed":
            self._channel = None
        told = self.roster.verdict(state)
        if told == "failed":
            self._channel = None
        elif told == "done":
            self._pauses = 0
        return told

    def wait_to_join(self) -> Backend:
        """A member, rank 0, that gives this rank, rank 1, the state.

        Raises:
            LeftOut: there was none in time.
            commopt.comm.CollectiveError: they have not reached each other.
        """
        self._channel = None
        lobby.wait_to_join(self.roster, self.join_timeout, self.timeout, begins=self.ranks is not None)
        return self._reach(f"state for {self.roster.ticket}", 1, 2)

    def find_store(self, lost: StoreLost) -> None:
        """Waits until the store answers again.

        Raises:
            StoreLost: ``lost``, if it does not within ``reconnect`` seconds, or another one answers.
        """
        left = until(self.reconnect)
        if isinstance(lost, StoreAnother) or not left():
            raise lost
        logger.warning("members: %s; this rank asks again for %g s", lost, self.reconnect)
        while left():
            try:
                self.roster.look()
            except StoreAnother:
                raise
            except StoreLost:
                time.sleep(min(AGAIN, left()))
            else:
                logger.warning("members: the store answers again")
                return
        raise lost

    def pause(self, cut: CutOff) -> None:
        """Waits before this rank joins those anew whom it has not reached, twice as long as the last time: while it
        reaches them no better, it costs them the exchanges of a round.

        Raises:
            CutOff: ``cut``, once these pauses would take more than ``reconnect`` seconds.
        """
        seconds = self.patience * 2**self._pauses
        if 2 * seconds - self.patience > self.reconnect:
            raise cut
        logger.warning("members: %s; its own round is lost, and it joins anew in %g s", cut, seconds)
        self._pauses += 1
        time.sleep(seconds)

    def ready(self) -> list[Ticket]:
        """The joiners that are there."""
        return lobby.ready(self.roster, min(CALL, self.patience))

    def call(self, ticket: Ticket, left: Callable[[], float]) -> Backend:
        """This rank, rank 0, and a joiner, whose collectives fail when no seconds are ``left()``.

        Raises:
            commopt.comm.CollectiveError: they have not reached each other.
        """
        lobby.call(self.roster, ticket)
        return self._reach(f"state for {ticket}", 0, 2, left)

    def forsake(self) -> None:
        """Leaves, to join anew."""
        lobby.forsake(self.roster)
        self._channel = None

    def has_joined(self, seconds: float) -> None:
        """Tells the others that nobody has to be given the state any more, which has taken so long."""
        lobby.has_joined(self.roster, seconds)

    def stats(self) -> Mapping[str, Any]:
        """For ``comm_stats()``: epoch, and names of the members."""
        return {"epoch": self.epoch, "members": self.names}

    def _needed(self, of: int) -> int:
        return of // 2 + 1 if self.quorum is None else self.quorum

    @property
    def _makes_connections(self) -> bool:
        """True if torch makes further connections to the store; before 2.8 it does not."""
        return hasattr(self._store, "clone")

    def _connection(self) -> dist.Store:
        """Another connection to the store, as over each one question is asked at a time; or else the one there is."""
        return self.roster.client.ask(lambda store: store.clone()) if self._makes_connections else self._store

    def _reach(self, what: str, rank: int, world_size: int, left: Callable[[], float] | None = None) -> Backend:
        epoch, _, lot = self.roster.now.split()
        name = f"{what} {epoch}-{lot}"
        store = dist.PrefixStore(name, self._connection())
        asks = self._makes_connections  # else who connects has the one connection to it meanwhile
        patience = self.patience if asks else self.patience + self.timeout

        def why() -> str | None:
            if left is not None and not left():
                return TOO_LONG
            return self.roster.given_up() if asks else None

        return connected(self._connect, store, name, rank, world_size, self.timeout, patience, why)


def _partner(mine: int, turn: int, size: int) -> int:
    """Whom rank ``mine`` of an even number of ranks meets in a turn, so that in ``size - 1`` turns all meet all."""
    last = size - 1
    if mine == last:
        return turn * (size // 2) % last
    other = (turn - mine) % last
    return last if other == mine else other


def _check_who(store: object, name: object) -> None:
    if not isinstance(store, dist.Store):
        raise ValueError(f"store must be a torch.distributed.Store, such as TCPStore, or None; got {store!r}")
    if not isinstance(name, (int, str)) or isinstance(name, bool):
        raise ValueError(f"name must be an int or a str, which names this rank; got {name!r}")


def _check_numbers(counts: Mapping[str, int | None], max_z: float | None) -> None:
    for what, value in counts.items():
        if value is not None:
            checks.check_int(what, value, 1)
    if max_z is not None and (not checks.is_number(max_z) or not max_z > 0):
        raise ValueError(f"max_z must be None or a number > 0, got {max_z!r}")

"""The roster: how ranks agree, through a store, on who is a member. No rank leads, so none can be lost in it.

One key, ``now``, has the epoch, a state and a lot: "7 open 5af0". It is changed by compare-and-set alone, so that of
several who would change it one does, and whoever is late learns that it has been:

    7 open    view 7 is published: its members exchange what the meeting was for
    7 done    some member has had all of it from all, so all have: each applies it. Joiners get the state
    7 kept    the same, of something that ends no round: joiners still wait
    7 failed  some member could not: nobody applies it, and all meet again
    8 open    those that came to the next meeting in time
    8 ended   all have left

Those that are to begin a run publish a view, too; if that has failed, others that come begin with the next one.

At a meeting each member leaves its report under a key of its own and adds 1 to a count. Who finds that it is the last
one publishes the view; if some do not come, whoever loses its patience first does. The others wait for one key: a rank
asks a handful of questions a meeting, none of them twice, and who publishes reads a report of each.

A view with too few members is not published: two parts of the ranks that cannot reach each other cannot both go on, as
only one can change ``now``; the other one is left out, or cannot reach the store.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace

from commopt.agreement.calls import StepRefused
from commopt.comm import first_notice
from commopt.comm.store import StoreAnother, StoreClient, StoreLost
from commopt.outer.view import REMEDY, CutOff, LeftOut, Name, NotEnoughMembers, Report, Ticket, View, next_view

logger = logging.getLogger("commopt")

NOW = "now"
ENDED = "ended"


class Roster:
    """One rank's part in it.

    Args:
        client: of a store under whose keys nothing else is.
        name: of this rank.
        needed: of so many ranks, how many must be there.
        max_z: as of :func:`commopt.outer.view.mad_ones`.

    Attributes:
        ticket: of this rank; -1 before it has drawn one.
        view: the last one that this rank was in.
        now: what ``now`` was when this rank last looked.
    """

    def __init__(self, client: StoreClient, name: Name, needed: Callable[[int], int], max_z: float | None) -> None:
        self.client, self.name, self.needed, self.max_z = client, name, needed, max_z
        self.ticket: Ticket = -1
        self.view: View | None = None
        self.now = ""
        self._told = False

    # where it stands --------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return int(self.now.split()[0]) if self.now else -1

    @property
    def state(self) -> str:
        return self.now.split()[1] if self.now else ""

    @property
    def expected(self) -> list[Ticket]:
        """Whom the next meeting waits for."""
        assert self.view is not None
        return [*self.view.members, *(self.view.joiners if self.state == "done" else ())]

    @property
    def rank(self) -> int:
        """This rank's number among the members."""
        assert self.view is not None
        return list(self.view.members).index(self.ticket)

    def look(self) -> str:
        """The value of ``now``; "" before the first view.

        Raises:
            StoreAnother: the store has forgotten it.
        """
        now = self.client.get(NOW) or ""
        if self.now and not now:
            raise StoreAnother(f"the store of the members has forgotten them: it is another one, begun anew; {REMEDY}")
        return now

    def read(self, now: str) -> View | None:
        """The view of ``now``; None if there is none, or it is long gone."""
        text = self.client.get(_body(now)) if now else None
        return None if text is None else View.from_json(text)

    def given_up(self) -> str | None:
        """Why it is no use to wait for the other members any more."""
        epoch, state, _ = self.look().split()
        if int(epoch) != self.epoch:
            return "the others have gone on"
        return "another member has given up" if state == "failed" else None

    # tickets ----------------------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draws a ticket."""
        self.ticket = self.client.add("tickets", 1) - 1
        self.client.set(f"ticket/{self.ticket}", json.dumps(self.name))

    def withdraw(self) -> None:
        """Takes the ticket back, if this rank has one: it waits no more."""
        if self.ticket >= 0:
            self.client.delete([f"ticket/{self.ticket}"])
        self.ticket = -1

    def waiting(self, since: int, drawn: int) -> dict[Ticket, Name]:
        """The names of those with tickets from ``since`` on, below ``drawn``."""
        found = self.client.get_all(f"ticket/{t}" for t in range(since, drawn))
        return {int(key.split("/")[1]): json.loads(name) for key, name in found.items()}

    def enter(self, view: View, now: str) -> None:
        """Takes over ``view``, in which this rank is, and ``now``."""
        if self.view is None or self.view.epoch < view.epoch:
            self._told = False
        self.view, self.now = view, now

    def take(self, now: str) -> bool:
        """Takes over the view of ``now``; whether this rank is a member in it."""
        view = self.read(now)
        if view is None or self.ticket not in view.members:
            return False
        self.enter(view, now)
        return True

    # meeting ----------------------------------------------------------------------------------------------------------

    def meet(self, report: Report, patience: float, busy: float) -> View:
        """The view of all members that come to this meeting.

        Args:
            report: of this rank.
            patience: seconds that those that are there wait for those that are not; behind a round in which some have
                joined, for as many more as that has taken.
            busy: seconds that they wait before that for who gives joiners the state, for each of these.

        Raises:
            LeftOut: the others have gone on without this rank: it was late, or holds another anchor; CutOff, if some
                do not reach it.
            StepRefused: most others stand elsewhere than this rank; or it has left.
            NotEnoughMembers: there are too few.
        """
        if self.view is None:
            raise StepRefused("this rank has left the run: it takes part again with another optimizer, and new Members")
        if self._settle(report):
            return self.view
        view = self.view
        patience += self._wait_for_joiners(view, busy)
        last = self._tell(report)
        if not last and not self._wait(patience):
            logger.warning("members: %s within %g s", self._late("did not come", "has not told the others"), patience)
        if (now := self.look()) == self.now:
            self.publish()
            now = self.look()
        epoch = self.epoch + 1
        if self.take(now):
            assert self.view is not None
            return self.view
        new = self.read(now)
        if new is not None and new.epoch == epoch:
            why = "the other members go on without this rank: "
            if self.ticket in new.refused:
                raise StepRefused(why + new.refused[self.ticket])
            if self.ticket in new.apart:
                raise LeftOut(why + new.apart[self.ticket])
            if self.ticket in new.unreached:
                raise CutOff(why + new.unreached[self.ticket])
        raise LeftOut(f"the other members have gone on without this rank: it was not there in time at meeting {epoch}")

    def verdict(self, state: str) -> str:
        """Says that what the meeting was for is "done", "kept" or "failed", and returns which it is for all.

        Raises:
            LeftOut: the others have gone on without this rank.
        """
        epoch, was, lot = self.now.split()
        if was != "open":
            return was  # before this rank has heard of it
        now = self.client.compare_set(NOW, self.now, f"{epoch} {state} {lot}")
        if now == self.now:
            self.look()  # where the key is gone, some stores return what was expected
        if now.split()[0] != epoch:
            raise LeftOut("the other members have gone on without this rank, while it exchanged with them")
        self.now = now
        return self.state

    def leave(self) -> None:
        """Lets the others go on without this rank: their next meeting does not wait for it."""
        if self.view is not None:
            with suppress(LeftOut):
                if self.state == "open":
                    self.verdict("failed")
            if self.look() == self.now:
                self._tell(None)
                self._told = False  # what it has said stays, whatever comes now
                if int(self.client.get(f"count/{self.epoch}") or 0) >= len(self.expected):
                    with suppress(NotEnoughMembers):  # the others, who wait, will say so
                        self.publish()
        self.view, self.ticket, self.now = None, -1, ""

    def _settle(self, report: Report) -> bool:
        """Finds out what has become of a meeting that this rank has left with an error. Returns whether it is the one
        for this ``report``: the rank is in its view, of which the store has not told it."""
        was, epoch, now = self.now, self.epoch, self.look()
        if now != was and not self.take(now):
            raise LeftOut("the other members have gone on without this rank")
        assert self.view is not None
        if self.epoch == epoch + 1 and self.state != "done" and _same(report, self.view.reports[self.rank]):
            with suppress(StoreLost):  # it may be this rank that has published it, and the others wait for that
                self.client.set(f"opened/{self.epoch}", "")
            return True
        if self.state == "open":
            self.verdict("failed")
        if self.now != was and self.state == "done":
            raise LeftOut("the other members have ended a round which this rank has not applied")
        return False

    def _wait_for_joiners(self, view: View, busy: float) -> float:
        """Waits until those that join have the state, or never will, which the first rank says once more: the store may
        have been lost when it had given what it could. Returns how many seconds later than this rank the first one and
        those that have joined may be now, as they have begun their round later."""
        if self.state != "done" or not view.joiners:
            return 0.0
        key = f"joined/{self.epoch}"
        if self.ticket == view.members[0]:
            self.client.compare_set(key, "", "0")
            return 0.0
        begin = time.monotonic()
        if not self.client.wait(key, busy * len(view.joiners)):
            return 0.0
        took = float(self.client.get(key) or 0)
        return max(0.0, took - (time.monotonic() - begin))

    def _wait(self, patience: float) -> bool:
        """Waits for the next view; says whom for."""
        key, first = f"opened/{self.epoch + 1}", min(patience, first_notice())
        if self.client.wait(key, first):
            return True
        assert self.view is not None
        if patience == first:
            return False
        logger.warning("members: waiting for %s for %.3g s", self._late("", "to tell the others"), first)
        return self.client.wait(key, patience - first)

    def _here(self, ticket: Ticket) -> str:
        return f"here/{self.epoch}/{ticket}"

    def _missing(self) -> list[Ticket]:
        there = self.client.get_all(self._here(ticket) for ticket in self.expected)
        return [ticket for ticket in self.expected if self._here(ticket) not in there]

    def _late(self, missing: str, untold: str) -> str:
        """Names who is missing, and is waited for; or says that all have come, and the view does not."""
        assert self.view is not None
        late = self._missing()
        who, what = (self.view.named(late), missing) if late else ("whoever came last", untold)
        return f"{who} {what}".rstrip()

    def leave_for(self, ticket: Ticket) -> None:
        """Tells the others not to wait for a rank that has not come, unless something has been said of it."""
        if self._say(ticket, _word(None)) is None:
            self._count()

    def _tell(self, report: Report | None) -> bool:
        """Says of this rank that it is there, or that it has gone, in place of what has been said of it. Returns
        whether nobody else need be waited for: each rank counts once, also one that another has said to have gone."""
        word = _word(report)
        before = self._say(self.ticket, word)
        if before is not None:
            self.client.set(self._here(self.ticket), word)
        if self._told:  # it comes again, and does not know whether its count was taken down
            return not self._missing()
        self._told = True
        counted = before is not None and _report_of(before) is None
        return not counted and self._count() >= len(self.expected)

    def _say(self, ticket: Ticket, word: str) -> str | None:
        """Says ``word`` of a rank, if nothing has been said of it; else returns what has."""
        said = self.client.compare_set(self._here(ticket), "", word)
        return None if said == word else said

    def _count(self) -> int:
        """One more rank need not be waited for; how many these are."""
        return self.client.add(f"count/{self.epoch}", 1)

    def publish(self) -> None:
        """Publishes the next view, of those that are there, unless somebody has.

        Raises:
            NotEnoughMembers: they are too few.
        """
        last = self.view
        assert last is not None
        there = self.client.get_all(self._here(ticket) for ticket in self.expected)
        said = {int(key.split("/")[2]): _report_of(word) for key, word in there.items()}
        gone = [ticket for ticket, report in said.items() if report is None]
        reports = {ticket: report for ticket, report in said.items() if report is not None}
        drawn = self.client.add("tickets", 0)
        waiting = self.waiting(last.drawn, drawn)
        try:
            new = next_view(last, self.state, reports, gone, waiting, drawn, self.needed, self.max_z)
        except NotEnoughMembers:
            self._take_back()
            raise
        if not new.members:
            if not could_not_begin(self.now, last):
                epoch, _, lot = self.now.split()
                self.client.compare_set(NOW, self.now, f"{epoch} {ENDED} {lot}")
        elif self.open(replace(new, before=_keys(last, _body(self.now)))):
            self._log(last, new, gone)

    def _take_back(self) -> None:
        if self._told and self.ticket >= 0:
            self.client.delete([self._here(self.ticket)])
            self.client.add(f"count/{self.epoch}", -1)
            self._told = False

    def open(self, view: View) -> bool:
        """Makes ``view`` that of all; False if somebody else has made another."""
        desired = f"{view.epoch} open {secrets.token_hex(4)}"
        self.client.set(_body(desired), view.to_json())
        made = self.client.compare_set(NOW, self.now, desired) == desired
        if made:
            old = self.view.before if self.view is not None else ()
            self.client.delete([*old, *(f"ticket/{t}" for t in view.joiners)])
        else:
            self.client.delete([_body(desired)])
        self.client.set(f"opened/{view.epoch}", "")
        return made

    def _log(self, last: View, view: View, gone: Sequence[Ticket]) -> None:
        without = {**view.refused, **view.apart, **view.unreached}
        lost = [t for t in self.expected if t not in view.members and t not in gone and t not in without]
        told = {"have gone": gone, "are missing": lost, "join": view.joiners}
        for what, tickets in told.items():
            if tickets:
                names: Mapping[Ticket, Name] = {**last.names, **view.names}
                who = ", ".join(str(names[t]) for t in tickets)
                logger.warning("members, meeting %d: %d go on; %s: %s", view.epoch, len(view.members), what, who)
        for what, found in {"goes on without": without, "does not count": view.excluded}.items():
            for ticket, why in found.items():
                logger.warning("members, meeting %d: %s %s: %s", view.epoch, what, last.names.get(ticket, "?"), why)


def could_not_begin(now: str, view: View | None) -> bool:
    """True if ``view``, that of ``now``, is of ranks that were to begin a run and could not: others may."""
    return view is not None and view.reports[0].kind == "begin" and now.split()[1] == "failed"


def _word(report: Report | None) -> str:
    """Word about a rank at a meeting: its report, or that it has gone; no two are alike."""
    return json.dumps([secrets.token_hex(4), None if report is None else asdict(report)])


def _same(mine: Report, other: Report) -> bool:
    """True if two reports say the same, of which norms may be NaN."""
    return json.dumps(asdict(mine)) == json.dumps(asdict(other))


def _report_of(word: str) -> Report | None:
    report = json.loads(word)[1]
    return None if report is None else Report(**report)


def _body(now: str) -> str:
    """Key of the view of ``now``, whatever its state is."""
    epoch, _, lot = now.split()
    return f"view/{epoch}/{lot}"


def _keys(view: View, body: str) -> list[str]:
    """All keys of an epoch."""
    e, tickets = view.epoch, [*view.members, *view.joiners]
    out = [body, *(f"{what}/{e}" for what in ("count", "opened", "joined"))]
    return out + [f"{what}/{e}/{t}" for t in tickets for what in ("here", "joins", "called")]

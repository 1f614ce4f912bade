"""Ways for a rank to become a member: it begins a run with others, or waits until a member takes it in: functions of a
roster."""

from __future__ import annotations

import time

from commopt.comm.store import until
from commopt.outer.roster import ENDED, Roster, could_not_begin
from commopt.outer.view import LeftOut, NotEnoughMembers, Report, Ticket, View, order_of

POLL = 0.05
"""Seconds between two looks of a rank that waits."""


def found(roster: Roster, ranks: int, seconds: float) -> bool:
    """Begins a run with those of so many ranks that come in time. Returns whether this rank is one of them; else there
    is a run, which it can join.

    Raises:
        NotEnoughMembers: there are too few.
    """
    client, now = roster.client, roster.look()
    failed = roster.read(now)
    if now and not could_not_begin(now, failed):
        return False
    roster.now, since = now, 0 if failed is None else failed.drawn
    epoch = roster.epoch + 1
    roster.draw()
    if len(roster.waiting(since, client.add("tickets", 0))) < ranks:
        client.wait(f"opened/{epoch}", seconds)
    if roster.look() == now:
        drawn = client.add("tickets", 0)
        names = roster.waiting(since, drawn)
        if len(names) < roster.needed(ranks):
            roster.withdraw()
            raise NotEnoughMembers(
                f"{len(names)} of {ranks} ranks have come within {seconds:g} s, and {roster.needed(ranks)} are needed "
                "to begin: start the others, on the same store"
            )
        members = order_of(names)
        roster.open(View(epoch, members, [Report() for _ in members], names, drawn=drawn))
    return roster.take(roster.look())


def wait_to_join(roster: Roster, seconds: float, busy: float, begins: bool) -> None:
    """Waits until a member is ready to give this rank the state: it is a member from then on. Until the run has begun
    it draws no ticket, which others would take for that of one that begins it.

    Args:
        roster: of this rank.
        seconds: how long.
        busy: seconds that the member may take for each that joins.
        begins: whether this rank is one of those that begin the run, and has come too late for that.

    Raises:
        LeftOut: none was, all members have left, or those that were to begin the run could not.
    """
    left, now, view = until(seconds), "", None
    while left():
        before, now = now, roster.look()
        view = view if now == before else roster.read(now)
        if now and now.split()[1] == ENDED:
            raise LeftOut(
                "the run of this store has ended: all its members have left; begin another over another store"
            )
        if not now or could_not_begin(now, view):
            roster.withdraw()
            if now and begins:
                raise LeftOut(
                    "those that were to begin the run of this store, while this rank came, could not: start them and "
                    "this one again, on the same store"
                )
        elif roster.ticket < 0:
            roster.draw()
        elif view is not None and roster.ticket in view.joiners and now.split()[1] == "done":
            roster.enter(view, now)
            roster.client.set(f"joins/{view.epoch}/{roster.ticket}", "")
            if _is_called(roster, view, busy * len(view.joiners)):
                return
            forsake(roster)
        elif view is not None and roster.ticket < view.drawn and roster.ticket not in view.joiners:
            roster.draw()  # nobody waits for this one
        time.sleep(POLL)
    roster.withdraw()
    raise LeftOut(
        f"no member has taken this rank in within {seconds:g} s: a rank joins where a round of the others ends; are "
        "they running, on the same store?"
    )


def _is_called(roster: Roster, view: View, seconds: float) -> bool:
    """True if a member is ready to give this rank the state within so many seconds; the members may have given up that
    it comes meanwhile."""
    left = until(seconds)
    while left() and roster.given_up() is None:
        if roster.client.wait(f"called/{view.epoch}/{roster.ticket}", min(1.0, seconds)):
            return True
    return False


def forsake(roster: Roster) -> None:
    """Leaves, and draws another ticket, to join anew."""
    roster.leave()
    roster.draw()


def ready(roster: Roster, seconds: float) -> list[Ticket]:
    """The joiners that are still there, within so many seconds; the next meeting does not wait for the others."""
    view, left = roster.view, until(seconds)
    assert view is not None
    keys = {f"joins/{view.epoch}/{ticket}": ticket for ticket in view.joiners}
    while len(there := roster.client.get_all(keys)) < len(keys) and left():
        time.sleep(POLL)
    here = sorted(keys[key] for key in there)
    for ticket in set(view.joiners) - set(here):
        roster.leave_for(ticket)
    return here


def call(roster: Roster, ticket: Ticket) -> None:
    """Tells a joiner that it is given the state now."""
    roster.client.set(f"called/{roster.epoch}/{ticket}", "")


def has_joined(roster: Roster, seconds: float) -> None:
    """Tells the other members that joiners have what they need, or never will, and after how many seconds."""
    roster.client.set(f"joined/{roster.epoch}", str(seconds))

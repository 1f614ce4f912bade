"""A view: which ranks are members now, what each has said of its round, and what follows for all alike.

Who publishes a view decides, from what those that are there have said; the others read it. Nothing here communicates.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from commopt.agreement.decision import LARGEST_NORM
from commopt.comm import CollectiveError

T = TypeVar("T")

Name = int | str
Ticket = int
"""The number of a rank that has come, from 0, in the order of their coming. One that comes again has another."""

REMEDY = (
    "nothing is lost: this rank has its parameters and state. The next step() meets the others again, if they come "
    "back or new ones join; a new run over another store begins from state_dict()"
)


class NotEnoughMembers(CollectiveError):
    """Too few members are there to go on."""


class LeftOut(CollectiveError):
    """The others have gone on without this rank."""


class CutOff(LeftOut):
    """The same, as this rank reaches the store, but not all of them."""


@dataclass(frozen=True)
class Report:
    """Report of a rank on itself where members meet.

    Attributes:
        kind: what they meet for: "round", "mean" or "begin".
        step, number: local steps since the last synchronisation, and synchronisations so far.
        terms: a checksum of the hyper-parameters that the outer step uses.
        weight: of what it has done in its round; None: it has not said.
        norm: 2-norm of its pseudo-gradient; not finite if its parameters are not.
        square_norm: of the last gradients that it stepped on.
        moved, frozen, packed: as of :class:`commopt.outer.rounds.RoundReport`.
        digest: of its anchors and outer state; None: nobody is to compare it.
        intact: whether these are finite.
        unreached: the tickets of members that it has tried to reach, and has not.
        unconnected: whether it has no connections to the members of the last view.
    """

    kind: str = "begin"
    step: int = 0
    number: int = 0
    terms: int = 0
    weight: float | None = None
    norm: float = 0.0
    square_norm: float = 0.0
    moved: bool = False
    digest: int | None = None
    intact: bool = True
    frozen: int = 0
    packed: int = 0
    unreached: Sequence[Ticket] = ()
    unconnected: bool = False

    @property
    def place(self) -> tuple[Any, ...]:
        """Values that must be the same of all members."""
        return self.kind, self.step, self.number, self.terms, self.packed, self.weight is None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)


@dataclass(frozen=True)
class View:
    """The members at one meeting.

    Attributes:
        epoch: its number: each meeting has another.
        members: their tickets, in the order of their ranks.
        reports: of each of them.
        names: of members and joiners, by ticket.
        joiners: tickets of those that are to get the state of a member, and be members from then on.
        drawn: how many tickets were drawn before.
        refused: why, by ticket, of those that cannot go on with the others.
        apart: why, by ticket, of those that hold another anchor than the others.
        unreached: why, by ticket, of those that others do not reach.
        excluded: why, by ticket, of members whose pseudo-gradients do not count.
        failures: how many meetings before this one have failed, in a row.
        before: keys in the store of the view before, for whoever takes them away.
    """

    epoch: int
    members: Sequence[Ticket]
    reports: Sequence[Report]
    names: Mapping[Ticket, Name]
    joiners: Sequence[Ticket] = ()
    drawn: int = 0
    refused: Mapping[Ticket, str] = field(default_factory=dict)
    apart: Mapping[Ticket, str] = field(default_factory=dict)
    unreached: Mapping[Ticket, str] = field(default_factory=dict)
    excluded: Mapping[Ticket, str] = field(default_factory=dict)
    failures: int = 0
    before: Sequence[str] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> View:
        given = json.loads(text)
        given["reports"] = [Report(**report) for report in given["reports"]]
        for name in ("names", "refused", "apart", "unreached", "excluded"):
            given[name] = {int(ticket): value for ticket, value in given[name].items()}
        return cls(**given)

    def named(self, tickets: Sequence[Ticket]) -> str:
        """The names of those of ``tickets``, in words."""
        return ", ".join(str(self.names.get(ticket, "?")) for ticket in tickets) or "nobody"

    def factors(self) -> list[float]:
        """By what each member's pseudo-gradient is multiplied, so that the mean over all is the weighted mean of those
        that count; exactly 1 where all count alike."""
        count = [ticket not in self.excluded for ticket in self.members]
        weights = [1.0 if report.weight is None else report.weight for report in self.reports]
        if not any(weight for weight, counts in zip(weights, count) if counts):
            weights = [1.0] * len(weights)
        total = math.fsum(weight for weight, counts in zip(weights, count) if counts)
        alike = all(count) and len(set(weights)) == 1
        return [
            1.0 if alike else (len(weights) * weight / total if counts else 0.0)
            for weight, counts in zip(weights, count)
        ]


def next_view(
    last: View,
    state: str,
    reports: Mapping[Ticket, Report],
    gone: Sequence[Ticket],
    waiting: Mapping[Ticket, Name],
    drawn: int,
    needed: Callable[[int], int],
    max_z: float | None,
) -> View:
    """The view behind ``last``; without members if all have left.

    Args:
        last: the view before.
        state: what has become of that one: if it is "done", its joiners are members.
        reports: of those that have come.
        gone: those that have said that they leave.
        waiting: the names of those that wait to join, and have not been taken in.
        drawn: how many tickets were drawn.
        needed: of so many ranks, how many must be there: those that wait to join count as there, and so do those that
            hold another anchor.
        max_z: as of :func:`mad_ones`.

    Raises:
        NotEnoughMembers: too few are there.
    """
    names = {ticket: last.names[ticket] for ticket in reports}
    refused = odd_ones(reports, names)
    apart = apart_from_most({t: r for t, r in reports.items() if t not in refused}, names)
    unreached = cut_off({t: r for t, r in reports.items() if t not in refused and t not in apart}, names)
    without = {**refused, **apart, **unreached}
    members = [ticket for ticket in order_of(names) if ticket not in without]
    joiners = {} if state == "done" else {ticket: last.names[ticket] for ticket in last.joiners}
    of = len(set(last.members) - set(gone))
    there = len(members) + len(apart) + len(joiners) + len(waiting)  # those apart join anew
    if members and there < needed(of):
        raise NotEnoughMembers(
            f"{len(members)} of {of} members are there ({last.named(members)}), and {needed(of)} are needed to go on; "
            + "".join(f"not {last.names[ticket]}: {why}; " for ticket, why in without.items())
            + REMEDY
        )
    joins = bool(members) and reports[members[0]].kind == "round"
    joiners |= waiting if joins else {}
    return View(
        epoch=last.epoch + 1,
        members=members,
        reports=[reports[ticket] for ticket in members],
        names={**{ticket: names[ticket] for ticket in members}, **joiners},
        joiners=sorted(joiners),
        drawn=drawn if joins else last.drawn,
        refused=refused,
        apart=apart,
        unreached=unreached,
        excluded=mad_ones({ticket: reports[ticket] for ticket in members}, max_z if joins else None),
        failures=last.failures + 1 if state == "failed" else 0,
    )


def order_of(names: Mapping[Ticket, Name]) -> list[Ticket]:
    """Tickets in the order of the ranks' names, numbers first; of equal ones, as they were drawn."""
    return sorted(names, key=lambda t: (isinstance(names[t], str), names[t], t))


def odd_ones(reports: Mapping[Ticket, Report], names: Mapping[Ticket, Name]) -> dict[Ticket, str]:
    """Those that stand elsewhere than most, and why they cannot go on with these; of equally many, than those with the
    first rank."""
    if not reports:
        return {}
    usual = _usual({ticket: report.place for ticket, report in reports.items()}, names)
    return {ticket: _difference(report.place, usual) for ticket, report in reports.items() if report.place != usual}


def _usual(values: Mapping[Ticket, T], names: Mapping[Ticket, Name]) -> T:
    """The value that most have; of equally many, that of the first rank. There is one at least."""
    return Counter(values[ticket] for ticket in order_of({t: names[t] for t in values})).most_common(1)[0][0]


def _difference(mine: tuple[Any, ...], usual: tuple[Any, ...]) -> str:
    if mine[0] != usual[0]:
        return f"it has come for a {mine[0]}, and most others for a {usual[0]}; all must call the same at the same step"
    if mine[1:3] != usual[1:3]:
        return (
            f"it has taken {mine[1]} local steps after {mine[2]} synchronisations, most others {usual[1]} after "
            f"{usual[2]}; all must call step() and synchronize() equally often between two rounds"
        )
    if mine[3] != usual[3]:
        return "it has other learning rates or outer hyper-parameters than most others; set them alike on every rank"
    if mine[4] != usual[4]:
        return (
            "it trains, or has trained, other parameters than most others; freeze and unfreeze the same ones on every "
            "rank, in the same round"
        )
    return "it has called add_weight(), or has not, other than most others; all must, or none"


def apart_from_most(reports: Mapping[Ticket, Report], names: Mapping[Ticket, Name]) -> dict[Ticket, str]:
    """Those whose anchors or outer state are other than most have, and what that may come from; of equally many, than
    those of the first rank. inf or NaN is what nobody shall have, unless all have some. Nobody where anchors are taken
    over anew from parameters."""
    digests = {ticket: report.digest for ticket, report in reports.items()}
    if not reports or None in digests.values() or any(report.moved for report in reports.values()):
        return {}
    intact = {ticket: digest for ticket, digest in digests.items() if reports[ticket].intact}
    usual = _usual(intact or digests, names)
    why = (
        "it holds another anchor or outer state than most others: it has loaded another state, or computes otherwise, "
        "or a bit has flipped"
    )
    broken = "inf or NaN is in its anchor or outer state"
    return {ticket: why if reports[ticket].intact else broken for ticket, digest in digests.items() if digest != usual}


def cut_off(reports: Mapping[Ticket, Report], names: Mapping[Ticket, Name]) -> dict[Ticket, str]:
    """Those without whom all reach each other, and why: time after time the one that most do not reach; of equal ones,
    the last."""
    out: dict[Ticket, str] = {}
    left = order_of({ticket: names[ticket] for ticket in reports})
    while True:
        missed = {t: [o for o in left if o in reports[t].unreached or t in reports[o].unreached] for t in left}
        worst = max(reversed(left), key=lambda ticket: len(missed[ticket]), default=None)
        if worst is None or not missed[worst]:
            return out
        who = ", ".join(str(names[other]) for other in missed[worst])
        out[worst] = f"it reaches the store, but not {who}; the network between them is cut"
        left.remove(worst)


def mad_ones(reports: Mapping[Ticket, Report], max_z: float | None) -> dict[Ticket, str]:
    """Those whose pseudo-gradients do not count, and why: inf or NaN in the parameters, unless that is so of all; a
    norm too far above the others', of those that have done anything.

    The z-score is the robust one: of n ranks the plain one is never above (n-1) / sqrt(n), however mad one of them is.
    Where the others are nearly alike, half their median stands for their spread, so that nobody is mad for little.
    """
    finite = {ticket: report.norm for ticket, report in reports.items() if report.finite}
    if not finite:
        return {}
    out = {
        ticket: f"inf, NaN or a norm above {LARGEST_NORM:g} in its parameters"
        for ticket in reports
        if ticket not in finite
    }
    at_work = {t: norm for t, norm in finite.items() if reports[t].weight != 0}
    finite = at_work or finite
    if max_z is None or len(finite) < 3:  # of two, nobody knows which
        return out
    median = statistics.median(finite.values())
    spread = max(1.4826 * statistics.median(abs(norm - median) for norm in finite.values()), median / 2)
    for ticket, norm in finite.items():
        if spread > 0 and (norm - median) / spread > max_z:
            out[ticket] = (
                f"its pseudo-gradient has the norm {norm:.3g}, z-score {(norm - median) / spread:.3g} among the "
                f"members', whose median is {median:.3g}"
            )
    return out

"""No rank waits in silence: who is waited for, said now and then, and in the error.

Work that can say who is missing has, besides the collectives of :class:`commopt.comm.Work`,

    wait_for(seconds) -> bool       waits at most so long; whether ``wait()`` would return, or raise, at once
    tell(state, where)              lets the others know that this rank is here: "waits", "late" or "failed"
    absent(states) -> Roll          who is not here, as far as the others have told; no longer than LOOK seconds
    leave()                         takes back what was told
    overdue() -> bool               whether its time is over
    timeout: float                  seconds after which the collective fails

Nothing is told before a wait has taken ``first_notice() / 10`` seconds, so a fast step knows nothing of this. What
others tell is repeated while they wait; a rank whose words have stopped counts as absent, as one that never came.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from commopt.comm.backend import Work

logger = logging.getLogger("commopt")

LOOK = 1.0
"""Seconds within which the others' words must be had, or they cannot be had."""
GRACE = 3.0
"""Seconds that a rank whose collective has failed gives the others to say that theirs has as well."""

_first = 10.0


@dataclass(frozen=True)
class Roll:
    """Roll call: the ranks that are missing.

    Attributes:
        absent: ranks of the world, in order, that have not come to the collective, or whose words have stopped.
        first: whether no other rank that has come has a lower number: it speaks for all.
        late: whether some rank has given up because its time was over.
        unknown: why nothing is known of the others; "" if it is.
        elsewhere: ranks that have come to as many collectives, but wait in another call, and in which.
    """

    absent: list[int] = field(default_factory=list)
    first: bool = True
    late: bool = False
    unknown: str = ""
    elsewhere: dict[int, str] = field(default_factory=dict)


def first_notice() -> float:
    """Seconds that a rank waits before it says for whom."""
    return _first


def set_first_notice(seconds: float) -> None:
    """Sets when a rank that waits says for whom: after ``seconds``, 3 and 6 times as long, then every 30 times. For
    this process; give every rank the same.

    Raises:
        ValueError: unless it is > 0.
    """
    global _first
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not seconds > 0:
        raise ValueError(f"seconds until the first notice must be a number > 0, got {seconds!r}")
    _first = float(seconds)


class Watch:
    """One wait, from its begin. ``look()`` is called again and again; a context, at whose end the rest is cleared up.

    Args:
        work: what is waited for.
        where: what it is about.
    """

    def __init__(self, work: Work, where: str) -> None:
        self._work: Any = work
        self._where = where
        self._able = can_tell(work)
        self._begin = time.monotonic()
        self._told = 0
        self._said = 0
        self._next = self._begin + _first / 10 if self._able else float("inf")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._told and error is None:  # after an error the others still want to know
            self._work.leave()

    def wait(self) -> None:
        """Until the work is done; says who is missing meanwhile."""
        while not self._work.wait_for(max(self._next - time.monotonic(), 0.001)):
            self.look()

    def look(self) -> None:
        """Says what is due."""
        now = time.monotonic()
        if now < self._next:
            return
        self._work.tell("waits", self._where)
        if not self._told:
            self._work.absent(("waits", "late", "failed"))  # remembers what each says now
        self._told += 1
        if now - self._begin >= self._due():
            self._say(self._work.absent(("waits", "late", "failed")), now - self._begin)
            while self._due() <= time.monotonic() - self._begin:
                self._said += 1
        self._next = min(time.monotonic() + 0.4 * _first, self._begin + self._due())

    def _due(self) -> float:
        """Seconds from the begin to the next notice."""
        return _first * ((1, 3, 6)[self._said] if self._said < 3 else 30 * (self._said - 2))

    def _say(self, roll: Roll, seconds: float) -> None:
        if roll.first:
            logger.warning("%s: %s", self._where, _sentence(roll, f"for {seconds:.3g} s"))


def is_soon_done(work: Any) -> bool:
    """Waits as long as nothing is told. False if ``work`` is not done then, and can say who is missing."""
    return not can_tell(work) or work.wait_for(_first / 10)


def can_tell(work: Work) -> bool:
    """True if ``work`` can say who is missing."""
    return hasattr(work, "wait_for")


def call_of(where: str) -> str:
    """The call in which a rank waits ``where``, as "DiLoCo, synchronisation 8"."""
    return ", ".join(where.split(", ")[:2])


def is_same_call(where: str, other: str) -> bool:
    """Whether ranks that wait ``where``, and in that ``other`` place, may be in one call: of one number, or name."""
    return _key_of(where) == _key_of(other)


def _key_of(where: str) -> str:
    found = re.search(r"\b(step|synchronisation|gradients) \d+", where)
    return found.group() if found else where.split(", ")[0]


class Blame(NamedTuple):
    """Why a collective has failed, with a colon, "" where nobody knows; and whether nobody is missing, but ranks are in
    different calls."""

    text: str
    calls_differ: bool = False


def blame(work: Any, where: str) -> Blame:
    """Names the ranks that have not joined a collective that has failed, or what else is the matter."""
    if not can_tell(work):
        return Blame("")
    seconds = min(GRACE, work.timeout)
    until, late = time.monotonic() + seconds, work.overdue()
    work.tell("late" if late else "failed", where)
    while True:
        roll = work.absent(("late", "failed"))
        if roll.unknown or not roll.absent or time.monotonic() >= until:
            break
        time.sleep(0.05)
    if roll.unknown:
        return Blame(f"who is missing is not known ({roll.unknown}): ")
    if not roll.absent and roll.elsewhere:
        return Blame(f"{_elsewhere(roll)}; {_EQUALLY}: ", calls_differ=True)
    if not roll.absent and (late or roll.late):
        how = f"not within {work.timeout:g} s, or the network between them is cut, or some are in another call"
        return Blame(f"all ranks have joined, but {how}, whose error names it: ")
    if not roll.absent:
        return Blame("all ranks have joined, but not all have reached each other: ")
    if late or roll.late:
        return Blame(f"{named(roll.absent)} did not join within {work.timeout:g} s: ")
    gone = "has gone" if len(roll.absent) == 1 else "have gone, or are still on their way"
    return Blame(f"{named(roll.absent)} {gone}: ")


_EQUALLY = "all ranks must make the same calls, step() among them, equally often and in the same order"


def _elsewhere(roll: Roll) -> str:
    return " and ".join(f"rank {rank} is in another call ({call})" for rank, call in sorted(roll.elsewhere.items())[:2])


def _sentence(roll: Roll, how_long: str) -> str:
    if roll.unknown:
        return f"waiting {how_long}; for whom is not known: {roll.unknown}"
    if not roll.absent and roll.elsewhere:
        return f"waiting {how_long}: {_elsewhere(roll)}; {_EQUALLY}; or the network between them is slow or cut"
    if not roll.absent:
        return f"waiting {how_long}, though all ranks are here: the network between them is slow or cut"
    return f"waiting for {named(roll.absent)} {how_long}"


def named(ranks: list[int]) -> str:
    """ "rank 2", "ranks 1 and 2", "ranks 0, 1, ... (eight of them) and 5 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:8]))} and {len(ranks) - 8} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"

"""Policies: the steps that communicate, as pure functions of the step (0/1 Adam, arXiv 2202.06009, section 4 and its
experiments).

Steps count from 1. A schedule has no state: what it is made of are numbers in the parameter groups, so that it is
saved, loaded and changed with them, and a resumed run is where it was by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from commopt.agreement.checks import check_int


@dataclass(frozen=True)
class VariancePolicy:
    """T_v: the steps at which the variance is refreshed from the exact mean gradient, ever more rarely.

        k_0 = 0;   k_{j+1} = k_j + 2^floor(j / kappa);   T_v = {k_1, k_2, ...} up to ``stop``

    Steps count from 1, so k_0 is where counting begins and no step. That leaves kappa refreshes at each distance to the
    refresh before (or to k_0): for kappa = 16 steps 1 to 16, then 18, 20, ..., 48, then 52. Whoever counts steps from 0
    and takes step k_0 for a refresh has each of them one step later in our count, and one more: steps 1 to 17, then 19,
    21; for BERT-Large 153 up to step 12,500 instead of 152. The released code doubles the distance after kappa
    refreshes, as it is done here.

    Args:
        kappa: how many refreshes follow each other at one distance, >= 1.
        stop: the variance stands still after this step, >= 1. The paper takes the end of the warm-up of lr. "auto":
            when it has settled (:mod:`commopt.optim.settling`); the optimizer then puts the step in its place.

    Raises:
        ValueError: for a number out of range.
    """

    kappa: int = 16
    stop: int | Literal["auto"] = 100_000

    def __post_init__(self) -> None:
        check_int("kappa", self.kappa, 1)
        if self.stop != "auto":
            check_int("stop", self.stop, 1, "'auto' or ")

    def has_stopped(self, step: int) -> bool:
        """True if the variance stands still at ``step``."""
        return self.stop != "auto" and step > self.stop

    def refreshes(self, step: int, begun: int = 0) -> bool:
        """True if ``step`` > ``begun`` is in T_v; ``begun``: the step, 0 or later, after which it has begun."""
        if self.has_stopped(step):
            return False
        step -= begun
        doubled = ((step - 1) // self.kappa + 1).bit_length() - 1  # the distance is 2^doubled around here,
        start = self.kappa * (2**doubled - 1)  # after this step
        return (step - start) % 2**doubled == 0


@dataclass(frozen=True)
class SyncPolicy:
    """T_u: the steps at which the ranks synchronise. Those in between are local and communicate nothing.

    While the variance still changes, that is at every step. Then, with s steps since it has stopped:

        s_0 = 0;   s_{j+1} = s_j + min(longest, first 2^floor(s_j / double_every))

    The paper doubles the distance when lr has halved, so that replicas drift apart by no more than they did before.

    Args:
        first: the first distance, >= 1.
        double_every: it is doubled after so many steps, >= 1; None: never.
        longest: the largest distance, >= ``first``.

    Raises:
        ValueError: for a number out of range.
    """

    first: int = 1
    double_every: int | None = 32678
    longest: int = 16

    def __post_init__(self) -> None:
        check_int("first", self.first, 1)
        if self.double_every is not None:
            check_int("double_every", self.double_every, 1, "None or ")
        check_int("longest", self.longest, 1)
        if self.longest < self.first:
            raise ValueError(f"longest must be at least first, {self.first}, got {self.longest}")

    def synchronises(self, steps: int) -> bool:
        """True if the ranks synchronise ``steps`` steps after the variance has stopped; always, if it has not."""
        return self.distance_to_next(steps - 1) == 1

    def distance_to_next(self, steps: int) -> int:
        """How many steps later than ``steps`` after the variance has stopped the ranks synchronise next."""
        if steps < 0:
            return 1
        done = 0  # a step at which they do
        while True:
            doubled = 0 if self.double_every is None else done // self.double_every
            distance = min(self.longest, self.first << min(doubled, 64))
            to_next = distance - (steps - done) % distance
            if self.double_every is None or distance == self.longest:
                return to_next
            last = done + -(-((doubled + 1) * self.double_every - done) // distance) * distance
            if steps < last:
                return to_next
            done = last


class Counts(NamedTuple):
    """Numbers of steps of a run, by kind."""

    exact: int
    """One full-precision round."""
    compressed: int
    """One compressed round."""
    local: int
    """No communication."""


def count_steps(variance: VariancePolicy, sync: SyncPolicy, steps: int) -> Counts:
    """The kinds of the steps 1 to ``steps`` of a run. BERT-Large, ``VariancePolicy(16, 12500)`` and ``SyncPolicy()``
    for 152,000 steps: 152 exact, 12,348 + 61,821 compressed. With a stop of "auto" as if it never came, and
    of a model all of whose elements have gradients in each step.

    152 = 9 * 16 refreshes at the distances 1, 2, ..., 256, up to step 16 (2^9 - 1) = 8176, and 8 more at 512;
    12,348 are the other steps up to 12,500, and 61,821 the rounds after it.
    """
    exact = sum(variance.refreshes(t) for t in range(1, steps + 1))
    stop = steps if variance.stop == "auto" else variance.stop
    rounds = sum(sync.synchronises(t - stop) for t in range(1, steps + 1))
    return Counts(exact, rounds - exact, steps - rounds)

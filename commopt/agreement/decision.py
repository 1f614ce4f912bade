"""Agreement of the ranks on a step, so that all of them do the same.

One small all-gather, before anything is touched, settles whether to skip, how to clip, and which parameters take part;
it also finds a rank that is at another step, or has another learning rate. Now and then the ranks compare digests of
what must be the same on all of them.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from commopt.agreement import calls
from commopt.agreement.calls import FIELDS, OTHER_BUCKETS, OutOfStep, StepRefused
from commopt.agreement.digest import as_long_as_any
from commopt.agreement.setup import gather_texts
from commopt.comm import CONFIRMATION_BYTES, Backend, Work, gather_rows, numbers_in_world, wait
from commopt.comm.backend import Done

LARGEST_NORM = 1e14
"""A rank whose gradients have a larger 2-norm counts as one whose gradients are not finite: their squares, and those of
what compression leaves behind of them, would not fit into float32."""

AGREEMENT_BYTES = 8 * FIELDS + CONFIRMATION_BYTES
"""Bytes of the rows that each rank all-gathers at a step: before anything is used, and when all has come."""


@dataclass(frozen=True)
class Holders:
    """Parts that each rank holds, where not all hold the whole model.

    Attributes:
        rank: this one.
        replicas: the ranks that have the same part of the model as this one.
        stages: of each rank, which parameters it has at all, whole or in part.
    """

    rank: int
    replicas: Sequence[int]
    stages: Sequence[int]


@dataclass(frozen=True)
class StepReport:
    """One rank's part in the agreement on a step.

    Attributes:
        square_norm: sum of squares of its gradients; finite if and only if all of them are.
        present: which parameters have a gradient here.
        unaveraged: whether some gradient that the step needs averaged has not been averaged yet.
        error: why this rank cannot take the step at all.
        terms: the hyper-parameters and counters of each parameter group, a tensor of one element as a number, and last
            the settings, all of which must be the same on all ranks.
        checks: whether this rank wants digests compared at this step.
        digests: makes the digests of what must be the same on all ranks, if any rank ``checks``.
        decide: is given those of every rank, by rank; raises if the step cannot be taken with them.
        gradients: makes a digest of this rank's gradients, if all ranks may find that theirs are equal, and need no
            averaging; None, on all ranks, if that is not asked.
        growth: a number of which all ranks want the mean; NaN if this one has none to tell.
        unmoved: bits, of kinds of parameters: whether gradients of this rank move nothing of them, though they should.
        skipped: how many steps before this one were skipped in a row, as far as this rank knows.
    """

    square_norm: float
    present: Sequence[bool]
    unaveraged: bool
    error: Exception | None = None
    terms: Sequence[Mapping[str, Any]] = ()
    checks: bool = False
    digests: Callable[[], list[int]] = list
    decide: Callable[[list[list[int]]], None] | None = None
    gradients: Callable[[], int] | None = None
    growth: float = 0.0
    unmoved: int = 0
    skipped: int = 0


@dataclass(frozen=True)
class StepDecision:
    """Outcome of the agreement; equal on every rank, but for ``already_equal`` and ``alike``.

    Attributes:
        non_finite: the ranks on which some gradient was inf or NaN, or their norm above LARGEST_NORM; the step is
            skipped unless empty.
        norm: root mean square over the ranks of their gradient norms.
        present: which parameters have a gradient on any rank.
        average: whether gradients still have to be averaged where averages are wanted: not if somebody has done so, nor
            if they are the same on all ranks, to the bit.
        already_equal: whether this rank's norm is that of every other rank: somebody else has averaged the gradients.
        alike: whether it nearly is: somebody may have clipped them.
        growth: mean over the ranks that report one; NaN if none does.
        unmoved: the bits that some rank has reported.
        skipped: how many steps before this one were skipped in a row, as all ranks know: one may have loaded a state.
    """

    non_finite: Sequence[int]
    norm: float
    present: Sequence[bool]
    average: bool
    already_equal: bool
    alike: bool = False
    growth: float = 0.0
    unmoved: int = 0
    skipped: int = 0


class StepSkipped(Exception):
    """All ranks skip the step; the decision says why."""


class Agreement:
    """Agreement of all ranks on one step: a :class:`Work` that is done when they have.

    One all-gather of 8 float64, which ``start()`` begins; a mean of one number per parameter (of every stage) if any
    rank lacks a gradient; an all-gather of digests if any rank checks; and one of digests of gradients, if these are to
    be averaged though their norms are equal.

    Attributes:
        decision: what was decided; None before.
    """

    def __init__(self) -> None:
        self.decision: StepDecision | None = None
        self._backend: Backend | None = None
        self._first: Work | None = None
        self._second: Work | None = None
        self._answer: list[list[float]] | None = None

    def start(
        self,
        backend: Backend,
        device: torch.device,
        report: StepReport,
        where: str,
        holders: Holders | None = None,
    ) -> None:
        """Tells the other ranks this ``report``; ``where`` says in an error which step it was about."""
        self._backend, self._device, self._report, self._where = backend, device, report, where
        self._holders = holders
        if backend.world_size == 1:
            return
        usable = is_usable(report.square_norm)
        row = [
            calls.word_of(calls.STEP, report.error is not None),
            report.growth,
            report.square_norm if usable else math.nan,
            float(not all(report.present)),
            float(report.unaveraged + 2 * report.skipped),
            float(len(report.present)),
            float(_checksum_of(report.terms)),
            float(report.checks + 2 * report.unmoved),
        ]
        self._table = torch.empty(backend.world_size, FIELDS, dtype=torch.float64, device=device)
        self._first = backend.all_gather(self._table, torch.tensor(row, dtype=torch.float64, device=device))

    @property
    def under_way(self) -> Work:
        """The collective that is waited for."""
        first = self._second or self._first
        return Done() if first is None else first

    def is_completed(self) -> bool:
        """True if wait() would not block, but for comparing digests. Starts the second collective when its time has
        come."""
        if self.decision is not None or self._first is None:
            return True
        if self._answer is None and not self._first.is_completed():
            return False
        try:
            self._read()
        except Exception:  # wait() raises it
            return True
        return self._second is None or self._second.is_completed()

    def wait(self) -> StepDecision:
        """Learns the decision. May be called again.

        Raises:
            report.error: on the rank that has one; the others raise StepRefused.
            OutOfStep: if ranks hold different numbers of trainable parameters, or differ in their terms.
            StepSkipped: if some gradient on some rank is inf or NaN.
            Exception: what ``report.decide`` raises.
        """
        assert self._backend is not None
        if self.decision is None:
            self.decision = self._alone() if self._backend.world_size == 1 else self._settle()
        if self.decision.non_finite:
            raise StepSkipped
        return self.decision

    def forget(self) -> None:
        """Lets go of this rank's report: its error holds the frames that it has passed, and some of these the step."""
        self._report = StepReport(0.0, [], False)

    def _alone(self) -> StepDecision:
        report = self._report
        if report.error is not None:
            raise report.error
        usable = is_usable(report.square_norm)
        norm = math.sqrt(report.square_norm) if usable else math.nan
        return StepDecision(
            [] if usable else [0], norm, report.present, False, False,
            growth=report.growth, unmoved=report.unmoved, skipped=report.skipped,
        )  # fmt: skip

    def _read(self) -> list[list[float]]:
        """Reports of all ranks, by rank; starts the second collective if it is needed. Communicates nothing else: ranks
        may call it differently often.

        Raises:
            Exception: the step is refused.
        """
        if self._answer is not None:
            return self._answer
        report, backend = self._report, self._backend
        assert backend is not None
        assert self._first is not None
        wait(self._first, self._where)
        table: list[list[float]] = self._table.tolist()
        calls.refuse_other_calls(table, backend, self._where)
        if report.error is not None:
            raise report.error
        if (number := calls.first_that_cannot(table, backend)) is not None:
            raise StepRefused(f"rank {number} cannot take this step; its own error says why")
        stages: Sequence[int] = [0] * len(table) if self._holders is None else self._holders.stages
        counts: dict[int, tuple[int, int]] = {}  # of each stage: parameters, and a rank that has so many
        for rank, (stage, row) in enumerate(zip(stages, table)):
            count, first = counts.setdefault(stage, (int(row[5]), rank))
            if row[5] != count:
                numbers = numbers_in_world(backend)
                raise OutOfStep(
                    f"{self._where}: ranks hold different numbers of trainable parameters: {row[5]:.0f} on rank "
                    f"{numbers[rank]}, {count} on rank {numbers[first]}; freeze and unfreeze the same ones on "
                    "every rank"
                )
        if [row for row in table if row[3]] and _same_terms(table):
            mine = 0 if self._holders is None else stages[self._holders.rank]
            sizes = {stage: count for stage, (count, _) in counts.items()}
            start = sum(count for stage, count in sizes.items() if stage < mine)
            self._mine = slice(start, start + len(report.present))
            self._shares = torch.zeros(sum(sizes.values()), dtype=torch.float64, device=self._device)
            self._shares[self._mine] = torch.tensor(
                [float(p) for p in report.present], dtype=torch.float64, device="cpu"
            )
            self._second = backend.all_reduce(self._shares)
        self._answer = table
        return table

    def _raise_different_terms(self) -> None:
        assert self._backend is not None
        found = first_difference(self._backend, self._report.terms)
        if found is None:
            raise OutOfStep(f"{self._where}: the ranks have different numbers of parameter groups")
        if found.key == "buckets":
            raise OutOfStep(f"{self._where}: {OTHER_BUCKETS}")
        whose = f" of parameter group {found.group}" if found.group < len(self._report.terms) - 1 else ""
        remedy = (
            "call step() equally often on every rank, and load a state on all of them or on none"
            if found.key == "step"
            else "set it alike on every rank, at the same step"
        )
        raise OutOfStep(f"{self._where}: {found.key}{whose} is {found.values}; {remedy}")

    def _settle(self) -> StepDecision:
        table = self._read()
        if not _same_terms(table):
            self._raise_different_terms()
        report, backend = self._report, self._backend
        assert backend is not None
        present: Sequence[bool] = report.present
        if self._second is not None:
            wait(self._second, self._where)
            present = [share > 0 for share in self._shares[self._mine].tolist()]
        if [row for row in table if row[7] % 2]:
            self._compare()
        squares = [row[2] for row in table]
        same = squares
        if self._holders is not None:  # somebody may have averaged what ranks hold of one part
            same = [squares[rank] for rank in self._holders.replicas]
        equal = within(1e-12, same)
        average = bool([row for row in table if row[4] % 2])
        if average and equal and report.gradients is not None:
            average = not self._same_everywhere(report.gradients())
        told = [row[1] for row in table if not math.isnan(row[1])]
        return StepDecision(
            non_finite=[rank for rank, square in enumerate(squares) if math.isnan(square)],
            norm=math.sqrt(sum(squares) / len(squares)),
            present=present,
            average=average,
            already_equal=equal,
            alike=clipped_alike(same),
            growth=sum(told) / len(told) if told else math.nan,
            unmoved=functools.reduce(operator.or_, [int(row[7]) // 2 for row in table]),
            skipped=min([int(row[4]) // 2 for row in table]),
        )

    def _same_everywhere(self, number: int) -> bool:
        """True if all ranks bring the same ``number``."""
        backend = self._backend
        assert backend is not None
        mine = torch.tensor([number], dtype=torch.int64, device=self._device)
        return bool((gather_rows(backend, mine, self._where) == mine).all())

    def _compare(self) -> None:
        """Compares the digests of all ranks."""
        backend, report = self._backend, self._report
        assert backend is not None
        # not counted: a resumed run compares once more, and must count as one that was never stopped
        uncounted = getattr(backend, "inner", backend)
        mine = torch.tensor(report.digests(), dtype=torch.int64, device=self._device)
        if self._holders is not None:
            mine = as_long_as_any(uncounted, mine)
        table = gather_rows(uncounted, mine, self._where)
        if report.decide is not None:
            report.decide(table.tolist())


def within(tolerance: float, squares: Sequence[float]) -> bool:
    """True if the square norms of several ranks are equal, but for a relative ``tolerance``."""
    if len(squares) < 2 or not squares[0] > 0:
        return False
    return not [s for s in squares if not math.isclose(s, squares[0], rel_tol=tolerance)]


def clipped_alike(squares: Sequence[float]) -> bool:
    """True if square norms of several ranks are as near to each other as if each rank had clipped its gradients to the
    same norm, and yet not equal."""
    return within(1e-4, squares) and not within(1e-12, squares)


def is_usable(square_norm: float) -> bool:
    """True if gradients with this sum of squares can be stepped on; False for NaN."""
    return square_norm <= LARGEST_NORM**2


class Difference(NamedTuple):
    """What one rank has other than rank 0."""

    key: str
    group: int
    values: str
    """In words: the two values, and whose they are."""


def first_difference(backend: Backend, terms: Sequence[Mapping[str, Any]]) -> Difference | None:
    """The first difference between the ``terms`` of the ranks, the same on all of them; None if there is none, but in
    how many groups they have. All ranks call it."""
    everyone = [json.loads(text) for text in gather_texts(backend, _as_json(terms))]
    for rank, theirs in enumerate(everyone):
        if len(theirs) != len(everyone[0]):
            break
        for i, (group, first) in enumerate(zip(theirs, everyone[0])):
            differ = [key for key in group.keys() | first.keys() if group.get(key) != first.get(key)]
            if differ:
                key = min(differ, key=lambda name: (name != "step", name))  # what follows from the step comes later
                numbers = numbers_in_world(backend)
                values = f"{group.get(key)} on rank {numbers[rank]} and {first.get(key)} on rank {numbers[0]}"
                return Difference(key, i, values)
    return None


def _same_terms(table: Sequence[Sequence[float]]) -> bool:
    """True if all ranks have reported the same terms."""
    return not [row for row in table if row[6] != table[0][6]]


def _as_json(terms: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([{key: repr(value) for key, value in group.items()} for group in terms])


def _checksum_of(terms: Sequence[Mapping[str, Any]]) -> int:
    """32 bits of the hyper-parameters of all groups."""
    return zlib.crc32(repr([list(group.values()) for group in terms]).encode())

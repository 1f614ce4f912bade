"""What the ranks tell each other before they average: that they stand at the same place, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commopt.comm import CONFIRMATION_BYTES, Backend, wait
from commopt.optim.agreement import StepRefused

FIELDS = 8
ROUND_BYTES = 8 * FIELDS + CONFIRMATION_BYTES
"""Bytes of the rows that each rank all-gathers at a synchronisation: before it, and when all has come."""


@dataclass(frozen=True)
class Standing:
    """Where a rank stands when it wants to synchronise.

    Attributes:
        finite: whether all its parameters are.
        square_norm: of the last gradients that it stepped on.
        step, number: local steps since the last synchronisation, and synchronisations so far.
        terms: a checksum of the hyper-parameters that the outer step uses, below 2**48.
        moved: whether parameters were changed between the last synchronisation and the next step.
        checks: whether this rank wants digests compared.
        error: why this rank cannot go on.
    """

    finite: bool
    square_norm: float
    step: int
    number: int
    terms: int
    moved: bool
    checks: bool = False
    error: Exception | None = None


@dataclass(frozen=True)
class Verdict:
    """What all ranks know then.

    Attributes:
        broken: the ranks some of whose parameters are inf or NaN; the same on every rank.
        equal_gradients: whether all ranks had the same last gradients: somebody else averages them.
        moved: whether parameters of any rank were changed between two rounds.
        checks: whether any rank wants digests compared.
    """

    broken: list[int]
    equal_gradients: bool
    moved: bool
    checks: bool


def exchange(backend: Backend, device: torch.device, mine: Standing, where: str) -> list[list[float]]:
    """What every rank says of itself, by rank: one all-gather of 64 bytes a rank.

    Raises:
        commopt.comm.CollectiveError: the other ranks could not be reached; begins with ``where``.
    """
    row = [mine.error is not None, mine.finite, mine.square_norm, mine.step, mine.number, mine.terms, mine.moved]
    row.append(mine.checks)
    if backend.world_size == 1:
        return [[float(x) for x in row]]
    message = torch.tensor([float(x) for x in row], dtype=torch.float64, device=device)
    received = torch.empty(backend.world_size, FIELDS, dtype=torch.float64, device=device)
    wait(backend.all_gather(received, message), where)
    table: list[list[float]] = received.tolist()
    return table


def judge(table: list[list[float]], mine: Standing, where: str) -> Verdict:
    """What follows from what :func:`exchange` brought.

    Raises:
        mine.error: on the rank that has one; the others raise StepRefused.
        StepRefused: on all ranks, if they stand at different places; names one that differs.
    """
    if mine.error is not None:
        raise mine.error
    for rank, (failed, *_) in enumerate(table):
        if failed:
            raise StepRefused(f"{where}: rank {rank} cannot take this step; its own error says why")
    first = table[0]
    for rank, (_, _, _, step, number, terms, *_) in enumerate(table):
        if (step, number) != (first[3], first[4]):
            raise StepRefused(
                f"{where}: rank {rank} has taken {step:.0f} local steps after {number:.0f} synchronisations, rank 0 "
                f"{first[3]:.0f} after {first[4]:.0f}; all ranks must call step() and synchronize() equally often"
            )
        if terms != first[5]:
            raise StepRefused(
                f"{where}: rank {rank} has other learning rates or outer hyper-parameters than rank 0; set them alike "
                "on every rank"
            )
    squares = [line[2] for line in table]
    equal = len(table) > 1 and squares[0] > 0 and all(s == squares[0] for s in squares)
    broken = [rank for rank, line in enumerate(table) if not line[1]]
    return Verdict(broken, equal, any(line[6] for line in table), any(line[7] for line in table))

"""The end of a round: what the ranks agree on, and the mean of how far they have come. Changes nothing that lasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from commopt.agreement import calls
from commopt.agreement.calls import FIELDS, StepRefused
from commopt.agreement.decision import first_difference, within
from commopt.agreement.digest import as_long_as_any
from commopt.comm import (
    CONFIRMATION_BYTES,
    STARTED,
    Backend,
    Channel,
    Topology,
    Work,
    mean_over_all,
    message_device,
    reduce_scatter,
    wait,
)
from commopt.compress import Compressor, Momentum
from commopt.optim.exchange import start_mean
from commopt.optim.masks import padding_mask
from commopt.state.replicas import reaching_others
from commopt.state.state_bucket import StateBucket

ROUND_BYTES = 8 * FIELDS + CONFIRMATION_BYTES
"""Bytes of the rows that each rank all-gathers at a synchronisation: before it, and when all has come."""
_OF_TERMS = 2**32
"""Above the checksum of the hyper-parameters, in one number with that of what is frozen."""


@dataclass(frozen=True)
class Round:
    """The round that has ended, as an outer step sees it.

    Attributes:
        number: of the round, from 0.
        lr: the mean learning rate of the group over the round's local steps; 0 if its base has none.
        positions: where each parameter of the bucket starts in the model, in elements.
    """

    number: int
    lr: float
    positions: list[int]


@dataclass(frozen=True)
class RoundReport:
    """One rank's part in the agreement at the end of a round.

    Attributes:
        finite: whether all its parameters are.
        square_norm: of the last gradients that it stepped on.
        step, number: local steps since the last synchronisation, and synchronisations so far.
        terms: a checksum of the hyper-parameters that the outer step uses, below 2**32.
        moved: whether parameters were changed between the last synchronisation and the next step.
        checks: whether this rank wants digests compared.
        error: why this rank cannot continue.
        frozen: a checksum of which parameters are frozen, below 2**20.
        packed: a checksum of which parameters are in which bucket, of members which are in any; below 2**32.
        skipped: how many rounds before this one were skipped in a row, as far as this rank knows.
        named: for each group what ``terms`` is a checksum of, if ranks can ask each other for it.
    """

    finite: bool
    square_norm: float
    step: int
    number: int
    terms: int
    moved: bool
    checks: bool = False
    error: Exception | None = None
    frozen: int = 0
    packed: int = 0
    skipped: int = 0
    named: Sequence[Mapping[str, Any]] | None = None

    @property
    def row(self) -> list[float]:
        """What the others are told."""
        both = self.terms + _OF_TERMS * self.frozen
        word, told = calls.word_of(calls.ROUND, self.error is not None), self.checks + 2 * self.packed
        moved = self.moved + 2 * self.skipped
        row = (word, self.finite, self.square_norm, self.step, self.number, both, moved, told)
        return [float(x) for x in row]


@dataclass(frozen=True)
class RoundDecision:
    """Outcome of that agreement.

    Attributes:
        broken: the ranks some of whose parameters are inf or NaN; the same on every rank.
        equal_gradients: whether all ranks had the same last gradients: somebody else averages them.
        moved: whether parameters of any rank were changed between two rounds.
        checks: whether any rank wants digests compared.
        alike_frozen: whether all ranks have frozen the same parameters.
        skipped: how many rounds before this one were skipped in a row, as all ranks know: one may have loaded a state.
    """

    broken: list[int]
    equal_gradients: bool
    moved: bool
    checks: bool
    alike_frozen: bool
    skipped: int


def agree(topology: Topology, device: torch.device, report: RoundReport, where: str) -> RoundDecision:
    """Decision that follows from the reports of all ranks: one all-gather of 64 bytes a rank.

    Raises:
        report.error: on the rank that has one; the others raise StepRefused.
        StepRefused: on all ranks, if they stand at different places; names one that differs.
        commopt.comm.CollectiveError: the other ranks could not be reached; begins with ``where``.
    """
    with reaching_others(topology, where):
        received, work = tell(topology.world, device, report)
        wait(work, where)
    return decide(topology, received.tolist(), report, where)


def tell(backend: Backend, device: torch.device, mine: RoundReport) -> tuple[Tensor, Work]:
    """Starts to tell all ranks the report of this one. Returns where those of all will be, a row for each rank, when
    the work is done."""
    message = torch.tensor(mine.row, dtype=torch.float64, device=device)
    if backend.world_size == 1:
        return message.unsqueeze(0), STARTED
    received = torch.empty(backend.world_size, FIELDS, dtype=torch.float64, device=device)
    return received, backend.all_gather(received, message)


def decide(topology: Topology, table: list[list[float]], mine: RoundReport, where: str) -> RoundDecision:
    """Decision that follows from the reports of all ranks, by rank; raises as :func:`agree` does."""
    squares, numbers = [table[rank][2] for rank in topology.same_part()], topology.numbers
    calls.refuse_other_calls(table, topology.world, where)
    if mine.error is not None:
        raise mine.error
    if (failed := calls.first_that_cannot(table, topology.world)) is not None:
        raise StepRefused(f"{where}: rank {failed} cannot take this step; its own error says why")
    first = table[0]
    for rank, (_, _, _, step, number, terms, *_) in enumerate(table):
        if (step, number) != (first[3], first[4]):
            raise StepRefused(
                f"{where}: rank {numbers[rank]} has taken {step:.0f} local steps after {number:.0f} synchronisations, "
                f"rank {numbers[0]} {first[3]:.0f} after {first[4]:.0f}; all ranks must call step() and synchronize() "
                "equally often"
            )
        if terms % _OF_TERMS != first[5] % _OF_TERMS:
            raise StepRefused(f"{where}: {_what_differs(topology, mine, rank)}; set it alike on every rank")
    _compare_layouts(topology, table, where)
    equal = within(0.0, squares)
    broken = [rank for rank, line in enumerate(table) if not line[1]]
    moved, checks = any(line[6] % 2 for line in table), any(line[7] % 2 for line in table)
    alike_frozen = len({table[rank][5] for rank in topology.same_part()}) == 1
    skipped = min(int(line[6]) // 2 for line in table)
    return RoundDecision(broken, equal, moved, checks, alike_frozen, skipped)


def _what_differs(topology: Topology, mine: RoundReport, rank: int) -> str:
    """What ``rank`` has other than rank 0, of the terms. All ranks call it."""
    found = None if mine.named is None else first_difference(topology.world, mine.named)
    if found is None:
        return f"rank {topology.numbers[rank]} has other learning rates or outer hyper-parameters than others"
    name = {"round_lr": "the sum of lr in this round", "fragment_lr": "the sums of lr in the rounds of fragments"}
    return f"{name.get(found.key, found.key)}, parameter group {found.group}, is {found.values}"


def _compare_layouts(topology: Topology, table: list[list[float]], where: str) -> None:
    """Raises StepRefused, on all ranks, if some with the same part of the model have others in their buckets."""
    firsts: dict[Any, int] = {}
    for rank, part in enumerate(topology.parts):
        first = firsts.setdefault(part, rank)
        if table[rank][7] // 2 != table[first][7] // 2:
            odd, usual = topology.numbers[rank], topology.numbers[first]
            raise StepRefused(
                f"{where}: rank {odd} trains, or has trained, other parameters than rank {usual}, or has them in other "
                "buckets; freeze and unfreeze the same ones on every rank, at the same step, and load a state with "
                "every rank's own part on all ranks, or without on all"
            )


class Comparison:
    """Digests of what must be the same on all ranks, on their way to all of them. Uncounted, as in the agreement of a
    step.

    Args:
        topology: of the optimizer.
        backend: all ranks, on whatever channel; all of them make this at the same point.
        digests: of this rank.
        where: begins errors.
    """

    def __init__(self, topology: Topology, backend: Backend, digests: Sequence[int], where: str) -> None:
        self.where, self._what = where, f"{where}, comparison of the replicas"
        self._reaching_others = partial(reaching_others, topology, self._what)
        self._mine = torch.tensor(digests, dtype=torch.int64, device=message_device(backend))
        with self._reaching_others():
            if topology.is_sharded:
                self._mine = as_long_as_any(backend, self._mine)
            self._received = self._mine.new_empty(backend.world_size, self._mine.numel())
            self._work = backend.all_gather(self._received, self._mine)

    def table(self) -> list[list[int]]:
        """Waits for the digests of all ranks, by rank.

        Raises:
            commopt.comm.CollectiveError: the other ranks could not be reached.
        """
        with self._reaching_others():
            wait(self._work, self._what)
        return self._received.tolist()


def pseudo_gradient(bucket: StateBucket) -> Tensor:
    """Pseudo-gradient of this rank: anchor - x_i, how far it has come from the anchor as its parameters have it; a
    new flat buffer."""
    flat = bucket.zeros()
    for p, x, d in zip(bucket.values, bucket.tensors("anchor"), bucket.views(flat)):
        d.copy_(x.to(p.dtype)).sub_(p)
    return flat


def mean_pseudo_gradient(
    flat: Tensor, bucket: StateBucket, compressor: Compressor | None, send: Channel, reply: Channel
) -> Iterator[Work]:
    """``flat`` <- its mean over all ranks, in place and with the same bits on every rank.

    Compressed if there is a compressor and more than one node: both ways, with the bucket's residuals, which the caller
    commits. Nothing else that lasts is written.

    Args:
        flat: (padded,) of the bucket's dtype.
        bucket: has the residuals.
        compressor: the same on every rank.
        send, reply: the ranks, on the channels for what goes out, and for what comes back.

    Yields:
        Each collective as it starts; the caller waits for it before it resumes the generator.
    """
    feedback = bucket.feedback
    if compressor is None or feedback is None:
        yield from mean_over_all(flat, send, reply)
        return
    part = flat
    if bucket.local_world_size > 1:  # this rank stands for its node, in its part of the bucket
        part = yield from reduce_scatter(flat, send.intra_node)
    active = padding_mask(bucket)
    local = Momentum(part, [], [], 1.0, 0.0)
    mask = active.view(bucket.world_size, -1)
    for chunk in (yield from start_mean(local, feedback, bucket, compressor, send, reply, active)):
        yield chunk.work
        compressor.decompress_active(chunk.payload, flat.view(bucket.world_size, -1), mask, chunk.chunk)

"""The first word of a call that all ranks make: a row of one size, whatever the call is.

Ranks that are in different calls find that in it, and all of them raise the same error. With rows of several sizes the
network library ends their processes, or they wait for each other until the time is over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commopt.comm import Backend, CountingBackend, gather_rows, message_device, numbers_in_world

FIELDS = 8
"""Numbers in a first word, float64. The first of them says which call it is, and whether this rank cannot make it."""

STEP = "step()"
FIRST_STEP = "the first step() of an optimizer"
ROUND = "the end of a round"
CONSTRUCTION = "construction of the optimizer"
REGISTRATION = "add_param_group() or rebind()"
GIVING_UP = "add_param_group(), rebind() or load_state_dict()"

CALLS = (
    STEP, FIRST_STEP, ROUND, CONSTRUCTION, REGISTRATION, GIVING_UP, "averaged()", "synchronize()",
    "consolidate_state_dict()",
)  # fmt: skip
"""All calls, in words; a new one goes to the end."""


OTHER_BUCKETS = (
    "the ranks have their parameters in other buckets; freeze, unfreeze and move the same ones at the same steps, and "
    "load a state with every rank's own part on all ranks, or without on all"
)
"""Error of ranks that would average other parameters than each other."""


class StepRefused(RuntimeError):
    """All ranks refuse the step, because one cannot take it or they do not fit together."""


class OutOfStep(StepRefused):
    """The ranks are at different places, or have other hyper-parameters: what they have started does not fit."""


class CallsDiffer(OutOfStep):
    """The ranks are in different calls. None of them has changed anything but what is each rank's own: an outer
    optimizer has counted the local step before the round, and with ``overlap=True`` some ranks have begun the step.
    These go on with a state that is loaded, the others as if nothing had been."""


def word_of(call: str, cannot: bool) -> float:
    """First number of the first word of ``call``, one of ``CALLS``; ``cannot``: this rank cannot make it."""
    return float(2 * CALLS.index(call) + cannot)


def _call_of(word: float) -> str:
    """The call that begins with ``word``."""
    known = {word_of(call, cannot): call for call in CALLS for cannot in (False, True)}
    return known.get(word, f"one that begins with {word}, which none does: what came is not what was sent")


def cannot(row: Sequence[float]) -> bool:
    """True if the rank of this first word cannot make the call."""
    return row[0] % 2 == 1


def first_that_cannot(table: Sequence[Sequence[float]], backend: Backend) -> int | None:
    """The number in the world of the first rank of ``backend`` whose first word, in ``table`` by rank, says that it
    cannot make the call; None if all can."""
    rank = next((rank for rank, row in enumerate(table) if cannot(row)), None)
    return None if rank is None else numbers_in_world(backend)[rank]


def refuse_other_calls(table: Sequence[Sequence[float]], backend: Backend, where: str) -> None:
    """Raises CallsDiffer, on all ranks of ``backend``, if first words in ``table``, by rank, are of different calls.
    ``where`` begins the error. Receipts forget the call then: ranks may go on as if it had not been."""
    if not [row for row in table if row[0] // 2 != table[0][0] // 2]:
        return
    made = [_call_of(row[0]) for row in table]
    for rank, call in enumerate(made):
        if call != made[0]:
            numbers = numbers_in_world(backend)
            if isinstance(backend, CountingBackend):
                backend.receipt.clear()
            raise CallsDiffer(
                f"{where}: rank {numbers[rank]} is in another call ({call}), rank {numbers[0]} in {made[0]}; all "
                "ranks must make the same calls, equally often and in the same order"
            )


def begin(backend: Backend, call: str, number: int = 0) -> list[int]:
    """Begins ``call`` on all ranks: one all-gather of 64 bytes a rank.

    Args:
        backend: the ranks, on the channel on which they agree on a step.
        call: one of ``CALLS``.
        number: what the others shall know.

    Returns:
        the ``number`` of each rank.

    Raises:
        CallsDiffer: on all ranks, if one is in another call.
        commopt.comm.CollectiveError: the other ranks could not be reached.
    """
    if backend.world_size == 1:
        return [number]
    table = tell(backend, call, number)
    refuse_other_calls(table, backend, call)
    return [int(row[1]) for row in table]


def tell(backend: Backend, call: str, number: int = 0, cannot: bool = False) -> list[list[float]]:
    """First words of all ranks, by rank; this one's is of ``call``, with ``number``, and whether it ``cannot``."""
    row = torch.tensor([word_of(call, cannot), number, *[0] * (FIELDS - 2)], dtype=torch.float64, device="cpu")
    told = gather_rows(backend, row.to(message_device(backend)), f"{call}, whether all ranks can")
    table: list[list[float]] = told.tolist()
    return table

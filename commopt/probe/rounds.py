"""Cost of a round of local steps: how long all wait for it, what a rank sends, and the period from which on nearly
all of the time is spent computing.

A round that is not streamed is an agreement, the messages of its mean, and a confirmation, one after the other. Where
all ranks gather what each has chosen (SparseLoCo), a rank sends W - 1 rows; where a mean is made on the way, and chosen
from once more (DiLoCo with ``TopK``), 2 (W - 1) / W of them; and to one other (NoLoCo) or two (Gossip) what it has,
however many there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from commopt.bucket import ROW_MULTIPLE
from commopt.comm import CONFIRMATION_BYTES, all_reduce_bytes
from commopt.compress import Compressor, Int4, Int8, TopK
from commopt.outer.rounds import ROUND_BYTES
from commopt.probe.clock import Costs
from commopt.probe.messages import rows_sent
from commopt.probe.predict import share

Message = tuple[str, int]
"""A collective, and the bytes that a rank sends in it."""

Mean = Callable[[int, int], list[Message]]
"""The messages of a mean, by the number of ranks and that of the parameters, in order."""


def full(ranks: int, params: int) -> list[Message]:
    """An all-reduce of float32."""
    return [("all_reduce", all_reduce_bytes(4 * params, ranks))]


def two_ways(compressor: Compressor) -> Mean:
    """A compressed mean: to who averages a share, and from there to all."""

    return lambda ranks, params: list(rows_sent(compressor, share(params, ranks), ranks))


def gathered(compressor: Compressor) -> Mean:
    """The messages of all ranks, gathered by all."""
    return lambda ranks, params: [("all_gather", (ranks - 1) * compressor.nbytes(params))]


def to_one(ranks: int, params: int) -> list[Message]:
    """Float32 to one other rank."""
    return [("exchange", 4 * params)]


def to_both_sides(compressor: Compressor | None) -> Mean:
    """The same message to both neighbours on a ring, or to the only one; of float32 if None."""

    def messages(ranks: int, params: int) -> list[Message]:
        nbytes = 4 * params if compressor is None else compressor.nbytes(params)
        return [("exchange", nbytes)] * min(2, ranks - 1)

    return messages


def rows(ranks: int, nbytes: int) -> Message:
    """A small row of each rank, of ``nbytes``."""
    return "all_gather", (ranks - 1) * nbytes


def whole_round(mean: Mean, ranks: int, params: int, shard: int = 1) -> list[Message]:
    """All messages of a round, in order. Of a model in ``shard`` parts the ranks of all of them agree and confirm."""
    before, after = ROUND_BYTES - CONFIRMATION_BYTES, CONFIRMATION_BYTES
    return [rows(ranks * shard, before), *mean(ranks, params), rows(ranks * shard, after)]


GATHERED, BOTH_WAYS = "SparseLoCo", "DiLoCo, TopK(), outer_momentum=0"
"""The same compressor: rows that all ranks gather, and those of a mean that is compressed once more."""

ROUNDS: dict[str, tuple[Mean, str | None]] = {
    "DiLoCo": (full, None),
    "DiLoCo, Int4()": (two_ways(Int4()), "gradients_int4"),
    BOTH_WAYS: (two_ways(TopK()), "gradients_topk"),
    GATHERED: (gathered(TopK()), "gradients_topk"),
    "NoLoCo": (to_one, None),
    "Gossip": (to_both_sides(None), None),
    "Gossip, Int8()": (to_both_sides(Int8()), "gradients_int8"),
}
"""By how one writes it: the mean, and the compressor whose computing has been measured."""

NEARLY_ALL = 0.95
"""Share of computing that a period is stated for."""


@dataclass(frozen=True)
class Round:
    """A predicted round.

    Attributes:
        seconds: for which nobody computes steps.
        nbytes: that a rank sends.
        period: the least number of local steps with which 95 % of the time is spent computing them.
    """

    seconds: float
    nbytes: int
    period: int


def fewer_from(params: int) -> int | None:
    """From how many ranks on a rank receives fewer bytes in a round of ``BOTH_WAYS`` than in one of ``GATHERED``.

    A rank receives as many bytes as it sends in either. Only the rows differ: for each other rank one of all
    parameters, or two of a share, which shrinks as ranks are added, and no further than ``ROW_MULTIPLE`` elements.

    Args:
        params: of the model, or of the part that a rank holds, >= 1.

    Returns:
        that number of ranks; None if the parameters are too few to be worth it on any.
    """

    def nbytes(name: str, ranks: int) -> int:
        return sum(sent for _, sent in whole_round(ROUNDS[name][0], ranks, params))

    most = max(2, -(-params // ROW_MULTIPLE))
    fewer = (ranks for ranks in range(2, most + 1) if nbytes(BOTH_WAYS, ranks) < nbytes(GATHERED, ranks))
    return next(fewer, None)


def predict_rounds(costs: Costs, params: int, step_time: float, shard: int = 1) -> dict[str, Round]:
    """By name. Compressing is counted as of gradients; what the ranks do with the mean, and streaming, are not.

    Args:
        costs: what was measured.
        params: of the model, or of the part that a rank holds.
        step_time: seconds of a local step.
        shard: ranks that hold a model together.
    """
    out = {}
    for name, (mean, compressor) in ROUNDS.items():
        messages = whole_round(mean, costs.world_size, params, shard)
        computing = sum(costs.means[compressor].values()) * params if compressor is not None else 0.0
        seconds = computing + sum(costs.link[collective](nbytes) for collective, nbytes in messages)
        period = max(1, math.ceil(seconds * NEARLY_ALL / (1 - NEARLY_ALL) / step_time))
        out[name] = Round(seconds, sum(nbytes for _, nbytes in messages), period)
    return out

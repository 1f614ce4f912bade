"""A step of CSER and of QSparseLocalSGD, as they come, on a :class:`Clock`: an agreement, blocks of each bucket by
all-reduces that all start after backward, and a confirmation.

Their base is SGD: what AdamW takes is no part of the step.
"""

from __future__ import annotations

from commopt.agreement.decision import AGREEMENT_BYTES
from commopt.comm import CONFIRMATION_BYTES, all_reduce_bytes
from commopt.compress import RandomBlocks
from commopt.probe.clock import Clock, Costs, Step, mean_of
from commopt.probe.messages import buckets_of
from commopt.probe.model import Model, adamw_seconds

PERIOD = 16
"""Steps from reset to reset of CSER and QSparseLocalSGD as they come."""
UPDATES, RESETS, ROUND = 64, 4, 8
"""Ratios of the blocks that they send as they come: CSER of updates and at its resets, QSparseLocalSGD at its own."""


def cser(costs: Costs, model: Model) -> Step:
    """CSER as it comes: the mean of the steps of a period."""
    between, reset = sgd(costs, model, "cser", UPDATES), sgd(costs, model, "cser_reset", UPDATES, RESETS)
    return mean_of([(PERIOD - 1, between), (1, reset)])


def qsparse(costs: Costs, model: Model) -> Step:
    """QSparseLocalSGD as it comes: the mean of the steps of a period. Its ranks wait for each other in each."""
    return mean_of([(PERIOD - 1, sgd(costs, model, "qsparse")), (1, sgd(costs, model, "qsparse_reset", ROUND))])


def sgd(costs: Costs, model: Model, name: str, *ratios: float) -> Step:
    """A step of SGD, of ``costs.sgd[name]``, that averages blocks of each bucket, of each of these ``ratios``."""
    clock, per, ranks = Clock(costs), costs.sgd[name], costs.world_size * model.shard
    clock.compute(model.step_time - adamw_seconds(costs, model))
    clock.compute(per["agreement"] * model.params)
    clock.wait(clock.send("all_gather", (ranks - 1) * (AGREEMENT_BYTES - CONFIRMATION_BYTES)))
    arrived, block = clock.now, RandomBlocks().block
    for bucket in buckets_of(model.all_shapes, costs.world_size, model.bucket_bytes):
        for ratio in ratios:
            clock.compute(per.get("all_reduce", 0.0) / len(ratios) * bucket.numel)  # none was sent of few blocks
            nbytes = all_reduce_bytes(4 * round(bucket.numel / ratio), costs.world_size)
            chance = min(1.0, -(-bucket.numel // block) / ratio)  # that a block of it is chosen
            arrived = max(arrived, clock.send("all_reduce", nbytes, chance))
    clock.wait(arrived)
    clock.wait(clock.send("all_gather", (ranks - 1) * CONFIRMATION_BYTES))
    clock.compute(per["end"] * model.params)
    return clock.step()

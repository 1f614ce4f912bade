"""The model that is trained, as the predictions know it: what it computes in a step, and what it is cut into."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from commopt.compress import Compressor
from commopt.gradients.method import OfGradients
from commopt.probe.clock import Clock, Costs
from commopt.probe.messages import Shapes

BACKWARD = 2 / 3
"""Share of backward in the time of forward and backward."""


@dataclass(frozen=True)
class Model:
    """The model that is trained.

    Attributes:
        params: parameters.
        step_time: seconds of forward, backward and AdamW on one device.
        last_params: of ``params``, how many are one tensor whose gradient comes last.
        bucket_bytes: most bytes of float32 in a bucket of OneBitAdam, and of compressed gradients.
        compressor: of OneBitAdam.
        shapes: of the tensors, all parameters together; if there are none, optimizers have as few buckets as can be.
        shard: ranks that FSDP2 cuts it over.
        early: whether buckets of compressed gradients may start in backward.
        compressors: of gradients, by name.
        machine: ranks of a machine, where machines are the nodes of what is compressed; 1: all ranks are alike.
        inside: compressors of gradients inside a machine, by the same names; in float32 where there is none.
    """

    params: int
    step_time: float
    last_params: int
    bucket_bytes: int
    compressor: Compressor
    shapes: Shapes = ()
    shard: int = 1
    early: bool = True
    compressors: dict[str, OfGradients] = field(default_factory=dict)
    machine: int = 1
    inside: dict[str, Compressor] = field(default_factory=dict)

    @property
    def all_shapes(self) -> Shapes:
        """The shapes, or those with which there are as few buckets as can be."""
        return self.shapes or tuple((n,) for n in reversed(split(self.params, self.last_params, self.bucket_bytes)))


@lru_cache(maxsize=16)
def split(params: int, last: int, *capacities: int) -> tuple[int, ...]:
    """Parameters in each bucket, in order of backward; the last capacity (in bytes of float32) holds for all further
    ones. ``last`` parameters are one tensor, the last one."""
    out: list[int] = []
    rest = params - last
    while rest > 0:
        out.append(min(rest, max(1, capacities[min(len(out), len(capacities) - 1)] // 4)))
        rest -= out[-1]
    if last and out and 4 * (out[-1] + last) <= capacities[min(len(out) - 1, len(capacities) - 1)]:
        out[-1] += last
    elif last:
        out.append(last)
    return tuple(out)


def begin(clock: Clock, model: Model) -> float:
    """Computes forward; returns the seconds of backward per parameter."""
    both = max(0.0, model.step_time - adamw_seconds(clock.costs, model))
    clock.compute(both * (1 - BACKWARD))
    return both * BACKWARD / model.params


def adamw_seconds(costs: Costs, model: Model) -> float:
    """Seconds of a step that AdamW takes: not more than all of it."""
    return min(costs.adamw * model.params, model.step_time)

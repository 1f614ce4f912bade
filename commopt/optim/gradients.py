"""What an optimizer of the Adam family asks of the gradients of a bucket: their exact mean, or what to compress."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from commopt import ops
from commopt.comm import Arrival, Work, mean_over_all, reduce_scatter
from commopt.compress import Compressor
from commopt.optim.flight import Step
from commopt.optim.packed import StateBucket
from commopt.optim.rules import scaled_gradient


def averaged_gradients(bucket: StateBucket, now: Step) -> Generator[Work, None, list[Tensor]]:
    """The exact averages of the gradients of the parameters that move, in the dtype of the state.

    Yields ``now.agreed``: all ranks take the step when it returns. Masks are for a variance that stands, so there are
    none from then on.
    """
    if now.average:
        flat = bucket.pack_gradients(now.scale)
        yield from mean_over_all(flat, now.line, now.back)
    yield now.agreed
    if now.average and now.line.world_size > 1:
        now.confirmed.note(torch.isfinite(ops.square_sum([flat])))
        yield now.confirmed
    bucket.set_live(None)
    moving = [i for i, p in enumerate(bucket.params) if id(p) in now.present]
    if now.average:
        views = bucket.views(flat)
        return [views[i] for i in moving]
    return [scaled_gradient(bucket.params[i], bucket.dtype, now.scale) for i in moving]


def all_arrived(arrivals: Sequence[Arrival], bucket: StateBucket, compressor: Compressor, now: Step) -> Iterator[Work]:
    """Waits for what is on its way, and for all ranks to agree on the step and to confirm that what they have received
    is what was sent and can be right. Only then is any of it used."""
    yield now.agreed
    for arrival in arrivals:
        yield arrival.work
        start, stop = arrival.columns
        now.confirmed.note(compressor.is_sound(arrival.wires, stop - start, bucket.dtype))
    yield now.confirmed


def gradients_to_compress(
    bucket: StateBucket, now: Step
) -> Generator[Work, None, tuple[list[Tensor], list[int], float]]:
    """What this rank brings to a compressed step: gradients, where each starts in the part of the bucket that this rank
    compresses, and what to multiply them by."""
    if bucket.places > 1:  # this rank stands for its node, in its part of the bucket
        part = yield from reduce_scatter(bucket.pack_gradients(now.scale), now.line.inside)
        return [part], [0], 1.0
    grads = bucket.gradients()
    return [g for g, _ in grads], [o for _, o in grads], now.scale

"""The mean over all ranks of how far they have come, in full precision or compressed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from commopt.comm import Channel, Work, mean_over_all, reduce_scatter
from commopt.compress import Compressor, Momentum
from commopt.optim.exchange import start_mean
from commopt.optim.packed import StateBucket


def mean_way(way: Tensor, bucket: StateBucket, compressor: Compressor | None, channel: Channel) -> Iterator[Work]:
    """``way`` <- its mean over all ranks, in place and with the same bits on every rank.

    Compressed if there is a compressor and more than one node: both ways, with the bucket's residuals, which the caller
    commits. Nothing else that lasts is written.

    Args:
        way: (padded,) of the bucket's dtype.
        bucket: has the residuals.
        compressor: the same on every rank.
        channel: the ranks.

    Yields:
        Each collective as it starts; the caller waits for it before it resumes the generator.
    """
    feedback = bucket.feedback
    if compressor is None or feedback is None:
        yield from mean_over_all(way, channel, channel)
        return
    part = way
    if bucket.places > 1:  # this rank stands for its node, in its part of the bucket
        part = yield from reduce_scatter(way, channel.intra_node)
    active = bucket.active
    local = Momentum(part, [], [], 1.0, 0.0)
    mask = None if active is None else active.view(channel.world.world_size, -1)
    for arrival in (yield from start_mean(local, feedback, bucket, compressor, channel, channel, active)):
        yield arrival.work
        compressor.decompress_live(arrival.wires, way.view(channel.world.world_size, -1), mask, arrival.columns)

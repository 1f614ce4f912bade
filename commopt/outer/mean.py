"""The mean over all ranks of how far they have come, in full precision or compressed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from commopt.comm import CountingBackend, Work, compressed_mean, mean_over_all, reduce_scatter, to_node
from commopt.compress import Columns, Compressor
from commopt.optim.packed import StateBucket


def mean_way(
    way: Tensor, bucket: StateBucket, compressor: Compressor | None, backend: CountingBackend
) -> Iterator[Work]:
    """``way`` <- its mean over all ranks, in place and with the same bits on every rank.

    Compressed if there is a compressor and more than one node: both ways, with the bucket's residuals, which the caller
    commits. Nothing else that lasts is written.

    Args:
        way: (padded,) of the bucket's dtype.
        bucket: has the residuals.
        compressor: the same on every rank.
        backend: the ranks.

    Yields:
        Each collective as it starts; the caller waits for it before it resumes the generator.
    """
    feedback = bucket.feedback
    if compressor is None or feedback is None:
        yield from mean_over_all(way, backend, backend)
        return
    nodes = backend.between.world_size
    part = way
    if bucket.places > 1:  # this rank stands for its node, in its part of the bucket
        part = yield from reduce_scatter(way, backend.inside)
    rows = part.view(nodes, -1)

    def compress(wire: Tensor, _: Columns) -> None:
        worker, after = feedback.worker_rows(nodes)
        compressor.compress_with_feedback(rows, worker, wire, feedback.live_rows(nodes), after)

    arrivals = yield from compressed_mean(compress, feedback, compressor, backend.between)
    for arrival in (yield from to_node(arrivals, backend.inside)):
        yield arrival.work
        compressor.decompress_live(arrival.wires, way.view(backend.world_size, -1), bucket.live_rows())
